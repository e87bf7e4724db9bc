"""The factors of `functional.parametrization` that a config asks for."""

from jaxblock.config import ModelConfig
from jaxblock.functional.parametrization import DEPTH_MUP_ALPHA, Scaling, complete_p


def scaling(config: ModelConfig) -> Scaling:
    """Return what the model's depth and width do to branches, logits, initial values and the optimizer."""
    name, options = config.parametrization_choice
    if name == "standard":
        return Scaling()
    depth_ratio, scale_epsilon = config.depth / options["base_depth"], options["scale_epsilon"]
    if name == "depth_mup":
        return complete_p(depth_ratio, 1.0, alpha=DEPTH_MUP_ALPHA, scale_epsilon=scale_epsilon)
    width_ratio = config.width / options["base_width"]
    return complete_p(depth_ratio, width_ratio, alpha=options["alpha"], scale_epsilon=scale_epsilon)

"""One optimizer from a config: clip, the algorithm's direction, decoupled weight decay, factors by parameter.

    g <- g * min(1, clip / ||g||)                  global norm, over all parameters
    d <- algorithm(g)
    update = -factor * (d + weight_decay * p)      decay by role and label, arXiv 1711.05101; factors by role, label
                                                   and, where the model scales with its depth, by `Scaling`
    p <- p + learning_rate * update                the caller's line

The learning rate is not in here and no schedule counts in the state: the rate a step logs is the one it applies, a
step that is passed over leaves no trace, and the rate can be a traced or a vmapped value.
"""

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import optax

from jaxblock.axes import Label, path_name
from jaxblock.contracts import check_number
from jaxblock.functional.parametrization import Scaling
from jaxblock.training.config import OptimizerConfig
from jaxblock.training.config.learning import SMALLEST
from jaxblock.training.optimizer.adafactor import adafactor
from jaxblock.training.optimizer.adam import adamw, lion
from jaxblock.training.optimizer.muon import muon
from jaxblock.training.optimizer.roles import UNSCALED, decay_rates, rate_factors
from jaxblock.types import Array, Params

MAKERS: Mapping[str, Callable[..., optax.GradientTransformation]] = {
    "adamw": adamw,
    "lion": lion,
    "adafactor": adafactor,
    "muon": muon,
}
"""Each returns a transformation from gradients to directions of ascent, both float32."""


def make_optimizer(
    config: OptimizerConfig, labels: Sequence[Label] = (), *, scaling: Scaling = UNSCALED
) -> optax.GradientTransformation:
    """Return the optimizer; `optax.apply_updates(params, optax.tree.scale(rate, updates))` makes the step.

    State and updates are float32 whatever the parameters are (float64 for float64 ones): a bfloat16 parameter is
    rounded once, when the update is added. Every parameter is of a role of `jaxblock.axes.PARAMETERS`.

    Args:
      config: the run's optimizer; its learning rate, schedule and average are not read.
      labels: what the model wants done differently with some of its parameters.
      scaling: factors that the model's depth and width put on rates, decay and epsilon; only AdamW has them.

    Raises:
      ValueError: factors for another algorithm than AdamW, or that leave an epsilon float32 cannot hold; from `init`
        and `update`: a parameter that is not floating point, or has no role; a label or a role rate that matches no
        parameter.
    """
    algorithm = _make_algorithm(config, scaling)

    def init(params: Params) -> optax.OptState:
        _check_floating(params)
        rate_factors(params, labels, role_rates=config.role_rates, scaling=scaling)
        return algorithm.init(_wide(params))

    def update(
        updates: Params, state: optax.OptState, params: Params | None = None
    ) -> tuple[Params, optax.OptState]:
        if params is None:
            raise ValueError("optimizer.update needs the parameters: update(gradients, state, params)")
        _check_floating(params)
        gradients, wide = _clipped(_wide(updates), config.clip), _wide(params)
        directions, state = algorithm.update(gradients, state, wide)

        def finish(direction: Array, param: Array, decay: float, factor: float) -> Array:
            return -factor * (direction + decay * param if decay else direction)

        decay = decay_rates(params, labels, weight_decay=config.weight_decay, scaling=scaling)
        factors = rate_factors(params, labels, role_rates=config.role_rates, scaling=scaling)
        return jax.tree.map(finish, directions, wide, decay, factors), state

    return optax.GradientTransformation(init, update)


def _make_algorithm(config: OptimizerConfig, scaling: Scaling) -> optax.GradientTransformation:
    name, options = config.algorithm_choice
    if scaling == UNSCALED:
        return MAKERS[name](**options)
    if name != "adamw":
        raise ValueError(
            f"optimizer.algorithm is {config.algorithm!r} and the model scales learning rates with its depth or width "
            "by AdamW's rules; the algorithm must be adamw"
        )
    epsilon = scaling.block_epsilon * options["epsilon"]
    check_number("optimizer.algorithm: epsilon, in the blocks", epsilon, least=SMALLEST)
    return adamw(**options, block_epsilon=epsilon)


def _wide(tree: Params) -> Params:
    return jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), tree)


def _clipped(gradients: Params, clip: float) -> Params:
    """Scale to a global norm of at most `clip`; 0 = off. The divisor is never 0, so nothing is to be selected away."""
    if clip == 0:
        return gradients
    factor = clip / jnp.maximum(optax.tree.norm(gradients), clip)
    return jax.tree.map(lambda g: factor * g, gradients)


def _check_floating(params: Params) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(
                f"parameter {path_name(path)!r} has dtype {leaf.dtype}; the optimizer moves floating-point arrays "
                "only: keep counters and buffers beside the parameters, not among them"
            )

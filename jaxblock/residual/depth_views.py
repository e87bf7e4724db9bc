"""What topologies share that give attention's query, key and value each an array of their own."""

from jaxblock.config import ModelConfig
from jaxblock.modules import Norm
from jaxblock.types import Views


def reads_views(config: ModelConfig) -> bool:
    """Return whether any sublayer can read views: attention can, where it is a sublayer by itself.

    A parallel block's one branch, the feed-forward and the other token mixers read one array.
    """
    return config.wiring == "serial" and config.token_mixer_choice.name == "attention"


def norm_views(config: ModelConfig, views: Views) -> Views:
    """Return each view through a norm of its own; to be called once, inside a compact method."""
    return Views(*(Norm(config, name=f"norm_{name}")(x) for name, x in views._asdict().items()))


def count_norms(config: ModelConfig) -> int:
    """Return the number of norms: one per sublayer, three where it reads views, and the final one."""
    return config.sublayers + (2 * config.depth if reads_views(config) else 0) + 1

"""LAuReL: learned weights for stream and branch, and a learned low-rank map beside the identity.

rw      a u + b x,            (a, b) = 2 softmax(w), w [2] from 0
lr      u + x + x A B,        A [D, r] random, B [r, D] from 0
rw_lr   a u + b (x + x A B)                          u = f(norm(x))            (arXiv 2411.07501, eq. 2, 3, 5)

All three start as pre-norm, exactly. The paper leaves the weights' normalization open; twice a softmax is 1 and 1 at
its start. Its third form, sums over earlier activations, is a history and not here.
"""

import flax.linen as nn
import jax.numpy as jnp

from jaxblock.config import ModelConfig
from jaxblock.contracts import check_choice, check_integer
from jaxblock.functional.residual_updates import low_rank, pair_weights
from jaxblock.modules import Norm
from jaxblock.residual.contract import Topology
from jaxblock.residual.declarations import additive_mixing, norm_parameters, passes
from jaxblock.types import Array, Branch

FORMS = ("rw", "lr", "rw_lr")
RANK = 8


class Laurel(nn.Module):
    """a f(norm(x)) + b (x + x A B), or one half of it."""

    config: ModelConfig
    form: str
    rank: int

    @nn.compact
    def __call__(self, x: Array, f: Branch) -> Array:
        """Return the weighted sum of branch and mapped stream."""
        norm = Norm(self.config, name="norm")
        a, b = self._weights()
        update, skip = f(norm(x)).astype(jnp.float32), self._skip(x)
        return (a * update + b * skip).astype(x.dtype)

    def _weights(self) -> tuple[Array | float, Array | float]:
        """Return a and b."""
        if self.form == "lr":
            return 1.0, 1.0
        logits = self.param("logits", nn.initializers.zeros, (2,), jnp.dtype(self.config.param_dtype))
        return pair_weights(logits)

    def _skip(self, x: Array) -> Array:
        """Return x, or x + x A B, float32."""
        if self.form == "rw":
            return x.astype(jnp.float32)
        width, dtype = self.config.width, jnp.dtype(self.config.param_dtype)
        check_rank(self.config, self.rank)
        draw = nn.initializers.normal(width**-0.5)
        down = self.param("down", draw, (width, self.rank), dtype)
        up = self.param("up", nn.initializers.zeros, (self.rank, width), dtype)
        return x.astype(jnp.float32) + low_rank(x, down, up)


def check_rank(config: ModelConfig, rank: int) -> None:
    """Raise ValueError for a rank above the width: the map would have more parameters than a full one."""
    check_integer("model.residual: rank", rank, least=1, most=config.width)


def laurel(form: str = "rw_lr", rank: int = RANK) -> Topology:
    """Return LAuReL in one of its forms.

    Args:
      form: "rw" (weights), "lr" (low rank) or "rw_lr" (both).
      rank: r of the low-rank map, at most the width. "rw" has none and refuses any but the default.
    """
    check_choice("model.residual: form", form, FORMS)
    check_integer("model.residual: rank", rank, least=1)
    if form == "rw" and rank != RANK:
        raise ValueError(
            f"model.residual: rank is {rank!r}; it must be left out where form is 'rw', which has no low-rank map"
        )
    has_weights, has_map = form != "lr", form != "rw"

    def connection(config: ModelConfig, *, name: str) -> nn.Module:
        return Laurel(config, form, rank, name=name)

    def parameters(config: ModelConfig) -> int:
        if has_map:
            check_rank(config, rank)
        own = 2 * has_weights + 2 * config.width * rank * has_map
        return config.sublayers * own + norm_parameters(config, config.sublayers + 1)

    skip = "(x + x A B)" if has_map else "x"
    return Topology(
        connection,
        f"a f(norm(x)) + b {skip}, (a, b) = 2 softmax(w)" if has_weights else "f(norm(x)) + x + x A B",
        "arXiv 2411.07501",
        parameters=parameters,
        reduces_to="pre_norm",
        mixing=additive_mixing,
        sums_width=has_map,
        flops=lambda config: 4 * config.width * rank * config.sublayers * has_map,
        traffic=passes(4),
        advice="pre-norm's learning rate; the paper's ranks are 4 for language models and 16 for images",
    )

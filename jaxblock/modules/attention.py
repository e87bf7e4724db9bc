"""Multi-head attention's parameters: query, key, value and output kernels around `functional.attention`.

Kernels stay apart by role ([D, H, K], [D, G, K], [D, G, K], [H, K, D]), so that initial scale, labels, sharding
and imports never slice a fused one; a fused product can still be formed where it is used.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax.numpy as jnp

from jaxblock.config import ExecutionConfig, ModelConfig
from jaxblock.functional.attention import ScoreRule, attention
from jaxblock.functional.dense import dense
from jaxblock.functional.masks import AttentionPattern
from jaxblock.functional.positions import alibi_slopes, apply_rotary
from jaxblock.modules.dropout import site_key
from jaxblock.modules.kernel import Kernel, unit_gain
from jaxblock.types import Array, Views

CACHE = "cache"
"""The collection with this block's cached keys and values, [B, S, G, K]; decoding is on exactly where it is given."""
WRITTEN = "written"
"""The collection to which attention then gives the new ones, [B, T, G, K]."""


class AttentionInputs(NamedTuple):
    """What attention reads besides the stream; the same for every block, except a per-layer window."""

    pattern: AttentionPattern
    """Who may attend to whom; with a cache, keys are those of the cache, then the new ones."""
    angles: Array | None = None
    """Rotary angles, float32 [B or 1, T, K/2]; None without rotary positions."""


class Attention(nn.Module):
    """Multi-head, multi-query or grouped-query self-attention, the module alone: no norm, no residual."""

    config: ModelConfig
    execution: ExecutionConfig
    gain: Callable[[str], float] = unit_gain
    """Factor on a kernel's initial values, by role."""

    @nn.compact
    def __call__(self, x: Array | Views, inputs: AttentionInputs) -> Array:
        """Return attention's output, [B, T, D], or `Views` of that shape, -> [B, T, D] in x's dtype.

        With a cache it runs by 'xla': one row of queries never makes a [T, T] array.
        """
        config, kernel = self.config, functools.partial(Kernel, self.config, gain=self.gain)
        width, heads, kv_heads, head_dim = config.width, config.heads, config.num_kv_heads, config.head_dim
        views = x if isinstance(x, Views) else Views(x, x, x)
        q_BTHK = dense(views.query, *kernel("query", (width, heads, head_dim), name="query")())
        k_BTGK = dense(views.key, *kernel("key", (width, kv_heads, head_dim), name="key")())
        v_BTGK = dense(views.value, *kernel("value", (width, kv_heads, head_dim), name="value")())
        positions = config.position_choice
        if inputs.angles is not None:
            convention = positions.options["convention"]
            q_BTHK = apply_rotary(q_BTHK, inputs.angles, convention=convention)
            k_BTGK = apply_rotary(k_BTGK, inputs.angles, convention=convention)
        cached = self.has_variable(CACHE, "keys")
        if cached:
            k_BTGK, v_BTGK = self._after_cached("keys", k_BTGK), self._after_cached("values", v_BTGK)
        scores = ScoreRule(
            soft_cap=config.soft_cap,
            alibi_slopes_H=alibi_slopes(heads) if positions.name == "alibi" else None,
            dropout_rate=config.attention_dropout,
            dropout_key=site_key(self, config.attention_dropout),
        )
        implementation = "xla" if cached else self.execution.attention
        y_BTHK = attention(
            q_BTHK, k_BTGK, v_BTGK, inputs.pattern, scores=scores, implementation=implementation
        )
        output = kernel("output", (heads, head_dim, width), axes=2, name="output")
        return dense(y_BTHK, *output(), axes=2)

    def _after_cached(self, name: str, new_BTGK: Array) -> Array:
        """Hand the new keys (or values) out, and return those of the cache followed by them."""
        self.put_variable(WRITTEN, name, new_BTGK)
        return jnp.concatenate([self.get_variable(CACHE, name), new_BTGK], axis=1)

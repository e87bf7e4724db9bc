"""Multi-head attention's parameters: query, key, value and output kernels around `functional.attention`.

Kernels stay apart by role ([D, H, K], [D, G, K], [D, G, K], [H, K, D]), so that initial scale, labels, sharding
and imports never slice a fused one; a fused product can still be formed where it is used.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxblock.config import ExecutionConfig, ModelConfig
from jaxblock.functional.attention import ScoreRule, attention
from jaxblock.functional.attention_cached import CachedKeys, attention_cached
from jaxblock.functional.attention_health import attention_health, first_rows
from jaxblock.functional.dense import dense
from jaxblock.functional.masks import AttentionPattern
from jaxblock.functional.positions import alibi_slopes, apply_rotary
from jaxblock.functional.value_residual import mix_values
from jaxblock.modules.dropout import site_key
from jaxblock.modules.intermediates import HEALTH, asked_for
from jaxblock.modules.kernel import Kernel, unit_gain
from jaxblock.modules.norm import Norm
from jaxblock.types import Array, Views

CACHE = "cache"
"""The collection with this block's cached keys and values, [B, G, S, K]; decoding is on exactly where it is given."""
WRITTEN = "written"
"""The collection to which attention then gives the new ones, [B, T, G, K]."""
VALUES = "values"
"""The collection to which attention gives its own values, [B, T, G, K], where the config has a value residual."""
HEALTH_ROWS = 4
"""First rows of a batch whose scores are made again for the collection "attention_health", [rows, H, T, T] numbers."""


class FirstValues(NamedTuple):
    """The first block's values, for the blocks after it."""

    values_BTGK: Array
    exist: Array
    """Boolean scalar: False in the first block, whose own are not mixed."""


class AttentionInputs(NamedTuple):
    """What attention reads besides the stream; the same for every block, except a per-layer window."""

    pattern: AttentionPattern
    """Who may attend to whom; with a cache, keys are those of the cache, then the new ones."""
    angles: Array | None = None
    """Rotary angles, float32 [B or 1, T, K/2]; None without rotary positions."""
    first: FirstValues | None = None
    """The stack's first values; None where values are not mixed."""


class Attention(nn.Module):
    """Multi-head, multi-query or grouped-query self-attention, the module alone: no norm, no residual."""

    config: ModelConfig
    execution: ExecutionConfig
    gain: Callable[[str], float] = unit_gain
    """Factor on a kernel's initial values, by role."""
    inner_norm: bool = False
    """Whether the heads' outputs, side by side, have a norm before the output kernel (Sub-LN, arXiv 2210.06423)."""

    @nn.compact
    def __call__(self, x: Array | Views, inputs: AttentionInputs) -> Array:
        """Return attention's output, [B, T, D], or `Views` of that shape, -> [B, T, D] in x's dtype.

        With a cache `execution.attention` is not asked: one row of queries never makes a [T, T] array.
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
        v_BTGK = self._mix_values(v_BTGK, inputs.first)
        cached = self._cached(k_BTGK, v_BTGK)
        scores = ScoreRule(
            soft_cap=config.soft_cap,
            alibi_slopes_H=alibi_slopes(heads) if positions.name == "alibi" else None,
            dropout_rate=config.attention_dropout,
            dropout_key=site_key(self, config.attention_dropout),
        )
        if asked_for(self, HEALTH):
            seen_BTGK = k_BTGK if cached is None else cached.followed_by(k_BTGK, v_BTGK)[0]
            self._show_health(q_BTHK, seen_BTGK, inputs.pattern, scores)
        given = (q_BTHK, k_BTGK, v_BTGK)
        if cached is None:
            y_BTHK = attention(*given, inputs.pattern, scores=scores, implementation=self.execution.attention)
        else:
            y_BTHK = attention_cached(*given, cached, inputs.pattern, scores=scores)
        if self.inner_norm:
            flat = y_BTHK.reshape(*y_BTHK.shape[:2], -1)
            y_BTHK = Norm(config, name="inner_norm")(flat).reshape(y_BTHK.shape)
        output = kernel("output", (heads, head_dim, width), axes=2, name="output")
        return dense(y_BTHK, *output(), axes=2)

    def _mix_values(self, own_BTGK: Array, first: FirstValues | None) -> Array:
        """Return first * V_1 + own * V, V_1 the first block's values and V this one's; V in the first block itself."""
        name, weights = self.config.value_residual_choice
        if name == "none":
            return own_BTGK
        if self.is_mutable_collection(VALUES):
            self.put_variable(VALUES, "own", own_BTGK)
        mix_2 = jnp.array([weights["first"], weights["own"]], jnp.float32)
        if name == "learned":
            start = mix_2.astype(jnp.dtype(self.config.param_dtype))
            mix_2 = self.param("value_mix", lambda key: start)
        if first is None:
            return own_BTGK
        return mix_values(own_BTGK, first.values_BTGK, mix_2, exist=first.exist)

    def _show_health(
        self, q_BTHK: Array, k_BTGK: Array, pattern: AttentionPattern, scores: ScoreRule
    ) -> None:
        """Hand out the health of the first rows' attention; gradients do not flow into it."""
        q_BTHK, k_BTGK = jax.lax.stop_gradient((q_BTHK[:HEALTH_ROWS], k_BTGK[:HEALTH_ROWS]))
        pattern, valid_BT = first_rows(pattern, HEALTH_ROWS), None
        if pattern.key_valid_BT is not None:  # the queries are the last of the keys, with a cache too
            valid_BT = pattern.key_valid_BT[:, -q_BTHK.shape[1] :]
        health = attention_health(q_BTHK, k_BTGK, pattern, scores=scores, query_valid_BQ=valid_BT)
        for name, value in health._asdict().items():
            self.put_variable(HEALTH, name, value)

    def _cached(self, k_BTGK: Array, v_BTGK: Array) -> CachedKeys | None:
        """Hand the new keys and values out, and return those of the cache; None where there is no cache."""
        if not self.has_variable(CACHE, "keys"):
            return None
        self.put_variable(WRITTEN, "keys", k_BTGK)
        self.put_variable(WRITTEN, "values", v_BTGK)
        return CachedKeys(self.get_variable(CACHE, "keys"), self.get_variable(CACHE, "values"))

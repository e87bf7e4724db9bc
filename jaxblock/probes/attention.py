"""Attention's health over depth: sizes of scores, queries and keys, entropy and the share of the first key, [L, H].

    profile = attention_profile(model, params, tokens_BT)             # one forward pass
    _, collected = model.apply(variables, tokens_BT, mutable=["attention_health"])    # or in a pass made anyway
    profile = collected_attention(collected)

A batch's first `jaxblock.modules.attention.HEALTH_ROWS` rows are measured, without dropout of weights.
"""

from collections.abc import Mapping
from typing import Any

from jaxblock.functional.attention_health import AttentionHealth
from jaxblock.models.trunk import Trunk
from jaxblock.modules.intermediates import HEALTH
from jaxblock.types import Array, Params


def attention_profile(
    model: Trunk,
    params: Params,
    tokens_BT: Array,
    *,
    valid_BT: Array | None = None,
    segments_BT: Array | None = None,
    positions_BT: Array | None = None,
) -> AttentionHealth | None:
    """Return the health of every block's attention, float32 [L, H], `key_norm` [L, G]; None where another token mixer
    stands in its place.

    Args:
      model: a decoder, an encoder or a classifier, however it is run.
      params: its parameters.
      tokens_BT: ids read.
      valid_BT, segments_BT, positions_BT: as the model takes them.
    """
    given = {"valid_BT": valid_BT, "segments_BT": segments_BT, "positions_BT": positions_BT}
    inputs: dict[str, Any] = {name: x for name, x in given.items() if x is not None}
    made: Any = model.clone(observe=None).apply({"params": params}, tokens_BT, mutable=[HEALTH], **inputs)
    return collected_attention(made[1])


def collected_attention(collected: Mapping[str, Any]) -> AttentionHealth | None:
    """Return the profile that `model.apply(..., mutable=["attention_health"])` collected; None where there is none."""
    blocks = collected.get(HEALTH, {}).get("blocks", {})
    return AttentionHealth(**blocks["attention"]) if blocks.get("attention") else None

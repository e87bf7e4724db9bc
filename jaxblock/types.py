"""The axis glossary and the few types that every room shares.

Array names in `functional/` end in their axes, one capital letter each, and `einsum` uses the same letters in
lower case:

    B batch      T positions (keys, where queries differ)      Q query positions
    D width      H heads      G key/value heads      R query heads per key/value head (H = G * R)
    K head dim   F feed-forward width      V vocabulary
    L blocks     S sublayers     N history rows     M streams

Dtypes on the way, by the setting of the config that decides each (float32 where none does):

    parameters                                              model.param_dtype
    residual stream: embedding, what a connection returns   model.stream_dtype
    what a branch reads and writes, keys and values kept    model.dtype
    norm statistics, attention scores and softmax, depth mixing weights, logits, loss      float32
    gradients: as their parameters; summed over pieces of a batch                          float32
    optimizer state, updates, moving average                                               float32
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax

Array: TypeAlias = jax.Array
"""Any JAX array (or tracer)."""

Stream: TypeAlias = Any
"""The residual stream: a pytree of arrays with static shapes; one [B, T, D] array for the plain rules."""


class Views(NamedTuple):
    """What attention's three projections read where a connection gives each its own array, [B, T, D]."""

    query: Array
    key: Array
    value: Array


Branch: TypeAlias = Callable[[Any], Array]
"""What a residual connection wraps, `f` in `x + f(norm(x))`: [B, T, D], or `Views`, -> [B, T, D]."""

Norm: TypeAlias = Callable[[Array], Array]
"""A normalization over the last axis, [B, T, D] -> [B, T, D], with its parameters already bound."""

Params: TypeAlias = Any
"""A pytree of parameters, as `init` returns it and `apply` takes it."""

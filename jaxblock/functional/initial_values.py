"""Standard deviations of initial kernels by the role a kernel plays, so that a rule for depth meets no bystander.

plain        std = 1 / sqrt(fan_in) for every kernel (LeCun)
gpt2         one std for every kernel and table; kernels that write to the stream are divided by sqrt(2 L)
zero_output  plain, but kernels that write to the stream start at 0, so that pre-norm blocks start as the identity
"""

import math

import jax

from jaxblock.contracts import check_choice
from jaxblock.types import Array

OUTPUT_ROLES = frozenset({"output", "down"})
"""Roles of the kernels that write to the residual stream: attention's output, the feed-forward's second."""


def standard_deviation(rule: str, role: str, *, fan_in: int, blocks: int, std: float) -> float:
    """Return the standard deviation of a kernel's initial entries.

    Args:
      rule: "plain", "gpt2" or "zero_output".
      role: the kernel's role; only `OUTPUT_ROLES` are treated apart.
      fan_in: number of inputs each output sums over, never counting a depth axis.
      blocks: L, used by "gpt2" (1 / sqrt(2 L), Radford et al. 2019) for output roles only.
      std: the base of "gpt2".

    Raises:
      ValueError: an unknown rule.
    """
    check_choice("initialization", rule, ("plain", "gpt2", "zero_output"))
    if rule == "gpt2":
        return std / math.sqrt(2 * blocks) if role in OUTPUT_ROLES else std
    if rule == "zero_output" and role in OUTPUT_ROLES:
        return 0.0
    return 1.0 / math.sqrt(fan_in)


def normal(key: Array, shape: tuple[int, ...], dtype: jax.typing.DTypeLike, *, std: float) -> Array:
    """Draw N(0, std^2) entries; a std of 0 gives exact zeros."""
    return std * jax.random.normal(key, shape, dtype)

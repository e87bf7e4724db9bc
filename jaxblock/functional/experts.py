"""A mixture of feed-forwards: each token goes to its most probable experts, whose outputs are summed by their gates.

    p = softmax(x W)          over E experts, float32 whatever x's dtype
    g = p of the A most probable, divided by their sum; for A = 1 it stays p, or the router would have no gradient
    y = sum_a g_a expert_a(x)

Experts multiply slots. A choice (a token and one of its experts) takes a slot of a group, a group belongs to one
expert, and one batched product runs over all groups. Two layouts:

    capacity   a group for each row of the batch and expert, of ceil(factor A T / E) slots; earlier positions go
               first, and a choice for which no slot is left is dropped: it adds nothing
    dropless   groups of one small size over all rows, as many for each expert as it needs: nothing is dropped, and
               of R choices' products at most R + E (C - 1) rows are computed instead of E R / A

`jax.lax.ragged_dot` is not used: on CPU and GPU it multiplies every expert's kernel with every row by default, and
under vmap it refuses a kernel or rows that are not batched (jax 0.12).

Letters of this file: E experts, A choices of a token, P parts of the batch laid out alone, R tokens of a part,
G groups of a part, C slots of a group. Sources: arXiv 1701.06538 (top-A gates), 2006.16668, algorithm 1 (capacity,
renormalised gates, a loss per group of tokens), 2101.03961, eq. 4 (balance), 2211.15841 (groups without dropping).
"""

import dataclasses
import math
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxblock.contracts import check_boolean, check_choice, check_integer, check_number
from jaxblock.functional.feed_forward import ACTIVATIONS, GATES, FeedForwardWeights, GatedWeights
from jaxblock.types import Array

GATHER_ROWS = 64
"""What reading a kernel once more costs, in rows of its product: measured on CPU (D = 128, F = 352)."""


class Routing(NamedTuple):
    """Where tokens go."""

    expert_BTA: Array
    """The chosen experts, int32, the most probable first."""
    gate_BTA: Array
    """Their gates, float32 (float64 for a float64 x)."""
    probability_BTE: Array
    """p, of all experts, in the gates' dtype."""
    valid_BT: Array
    """True = real token; others take no slot and count nowhere."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotLayout:
    """Which slot each choice has, P parts of the batch apart from each other."""

    slot_PRA: Array
    """Number of the choice's slot among all G C of its part, int32; G C = none."""
    expert_G: Array | None
    """The expert of each group, int32; None: group e is expert e's."""
    groups: int = dataclasses.field(metadata={"static": True})
    """G."""
    slots: int = dataclasses.field(metadata={"static": True})
    """C, slots of a group."""


def route(x_BTD: Array, router_DE: Array, *, active: int, valid_BT: Array | None = None) -> Routing:
    """Return each token's `active` most probable experts and their gates; of equals, the first.

    What stands at a place that is not real is not read. Raises ValueError for an `active` outside 1 to E or a mask
    that is not boolean, AssertionError for shapes and dtypes.
    """
    chex.assert_rank([x_BTD, router_DE], [3, 2])
    chex.assert_type([x_BTD, router_DE], float)
    chex.assert_equal(x_BTD.shape[-1], router_DE.shape[0])
    check_integer("active", active, least=1, most=router_DE.shape[1])
    if valid_BT is None:
        valid_BT = jnp.ones(x_BTD.shape[:2], jnp.bool_)
    check_boolean("valid_BT", valid_BT)
    chex.assert_shape(valid_BT, x_BTD.shape[:2])
    wide = jnp.promote_types(x_BTD.dtype, jnp.float32)
    x_BTD = jnp.where(valid_BT[..., None], x_BTD, jnp.zeros((), x_BTD.dtype)).astype(wide)
    # Full precision: a rounded score sends tokens elsewhere, and the product is small.
    scores_BTE = jnp.matmul(x_BTD, router_DE.astype(wide), precision=jax.lax.Precision.HIGHEST)
    probability_BTE = jax.nn.softmax(scores_BTE, axis=-1)
    expert_BTA = _most_probable(jax.lax.stop_gradient(probability_BTE), active)
    chosen_BTAE = expert_BTA[..., None] == _numbers(probability_BTE)
    gate_BTA = jnp.sum(jnp.where(chosen_BTAE, probability_BTE[:, :, None], 0.0), axis=-1)
    if active > 1:
        gate_BTA = gate_BTA / jnp.sum(gate_BTA, axis=-1, keepdims=True)
    return Routing(expert_BTA, gate_BTA, probability_BTE, valid_BT)


def choices_per_expert(routing: Routing) -> Array:
    """Return how many choices of real tokens fall on each expert, dropped ones included, float32 [B, E]."""
    chosen_BTAE = routing.expert_BTA[..., None] == _numbers(routing.probability_BTE)
    return jnp.sum(chosen_BTAE & routing.valid_BT[..., None, None], axis=(1, 2)).astype(jnp.float32)


def balance_loss(routing: Routing) -> Array:
    """Return each row's load-balance loss, E sum_e f_e p_e, [B]: 1 where tokens are spread evenly, E / A at the worst.

    f_e is the fraction of the row's choices that fall on expert e, p_e the mean probability of e, both over its real
    tokens; only p_e has a gradient. A row without a real token has 0. Per row, as arXiv 2006.16668 has it per group
    of tokens: what a row adds to the objective depends on no other row, however the batch is split.
    Source: arXiv 2101.03961, eq. 4, there for A = 1.
    """
    probability_BTE = routing.probability_BTE
    real_B1 = jnp.maximum(jnp.sum(routing.valid_BT, axis=1, keepdims=True), 1).astype(probability_BTE.dtype)
    fraction_BE = choices_per_expert(routing) / (real_B1 * routing.expert_BTA.shape[-1])
    mean_BE = jnp.sum(jnp.where(routing.valid_BT[..., None], probability_BTE, 0.0), axis=1) / real_B1
    return probability_BTE.shape[-1] * jnp.sum(fraction_BE * mean_BE, axis=-1)


def slots_per_expert(length: int, *, experts: int, active: int, factor: float) -> int:
    """Return ceil(factor * active * length / experts), exactly; at most `length`, as no token chooses one twice."""
    check_number("factor", factor, above=0.0)
    return min(length, math.ceil(Fraction(str(factor)) * active * length / experts))


def capacity_layout(routing: Routing, *, slots: int, limit_B: Array | None = None) -> SlotLayout:
    """Return slots for at most `slots` tokens of a row at each expert; the rest are dropped.

    Earlier positions go first, and of one token's choices the more probable one, so that no token displaces an
    earlier one, and no row another row's.

    Args:
      routing: where tokens go.
      slots: C.
      limit_B: int32, how many of a row's tokens an expert takes where that is less than `slots`: what the row's real
        tokens alone would give, so that padding changes nothing.
    """
    check_integer("slots", slots, least=1)
    batch, length, active = routing.expert_BTA.shape
    limit_B1 = slots if limit_B is None else jnp.minimum(limit_B, slots)[:, None]
    experts = routing.probability_BTE.shape[-1]
    expert_BN = routing.expert_BTA.reshape(batch, length * active)
    rank_BN = jax.vmap(_ranks, in_axes=(0, 0, None))(expert_BN, _counted(routing), experts)
    kept_BN = _counted(routing) & (rank_BN < limit_B1)
    slot_BN = jnp.where(kept_BN, expert_BN * slots + rank_BN, experts * slots)
    return SlotLayout(slot_BN.reshape(batch, length, active), None, experts, slots)


def dropless_layout(routing: Routing) -> SlotLayout:
    """Return a slot for every choice of a real token, in groups of one size that all rows of the batch share.

    Each expert has as many groups as its choices need; their sum has a bound that depends on shapes alone.
    """
    batch, length, active = routing.expert_BTA.shape
    experts, choices = routing.probability_BTE.shape[-1], batch * length * active
    slots = _group_size(choices, experts)
    groups = min(choices, (choices + experts * (slots - 1)) // slots)
    expert_N, counted_N = routing.expert_BTA.reshape(-1), _counted(routing).reshape(-1)
    taken_E = jnp.sum(choices_per_expert(routing), axis=0).astype(jnp.int32)
    last_E = jnp.cumsum((taken_E + slots - 1) // slots)
    first_E = last_E - (taken_E + slots - 1) // slots
    slot_N = first_E[expert_N] * slots + _ranks(expert_N, counted_N, experts)
    slot_N = jnp.where(counted_N, slot_N, groups * slots)
    # Groups that nobody needs are the last expert's, and empty.
    expert_G = jnp.sum(jnp.arange(groups, dtype=jnp.int32)[:, None] >= last_E[None], axis=1)
    expert_G = jnp.minimum(expert_G, experts - 1).astype(jnp.int32)
    return SlotLayout(slot_N.reshape(1, batch * length, active), expert_G, groups, slots)


def dropped_choices(routing: Routing, layout: SlotLayout) -> Array:
    """Return the number of choices of real tokens that have no slot, a float32 scalar."""
    none_PRA = layout.slot_PRA == layout.groups * layout.slots
    valid_PR = routing.valid_BT.reshape(none_PRA.shape[:2])
    return jnp.sum(none_PRA & valid_PR[..., None]).astype(jnp.float32)


def mix_experts(
    x_BTD: Array, routing: Routing, layout: SlotLayout, experts: Callable[[Array], Array]
) -> Array:
    """Return sum_a g_a expert_a(x), [B, T, D] in x's dtype, summed in float32; 0 where a token is not real.

    Args:
      x_BTD: the tokens.
      routing: where they go.
      layout: the slots they take.
      experts: what is done with slots, [P, G, C, D] -> the same, each slot on its own; as `expert_feed_forward`.
    """
    chex.assert_rank(x_BTD, 3)
    chex.assert_equal_shape_prefix([x_BTD, routing.expert_BTA], 2)
    parts, tokens, active = layout.slot_PRA.shape
    width, size = x_BTD.shape[-1], layout.groups * layout.slots
    chex.assert_equal(parts * tokens, x_BTD.shape[0] * x_BTD.shape[1])
    slot_PN = layout.slot_PRA.reshape(parts, tokens * active)
    token_N = jnp.arange(tokens * active, dtype=jnp.int32) // active
    # An empty slot reads token number R, which is none, so 0.
    empty_S = jnp.full((size,), tokens, jnp.int32)
    token_PS = jax.vmap(lambda slot_N: empty_S.at[slot_N].set(token_N, mode="drop"))(slot_PN)
    x_PSD = jax.vmap(_rows)(x_BTD.reshape(parts, tokens, width), token_PS)
    y_PGCD = experts(x_PSD.reshape(parts, layout.groups, layout.slots, width))
    y_PND = jax.vmap(_rows)(y_PGCD.reshape(parts, size, width), slot_PN)
    y_BTAD = y_PND.reshape(*routing.gate_BTA.shape, width).astype(routing.gate_BTA.dtype)
    return jnp.sum(routing.gate_BTA[..., None] * y_BTAD, axis=2).astype(x_BTD.dtype)


def expert_feed_forward(
    x_PGCD: Array,
    weights: FeedForwardWeights | GatedWeights,
    activation: str,
    *,
    expert_G: Array | None = None,
    hidden_dropout: Callable[[Array], Array] = lambda hidden: hidden,
) -> Array:
    """Return each slot's feed-forward by its group's expert, plain or gated, [P, G, C, D] in x's dtype.

    `weights` are those of `functional.feed_forward` with a leading axis E; which of the two they are says which
    table `activation` names. expert_G as in `SlotLayout`. Raises ValueError for another name, AssertionError for
    shapes that do not match.
    """
    chex.assert_rank([x_PGCD, weights.up, weights.down], [4, 3, 3])
    chex.assert_type([x_PGCD, weights.up, weights.down], float)
    gated = isinstance(weights, GatedWeights)
    table = GATES if gated else ACTIVATIONS
    check_choice("gate" if gated else "activation", activation, table)

    def product(x_PGCD: Array, kernel_EDF: Array, bias_EF: Array | None) -> Array:
        return _group_product(x_PGCD, kernel_EDF, bias_EF, expert_G)

    if expert_G is not None:
        # Of a gathered kernel nothing is kept for the backward pass: it is gathered again.
        product = jax.checkpoint(product)
    hidden = product(x_PGCD, weights.up, weights.up_bias)
    if isinstance(weights, GatedWeights):
        hidden = table[activation](product(x_PGCD, weights.gate, weights.gate_bias)) * hidden
    else:
        hidden = table[activation](hidden)
    return product(hidden_dropout(hidden), weights.down, weights.down_bias)


def _group_product(x_PGCD: Array, kernel_EDF: Array, bias_EF: Array | None, expert_G: Array | None) -> Array:
    """Return x kernel + bias, each group with its expert's."""

    def of_groups(leaf: Array) -> Array:
        if expert_G is None:
            return leaf
        return leaf.at[expert_G].get(indices_are_sorted=True, mode="promise_in_bounds")

    y_PGCF = jnp.einsum("pgcd,gdf->pgcf", x_PGCD, of_groups(kernel_EDF).astype(x_PGCD.dtype))
    if bias_EF is None:
        return y_PGCF
    return y_PGCF + of_groups(bias_EF).astype(x_PGCD.dtype)[None, :, None]


def _rows(x_ND: Array, index_S: Array) -> Array:
    """Return rows of x, 0 for a number that is none; what is not read cannot reach the result, NaN included."""
    return x_ND.at[index_S].get(mode="fill", fill_value=0)


def _ranks(expert_N: Array, counted_N: Array, experts: int) -> Array:
    """Return for each choice the number of counted ones before it that fall on its expert."""
    on_NE = (expert_N[:, None] == jnp.arange(experts, dtype=jnp.int32)[None]) & counted_N[:, None]
    before_NE = jnp.cumsum(on_NE, axis=0, dtype=jnp.int32) - on_NE
    return jnp.sum(jnp.where(on_NE, before_NE, 0), axis=1)


def _counted(routing: Routing) -> Array:
    """Return which choices are a real token's, boolean [B, T A]."""
    return jnp.repeat(routing.valid_BT, routing.expert_BTA.shape[-1], axis=1)


def _numbers(x_BTE: Array) -> Array:
    """Return the numbers of the last axis, int32 [1, 1, 1, E]."""
    return jnp.arange(x_BTE.shape[-1], dtype=jnp.int32)[None, None, None]


def _most_probable(x_BTE: Array, active: int) -> Array:
    """Return where each token's largest entries stand, int32 [B, T, A], the largest first and of equals the first.

    As `jax.lax.top_k`, for which the compiler gathers sharded rows on every device.
    """
    numbers_11E, found = _numbers(x_BTE)[0], []
    for _ in range(active):
        found.append(jnp.argmax(x_BTE, axis=-1).astype(jnp.int32))
        x_BTE = jnp.where(numbers_11E == found[-1][..., None], -jnp.inf, x_BTE)
    return jnp.stack(found, axis=-1)


def _group_size(choices: int, experts: int) -> int:
    """Return C, a power of two near the one that costs least.

    R choices in groups of C cost (R / C + E) (C + GATHER_ROWS) rows: least at sqrt(GATHER_ROWS R / E).
    """
    return 2 ** max(0, round(math.log2(GATHER_ROWS * choices / experts) / 2))

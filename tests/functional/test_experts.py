"""Experts against a float64 loop over tokens; who may influence whom; slots, balance, gates and gradients."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxblock.functional import experts as module
from jaxblock.functional.experts import (
    Routing,
    balance_loss,
    capacity_layout,
    choices_per_expert,
    dropless_layout,
    dropped_choices,
    expert_feed_forward,
    mix_experts,
    route,
    slots_per_expert,
)
from jaxblock.functional.feed_forward import (
    FeedForwardWeights,
    GatedWeights,
    feed_forward,
    gated_feed_forward,
)
from tests.functional.test_feed_forward import GATE_REFERENCES, REFERENCES

BATCH, LENGTH, WIDTH, HIDDEN, EXPERTS, ACTIVE = 2, 6, 4, 5, 3, 2
DROPLESS, ROOMY, TIGHT = None, LENGTH, 1  # slots of an expert; None = as many as it needs
LAYOUTS = pytest.mark.parametrize("slots", [DROPLESS, TIGHT], ids=["dropless", "capacity"])


def draw(seed, *shape) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def weights_of(experts=EXPERTS, *, gated=False, bias=True, seed=10):
    up, down = draw(seed, experts, WIDTH, HIDDEN), draw(seed + 1, experts, HIDDEN, WIDTH)
    up_bias, down_bias = draw(seed + 2, experts, HIDDEN), draw(seed + 3, experts, WIDTH)
    if not bias:
        up_bias = down_bias = None
    if not gated:
        return FeedForwardWeights(up, down, up_bias, down_bias)
    gate_bias = draw(seed + 5, experts, HIDDEN) if bias else None
    return GatedWeights(draw(seed + 4, experts, WIDTH, HIDDEN), up, down, gate_bias, up_bias, down_bias)


def mixture(x_BTD, router_DE, weights, valid_BT, *, activation="silu", active=ACTIVE, slots=DROPLESS):
    """Return (y, balance loss, choices per expert, dropped choices)."""
    routing = route(x_BTD, router_DE, active=active, valid_BT=valid_BT)
    layout = dropless_layout(routing) if slots is None else capacity_layout(routing, slots=slots)
    branch = functools.partial(
        expert_feed_forward, weights=weights, activation=activation, expert_G=layout.expert_G
    )
    y_BTD = mix_experts(x_BTD, routing, layout, branch)
    return y_BTD, balance_loss(routing), choices_per_expert(routing), dropped_choices(routing, layout)


jitted = jax.jit(mixture, static_argnames=("activation", "active", "slots"))


@functools.partial(jax.jit, static_argnames=("active", "slots"))
def value_and_gradient(x_BTD, router_DE, weights, valid_BT, ones_BTD, *, active=ACTIVE, slots=DROPLESS):
    """Return y's and the balance loss' sum with weights, and its gradient by x, router and kernels."""

    def total(x_BTD, router_DE, weights):
        y_BTD, loss_B, _, _ = mixture(x_BTD, router_DE, weights, valid_BT, active=active, slots=slots)
        return jnp.sum(y_BTD * ones_BTD) + jnp.sum(loss_B)

    return jax.value_and_grad(total, argnums=(0, 1, 2))(x_BTD, router_DE, weights)


def expert(x_D: Any, weights, number, activation):
    """Return one expert's feed-forward of one token in float64."""
    of = lambda name: np.asarray(getattr(weights, name)[number], np.float64)  # noqa: E731
    bias = lambda name: 0.0 if getattr(weights, name) is None else of(name)  # noqa: E731
    hidden_F: Any = x_D @ of("up") + bias("up_bias")
    if isinstance(weights, GatedWeights):
        hidden_F = GATE_REFERENCES[activation](x_D @ of("gate") + bias("gate_bias")) * hidden_F
    else:
        hidden_F = REFERENCES[activation](hidden_F)
    return hidden_F @ of("down") + bias("down_bias")


def reference(
    x_BTD, router_DE, weights, valid_BT=None, *, activation="silu", active=ACTIVE, slots=DROPLESS, fixed=None
):
    """Return what `mixture` returns, token after token; `fixed` replaces f of the balance loss, [B, E]."""
    (batch, length, _), experts = x_BTD.shape, router_DE.shape[1]
    valid_BT = np.ones((batch, length), bool) if valid_BT is None else valid_BT
    y_BTD, dropped = np.zeros(x_BTD.shape), 0
    loss_B, choices_BE = np.zeros(batch), np.zeros((batch, experts))
    for b in range(batch):
        taken_E, p_E = np.zeros(experts, int), np.zeros(experts)
        for t in np.flatnonzero(valid_BT[b]):
            scores_E = np.asarray(x_BTD[b, t], np.float64) @ np.asarray(router_DE, np.float64)
            p = np.exp(scores_E - scores_E.max())
            p /= p.sum()
            p_E += p
            chosen = np.argsort(-p, kind="stable")[:active]
            for e in chosen:
                gate = p[e] if active == 1 else p[e] / p[chosen].sum()
                choices_BE[b, e] += 1
                if slots is not None and taken_E[e] == slots:
                    dropped += 1
                    continue
                taken_E[e] += 1
                y_BTD[b, t] += gate * expert(np.asarray(x_BTD[b, t], np.float64), weights, e, activation)
        real = max(valid_BT[b].sum(), 1)
        f_E = choices_BE[b] / (active * real) if fixed is None else fixed[b]
        loss_B[b] = experts * (f_E * p_E / real).sum()
    return y_BTD, loss_B, choices_BE, dropped


def assert_equals_the_loop(x_BTD, router_DE, weights, valid_BT, **options):
    got = jitted(x_BTD, router_DE, weights, valid_BT, **options)
    want = reference(x_BTD, router_DE, weights, valid_BT, **options)
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    return want


X, ROUTER = draw(0, BATCH, LENGTH, WIDTH), draw(1, WIDTH, EXPERTS)
VALID = np.array([[0, 1, 1, 0, 1, 1], [1, 1, 1, 1, 1, 0]], bool)


# Against the loop ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slots", "gated"),
    [
        (DROPLESS, True),
        (TIGHT, False),
        pytest.param(DROPLESS, False, marks=pytest.mark.full),
        pytest.param(TIGHT, True, marks=pytest.mark.full),
    ],
)
def test_equals_the_loop_over_tokens(slots, gated):
    activation = "swiglu" if gated else "silu"
    options = {"activation": activation, "slots": slots}
    weights = weights_of(gated=gated, bias=not gated)
    y_BTD, _, _, dropped = assert_equals_the_loop(X, ROUTER, weights, VALID, **options)
    assert (dropped > 0) == (slots == TIGHT)
    # Controls: another number of slots, other gates, other kernels are other numbers.
    wrong = [
        reference(X, ROUTER, weights, VALID, activation=activation, slots=2 if slots else 1),
        reference(X, 0.5 * ROUTER, weights, VALID, **options),
        reference(X, ROUTER, jax.tree.map(lambda w: np.roll(w, 1, axis=0), weights), VALID, **options),
    ]
    for other in wrong:
        assert np.abs(other[0] - y_BTD).max() > 1e-2


SHAPES = st.sampled_from(
    [
        # batch, length, experts, active
        (1, 7, 4, 3),
    ]
)


@settings(max_examples=6, deadline=None)
@given(shape=SHAPES, slots=st.sampled_from([None, 1]), seed=st.integers(0, 10**6))
def test_other_shapes_equal_the_loop(shape, slots, seed):
    batch, length, experts, active = shape
    x_BTD, router_DE = draw(seed, batch, length, WIDTH), draw(seed + 1, WIDTH, experts)
    valid_BT = np.random.default_rng(seed).random((batch, length)) < 0.7
    assert_equals_the_loop(x_BTD, router_DE, weights_of(experts), valid_BT, active=active, slots=slots)


@pytest.mark.full
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_shape_equals_the_loop(data):
    batch, length, experts = (data.draw(st.integers(1, most)) for most in (3, 9, 5))
    active = data.draw(st.integers(1, experts))
    slots = data.draw(st.sampled_from([None, 1, 2, length]))
    seed = data.draw(st.integers(0, 10**6))
    x_BTD, router_DE = draw(seed, batch, length, WIDTH), draw(seed + 1, WIDTH, experts)
    valid_BT = np.random.default_rng(seed).random((batch, length)) < 0.7
    assert_equals_the_loop(x_BTD, router_DE, weights_of(experts), valid_BT, active=active, slots=slots)


@pytest.mark.parametrize("rows", [1, *(pytest.param(rows, marks=pytest.mark.full) for rows in (64, 10**4))])
def test_every_choice_has_a_slot_of_its_own_with_its_expert_however_large_groups_are(monkeypatch, rows):
    monkeypatch.setattr(module, "GATHER_ROWS", rows)
    x_BTD = np.concatenate([X, 3 * X + 1, draw(3, 3, LENGTH, WIDTH)])
    valid_BT = np.concatenate([VALID, ~VALID, np.ones((3, LENGTH), bool)])
    routing = routed(x_BTD, ROUTER, active=ACTIVE, valid_BT=jnp.asarray(valid_BT))
    layout = jax.jit(lambda routing: dropless_layout(routing))(routing)
    slot_BTA, expert_G = np.asarray(layout.slot_PRA).reshape(7, LENGTH, ACTIVE), np.asarray(layout.expert_G)
    total, choices = layout.groups * layout.slots, valid_BT.size * ACTIVE
    assert layout.slots == {1: 4, 64: 32, 10**4: 512}[rows]
    assert (slot_BTA[~valid_BT] == total).all()
    taken = slot_BTA[valid_BT]
    assert len(np.unique(taken)) == taken.size
    assert taken.max() < total
    np.testing.assert_array_equal(expert_G[taken // layout.slots], np.asarray(routing.expert_BTA)[valid_BT])
    assert total <= choices + EXPERTS * (layout.slots - 1)  # what it costs
    assert (np.diff(expert_G) >= 0).all()  # what the gather promises the compiler


# Dropless and capacity are one function --------------------------------------------------------------------


@pytest.mark.parametrize("active", [1, pytest.param(2, marks=pytest.mark.full)])
def test_dropless_is_a_capacity_that_suffices_in_values_and_gradients(active):
    weights, ones = weights_of(), draw(5, *X.shape)
    found = {
        slots: value_and_gradient(X, ROUTER, weights, VALID, ones, active=active, slots=slots)
        for slots in (DROPLESS, ROOMY, TIGHT)
    }
    leaves = {slots: jax.tree.leaves(tree) for slots, tree in found.items()}
    for ours, theirs in zip(leaves[DROPLESS], leaves[ROOMY], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    assert np.abs(leaves[TIGHT][1] - leaves[ROOMY][1]).max() > 1e-2


@LAYOUTS
def test_gradients_equal_the_loops_differences(slots):
    """The router's among them: with one expert a token its only way to learn is the probability kept as the gate."""
    weights, ones = weights_of(), draw(5, *X.shape)
    _, gradients = value_and_gradient(X, ROUTER, weights, VALID, ones, active=1, slots=slots)
    fixed = reference(X, ROUTER, weights, VALID, active=1)[2] / VALID.sum(1, keepdims=True)

    def total(x_BTD, router_DE, weights):
        y_BTD, loss_B, *_ = reference(x_BTD, router_DE, weights, VALID, active=1, slots=slots, fixed=fixed)
        return (y_BTD * ones).sum() + loss_B.sum()

    arguments, step = (X, ROUTER, weights), 1e-6
    for number, gradient in enumerate(gradients):
        way = jax.tree.map(lambda g: np.float64(draw(6, *g.shape)), gradient)
        moved = []
        for sign in (1, -1):
            changed = list(arguments)
            changed[number] = jax.tree.map(
                lambda a, w, sign=sign: np.float64(a) + sign * step * w, arguments[number], way
            )
            moved.append(total(*changed))
        slope = sum(
            (np.asarray(g) * w).sum() for g, w in zip(*map(jax.tree.leaves, (gradient, way)), strict=True)
        )
        np.testing.assert_allclose(slope, (moved[0] - moved[1]) / (2 * step), rtol=1e-4)
        assert abs(slope) > 1e-2


# Who influences whom ---------------------------------------------------------------------------------------


@LAYOUTS
def test_a_token_changes_no_earlier_one_and_no_other_row_in_any_bit(slots):
    weights = weights_of()
    everyone = np.ones((BATCH, LENGTH), bool)
    before = np.asarray(jitted(X, ROUTER, weights, everyone, slots=slots)[0])
    later = set()
    for t in range(LENGTH):
        changed = X.copy()
        changed[1, t] = -2 * X[1, t] + 1
        after = np.asarray(jitted(changed, ROUTER, weights, everyone, slots=slots)[0])
        np.testing.assert_array_equal(after[1, :t], before[1, :t])
        np.testing.assert_array_equal(after[0], before[0])
        later |= set(np.flatnonzero((after[1] != before[1]).any(axis=1)) - t)
    assert 0 in later
    # Control: where slots are few an earlier token can take a later one's; else it cannot.
    assert (max(later) > 0) == (slots == TIGHT)


@LAYOUTS
def test_what_stands_in_padding_reaches_nothing(slots):
    weights, ones = weights_of(), draw(5, *X.shape)
    holes, zeros = X.copy(), X.copy()
    holes[~VALID], zeros[~VALID] = np.nan, 0.0
    got = jitted(holes, ROUTER, weights, VALID, slots=slots)
    for ours, theirs in zip(got, jitted(zeros, ROUTER, weights, VALID, slots=slots), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert (np.asarray(got[0])[~VALID] == 0).all()
    _, gradients = value_and_gradient(holes, ROUTER, weights, VALID, ones, active=1, slots=slots)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))
    assert (np.asarray(gradients[0])[~VALID] == 0).all()
    # Control: read as real, it is NaN, at its own places alone.
    read = np.asarray(jitted(holes, ROUTER, weights, np.ones_like(VALID), slots=slots)[0])
    np.testing.assert_array_equal(np.isnan(read).any(axis=-1), ~VALID)


# Slots -------------------------------------------------------------------------------------------------------


def test_slots_are_rounded_up_once_and_exactly():
    sizes = {"experts": 4, "active": 2}
    assert slots_per_expert(10, **sizes, factor=1.25) == 7  # 6.25
    assert slots_per_expert(8, **sizes, factor=1) == 4
    assert slots_per_expert(1, **sizes, factor=0.01) == 1
    assert slots_per_expert(8, **sizes, factor=100.0) == 8
    assert 1.1 * 1 * 50 / 5 > 11  # in floating point; control for the next line
    assert slots_per_expert(50, experts=5, active=1, factor=1.1) == 11
    with pytest.raises(ValueError, match="factor is 0; it must be a finite number above 0"):
        slots_per_expert(8, **sizes, factor=0)


def test_the_first_positions_of_each_row_take_the_slots():
    """All tokens want expert 2, then 0: padding takes no slot, and what is dropped adds nothing."""
    router_DE = np.zeros((WIDTH, EXPERTS), np.float32)
    router_DE[0] = (1.0, 0.0, 2.0)
    x_BTD = X.copy()
    x_BTD[..., 0] = 3.0
    y_BTD, _, choices_BE, dropped = jitted(x_BTD, router_DE, weights_of(), VALID, slots=TIGHT)
    served = np.zeros_like(VALID)
    served[0, 1] = served[1, 0] = True
    np.testing.assert_array_equal(np.asarray(y_BTD).any(axis=-1), served)
    np.testing.assert_array_equal(choices_BE, [[4, 0, 4], [5, 0, 5]])
    assert dropped == 2 * (9 - 2)


# Limits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [DROPLESS, pytest.param(ROOMY, marks=pytest.mark.full)])
def test_one_expert_is_the_feed_forward_exactly(slots):
    """In whole numbers, so that no order of sums is rounded."""
    weights = jax.tree.map(lambda w: np.round(4 * w), weights_of(1))
    one, x_BTD = jax.tree.map(lambda w: w[0], weights), np.round(4 * X)
    everyone = np.ones_like(VALID)
    got = jitted(x_BTD, ROUTER[:, :1], weights, everyone, activation="relu", active=1, slots=slots)[0]
    want = feed_forward(x_BTD, one, "relu")
    np.testing.assert_array_equal(got, want)
    assert np.asarray(want).any()


@pytest.mark.full
@pytest.mark.parametrize("slots", [DROPLESS, ROOMY])
def test_one_gated_expert_is_the_gated_feed_forward(slots):
    weights, everyone = weights_of(1, gated=True), np.ones_like(VALID)
    got = jitted(X, ROUTER[:, :1], weights, everyone, activation="swiglu", active=1, slots=slots)[0]
    want = gated_feed_forward(X, jax.tree.map(lambda w: w[0], weights), "swiglu")
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("slots", [DROPLESS, pytest.param(ROOMY, marks=pytest.mark.full)])
def test_all_of_equal_experts_are_the_feed_forward(slots):
    one = jax.tree.map(lambda w: w[0], weights_of(1))
    weights = jax.tree.map(lambda w: np.repeat(w[None], EXPERTS, axis=0), one)
    everyone = np.ones_like(VALID)
    got = jitted(X, ROUTER, weights, everyone, active=EXPERTS, slots=slots)[0]
    want = feed_forward(X, one, "silu")
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    # Control: with experts that differ they are not.
    other = jitted(X, ROUTER, weights_of(), everyone, active=EXPERTS, slots=slots)[0]
    assert np.abs(other - want).max() > 1e-2


# Balance -------------------------------------------------------------------------------------------------------


def sent(*experts: int, active: int = 1, count: int = 4) -> Routing:
    """Return the routing of a row of tokens that are all but certain of these experts; two choices: the next one."""
    scores_TE = np.full((len(experts), count), -30.0, np.float32)
    for t, e in enumerate(experts):
        for choice in range(active):
            scores_TE[t, (e + choice) % count] = 30.0 - 1e-3 * choice
    return routed(scores_TE[None], np.eye(count, dtype=np.float32), active=active)


routed, losses = jax.jit(route, static_argnames="active"), jax.jit(balance_loss)


def test_the_balance_loss_is_1_in_balance_and_as_large_as_there_are_experts_at_the_worst():
    np.testing.assert_allclose(losses(sent(0, 1, 2, 3)), [1.0], rtol=1e-6)
    np.testing.assert_allclose(losses(sent(2, 2, 2, 2)), [4.0], rtol=1e-6)
    np.testing.assert_allclose(losses(sent(0, 0, 2, 2)), [2.0], rtol=1e-6)
    np.testing.assert_allclose(losses(sent(0, 1, 2, 3, active=2)), [1.0], rtol=1e-3)
    np.testing.assert_allclose(losses(sent(2, 2, 2, 2, active=2)), [2.0], rtol=1e-3)
    # A router that knows nothing is in balance, whichever of equals is taken.
    flat = routed(X, np.zeros((WIDTH, EXPERTS), np.float32), active=1)
    np.testing.assert_allclose(losses(flat), [1.0, 1.0], rtol=1e-6)
    assert np.asarray(flat.expert_BTA == 0).all()


def test_a_row_without_a_token_has_no_loss():
    valid_BT = jnp.zeros(VALID.shape, bool).at[1].set(True)
    loss_B = losses(routed(X, ROUTER, active=1, valid_BT=valid_BT))
    assert loss_B[0] == 0
    assert loss_B[1] >= 0.5


def test_gates_sum_to_1_but_for_a_single_choice():
    one, two = (routed(X, ROUTER, active=active) for active in (1, 2))
    np.testing.assert_allclose(two.gate_BTA.sum(-1), 1.0, rtol=1e-6)
    np.testing.assert_array_equal(one.gate_BTA[..., 0], one.probability_BTE.max(-1))
    assert one.gate_BTA.max() < 0.999


# Under transformations, and dtypes -----------------------------------------------------------------------------


TOKENS, BOTH = (0, None, None), (0, 0, 0)


@pytest.mark.parametrize(
    ("slots", "axes"),
    [
        (DROPLESS, TOKENS),
        pytest.param(TIGHT, BOTH, marks=pytest.mark.full),
        pytest.param(DROPLESS, BOTH, marks=pytest.mark.full),
        pytest.param(TIGHT, TOKENS, marks=pytest.mark.full),
    ],
)
def test_vmap_gives_each_what_it_gets_alone(slots, axes):
    """With one set of kernels for all as well: what `jax.lax.ragged_dot` refuses."""
    tokens_NBTD, weights = np.stack([X, 2 * X[::-1]]), [weights_of(), weights_of(seed=20)]
    of = lambda tree: jax.tree.map(lambda *w: np.stack(w), *tree) if axes[1] == 0 else tree[0]  # noqa: E731
    routers = [ROUTER, 2 * ROUTER]
    run = lambda x, router, weights: mixture(x, router, weights, VALID, slots=slots)[0]  # noqa: E731
    got = jax.jit(jax.vmap(run, in_axes=axes))(tokens_NBTD, of(routers), of(weights))
    for number in range(2):
        own = number if axes[1] == 0 else 0
        want = jitted(tokens_NBTD[number], routers[own], weights[own], VALID, slots=slots)[0]
        np.testing.assert_allclose(got[number], want, rtol=1e-5, atol=1e-5)


@pytest.mark.full
@LAYOUTS
def test_forward_mode_equals_reverse_mode(slots):
    weights, ones = weights_of(), draw(5, *X.shape)
    _, gradients = value_and_gradient(X, ROUTER, weights, VALID, ones, slots=slots)
    way = jax.tree.map(lambda g: draw(6, *g.shape), gradients)

    def total(x_BTD, router_DE, weights):
        y_BTD, loss_B, *_ = mixture(x_BTD, router_DE, weights, VALID, slots=slots)
        return jnp.sum(y_BTD * ones) + jnp.sum(loss_B)

    _, slope = jax.jit(lambda *a: jax.jvp(total, a, way))(X, ROUTER, weights)
    want = sum(
        (np.asarray(g) * w).sum() for g, w in zip(*map(jax.tree.leaves, (gradients, way)), strict=True)
    )
    np.testing.assert_allclose(slope, want, rtol=1e-4)


def test_the_router_is_float32_and_the_output_x_dtype():
    half = jnp.asarray(X, jnp.bfloat16)
    y_BTD, loss_B, choices_BE, dropped = jax.eval_shape(
        functools.partial(mixture, slots=TIGHT), half, jnp.asarray(ROUTER, jnp.bfloat16), weights_of(), VALID
    )
    assert y_BTD.dtype == jnp.bfloat16
    assert loss_B.dtype == choices_BE.dtype == dropped.dtype == jnp.float32
    routing = jax.eval_shape(functools.partial(route, active=2), half, ROUTER)
    assert routing.gate_BTA.dtype == routing.probability_BTE.dtype == jnp.float32


def test_what_is_refused():
    with pytest.raises(ValueError, match="active is 4; it must be a whole number of at most 3"):
        route(X, ROUTER, active=4)
    with pytest.raises(ValueError, match="valid_BT has dtype int32"):
        route(X, ROUTER, active=1, valid_BT=jnp.ones(VALID.shape, jnp.int32))
    with pytest.raises(AssertionError):
        route(X, ROUTER[1:], active=1)
    with pytest.raises(ValueError, match="gate is 'silu'; it must be one of"):
        expert_feed_forward(X[None], weights_of(gated=True), "silu")

"""Claims of seed 001 on masks and their polarity, padding, pooling and the loss, on dropout, the clip and the guard."""

import functools
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxblock.functional import (
    AttentionPattern,
    attention,
    cross_entropy,
    dense,
    dropout,
    masked_mean,
)
from jaxblock.modules import FeedForward
from jaxblock.residual import topology
from jaxblock.training.config import OptimizerConfig
from jaxblock.training.guard import GOOD
from jaxblock.training.optimizer import make_optimizer
from jaxblock.training.step import make_step
from tests.claims.claims import (
    CAUSAL,
    SHAPE,
    WIDTH,
    apply_block,
    attend,
    block,
    compiled_attention,
    draw,
    layer,
    stack,
    stream,
)
from tests.small import built, config
from tests.small_training import Bigram, batch, bigram_params, state_of, training

PRE = config()
SEEDS = st.integers(0, 2**32 - 1)
few = settings(max_examples=6, deadline=None)
REAL = np.asarray([[True, True, True, True, False, False], [True] * 6])
PADDED = AttentionPattern(key_valid_BT=jnp.asarray(REAL))
KEY = jax.random.key(3)


# Masks ---------------------------------------------------------------------------------------------------------------


def test_s1_19_true_means_real_and_nothing_but_booleans_is_a_mask():
    params, x_BTD = layer(PRE), stream()
    flipped = AttentionPattern(key_valid_BT=~jnp.asarray(REAL[:1]))
    right, wrong = (np.asarray(attend(params, x_BTD, p))[0] for p in (PADDED, flipped))
    assert np.all(np.abs(right - wrong).max(-1) > 1e-3)
    short = np.asarray(attend(params, x_BTD[:1, :4]))[0]
    np.testing.assert_allclose(right[:4], short, atol=1e-5)
    for bad in (
        jnp.asarray(REAL, jnp.int32),
        jnp.where(REAL, 0.0, -1e9),
        jnp.asarray(REAL).T,
        jnp.asarray(REAL[0]),
    ):
        with pytest.raises(ValueError, match=r"key_valid_BT has (dtype|shape)"):
            attend(params, x_BTD, AttentionPattern(key_valid_BT=bad))


def test_s1_20_a_row_without_a_real_token_gives_zero_and_no_nan():
    nothing = np.zeros((2, 6), bool)
    nothing[1] = True
    pattern = AttentionPattern(key_valid_BT=jnp.asarray(nothing))
    q, k, v = (draw(2, 6, 2, 4, seed=i) for i in range(3))

    @jax.jit
    def measured(q, k, v):
        y, pullback = jax.vjp(lambda *qkv: attention(*qkv, pattern), q, k, v)
        return y, pullback(jnp.ones_like(y))

    y_BTHK, gradients = measured(q, k, v)
    for x in (y_BTHK, *gradients):
        assert not np.any(np.asarray(x[0]))
        assert np.all(np.isfinite(np.asarray(x)))
        assert np.any(np.asarray(x[1]))
    np.testing.assert_array_equal(masked_mean(stream(), jnp.asarray(nothing))[0], np.zeros(WIDTH))
    logits_BTV, targets_BT = draw(1, 6, 5), jnp.zeros((1, 6), jnp.int32)
    loss = jax.jit(cross_entropy)(logits_BTV, targets_BT, valid_BT=jnp.asarray(nothing[:1])).loss
    assert float(loss) == 0
    # Controls: what a softmax over nothing, and over a large negative constant, would have given.
    assert np.all(np.isnan(jax.nn.softmax(jnp.full(6, -jnp.inf))))
    np.testing.assert_allclose(jax.nn.softmax(jnp.full(6, -1e9)), 1 / 6, rtol=1e-6)


def test_s1_23_queries_at_padding_are_not_zero():
    """Only keys are masked: the stream at padded places goes on, and depends on what stands there."""
    params, x_BTD = layer(PRE), stream()
    noisy_BTD = jnp.where(REAL[..., None], x_BTD, stream(seed=9))
    (after, kept), (other, _) = (block(PRE)(params, x, PADDED) for x in (x_BTD, noisy_BTD))
    assert np.all(np.asarray(kept["attention_out"])[~REAL] != 0)
    assert np.all(np.asarray(after)[~REAL] != np.asarray(other)[~REAL])
    np.testing.assert_array_equal(np.asarray(after)[REAL], np.asarray(other)[REAL])
    # Control: attention with no key at all does write 0.
    nobody = AttentionPattern(key_valid_BT=jnp.zeros((1, 6), bool))
    q = draw(2, 6, 2, 4)
    assert not np.any(np.asarray(compiled_attention(q, q, q, nobody)))


@given(SEEDS)
@few
def test_s1_24_pooling_has_a_mask_of_its_own(seed):
    x_BTD = np.asarray(stream(seed=seed))
    noisy_BTD = np.where(REAL[..., None], x_BTD, np.asarray(draw(*SHAPE, seed=seed + 1)))
    ours, noisy = (np.asarray(masked_mean(jnp.asarray(x), jnp.asarray(REAL))) for x in (x_BTD, noisy_BTD))
    np.testing.assert_array_equal(ours, noisy)
    np.testing.assert_allclose(ours[0], x_BTD[0, :4].mean(0), atol=1e-6)
    assert not np.allclose(x_BTD.mean(1)[0], noisy_BTD.mean(1)[0], atol=1e-3)


def test_s1_25_labels_at_padding_do_not_reach_the_loss():
    logits_BTV, valid_BT, loss_of = draw(2, 6, 5), jnp.asarray(REAL), jax.jit(cross_entropy)
    labels_BT = jnp.asarray(np.random.default_rng(0).integers(0, 5, (2, 6)), jnp.int32)
    for pad in (4, -1, 99):
        other_BT = jnp.where(REAL, labels_BT, pad)
        masked = [float(loss_of(logits_BTV, x, valid_BT=valid_BT).loss) for x in (labels_BT, other_BT)]
        assert masked[0] == masked[1] > 0
        unmasked = [float(loss_of(logits_BTV, x).loss) for x in (labels_BT, other_BT)]
        assert not abs(unmasked[0] - unmasked[1]) < 1e-3


@pytest.mark.parametrize("implementation", ["xla", "blocked"])
def test_s1_32_causal_is_no_hint_it_hides_what_it_says(implementation):
    """With a mask as well, both hold: beside a causal mask it changes nothing, another one it never overrules."""
    q, k, v = (draw(1, 6, 2, 4, seed=i) for i in range(3))
    lower = jnp.tri(6, dtype=bool)[None, None]
    columns = (
        jnp.asarray(np.random.default_rng(1).random((6, 6)) < 0.6)[None, None]
        | jnp.eye(6, dtype=bool)[None, None]
    )

    def run(mask, *, causal=False):
        pattern = AttentionPattern(causal=causal, mask=mask)
        return np.asarray(compiled_attention(q, k, v, pattern, implementation=implementation))

    np.testing.assert_allclose(run(lower, causal=True), run(lower), atol=1e-6)
    np.testing.assert_allclose(run(columns, causal=True), run(columns & lower), atol=1e-6)
    assert not np.allclose(run(columns, causal=True), run(columns), atol=1e-2)
    assert not np.allclose(run(columns, causal=True), run(lower), atol=1e-2)


# Padding through the whole stack -------------------------------------------------------------------------------------


@functools.cache
def padding_errors(*, keys_masked: bool = True, pool_masked: bool = True) -> tuple[np.ndarray, float]:
    """Return what noise at padded places does: the largest error at real ones per block, and of pooled logits."""
    pattern = PADDED if keys_masked else AttentionPattern(key_valid_BT=jnp.ones((2, 6), bool))
    x_BTD, kernel_DC = stream(), draw(WIDTH, 3)
    results = []
    for given_BTD in (x_BTD, jnp.where(REAL[..., None], x_BTD, 3 * draw(*SHAPE, seed=5))):
        after, kept = stack(PRE)(built(PRE)[1]["blocks"], given_BTD, pattern)
        pooled_BD = masked_mean(after, jnp.asarray(REAL if pool_masked else np.ones_like(REAL)))
        results.append((np.asarray(kept["resid_post"])[:, REAL], np.asarray(dense(pooled_BD, kernel_DC))))
    (tokens, logits), (noisy_tokens, noisy_logits) = results
    return np.abs(tokens - noisy_tokens).max((1, 2)), float(np.abs(logits - noisy_logits).max())


def test_s1_38_padding_reaches_neither_tokens_nor_pooled_logits_at_any_depth():
    per_block, pooled = padding_errors()
    assert per_block.shape == (PRE.depth,)
    assert np.all(per_block < 1e-6), f"error per block: {per_block}"
    assert pooled < 1e-6


def test_s1_39_without_the_key_mask_padding_is_read():
    per_block, pooled = padding_errors(keys_masked=False)
    assert np.all(per_block > 1e-3), f"error per block: {per_block}"
    assert pooled > 1e-3


def test_s1_45_masked_attention_is_not_enough_if_pooling_is_not_masked():
    per_block, pooled = padding_errors(pool_masked=False)
    assert np.all(per_block < 1e-6)
    assert pooled > 1e-3


# Dropout -------------------------------------------------------------------------------------------------------------

RATES = {"attention_dropout": 0.5, "hidden_dropout": 0.5, "branch_dropout": 0.5}


def dropout_keys(monkeypatch, **rates) -> dict[tuple[str, int], bytes]:
    """Return the key of every dropout of one block, by what it acts on and its turn among those."""
    drawn, kinds = {}, {4: "weights", 3: "branch"}

    def spied(x, rate, key):
        if key is not None and rate > 0:
            kind = "hidden" if x.shape[-1] == PRE.num_hidden else kinds[min(x.ndim, 4)]
            place = kind, sum(name == kind for name, _ in drawn)
            drawn[place] = jax.random.key_data(key)
        return dropout(x, rate, key)

    for module in ("jaxblock.functional.attention_xla", "jaxblock.modules.dropout"):
        monkeypatch.setattr(sys.modules[module], "dropout", spied)

    def run(x_BTD):
        drawn.clear()
        apply_block(config(**rates), layer(PRE), x_BTD, key=KEY)
        return dict(drawn)

    return {place: np.asarray(data).tobytes() for place, data in jax.jit(run)(stream()).items()}


SITES = {
    "attention_dropout": {("weights", 0)},
    "hidden_dropout": {("hidden", 0)},
    "branch_dropout": {("branch", 0), ("branch", 1)},
}


def test_s1_21_every_dropout_site_has_its_own_key(monkeypatch):
    """Weights, hidden units and both branch outputs: four keys; switching one off leaves the others' keys."""
    every = dropout_keys(monkeypatch, **RATES)
    assert set(every) == set().union(*SITES.values())
    assert len(set(every.values())) == len(every) == 4
    for off, sites in SITES.items():
        rest = dropout_keys(monkeypatch, **{**RATES, off: 0.0})
        assert rest == {place: key for place, key in every.items() if place not in sites}
    assert dropout_keys(monkeypatch) == {}


@pytest.mark.parametrize("site", RATES)
def test_s1_21_each_dropout_acts_where_it_says(site):
    rates = {**dict.fromkeys(RATES, 0.0), site: 0.5}
    _, kept = block(config(**rates))(layer(PRE), stream(), CAUSAL, KEY)
    _, clean = block(PRE)(layer(PRE), stream(), CAUSAL, None)
    moved = not np.array_equal(kept["attention_out"], clean["attention_out"])
    assert moved == (site != "hidden_dropout")
    assert bool(np.any(np.asarray(kept["attention_out"]) == 0)) == (site == "branch_dropout")
    assert not np.array_equal(kept["feed_forward_out"], clean["feed_forward_out"])
    assert bool(np.any(np.asarray(kept["feed_forward_out"]) == 0)) == (site == "branch_dropout")


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_s1_22_kept_units_are_scaled_and_evaluation_is_the_identity(rate):
    keys, x = jax.random.split(KEY, 2000), 1.0 + jnp.arange(16.0) / 16
    y = np.asarray(jax.jit(jax.vmap(lambda key: dropout(x, rate, key)))(keys), np.float64)
    kept = np.broadcast_to(np.asarray(x / (1 - rate)), y.shape)[y != 0]
    np.testing.assert_allclose(y[y != 0], kept, rtol=1e-6)
    error = np.asarray(x) * np.sqrt(rate / (1 - rate) / len(keys))
    assert np.all(np.abs(y.mean(0) - x) < 4 * error)
    assert np.all(np.abs(y.mean(0) * (1 - rate) - x) > 4 * error)  # not scaled, it would fail
    np.testing.assert_array_equal(dropout(x, rate, None), x)


def test_s1_35_evaluation_and_no_gradient_are_separate_switches():
    """Dropout goes by the key alone, whether a gradient is taken or not; without it there is a gradient."""
    module, params = FeedForward(config(hidden_dropout=0.5)), layer(PRE)["feed_forward"]

    def total(x_BTD, key):
        rngs = {} if key is None else {"dropout": key}
        return jnp.sum(jnp.sin(module.apply({"params": params}, x_BTD, rngs=rngs)))

    alone, both = jax.jit(total), jax.jit(jax.value_and_grad(total))
    values, gradients = {}, {}
    for name, key in (("train", KEY), ("evaluation", None)):
        values[name], (value, gradients[name]) = float(alone(stream(), key)), both(stream(), key)
        assert float(value) == pytest.approx(values[name], rel=1e-5)
        assert np.any(np.asarray(gradients[name]))
    assert abs(values["train"] - values["evaluation"]) > 1e-2
    assert not np.allclose(gradients["train"], gradients["evaluation"], atol=1e-2)


@given(SEEDS)
@few
def test_s1_43_two_training_passes_differ_and_two_evaluations_agree(seed):
    run = block(config(**RATES))
    first, second = (run(layer(PRE), stream(), CAUSAL, jax.random.key(seed + i))[0] for i in range(2))
    again = run(layer(PRE), stream(), CAUSAL, jax.random.key(seed))[0]
    assert not np.allclose(first, second, atol=1e-2)
    np.testing.assert_array_equal(first, again)
    evaluated = [run(layer(PRE), stream(), CAUSAL, None)[0] for _ in range(2)]
    np.testing.assert_array_equal(*evaluated)
    np.testing.assert_array_equal(evaluated[0], block(PRE)(layer(PRE), stream(), CAUSAL, None)[0])


# The clip and the guard ----------------------------------------------------------------------------------------------


def test_s1_34_the_global_norm_is_clipped_to_1():
    """With beta1 = 0 Adam's first moment is the gradient it was given."""
    params = bigram_params()
    unit = jax.tree.map(lambda x: x / optax.tree.norm(params), params)
    for clip, most in ((1.0, 1.0), (0.0, 1e9)):
        optimizer = make_optimizer(OptimizerConfig(clip=clip, algorithm="adamw(beta1=0.0)"))
        update, start = jax.jit(optimizer.update), optimizer.init(params)
        for size in (0.01, 0.99, 1e4):
            state = update(optax.tree.scale(size, unit), start, params)[1]
            want = optax.tree.scale(min(size, most), unit)
            chex.assert_trees_all_close(optax.tree.get(state, "mu"), want, rtol=1e-5)


class TwoMatrices(Bigram):
    """What a step asks of a model besides its logits."""

    connections = topology("pre_norm")

    def project(self, params):
        return params


def test_s1_34_a_gradient_that_is_not_finite_is_flagged_and_not_applied():
    """A head of 1e25 keeps the loss finite, while the squares of its gradients are beyond float32."""
    run, params = training(), bigram_params()
    step = jax.jit(make_step(TwoMatrices(), run))
    for scale, fine in ((1.0, True), (1e25, False)):
        start = {**params, "head": {"kernel": scale * params["head"]["kernel"]}}
        after, metrics = step(state_of(run, start), batch(), KEY)
        assert np.isfinite(metrics.loss)
        assert bool(metrics.alarm == GOOD) == bool(np.isfinite(metrics.gradient_norm)) == fine
        same = jax.tree.map(np.array_equal, after.params, start)
        assert set(jax.tree.leaves(same)) == {not fine}

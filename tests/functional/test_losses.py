"""Cross-entropy against float64 numpy, its gradient, its sums, and faults B27 (seams), B65 (-inf), B72 (padding)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxblock.functional.losses import LossOptions, cross_entropy, mean_over_targets, next_token_targets

SHAPE = (2, 3, 5)
PLAIN = LossOptions()
JIT_TARGETS = jax.jit(
    lambda tokens, valid, segments: next_token_targets(tokens, valid_BT=valid, segments_BT=segments).valid
)


@functools.partial(jax.jit, static_argnames="options")
def jitted(logits, targets, valid=None, options=PLAIN):
    return cross_entropy(logits, targets, valid_BT=valid, options=options)


@functools.partial(jax.jit, static_argnames="options")
def gradient(logits, targets, valid=None, options=PLAIN):
    return jax.grad(lambda x: cross_entropy(x, targets, valid_BT=valid, options=options).loss)(logits)


def reference(logits, targets, valid, options=PLAIN):
    """The sums (objective, nats, z-loss) over real targets, token by token, in float64."""
    total = nats = z_loss = 0.0
    for row, target in zip(np.asarray(logits, np.float64)[valid], np.asarray(targets)[valid], strict=True):
        row = row[: options.vocab_size]
        log_z = row.max() + np.log(np.exp(row - row.max()).sum())
        q = np.full(len(row), options.label_smoothing / len(row))
        q[target] += 1 - options.label_smoothing
        nats += log_z - row[target]
        z_loss += options.z_loss * log_z**2
        total += (q * (log_z - row)).sum() + options.z_loss * log_z**2
    return total, nats, z_loss


def draw(seed, shape=SHAPE, spread=1.0, vocabulary=None):
    rng = np.random.default_rng(seed)
    logits = (spread * rng.normal(size=shape)).astype(np.float32)
    targets = rng.integers(0, vocabulary or shape[-1], shape[:-1]).astype(np.int32)
    return logits, targets, rng.random(shape[:-1]) < 0.6


OPTIONS = [
    PLAIN,
    LossOptions(z_loss=0.1),
    LossOptions(label_smoothing=0.2),
    LossOptions(z_loss=0.1, label_smoothing=0.2, vocab_size=4),
]


@settings(deadline=None, max_examples=20)
@given(
    shape=st.sampled_from([SHAPE, (3, 1, 7)]),
    seed=st.integers(0, 999),
    spread=st.sampled_from([0.1, 1.0, 30.0]),
    options=st.sampled_from(OPTIONS),
)
def test_sums_weight_and_mean_equal_the_float64_formula(shape, seed, spread, options):
    logits, targets, valid = draw(seed, shape, spread, options.vocab_size)
    got = jitted(logits, targets, valid, options)
    total, nats, z_loss = reference(logits, targets, valid, options)
    np.testing.assert_allclose(got.total, total, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got.nats, nats, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got.z_loss, z_loss, rtol=1e-5, atol=1e-5)
    assert got.weight == valid.sum()
    np.testing.assert_allclose(got.loss, total / max(valid.sum(), 1), rtol=1e-5, atol=1e-5)
    assert all(value.dtype == jnp.float32 and value.shape == () for value in got)


def test_each_option_changes_the_loss_and_zero_options_change_nothing():
    logits, targets, valid = draw(0)
    plain = jitted(logits, targets, valid)
    assert plain.total == plain.nats
    assert plain.z_loss == 0
    for option in ({"z_loss": 0.1}, {"label_smoothing": 0.1}):
        got = jitted(logits, targets, valid, LossOptions(**option))
        assert abs(got.loss - plain.loss) > 1e-3
        assert got.nats == plain.nats
    assert abs(jitted(logits, 0 * targets, valid, LossOptions(vocab_size=4)).loss - plain.loss) > 1e-3


def test_zero_logits_cost_ln_of_the_vocabulary():
    logits, targets, _ = draw(0)
    np.testing.assert_allclose(jitted(0 * logits, targets).loss, np.log(5), rtol=1e-6)


def test_gradient_is_softmax_minus_one_hot_over_the_weight():
    logits, targets, valid = draw(1)
    p = np.exp(logits.astype(np.float64))
    p /= p.sum(-1, keepdims=True)
    want = (p - np.eye(5)[targets]) * valid[..., None]
    np.testing.assert_allclose(gradient(logits, targets, valid), want / valid.sum(), atol=1e-6)
    assert 1 < valid.sum() < valid.size
    # Control: the mean over all positions is another gradient.
    assert np.abs(gradient(logits, targets, valid) - want / valid.size).max() > 1e-2


@pytest.mark.parametrize("options", OPTIONS)
def test_gradient_equals_the_float64_finite_difference(options):
    logits, targets, valid = draw(2, vocabulary=4)
    got = np.asarray(gradient(logits, targets, valid, options))
    for index in np.ndindex(*SHAPE):
        step = np.zeros(SHAPE)
        step[index] = 1e-5
        up, down = (
            reference(logits.astype(np.float64) + s, targets, valid, options)[0] for s in (step, -step)
        )
        np.testing.assert_allclose(got[index], (up - down) / 2e-5 / valid.sum(), atol=2e-6)


def test_a_large_common_offset_costs_no_digits():
    logits, targets, valid = draw(3, spread=0.25)
    shifted = (np.round(logits * 64) / 64).astype(np.float32)
    want = jitted(shifted, targets, valid).loss
    assert jitted(shifted + np.float32(2**16), targets, valid).loss == want
    # Control: log-sum-exp minus the target logit, both near 65536, has lost them.
    offset = shifted + np.float32(2**16)
    naive = jax.nn.logsumexp(offset, axis=-1) - np.take_along_axis(offset, targets[..., None], -1)[..., 0]
    assert abs(naive[valid].mean() - want) > 1e-4


@pytest.mark.parametrize("scale", [1e4, 1e30])
def test_huge_logits_stay_finite(scale):
    logits = jnp.array([[[scale, -scale, 0.0]]])
    assert jitted(logits, jnp.array([[0]])).loss == 0
    assert jitted(logits, jnp.array([[1]])).loss == np.float32(2 * scale)
    assert np.isfinite(gradient(logits, jnp.array([[1]]))).all()


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_the_mathematics_is_float32_whatever_the_logits_dtype(dtype):
    logits, targets, valid = draw(4)
    narrow = jnp.asarray(logits, dtype)
    got = jitted(narrow, targets, valid, OPTIONS[-2])
    want = jitted(narrow.astype(jnp.float32), targets, valid, OPTIONS[-2])
    assert got.loss.dtype == jnp.float32
    np.testing.assert_array_equal(got, want)
    assert gradient(narrow, targets, valid).dtype == dtype
    # Control: rounded to the narrow dtype it is another number.
    assert got.loss.astype(dtype).astype(jnp.float32) != got.loss


def test_float64_logits_keep_float64():
    with jax.enable_x64(True):
        logits, targets, valid = draw(5)
        got = jitted(logits.astype(np.float64), targets, valid)
        assert got.loss.dtype == jnp.float64
        np.testing.assert_allclose(got.total, reference(logits, targets, valid)[0], rtol=1e-13)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_b65_minus_infinity_elsewhere_spoils_neither_loss_nor_gradient(smoothing):
    logits, targets = jnp.array([[[-jnp.inf, 0.0]]]), jnp.array([[1]])
    options = LossOptions(label_smoothing=smoothing, z_loss=0.1)
    got = jitted(logits, targets, options=options)
    np.testing.assert_array_equal(got, [0, 0, 1, 0, 0])
    np.testing.assert_array_equal(gradient(logits, targets, options=options), np.zeros((1, 1, 2)))
    # Without jit too: XLA may turn a product with a mask into a selection and hide the NaN.
    np.testing.assert_array_equal(cross_entropy(logits, targets, options=options), got)
    # Control: the product with a one-hot row is NaN; so targets are ids, and one-hot rows are refused.
    assert np.isnan(jnp.sum(jax.nn.one_hot(targets, 2) * jax.nn.log_softmax(logits)))
    with pytest.raises(AssertionError, match="rank"):
        cross_entropy(logits, jax.nn.one_hot(targets, 2), options=options)


def test_b65_an_entry_at_minus_infinity_is_as_if_it_were_not_there():
    logits, targets, valid = draw(6, vocabulary=4)
    options = LossOptions(label_smoothing=0.1, z_loss=0.1)
    with_hole = np.concatenate([logits[..., :4], np.full((2, 3, 1), -np.inf, np.float32)], -1)
    np.testing.assert_allclose(
        jitted(with_hole, targets, valid, options),
        jitted(logits[..., :4], targets, valid, options),
        rtol=1e-6,
    )
    want = gradient(logits[..., :4], targets, valid, options)
    got = np.asarray(gradient(with_hole, targets, valid, options))
    np.testing.assert_allclose(got[..., :4], want, atol=1e-7)
    np.testing.assert_array_equal(got[..., 4], 0)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_real_target_at_minus_infinity_costs_infinity(smoothing):
    logits = jnp.array([[[-jnp.inf, 0.0, 1.0]]])
    assert jitted(logits, jnp.array([[0]]), options=LossOptions(label_smoothing=smoothing)).loss == jnp.inf


def test_b72_padded_vocabulary_columns_count_for_nothing():
    logits, targets = jnp.zeros((1, 1, 4)), jnp.array([[1]])
    real = LossOptions(vocab_size=3)
    np.testing.assert_allclose(jitted(logits, targets, options=real).loss, np.log(3), rtol=1e-6)
    np.testing.assert_allclose(
        jitted(logits, targets).loss, np.log(4), rtol=1e-6
    )  # control: without the size
    for smoothing in (0.0, 0.3):
        options = LossOptions(vocab_size=3, label_smoothing=smoothing, z_loss=0.1)
        for padding in (50.0, np.nan, np.inf, -np.inf):
            forced = np.array([[[0, 0, 0, padding]]], np.float32)
            np.testing.assert_array_equal(
                jitted(forced, targets, options=options), jitted(logits, targets, options=options)
            )
            slope = gradient(forced, targets, options=options)
            np.testing.assert_array_equal(slope, gradient(logits, targets, options=options))
            assert slope[0, 0, 3] == 0


@pytest.mark.parametrize("options", OPTIONS)
def test_no_real_target_gives_zero_loss_and_zero_gradient(options):
    logits, targets, valid = draw(7, vocabulary=4)
    np.testing.assert_array_equal(jitted(logits, targets, False & valid, options), np.zeros(5))
    np.testing.assert_array_equal(gradient(logits, targets, False & valid, options), np.zeros(SHAPE))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("garbage", [1e4, np.nan, np.inf, -np.inf])
def test_positions_that_are_not_real_may_hold_anything(options, garbage):
    logits, targets, valid = draw(8, vocabulary=4)
    want, slope = jitted(logits, targets, valid, options), gradient(logits, targets, valid, options)
    logits = np.where(valid[..., None], logits, np.float32(garbage))
    for bad_id in (-1, 5, 2**31 - 1):
        ids = np.where(valid, targets, np.int32(bad_id))
        np.testing.assert_array_equal(jitted(logits, ids, valid, options), want)
        np.testing.assert_array_equal(gradient(logits, ids, valid, options), slope)
    moved = np.where(valid[..., None], logits + np.arange(5, dtype=np.float32), logits)
    assert jitted(moved, targets, valid, options).loss != want.loss  # control: real positions matter


@pytest.mark.parametrize(("bad_id", "options"), [(-1, OPTIONS[0]), (5, OPTIONS[0]), (4, OPTIONS[-1])])
def test_a_real_target_outside_the_vocabulary_is_loud(bad_id, options):
    logits, targets, valid = draw(9, vocabulary=4)
    valid[0, 0] = True
    targets[0, 0] = bad_id
    got = jitted(logits, targets, valid, options)
    assert np.isnan([got.loss, got.total, got.nats]).all()


@settings(deadline=None, max_examples=8)
@given(seed=st.integers(0, 999), options=st.sampled_from([OPTIONS[0], OPTIONS[-1]]))
def test_parts_combine_exactly_and_the_mean_of_means_does_not(seed, options):
    logits, targets, valid = draw(seed, vocabulary=4)
    valid[0], valid[1] = [True, False, False], [True, True, True]
    whole = jitted(logits, targets, valid, options)
    parts = [jitted(logits[i : i + 1], targets[i : i + 1], valid[i : i + 1], options) for i in (0, 1)]
    sums = [np.float32(a + b) for a, b in zip(*parts, strict=True)]
    np.testing.assert_allclose(mean_over_targets(sums[1], sums[2]), whole.loss, rtol=1e-6)
    np.testing.assert_allclose(sums[1:], np.asarray(whole[1:]), rtol=1e-5, atol=1e-6)
    if abs(parts[0].loss - parts[1].loss) > 1e-3:  # control
        assert abs((parts[0].loss + parts[1].loss) / 2 - whole.loss) > 1e-4


def test_mean_over_targets_of_nothing_is_zero_with_a_finite_gradient():
    value, slope = jax.value_and_grad(mean_over_targets)(jnp.float32(0), jnp.float32(0))
    assert (value, slope) == (0, 1)


def test_jit_equals_eager_and_leaving_out_valid_means_all():
    logits, targets, valid = (jnp.asarray(a) for a in draw(10, vocabulary=4))
    eager = cross_entropy(logits, targets, valid_BT=valid)
    np.testing.assert_allclose(eager, jitted(logits, targets, valid), rtol=1e-6)
    np.testing.assert_array_equal(jitted(logits, targets), jitted(logits, targets, jnp.ones((2, 3), bool)))


def test_wrong_masks_shapes_and_dtypes_are_refused():
    logits, targets, _ = (jnp.asarray(a) for a in draw(11))
    for mask in (jnp.ones((2, 3)), jnp.ones((2, 3), jnp.int32)):
        with pytest.raises(ValueError, match="valid_BT has dtype"):
            cross_entropy(logits, targets, valid_BT=mask)
        with pytest.raises(ValueError, match="valid_BT has dtype"):
            next_token_targets(targets, valid_BT=mask)
    for call in (
        lambda: cross_entropy(logits[0], targets[0]),
        lambda: cross_entropy(logits, targets[:, 1:]),
        lambda: cross_entropy(logits, targets, valid_BT=jnp.ones((2, 1), bool)),
        lambda: cross_entropy(logits, logits[..., 0]),
        lambda: next_token_targets(targets, segments_BT=targets[:, 1:]),
        lambda: next_token_targets(targets, valid_BT=jnp.ones((2, 1), bool)),
    ):
        with pytest.raises(AssertionError):
            call()


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("z_loss", [-1e-4, float("nan"), True]),
        ("label_smoothing", [-0.1, 1.0, float("inf")]),
        ("vocab_size", [0, 3.0, True]),
    ],
)
def test_options_out_of_range_are_refused(field, values):
    for value in values:
        with pytest.raises(ValueError, match=f"{field} is"):
            LossOptions(**{field: value})


def test_a_vocabulary_wider_than_the_logits_is_refused():
    with pytest.raises(ValueError, match="vocab_size is 6; it must be at most 5"):
        cross_entropy(jnp.zeros(SHAPE), jnp.zeros((2, 3), jnp.int32), options=LossOptions(vocab_size=6))


def test_next_token_targets_shift_by_one():
    tokens = jnp.array([[7, 8, 9], [4, 5, 6]])
    got = next_token_targets(tokens)
    np.testing.assert_array_equal(got.inputs, [[7, 8], [4, 5]])
    np.testing.assert_array_equal(got.targets, [[8, 9], [5, 6]])
    assert got.valid.all()
    assert got.valid.dtype == bool


def test_b27_no_target_crosses_the_seam_between_documents():
    tokens, segments = jnp.arange(5)[None], jnp.array([[1, 1, 1, 2, 2]])
    _, targets, valid = next_token_targets(tokens, segments_BT=segments)
    np.testing.assert_array_equal(valid, [[True, True, False, True]])
    assert valid.sum() == 3
    assert next_token_targets(tokens).valid.sum() == 4  # control: without segments the seam counts
    logits = jnp.zeros((1, 4, 5))
    np.testing.assert_array_equal(gradient(logits, targets, valid)[0, 2], np.zeros(5))


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 3), st.booleans())
def test_b27_documents_of_n_tokens_give_n_minus_one_targets(lengths, padding, left):
    ids = np.repeat(np.arange(len(lengths)), lengths)
    pad = (padding, 0) if left else (0, padding)
    # Filled up to one shape for one compile, at the other end, with what is not real.
    pad = (pad[0], pad[1] + 20 - padding - len(ids))
    segments = np.pad(ids, pad, constant_values=9)[None].astype(np.int32)
    real = np.pad(np.ones(len(ids), bool), pad)[None]
    valid = JIT_TARGETS(segments, real, segments)
    assert np.asarray(valid).sum() == sum(n - 1 for n in lengths)


def test_a_target_is_real_only_when_both_its_tokens_are():
    valid = jnp.array([[False, True, True, False, True]])
    got = next_token_targets(jnp.arange(5)[None], valid_BT=valid).valid
    np.testing.assert_array_equal(got, [[False, True, False, False]])


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16"])
@pytest.mark.parametrize("vocabulary", [200, 256, 300])
def test_narrow_target_types_do_not_wrap(dtype, vocabulary):
    logits_BTV = jnp.asarray(np.random.default_rng(0).normal(size=(1, 4, vocabulary)), jnp.float32)
    targets_BT = jnp.asarray([[1, 2, 3, 4]])
    want = cross_entropy(logits_BTV, targets_BT).loss
    assert cross_entropy(logits_BTV, targets_BT.astype(dtype)).loss == want

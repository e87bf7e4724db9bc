"""Seed 003: what can be read of earlier layers. Running sums, DenseFormer's averages, attention over depth."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxblock.functional.depth_mixing import Sources, depth_weights, mix_sources
from jaxblock.functional.residual import no_residual, pre_norm
from jaxblock.residual import History, residual
from jaxblock.residual.attention_residual import DepthReader, ReaderOptions
from jaxblock.residual.dense_former import DenseStream, DepthAverage
from tests.claims import depth
from tests.claims.depth import count, root_mean_square, values
from tests.small import built, config, tokens

SMALL = config()
DENSE = config(residual="dense_former", positions="none")
ATTENTIVE = config(residual="attention_residual", positions="none")
ROWS = (4, 2, 3, 8)
"""A history of 4 rows [B, T, D]; more features than rows, so that weights can be read off a mixture."""


def history(seed, *, spread=1.0):
    return (spread * np.random.default_rng(seed).normal(size=ROWS)).astype(np.float32)


def recovered(rows_NBTD, mixed_BTD):
    """Return the weights with which each token's rows were mixed, [N, B, T], by least squares in float64."""
    rows, mixed = np.asarray(rows_NBTD, np.float64), np.asarray(mixed_BTD, np.float64)
    weights = np.zeros(rows.shape[:-1])
    for b, t in np.ndindex(mixed.shape[:-1]):
        weights[:, b, t], error, *_ = np.linalg.lstsq(rows[:, b, t].T, mixed[b, t], rcond=None)
        assert error.max() < 1e-8
    return weights


# ------------------------------------------------------------------ the running sum


def test_s3_01_the_branch_learns_what_is_left_of_the_target():
    x = jnp.asarray([1.0, -2.0, 3.0, 8.0])
    want = x**2  # any map H; F is what is missing
    after = pre_norm(x, lambda h: want - x, depth.identity)
    np.testing.assert_array_equal(after, want)
    np.testing.assert_array_equal(after - x, want - x)
    assert not np.array_equal(no_residual(x, lambda h: want - x, depth.identity), want)  # control


@pytest.mark.parametrize(("rate", "want"), [(0.9, 0.006363), (1.0, 1.0), (1.1, 97.02)])
def test_s3_03_a_skip_that_is_not_the_identity_scales_signal_and_gradient_by_its_power(rate, want):
    """48 sublayers, 24 blocks, of x <- rate x + f(x), run by the combinator; the branches write nothing."""

    def run(x):
        for _ in range(48):
            x = residual(lambda x, f: rate * x + f(x), x, jnp.zeros_like, dtype="float32")
        return x

    signal, pullback = jax.vjp(run, jnp.ones(()))
    assert float(signal) == pytest.approx(want, rel=1e-3)
    assert float(pullback(jnp.ones(()))[0]) == pytest.approx(want, rel=1e-3)
    assert (float(signal) == 1.0) == (rate == 1.0)  # only the identity keeps both


@pytest.mark.parametrize(("wiring", "updates"), [("serial", 2), ("parallel", 1)])
def test_s3_05_a_block_updates_the_stream_twice(wiring, updates):
    """Each update adds 1, whatever its branch says; the parallel wiring, with one, is the control."""
    model_config = config(wiring=wiring)
    x_BTD = jnp.zeros((1, 2, 8))

    def count_updates(x, f):
        return x + jnp.ones_like(f(x))

    params = depth.row(built(model_config)[1]["blocks"], 0)
    after = jax.jit(lambda x: depth.run_block(model_config, params, x, rule=count_updates))(x_BTD)
    np.testing.assert_array_equal(after, jnp.full_like(x_BTD, updates))
    assert model_config.sublayers == updates * model_config.depth


def unrolled(residual):
    """Return the stream after the stack, the sum of what it started from and all branches, and both in float32."""
    _, made = values(config(residual=residual))
    blocks = made["blocks"]
    writes = np.stack([blocks["attention_out"], blocks["feed_forward_out"]], axis=1).reshape(6, 2, 6, 8)
    total = blocks["resid_pre"][0]
    for write in writes:
        total = total + write
    wide = blocks["resid_pre"][0].astype(np.float64) + writes.astype(np.float64).sum(0)
    return made["resid_final"], total, wide


def test_s3_10_pre_norm_is_a_running_sum():
    final, same_order, wide = unrolled("pre_norm")
    np.testing.assert_array_equal(final, same_order)
    np.testing.assert_allclose(final, wide, atol=math.sqrt(6) * np.finfo(np.float32).eps * np.abs(wide).max())


def test_s3_08_post_norm_is_not():
    """The control of the test above: no sum of what was written, by more than rounding: by its own size."""
    final, _, wide = unrolled("post_norm")
    error = np.linalg.norm(final - wide) / np.linalg.norm(final)
    assert error > 0.3
    # Not even of another size: no factor per token makes the sum the stream.
    factor = (final * wide).sum(-1, keepdims=True) / np.square(wide).sum(-1, keepdims=True)
    assert np.linalg.norm(final - factor * wide) / np.linalg.norm(final) > 0.1


# ------------------------------------------------------------------ DenseFormer


def test_s3_16_dense_former_with_alpha_the_identity_is_the_plain_stack():
    params = built(DENSE)[1]
    plain = values(config(positions="none"), {name: x for name, x in params.items() if name != "shared"})[0]
    started = values(DENSE, depth.edited(params, "^shared/weight", jnp.zeros_like))[0]
    np.testing.assert_allclose(started, plain, rtol=1e-5, atol=1e-5)
    assert np.abs(values(DENSE)[0] - plain).max() > 0.1  # control: with other weights it is not


def test_s3_16_dense_former_averages_the_states_of_all_blocks():
    """Y_i = sum_{j <= i} alpha_ij X_j against float64, alpha from the parameters in the order of the formula."""
    made, params = values(DENSE)[1], built(DENSE)[1]
    blocks = jax.tree.map(lambda x: x.astype(np.float64), made["blocks"])
    learned, alpha = iter(np.asarray(params["shared"]["weight"], np.float64)), np.eye(4)
    for i in (1, 2, 3):
        for j in range(i + 1):
            alpha[i, j] += next(learned)
    assert next(learned, None) is None
    norms = jax.tree.map(np.asarray, params["blocks"]["attention_connection"]["norm"])
    y = np.asarray(params["embedding"]["table"], np.float64)[np.asarray(tokens())]
    states = [y]
    for i in range(3):
        centred = y - y.mean(-1, keepdims=True)
        read = centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + 1e-5)
        np.testing.assert_allclose(
            read * norms["scale"][i] + norms["bias"][i], blocks["attention_in"][i], rtol=1e-4, atol=1e-5
        )
        states.append(y + blocks["attention_out"][i] + blocks["feed_forward_out"][i])
        y = np.einsum("j,jbtd->btd", alpha[i + 1, : i + 2], np.stack(states))
    np.testing.assert_allclose(made["resid_final"], y, rtol=1e-4, atol=1e-4)
    assert np.abs(made["resid_final"] - states[-1]).max() > 0.1  # control: the last state alone is not it


@pytest.mark.parametrize("blocks", [1, 3, 12, 48])
def test_s3_16_dense_former_adds_one_row_of_scalars_per_block(blocks):
    dense, plain = (config(residual=name, depth=blocks) for name in ("dense_former", "pre_norm"))
    assert count(dense) - count(plain) == blocks * (blocks + 3) // 2 == count(dense, "^shared/")
    sparse = config(residual="dense_former(dilation=2)", depth=blocks)
    assert count(sparse) < count(dense)  # control: with every second state there are fewer


@jax.jit
def dense_average(rows_NBTD, table):
    """Return what is read after the last of three blocks whose states, and the embedding, are these rows."""
    states = History(rows_NBTD[:3], jnp.int32(3))
    here = {"block": jnp.int32(2), "sublayer": jnp.int32(4), "shared": table}
    after: Any = DepthAverage(DENSE, 1, 1).apply({"place": here}, DenseStream(rows_NBTD[3], states))
    return after.x_BTD


@settings(deadline=None, max_examples=6)
@given(seed=st.integers(0, 999))
def test_s3_17_dense_former_weighs_every_token_alike(seed):
    table = np.random.default_rng(seed).normal(size=(4, 4)).astype(np.float32)
    for rows in (history(seed), history(seed + 1)):  # nor do they depend on what the history holds
        weights = recovered(rows, dense_average(rows, table))
        np.testing.assert_allclose(weights, np.broadcast_to(table[3][:, None, None], (4, 2, 3)), atol=1e-4)
    assert weights.var((1, 2)).max() < 1e-8
    control = recovered(history(seed), read(ReaderOptions(), drawn(ReaderOptions(), seed), history(seed)))
    assert control.var((1, 2)).max() > 1e-5  # attention over depth does not


# ------------------------------------------------------------------ attention over depth


@functools.cache
def reader(options):
    """Return (params, rows, keys) -> what is read of the rows, compiled once per options."""
    module = DepthReader(config(), options, 4)

    def run(params, rows_NBTD, keys_ND):
        sources = Sources((rows_NBTD,), jnp.ones(4, bool), jnp.arange(4))
        return module.apply({"params": params}, sources, rows_NBTD[-1], keys_ND)

    return jax.jit(run)


def drawn(options, seed, *, size=1.0):
    """Return a reader's parameters, and keys of places where it has them."""
    draw = np.random.default_rng(seed)
    params = {}
    if options.query == "dynamic":
        params["query_kernel"] = size * draw.normal(size=(8, 8)) / math.sqrt(8)
    elif options.key == "content":
        params["query"] = size * draw.normal(size=8)
    else:
        params["logits"] = size * draw.normal(size=(4, 1))
    if options.key == "content":
        params["key_scale"] = np.ones(8)
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)


def read(options, params, rows_NBTD):
    keys = None
    if options.key == "layer" and options.query == "dynamic":
        keys = jnp.asarray(np.random.default_rng(7).normal(size=(4, 8)), jnp.float32)
    return reader(options)(params, jnp.asarray(rows_NBTD), keys)


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 999))
def test_s3_18_weights_are_a_softmax_over_depth_of_w_dot_rms_norm(seed):
    rows, params = history(seed), drawn(ReaderOptions(), seed + 1)
    wide = rows.astype(np.float64)
    keys = wide / np.sqrt(np.square(wide).mean(-1, keepdims=True) + 1e-5)
    scores = np.exp(keys @ np.asarray(params["query"], np.float64))
    want = scores / scores.sum(0)
    got = recovered(rows, read(ReaderOptions(), params, rows))
    np.testing.assert_allclose(got, want, atol=1e-4)
    np.testing.assert_allclose(got.sum(0), 1.0, atol=1e-4)
    # Control: sigmoids of the same scores do not sum to one.
    sigmoid = recovered(rows, read(ReaderOptions(score="sigmoid"), params, rows))
    np.testing.assert_allclose(sigmoid, scores / (1 + scores), atol=1e-4)
    assert np.abs(sigmoid.sum(0) - 1.0).max() > 1e-2


def test_s3_18_a_query_of_zero_is_the_uniform_mean():
    rows = history(0)
    np.testing.assert_allclose(
        read(ReaderOptions(), drawn(ReaderOptions(), 0, size=0.0), rows), rows.mean(0), atol=1e-6
    )
    assert np.abs(read(ReaderOptions(), drawn(ReaderOptions(), 0), rows) - rows.mean(0)).max() > 0.1
    params = depth.edited(built(ATTENTIVE)[1], "reader/query", jnp.zeros_like)
    made = values(ATTENTIVE, params)[1]
    closing = made["close"]["reader"]["depth_weights"]
    np.testing.assert_allclose(closing[:, :, :, 0], np.full((7, 2, 6), 1 / 7), rtol=1e-6)


def test_s3_19_a_query_that_is_not_zero_can_weigh_all_alike():
    """Rows that agree where the query looks, once normalized; a row that does not is the control."""
    signs = np.sign(history(0))
    signs[..., 0] = 1.0
    rows = signs * np.asarray([1.0, 2.0, 3.0, 4.0], np.float32).reshape(4, 1, 1, 1)
    params = {"query": 5.0 * jnp.eye(8)[0], "key_scale": jnp.ones(8)}
    np.testing.assert_allclose(read(ReaderOptions(), params, rows), rows.mean(0), atol=1e-4)
    rows[2, ..., 0] *= -1.0
    assert np.abs(read(ReaderOptions(), params, rows) - rows.mean(0)).max() > 0.3


CELLS = {
    ("static", "layer"): False,
    ("static", "content"): True,
    ("dynamic", "layer"): True,
    ("dynamic", "content"): True,
}
"""Query and key -> whether the weights depend on the token."""


@pytest.mark.parametrize("cell", CELLS)
@settings(deadline=None, max_examples=6)
@given(seed=st.integers(0, 999))
def test_s3_20_s3_22_weights_depend_on_the_content_unless_query_and_key_are_both_static(cell, seed):
    """All four cells of S3-22, the unpublished one (dynamic query, static key) included."""
    options = ReaderOptions(query=cell[0], key=cell[1])
    rows = history(seed)
    variance = recovered(rows, read(options, drawn(options, seed + 1), rows)).var((1, 2)).max()
    assert variance > 1e-5 if CELLS[cell] else variance < 1e-9
    still = recovered(rows, read(options, drawn(options, seed + 1, size=0.0), rows))
    assert still.var((1, 2)).max() < 1e-9  # control: without a query nothing depends on anything


@pytest.mark.parametrize("blocks", [1, 3, 12])
def test_s3_21_a_dynamic_query_costs_one_square_matrix_per_sublayer(blocks):
    """Of the blocks S of them; the reader that closes the stack has one too, and the static queries go."""
    dynamic, static = (
        config(residual=f"attention_residual(query='{query}')", depth=blocks)
        for query in ("dynamic", "static")
    )
    sublayers, width = 2 * blocks, 8
    assert count(dynamic, "^blocks/.*query_kernel") == sublayers * width**2
    assert count(dynamic, "^close/.*query_kernel") == width**2
    assert count(static, "query_kernel") == 0
    assert count(static, "reader/query$") == (sublayers + 1) * width
    assert count(dynamic) - count(static) == (sublayers + 1) * (width**2 - width)
    # Control: it is per sublayer, not per block.
    assert count(dynamic, "^blocks/.*query_kernel") != blocks * width**2


# ------------------------------------------------------------------ growth


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 999))
def test_s3_23_convex_weights_do_not_grow_the_stream(seed):
    rows, draw = history(seed), np.random.default_rng(seed)
    sources = Sources((jnp.asarray(rows),), jnp.ones(4, bool), jnp.arange(4))
    largest = root_mean_square(rows).max(0)
    convex = depth_weights(jnp.asarray(draw.normal(size=4), jnp.float32), jnp.ones(4, bool), "softmax")
    assert (root_mean_square(mix_sources(sources, convex)) <= largest * (1 + 1e-6)).all()
    # Control: weights that are free, as DenseFormer's, can; so can a sum.
    free = 3.0 * jnp.eye(4)[int(root_mean_square(rows).mean((1, 2)).argmax())]
    assert (root_mean_square(mix_sources(sources, free)) > largest).any()


def test_s3_23_the_stack_grows_under_a_sum_and_not_under_attention_over_depth():
    def final_over_largest(residual):
        """Return the size of the closed stream over the largest of what it is made of, per token."""
        model_config = config(residual=residual, positions="none")
        made, table = values(model_config)[1], built(model_config)[1]["embedding"]["table"]
        embedded = np.asarray(table)[np.asarray(tokens())][None]
        blocks = made["blocks"]
        rows = np.concatenate([embedded, blocks["attention_out"], blocks["feed_forward_out"]])
        return root_mean_square(made["resid_final"]) / root_mean_square(rows).max(0)

    assert final_over_largest("attention_residual").max() <= 1 + 1e-6
    assert np.median(final_over_largest("pre_norm")) > 1.0
    assert np.median(final_over_largest("dense_former")) > 1.0

"""Cross-entropy in blocks of positions is the whole one: sums, gradients, dtypes, edges; what it never makes."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from jaxblock.functional.cross_entropy_blocked import block_positions, cross_entropy_blocked
from jaxblock.functional.losses import CrossEntropy, LossOptions, cross_entropy
from jaxblock.functional.readout import Readout, read_out

B, T, D, V = 2, 7, 4, 5
PLAIN = LossOptions()
RICH = LossOptions(z_loss=0.1, label_smoothing=0.2, vocab_size=4)
BLOCK = 3 * B * V  # three positions: blocks of 3, 3 and 1 of the 7


def whole(x_BTD, readout, targets_BT, valid_BT=None, options=PLAIN):
    return cross_entropy(read_out(x_BTD, readout), targets_BT, valid_BT=valid_BT, options=options)


def blocked(x_BTD, readout, targets_BT, valid_BT=None, options=PLAIN, block_elements=BLOCK):
    return cross_entropy_blocked(
        x_BTD, readout, targets_BT, valid_BT=valid_BT, options=options, block_elements=block_elements
    )


def draw(seed=0, layout="table", factor=1.0, dtype: Any = np.float32, vocabulary=4, columns=V):
    rng = np.random.default_rng(seed)
    x_BTD, matrix = rng.normal(size=(B, T, D)), rng.normal(size=(columns, D))
    targets_BT, valid_BT = rng.integers(0, vocabulary, (B, T)), rng.random((B, T)) < 0.7
    matrix = matrix if layout == "table" else matrix.T
    return (
        jnp.asarray(x_BTD, dtype),
        Readout(jnp.asarray(matrix, dtype), layout, factor),
        jnp.asarray(targets_BT, jnp.int32),
        jnp.asarray(valid_BT),
    )


def loss_of(result):
    return result.loss


@functools.partial(jax.jit, static_argnames=("loss", "objective", "options", "block_elements"))
def run(loss, x_BTD, readout, targets_BT, valid_BT=None, *, objective=loss_of, options=PLAIN, **more):
    """Return (what the loss returns, the gradient of `objective` of it by states and readout)."""

    def value(x_BTD, readout):
        result = loss(x_BTD, readout, targets_BT, valid_BT, options, **more)
        return objective(result), result

    gradient, result = jax.grad(value, argnums=(0, 1), has_aux=True)(x_BTD, readout)
    return result, gradient


def assert_equal(got, want, *, tolerance=2e-6):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("layout", "factor", "options", "block"),
    [
        ("table", 1.0, PLAIN, BLOCK),
        ("kernel", 0.5, RICH, BLOCK),
        ("table", 0.5, LossOptions(label_smoothing=0.2), 1),
        pytest.param("kernel", 1.0, LossOptions(z_loss=0.1), 2**24, marks=pytest.mark.full),
        pytest.param("table", 1.0, RICH, 2 * B * V, marks=pytest.mark.full),
    ],
)
def test_sums_and_gradients_are_those_of_whole_logits(layout, factor, options, block):
    given = draw(0, layout, factor)
    want, wanted = run(whole, *given, options=options)
    got, gradient = run(blocked, *given, options=options, block_elements=block)
    assert_equal(got, want)
    assert_equal(gradient, wanted)
    assert all(np.abs(leaf).max() > 1e-2 for leaf in jax.tree.leaves(wanted))
    # Controls: with every position real, both the loss and the gradient are others.
    other, another = run(blocked, *given[:3], jnp.ones((B, T), bool), options=options, block_elements=block)
    assert abs(other.loss - want.loss) > 1e-3
    assert np.abs(another[0] - wanted[0]).max() > 1e-3
    # Without a derivative the same sums.
    assert_equal(blocked(*given, options, block), want)


def test_sums_equal_the_float64_formula():
    with jax.enable_x64(True):
        x_BTD, readout, targets_BT, valid_BT = draw(1, dtype=np.float64)
        got, _ = run(blocked, x_BTD, readout, targets_BT, valid_BT, options=RICH)
        logits = np.asarray(x_BTD @ readout.matrix.T)[np.asarray(valid_BT)][:, :4]
        log_z = np.log(np.exp(logits).sum(-1))
        nats = log_z - logits[np.arange(len(logits)), np.asarray(targets_BT)[np.asarray(valid_BT)]]
        spread = log_z - logits.mean(-1)
        assert got.loss.dtype == jnp.float64
        np.testing.assert_allclose(got.nats, nats.sum(), rtol=1e-12)
        np.testing.assert_allclose(got.z_loss, 0.1 * (log_z**2).sum(), rtol=1e-12)
        total = (0.8 * nats + 0.2 * spread + 0.1 * log_z**2).sum()
        np.testing.assert_allclose(got.total, total, rtol=1e-12)
        assert got.weight == len(logits)


def of_every_sum(result: CrossEntropy):
    return result.total + 2.0 * result.nats - 3.0 * result.z_loss


def test_every_sum_has_its_derivative():
    given = draw(2)
    wanted = run(whole, *given, options=RICH, objective=of_every_sum)[1]
    assert_equal(run(blocked, *given, options=RICH, objective=of_every_sum)[1], wanted, tolerance=1e-5)
    total = run(blocked, *given, options=RICH, objective=lambda result: result.total)[1]
    assert np.abs(total[0] - wanted[0]).max() > 1e-2  # control: not that of the total


def products_and_largest(loss, objective=loss_of, **more):
    """Return how many products the derivative has, and the largest array it ever makes, at a vocabulary of 50."""

    def derivative(*given):
        return run(loss, *given, options=RICH, objective=objective, **more)

    jaxpr = jax.make_jaxpr(derivative)(*draw(columns=50))
    products, sizes = [], [0]

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            products.append(equation.primitive.name == "dot_general")
            sizes.extend(var.aval.size for var in equation.outvars)
            for inner in jaxprs_in_params(equation.params):
                walk(inner)

    walk(jaxpr.jaxpr)
    return sum(products), max(sizes)


def test_the_gradient_has_derivatives_of_its_own():
    with jax.enable_x64(True):
        x_BTD, readout, targets_BT, valid_BT = draw(1, dtype=np.float64)

        @functools.partial(jax.jit, static_argnums=0)
        def curved(loss, x_BTD):
            """Return the gradient, by states and by the readout, of half the gradient's squared length."""

            def half(x_BTD, readout):
                found = jax.grad(lambda x: loss(x, readout, targets_BT, valid_BT, RICH).loss)(x_BTD)
                return jnp.sum(jnp.square(found)) / 2

            return jax.grad(half, (0, 1))(x_BTD, readout)

        want = curved(whole, x_BTD)
        assert_equal(curved(blocked, x_BTD), want, tolerance=1e-12)
        assert (
            np.abs(curved(blocked, 2 * x_BTD)[0] - want[0]).max() > 1e-3
        )  # control: elsewhere it is another


def test_three_products_and_never_the_whole_logits():
    three = {"block_elements": 3 * B * 50}
    assert products_and_largest(whole) == (3, B * T * 50)
    assert products_and_largest(blocked, **three) == (3, B * 3 * 50)
    # Control: where the sums cannot be told apart the gradient is made twice.
    assert products_and_largest(blocked, of_every_sum, **three) == (6, B * 3 * 50)


def temporary_bytes(loss, columns, width, positions) -> int:
    shapes = (
        jax.ShapeDtypeStruct((*positions, width), jnp.float32),
        Readout(jax.ShapeDtypeStruct((columns, width), jnp.float32)),  # pyright: ignore[reportArgumentType]
        jax.ShapeDtypeStruct(positions, jnp.int32),
    )
    compiled = jax.jit(jax.value_and_grad(lambda x, readout, targets: loss(x, readout, targets).loss, (0, 1)))
    memory = compiled.lower(*shapes).compile().memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


def test_memory_at_fifty_thousand_tokens_is_at_most_a_third():
    """Measured when this was written: 183 MB in the place of 1,235. Nothing is run."""
    sizes = {"columns": 50_257, "width": 256, "positions": (8, 256)}
    most = temporary_bytes(whole, **sizes)
    assert temporary_bytes(cross_entropy_blocked, **sizes) <= most / 3
    assert most > 2 * 4 * 8 * 256 * 50_257  # control: the whole form holds logits and their gradient


@pytest.mark.full
def test_value_and_gradient_at_fifty_thousand_tokens():
    rng = np.random.default_rng(0)
    x_BTD = jnp.asarray(rng.normal(size=(8, 256, 256)), jnp.float32)
    readout = Readout(jnp.asarray(rng.normal(size=(50_257, 256)) / 16, jnp.float32))
    targets_BT = jnp.asarray(rng.integers(0, 50_257, (8, 256)))
    want, wanted = run(whole, x_BTD, readout, targets_BT)
    got, gradient = run(cross_entropy_blocked_default, x_BTD, readout, targets_BT)
    np.testing.assert_allclose(got.loss, want.loss, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(wanted), strict=True):
        assert np.abs(a - b).max() <= 1e-5 * np.abs(b).max()


def cross_entropy_blocked_default(x_BTD, readout, targets_BT, valid_BT, options):
    return cross_entropy_blocked(x_BTD, readout, targets_BT, valid_BT=valid_BT, options=options)


@pytest.mark.parametrize("garbage", [np.nan, np.inf])
def test_positions_that_are_not_real_may_hold_anything(garbage):
    x_BTD, readout, targets_BT, valid_BT = draw(3)
    want = run(blocked, x_BTD, readout, targets_BT, valid_BT, options=RICH)
    x_BTD = jnp.where(valid_BT[..., None], x_BTD, garbage)
    got = run(blocked, x_BTD, readout, jnp.where(valid_BT, targets_BT, -1), valid_BT, options=RICH)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)
    # Control: with whole logits a NaN state spoils the gradient of the matrix, 0 * NaN.
    assert np.isnan(run(whole, x_BTD, readout, targets_BT, valid_BT, options=RICH)[1][1].matrix).any()


def test_no_real_target_a_wrong_target_and_a_hole_in_the_vocabulary():
    x_BTD, readout, targets_BT, valid_BT = draw(4)
    nothing, slopes = run(blocked, x_BTD, readout, targets_BT, valid_BT & False, options=RICH)
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves((nothing, slopes)))
    for bad_id in (-1, 4, 5):  # 4 is a column, but no token
        wrong = jnp.where(jnp.arange(T) == 6, bad_id, targets_BT)
        got, _ = run(blocked, x_BTD, readout, wrong, jnp.ones((B, T), bool), options=RICH)
        assert np.isnan([got.loss, got.total, got.nats]).all()
    hole = Readout(readout.matrix.at[3].set(-jnp.inf))
    given = (jnp.abs(x_BTD) + 1, hole, targets_BT % 3, valid_BT)
    assert_equal(run(blocked, *given, options=RICH)[0], run(whole, *given, options=RICH)[0])
    assert np.isfinite(run(blocked, *given, options=RICH)[0].loss)


@pytest.mark.parametrize(("rows", "length"), [(0, T), (B, 0)])
def test_a_batch_without_rows_or_positions_is_that_of_whole_logits(rows, length):
    x_BTD, readout, targets_BT, valid_BT = draw()
    given = (x_BTD[:rows, :length], readout, targets_BT[:rows, :length], valid_BT[:rows, :length])
    got, want = run(blocked, *given), run(whole, *given)
    assert_equal(got, want)
    assert got[1][0].shape == (rows, length, D)
    assert not np.any(got[1][1].matrix)
    # Control: one position has a gradient.
    assert np.any(run(blocked, x_BTD[:1, :1], readout, targets_BT[:1, :1])[1][1].matrix)


@pytest.mark.parametrize("layout", ["table", "kernel"])
def test_half_precision_products_are_summed_in_float32(layout):
    """A float32 matrix read in bfloat16: 14 rounded pieces would lose more than one rounding of the sum."""
    x_BTD, readout, targets_BT, valid_BT = draw(5, layout)
    x_BTD = x_BTD.astype(jnp.bfloat16)
    rounded = Readout(readout.matrix.astype(jnp.bfloat16).astype(jnp.float32), layout)
    exact, wanted = run(whole, x_BTD.astype(jnp.float32), rounded, targets_BT, valid_BT)
    got, (dx_BTD, dreadout) = run(blocked, x_BTD, readout, targets_BT, valid_BT, block_elements=1)
    np.testing.assert_allclose(got.loss, exact.loss, rtol=1e-6)
    assert (dx_BTD.dtype, dreadout.matrix.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(dreadout.matrix, wanted[1].matrix, atol=1e-6)
    np.testing.assert_allclose(dx_BTD.astype(jnp.float32), wanted[0], rtol=2**-8)
    half = Readout(readout.matrix.astype(jnp.bfloat16), layout)
    slopes = run(blocked, x_BTD, half, targets_BT, valid_BT, block_elements=1)[1][1].matrix
    assert slopes.dtype == jnp.bfloat16
    np.testing.assert_allclose(slopes.astype(jnp.float32), wanted[1].matrix, rtol=2**-8)
    # Control: rounded to bfloat16 it is another gradient.
    assert np.abs(slopes.astype(jnp.float32) - wanted[1].matrix).max() > 1e-5


def test_rows_of_a_vmap_are_calls_of_their_own():
    lanes = [draw(seed) for seed in (6, 7)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *lanes)
    got = jax.vmap(functools.partial(run, blocked))(*stacked)
    for lane, given in enumerate(lanes):
        assert_equal(jax.tree.map(lambda leaf, i=lane: leaf[i], got), run(blocked, *given))
    text = str(jax.make_jaxpr(jax.vmap(functools.partial(run, blocked)))(*stacked))
    assert text.count("dot_general[") == 3


def test_gradients_are_the_same_under_shard_map():
    x_BTD, readout, targets_BT, valid_BT = draw(8)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    rows = jax.sharding.PartitionSpec("data")

    def gradient(x_BTD, readout, targets_BT, valid_BT):
        return jax.grad(lambda x, readout: blocked(x, readout, targets_BT, valid_BT).total, (0, 1))(
            x_BTD, readout
        )

    given = (x_BTD, readout, targets_BT, valid_BT)
    mapped = jax.jit(jax.shard_map(gradient, mesh=mesh, in_specs=rows, out_specs=rows))(*given)
    assert_equal(mapped, gradient(*given))


def test_blocks_are_even_and_no_larger_than_asked():
    assert block_positions(8, 256, 50_257) == 37  # 7 blocks of at most 41
    assert block_positions(8, 256, 256) == 256
    assert block_positions(4096, 16, 50_257) == 1
    for length in range(1, 40):
        positions = block_positions(2, length, 5, block_elements=70)
        blocks = -(-length // positions)
        assert positions <= 7
        assert blocks == -(-length // 7)
        assert blocks * positions - length < blocks


def test_what_cannot_be_is_refused():
    x_BTD, readout, targets_BT, valid_BT = draw()
    with pytest.raises(ValueError, match="valid_BT has dtype"):
        blocked(x_BTD, readout, targets_BT, valid_BT.astype(jnp.int32))
    with pytest.raises(ValueError, match="block_elements is 0; it must be a whole number of at least 1"):
        blocked(x_BTD, readout, targets_BT, block_elements=0)
    with pytest.raises(ValueError, match="vocab_size is 6; it must be at most 5"):
        blocked(x_BTD, readout, targets_BT, options=LossOptions(vocab_size=6))
    with pytest.raises(ValueError, match="layout is 'matrix'; it must be one of kernel, table"):
        Readout(readout.matrix, "matrix")
    for call in (
        lambda: blocked(x_BTD[0], readout, targets_BT[0]),
        lambda: blocked(x_BTD, readout, targets_BT[:, 1:]),
        lambda: blocked(x_BTD, readout, targets_BT, valid_BT[:, :1]),
        lambda: blocked(x_BTD, readout, x_BTD[..., 0]),
        lambda: blocked(x_BTD[..., :3], readout, targets_BT),
    ):
        with pytest.raises(AssertionError):
            call()
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda x: blocked(x, readout, targets_BT).loss, (x_BTD,), (x_BTD,))

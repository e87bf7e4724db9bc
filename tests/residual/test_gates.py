"""Highway, orthogonal update and LAuReL: the papers' equations as float64 loops, and what must hold at their ends."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblock import Decoder
from jaxblock.functional.residual_updates import gated_sum, low_rank, orthogonal_part, pair_weights
from jaxblock.residual import topology
from jaxblock.residual.highway import highway
from jaxblock.residual.laurel import laurel
from tests.residual.battery.structure import measured_mixing
from tests.residual.battery.subject import PLAIN
from tests.residual.given import Entry, draw
from tests.residual.test_history_references import SUBLAYERS, layer, rms, run
from tests.small import config, tokens

X, U = draw(2, 3, 8, seed=5), draw(2, 3, 8, seed=6)


def assert_close(got, want, tolerance=2e-5):
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * np.abs(want).max())


def loop(x, weights, params, rule):
    """Run rule(x, u, p) over the sublayers, u = tanh(norm(x) W)."""
    for n in range(SUBLAYERS):
        p = layer(params, n)
        x = rule(x, np.tanh(rms(x, p["norm"]["scale"]) @ weights[n]), p)
    return x


def connect(name, params, x, update, **changes):
    """Run one connection, op by op, around a branch that returns `update`."""
    connection = topology(name).connection(config(**PLAIN, **changes), name="connection")
    params = {"norm": {"scale": jnp.ones(x.shape[-1])}, **params}
    return connection.apply({"params": params}, x, lambda h: update.astype(h.dtype))


# ------------------------------------------------------------------ highway


def highway_rule(x, u, p):
    g = 1 / (1 + np.exp(-(x @ p["gate_kernel"] + p["gate_bias"])))
    return (1 - g) * x + g * u


def test_highway_equals_its_paper():
    closed, *given = run("highway")
    assert_close(closed, loop(*given, highway_rule))
    swapped = loop(*given, lambda x, u, p: x + u - highway_rule(x, u, p))
    assert not np.allclose(closed, swapped, atol=1e-3)


@pytest.mark.parametrize(("bias", "want"), [(-1000.0, X), (1000.0, U)])
def test_i22_a_closed_highway_gate_is_the_identity_and_an_open_one_the_branch(bias, want):
    params = {"gate_kernel": jnp.zeros((8, 8)), "gate_bias": jnp.full(8, bias)}
    np.testing.assert_array_equal(connect("highway", params, X, U), want)
    half = connect("highway", {**params, "gate_bias": jnp.zeros(8)}, X, U)
    np.testing.assert_allclose(half, (X + U) / 2, rtol=1e-6)
    gate = float(bias > 0)
    start = highway(bias=bias).mixing(config())
    np.testing.assert_array_equal(start[1:, 1:], gate * np.eye(SUBLAYERS))


def test_i01_rows_of_the_highway_mixing_matrix_sum_to_one():
    """So the stream is an average of what was written; a running sum is not."""
    model_config = config(**PLAIN, norm_epsilon=1.0)
    table = measured_mixing(Entry("highway", highway(bias=-1.0)), model_config)
    np.testing.assert_allclose(table.sum(1), 1.0, rtol=1e-6)
    g = 1 / (1 + np.e)
    np.testing.assert_allclose(table[3, :4], [(1 - g) ** 3, g * (1 - g) ** 2, g * (1 - g), g], rtol=1e-5)
    assert not np.allclose(topology("pre_norm").mixing(model_config).sum(1), 1.0)


# ------------------------------------------------------------------ orthogonal update


def test_orthogonal_update_equals_its_paper():
    closed, *given = run("orthogonal_update")

    def rule(x, u, p):
        return x + u - (u * x).sum(-1, keepdims=True) / ((x * x).sum(-1, keepdims=True) + 1e-6) * x

    assert_close(closed, loop(*given, rule))
    assert not np.allclose(closed, loop(*given, lambda x, u, p: x + u), atol=1e-3)


def test_i22_the_orthogonal_update_is_orthogonal_to_the_stream():
    """<delta, x> = 0 up to round-off, so |x + delta|^2 = |x|^2 + |delta|^2; the branch itself is not orthogonal."""
    sizes = np.linalg.norm(X, axis=-1) * np.linalg.norm(U, axis=-1)
    delta = np.asarray(orthogonal_part(U, X))
    assert np.all(np.abs((delta * X).sum(-1)) < 1e-6 * sizes)
    assert np.all(np.abs(np.asarray(U * X).sum(-1)) > 1e-3 * sizes)
    after = np.asarray(connect("orthogonal_update", {}, X, U))
    np.testing.assert_allclose(after - X, delta, atol=1e-6)
    np.testing.assert_allclose(
        (after**2).sum(-1), (np.asarray(X) ** 2).sum(-1) + (delta**2).sum(-1), rtol=1e-5
    )


def test_an_orthogonal_update_of_a_parallel_branch_is_nothing_and_of_a_zero_stream_the_branch():
    np.testing.assert_allclose(orthogonal_part(3.0 * X, X), 0.0, atol=1e-5)
    zero = jnp.zeros_like(X)
    np.testing.assert_array_equal(orthogonal_part(U, zero), U)
    gradient = jax.grad(lambda x: jnp.sum(jnp.sin(orthogonal_part(U, x))))(zero)
    assert np.isfinite(gradient).all()


def test_updates_are_computed_in_float32_and_cast_to_the_streams_dtype():
    x, u = X.astype(jnp.bfloat16), U.astype(jnp.bfloat16)
    assert orthogonal_part(u, x).dtype == jnp.float32
    gate = jnp.full(x.shape, 1 / 3)
    mixed = gated_sum(x, u, gate)
    assert mixed.dtype == jnp.bfloat16
    want = (2 / 3 * x.astype(jnp.float32) + u.astype(jnp.float32) / 3).astype(jnp.bfloat16)
    np.testing.assert_array_equal(mixed.astype(jnp.float32), want.astype(jnp.float32))
    rounded = (1 - gate.astype(x.dtype)) * x + gate.astype(x.dtype) * u
    assert not np.array_equal(mixed.astype(jnp.float32), rounded.astype(jnp.float32))


# ------------------------------------------------------------------ LAuReL


def laurel_rule(form):
    def rule(x, u, p):
        a = b = 1.0
        if "rw" in form:
            e = np.exp(p["logits"])
            a, b = 2 * e / e.sum()
        mapped = x + x @ p["down"] @ p["up"] if "lr" in form else x
        return a * u + b * mapped

    return rule


@pytest.mark.parametrize("form", ["rw", pytest.param("lr", marks=pytest.mark.full), "rw_lr"])
def test_laurel_equals_its_paper(form):
    closed, *given = run(f"laurel(form={form!r}{'' if form == 'rw' else ', rank=3'})")
    assert_close(closed, loop(*given, laurel_rule(form)), tolerance=1e-4)
    assert not np.allclose(closed, loop(*given, lambda x, u, p: x + u), atol=1e-3)


def test_i23_laurel_with_equal_weights_and_a_map_of_zero_is_plain():
    """Bitwise; with other weights, or with B off zero, it is not."""
    down, zeros = draw(8, 8, seed=7), jnp.zeros((8, 8))
    for logit in (0.0, 1.5):
        params = {"logits": jnp.full(2, logit), "down": down, "up": zeros}
        np.testing.assert_array_equal(connect("laurel", params, X, U), X + U)
    uneven = {"logits": jnp.asarray([0.0, 1.0]), "down": down, "up": zeros}
    assert not np.allclose(connect("laurel", uneven, X, U), X + U, atol=1e-3)
    mapped = {"down": down, "up": zeros.at[0, 0].set(1.0)}
    assert not np.allclose(connect("laurel(form='lr')", mapped, X, U), X + U, atol=1e-3)


def test_laurels_weights_sum_to_two_and_its_map_has_its_rank():
    a, b = pair_weights(jnp.asarray([0.3, -2.0]))
    np.testing.assert_allclose(a + b, 2.0, rtol=1e-6)
    np.testing.assert_allclose(a / b, np.exp(2.3), rtol=1e-5)
    eye = jnp.eye(8)[None]
    mapped = np.asarray(low_rank(eye, draw(8, 3, seed=1), draw(3, 8, seed=2)))[0]
    assert np.linalg.matrix_rank(mapped, tol=1e-4) == 3


def test_laurels_first_map_is_drawn_and_its_second_starts_at_zero():
    model_config = config(**PLAIN)
    connection = laurel(rank=2).connection(model_config, name="connection")
    params = connection.init(jax.random.key(0), X, lambda h: h)["params"]
    assert params["down"].shape == (8, 2)
    assert np.std(params["down"]) > 0.1
    assert not np.any(params["up"])
    assert not np.any(params["logits"])


# ------------------------------------------------------------------ options


@pytest.mark.parametrize(
    ("factory", "options", "sentence"),
    [
        (highway, {"bias": float("nan")}, "bias is nan; it must be a finite number"),
        (laurel, {"form": "pa"}, "form is 'pa'; it must be one of lr, rw, rw_lr"),
        (laurel, {"rank": 0}, "rank is 0; it must be a whole number of at least 1"),
        (laurel, {"form": "rw", "rank": 4}, "rank is 4; it must be left out where form is 'rw'"),
    ],
)
def test_options_out_of_range_are_refused(factory, options, sentence):
    with pytest.raises(ValueError, match=f"model.residual: {sentence}"):
        factory(**options)


def test_a_rank_above_the_width_is_refused_where_the_width_is_known():
    model = Decoder(config(residual="laurel(rank=9)"))
    with pytest.raises(ValueError, match="rank is 9; it must be a whole number of at most 8"):
        jax.eval_shape(model.init, jax.random.key(0), tokens(1, 2))

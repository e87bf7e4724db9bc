"""Claims of seed 001 on the placement of the norm, the two additions, and the debug list's sublayer checks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblock import Decoder
from jaxblock.functional import cross_entropy, dense, layer_norm, masked_mean, residual
from jaxblock.residual import residual as combine
from jaxblock.training.config_file import read_config_file, write_config
from tests.claims.claims import (
    SHAPE,
    WIDTH,
    apply_block,
    attend,
    block,
    draw,
    feed,
    layer,
    model,
    one_of,
    square_jacobian,
    started,
    stream,
    stream_adds,
    zeroed,
)
from tests.small import built, config, tokens
from tests.small_training import training

PRE, POST = config(), config(residual="post_norm")


def block_shapes(model_config):
    variables = jax.eval_shape(Decoder(model_config).init, jax.random.key(0), tokens())
    return jax.tree.map(lambda leaf: leaf.shape, variables["params"])


# Post-norm and pre-norm ----------------------------------------------------------------------------------------------


def test_s1_11_pre_and_post_norm_have_the_same_shapes():
    """Shapes cannot tell the two apart; values can."""
    (pre, kept), (post, also_kept) = (block(c)(layer(PRE), stream()) for c in (PRE, POST))
    assert jax.tree.map(jnp.shape, (pre, kept)) == jax.tree.map(jnp.shape, (post, also_kept))
    assert not np.allclose(pre, post, atol=0.1)


@functools.cache
def jacobians():
    """Return the Jacobians of both placements and of their factors at every point in question, float32."""
    params, x_BTD = layer(PRE), stream()[:1, :2]

    def s(h):
        return feed(params, h) + attend(params, h)

    @jax.jit
    def found(x):
        j = square_jacobian
        return {
            "pre": j(lambda x: residual.pre_norm(x, s, layer_norm), x),
            "post": j(lambda x: residual.post_norm(x, s, layer_norm), x),
            "s at x": j(s, x),
            "s at norm(x)": j(s, layer_norm(x)),
            "norm at x": j(layer_norm, x),
            "norm at the sum": j(layer_norm, x + s(x)),
        }

    return jax.tree.map(np.asarray, found(x_BTD)), np.eye(x_BTD.size)


def test_s1_12_where_the_two_jacobians_are_taken():
    found, eye = jacobians()
    np.testing.assert_allclose(found["post"], found["norm at the sum"] @ (eye + found["s at x"]), atol=2e-5)
    np.testing.assert_allclose(found["pre"], eye + found["s at norm(x)"] @ found["norm at x"], atol=2e-5)
    for wrong in (
        found["norm at x"] @ (eye + found["s at x"]),
        found["norm at the sum"] @ (eye + found["s at norm(x)"]),
    ):
        assert not np.allclose(found["post"], wrong, atol=1e-2)
    for wrong in (
        eye + found["s at x"] @ found["norm at x"],
        eye + found["s at norm(x)"] @ found["norm at the sum"],
    ):
        assert not np.allclose(found["pre"], wrong, atol=1e-2)


def test_s1_13_a_vanishing_branch_leaves_the_identity_in_pre_norm_only():
    params, x_BTD = layer(PRE), stream()[:1, :2]

    @functools.partial(jax.jit, static_argnums=0)
    def jacobian(rule, size):
        return square_jacobian(lambda x: rule(x, lambda h: size * feed(params, h), layer_norm), x_BTD)

    eye, norm_at_x = np.eye(x_BTD.size), np.asarray(jax.jit(lambda x: square_jacobian(layer_norm, x))(x_BTD))
    sizes = (1.0, 0.1, 0.01)
    pre = [np.linalg.norm(np.asarray(jacobian(residual.pre_norm, e)) - eye) for e in sizes]
    np.testing.assert_allclose(np.divide(pre, sizes), pre[0], rtol=1e-4)
    np.testing.assert_array_equal(jacobian(residual.pre_norm, 0.0), eye)
    post = [np.linalg.norm(np.asarray(jacobian(residual.post_norm, e)) - norm_at_x) for e in (*sizes, 0.0)]
    assert post[0] > post[1] == pytest.approx(10 * post[2], rel=0.2)
    assert post[3] < 1e-5
    assert np.linalg.norm(np.asarray(jacobian(residual.post_norm, 0.0)) - eye) > 1


def test_s1_26_post_norm_from_pre_norm_changes_the_order_alone():
    """The blocks' parameters are the same tree; the one difference is the final norm that pre-norm needs."""
    pre, post, peri = (block_shapes(config(residual=name)) for name in ("pre_norm", "post_norm", "peri_norm"))
    assert pre["blocks"] == post["blocks"] != peri["blocks"]
    assert set(pre) - set(post) == {"final_norm"}
    assert not set(post) - set(pre)


# A zero last projection ----------------------------------------------------------------------------------------------


def test_s1_28_zero_output_starts_as_the_identity_and_is_recorded(tmp_path):
    """The identity of the stack, to the bit; which start it was stands in the run's config."""
    _, kept = model(PRE)(started(), tokens())
    np.testing.assert_array_equal(kept["resid_final"], kept["blocks"]["resid_pre"][0])
    _, kept = model(PRE)(built(PRE)[1], tokens())
    assert not np.allclose(kept["resid_final"], kept["blocks"]["resid_pre"][0], atol=0.1)
    for name in ("zero_output", "plain"):
        write_config(training(initialization=name), tmp_path / f"{name}.toml")
        assert read_config_file(tmp_path / f"{name}.toml")["model"]["initialization"] == name


def test_s1_28_zero_output_gives_the_first_gradient_to_output_projections_only():
    @jax.jit
    @jax.grad
    def gradient(params):
        return jnp.sum(jnp.sin(apply_block(PRE, params, stream())[0]))

    def moved(params) -> set[str]:
        leaves = jax.tree_util.tree_leaves_with_path(gradient(params))
        return {
            jax.tree_util.keystr(p, simple=True, separator="/")
            for p, g in leaves
            if np.any(np.asarray(g) != 0)
        }

    kernels = {"attention/output/kernel", "feed_forward/down/kernel"}
    biases = {"attention/output/bias", "feed_forward/down/bias"}
    others = {f"attention/{name}/kernel" for name in ("query", "key", "value")} | {"feed_forward/up/kernel"}
    assert moved(one_of(started()["blocks"], 0)) == kernels | biases
    assert moved(layer(PRE)) > kernels | biases | others


# Shapes at every checkpoint ------------------------------------------------------------------------------------------


def test_s1_33_from_tokens_to_classes():
    """[N, L] -> [N, L, D] -> [N, D] -> [N, C]."""
    variables = jax.eval_shape(Decoder(PRE).init, jax.random.key(0), tokens())
    valid = jax.ShapeDtypeStruct((2, 6), jnp.bool_)
    kernel_DC = jax.ShapeDtypeStruct((WIDTH, 3), jnp.float32)

    def classes(variables, tokens_BT, valid_BT, kernel_DC):
        kept = Decoder(PRE).apply(variables, tokens_BT, valid_BT=valid_BT, mutable=["intermediates"])[1]
        x_BTD = kept["intermediates"]["resid_final"]
        pooled_BD = masked_mean(layer_norm(x_BTD), valid_BT)
        return x_BTD, pooled_BD, dense(pooled_BD, kernel_DC)

    shapes = [x.shape for x in jax.eval_shape(classes, variables, tokens(), valid, kernel_DC)]
    assert shapes == [(2, 6, WIDTH), (2, WIDTH), (2, 3)]
    turned = jax.ShapeDtypeStruct((6, 2), jnp.bool_)
    with pytest.raises((ValueError, AssertionError)):
        jax.eval_shape(classes, variables, tokens(), turned, kernel_DC)


def test_s1_37_every_checkpoint_has_its_shape():
    """The stream's at all seven; the hidden width is at none of them, and follows its own setting."""
    for hidden in (5, 20):
        model_config = config(hidden=hidden)
        run = functools.partial(apply_block, model_config, layer(model_config))
        after, kept = jax.eval_shape(run, stream())
        assert {name: x.shape for name, x in kept.items()} == dict.fromkeys(CHECKPOINTS, SHAPE)
        assert after.shape == SHAPE
        assert block_shapes(model_config)["blocks"]["feed_forward"]["up"]["kernel"] == (3, WIDTH, hidden)


CHECKPOINTS = (
    "resid_pre",
    "attention_in",
    "attention_out",
    "resid_mid",
    "feed_forward_in",
    "feed_forward_out",
    "resid_post",
)


def test_s1_61_both_additions_are_of_the_streams_shape():
    """Read off the block's equations, at two widths; without a skip there is no such addition."""
    for width in (8, 12):
        shape = (*SHAPE[:2], width)
        assert stream_adds(config(width=width)) == [(shape, shape), (shape, shape)]
    assert stream_adds(config(residual="none")) == []


def test_s1_47_a_branch_that_stays_wide_is_refused_by_name_of_both_shapes():
    params, x_BTD = layer(PRE), stream()
    connect = lambda x, f: residual.pre_norm(x, f, layer_norm)  # noqa: E731
    up = params["feed_forward"]["up"]["kernel"]
    with pytest.raises(AssertionError, match=r"\(2, 6, 8\).*\(2, 6, 32\)"):
        combine(connect, x_BTD, lambda h: dense(h, up), dtype="float32")
    with pytest.raises(
        AssertionError, match=r"\(2, 6, 8\).*\(2, 6, 1\)"
    ):  # broadcasting would have let it through
        combine(connect, x_BTD, lambda h: dense(h, up[:, :1]), dtype="float32")
    assert combine(connect, x_BTD, functools.partial(feed, params), dtype="float32").shape == SHAPE


# One sublayer at a time ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("off", ["attention/output", "feed_forward/down"])
def test_s1_40_a_sublayer_is_switched_off_by_its_last_projection(off):
    params, x_BTD = layer(PRE), stream()
    _, whole = block(PRE)(params, x_BTD)
    after, kept = block(PRE)(zeroed(params, off), x_BTD)
    if off == "attention/output":
        np.testing.assert_array_equal(kept["resid_mid"], x_BTD)
        parts = params["feed_forward_connection"]["norm"]
        norm = functools.partial(layer_norm, scale=parts["scale"], bias=parts["bias"])
        want = residual.pre_norm(x_BTD, functools.partial(feed, params), norm)
        np.testing.assert_allclose(after, want, rtol=1e-6, atol=1e-6)
    else:
        np.testing.assert_array_equal(kept["resid_mid"], whole["resid_mid"])
        np.testing.assert_array_equal(after, kept["resid_mid"])
    assert not np.allclose(after, whole["resid_post"], atol=0.1)
    # Control: the first projections do not switch it off.
    still, kept = block(PRE)(zeroed(params, off.replace("output", "query").replace("down", "up")), x_BTD)
    assert np.any(kept["resid_mid"] != x_BTD)
    assert np.any(still != kept["resid_mid"])


def run(params) -> tuple[dict, float]:
    """Return what the decoder recorded, and its loss."""
    logits_BTV, kept = model(PRE)(params, tokens())
    targets_BT = jnp.roll(tokens(), -1, axis=1)
    return kept, float(cross_entropy(logits_BTV, targets_BT).loss)


def first_difference(ours, theirs) -> tuple[int, str] | None:
    """Return the first block and branch whose output differs by more than round-off."""
    for index in range(PRE.depth):
        for name in ("attention_out", "feed_forward_out"):
            if not np.allclose(ours[name][index], theirs[name][index], rtol=1e-4, atol=1e-4):
                return index, name
    return None


@pytest.mark.parametrize(
    ("index", "branch", "last"), [(1, "feed_forward", "down"), (2, "attention", "output")]
)
def test_s1_44_an_equal_loss_can_hide_a_broken_sublayer(index, branch, last):
    """A constant added to a branch's output is taken out by every later layer norm: only the sublayer shows it."""
    params = built(PRE)[1]
    blocks = params["blocks"]
    bias_LD = blocks[branch][last]["bias"].at[index].add(2.0)
    faulty = {**blocks, branch: {**blocks[branch], last: {**blocks[branch][last], "bias": bias_LD}}}
    (kept, loss), (faulty_kept, faulty_loss) = (run({**params, "blocks": b}) for b in (blocks, faulty))
    assert loss == pytest.approx(faulty_loss, rel=1e-5)
    assert first_difference(kept["blocks"], faulty_kept["blocks"]) == (index, f"{branch}_out")
    assert first_difference(kept["blocks"], kept["blocks"]) is None
    # Control: a fault in one channel moves the loss too.
    one = {
        **faulty,
        branch: {**faulty[branch], last: {**faulty[branch][last], "bias": bias_LD + 2 * draw(WIDTH)[None]}},
    }
    assert abs(run({**params, "blocks": one})[1] - loss) > 1e-3

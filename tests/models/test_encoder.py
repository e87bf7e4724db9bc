"""The encoder: both sides are seen, padding is not, and it is run in every way a decoder is."""

import functools
from typing import Any, ClassVar

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblock import Decoder, ExecutionConfig, ModelConfig
from jaxblock.axes import path_name
from jaxblock.models.encoder import Encoder
from jaxblock.models.trunk import Trunk
from tests import small
from tests.small import KINDS, built, tokens


def config(**changes: Any) -> ModelConfig:
    """Return a small config of few kinds of operations: compiling is what these tests cost."""
    few = {"depth": 2, "norm": "rms_norm", "bias": False, "feed_forward": "relu"}
    return small.config(**{**few, **changes})


BASE = config()
VALID = {
    "right": [[True, True, True, True, False, False], [True] * 6],
    "left": [[False, False, True, True, True, True], [True] * 6],
    "hole": [[True, True, False, False, True, True], [True] * 6],
}
DISTINCT = jnp.asarray([[3, 9, 1, 7, 0, 5]], jnp.int32)
NOT_IN_TABLE = 10_000


def params_of(model_config) -> Any:
    """Return an encoder's parameters: a decoder's, off their initial zeros and ones."""
    return {name: leaf for name, leaf in built(model_config)[1].items() if name != "head"}


@functools.cache
def forward(model_config):
    """Return (params, tokens, valid, segments) -> states, one program per config and shape of tokens."""
    model = Encoder(model_config)

    @jax.jit
    def apply(params, tokens_BT, valid_BT, segments_BT):
        return model.apply({"params": params}, tokens_BT, valid_BT=valid_BT, segments_BT=segments_BT)

    def spread(params, tokens_BT, valid_BT=None, segments_BT=None):
        valid_BT = np.ones(tokens_BT.shape, bool) if valid_BT is None else valid_BT
        segments_BT = np.zeros(tokens_BT.shape, np.int32) if segments_BT is None else segments_BT
        return np.asarray(apply(params, tokens_BT, valid_BT, segments_BT))

    return spread


def run(model_config, tokens_BT, valid_BT=None, segments_BT=None) -> np.ndarray:
    return forward(model_config)(params_of(model_config), tokens_BT, valid_BT, segments_BT)


# Both sides ----------------------------------------------------------------------------------------------------------


def reaches(model_config) -> np.ndarray:
    """Return whether replacing token s changes state t, [T, T]: one row of a batch for each s."""
    rows_TT = jnp.repeat(DISTINCT, 6, axis=0)
    plain_TTD, replaced_TTD = (
        run(model_config, jnp.where(jnp.eye(6, dtype=bool), x, rows_TT)) for x in (rows_TT, 2)
    )
    return np.any(plain_TTD != replaced_TTD, axis=-1).T


def gradient_size(model: Any, params: Any) -> np.ndarray:
    """Return |d output[t] / d embedding of token s|, [T, T]; no token occurs twice."""

    def outputs(table_VD):
        states_BTD = model.apply({"params": {**params, "embedding": {"table": table_VD}}}, DISTINCT)
        return jnp.sum(jnp.sin(states_BTD), axis=(0, 2))

    jacobian_TVD = jax.jit(jax.jacrev(outputs))(params["embedding"]["table"])
    return np.abs(np.asarray(jacobian_TVD)[:, np.asarray(DISTINCT[0])]).sum(-1)


def test_every_state_depends_on_every_token():
    """Control: with a window, below, not every one does."""
    assert np.all(reaches(BASE))


@pytest.mark.full
def test_a_decoders_gradients_flow_to_earlier_tokens_only():
    model_config = config(head="untied")
    above = ~np.tril(np.ones((6, 6), bool))
    size_TT = gradient_size(Decoder(model_config), built(model_config)[1])
    assert np.all(size_TT[above] == 0)
    assert np.all(size_TT[~above] > 0)


@pytest.mark.full
@pytest.mark.parametrize("residual", KINDS)
def test_gradients_flow_to_both_sides(residual):
    model_config = config(residual=residual)
    assert np.all(gradient_size(Encoder(model_config), params_of(model_config)) > 0)


@pytest.mark.parametrize(("window", "reach"), [((2,), 2), pytest.param((2, 3), 3, marks=pytest.mark.full)])
def test_a_window_reaches_as_far_to_the_right_as_to_the_left(window, reach):
    """Two blocks of W tokens reach the sum of W - 1 to each side, the same window for all blocks or one for each."""
    distance_TT = np.abs(np.arange(6)[:, None] - np.arange(6)[None])
    np.testing.assert_array_equal(reaches(config(window=window)), distance_TT <= reach)


@pytest.mark.parametrize("positions", ["alibi", pytest.param("none", marks=pytest.mark.full), "learned"])
def test_reading_backwards_reverses_the_states_where_nothing_has_a_direction(positions):
    """|i - j| does not change under reversal; a table of positions, the control, does."""
    model_config = config(positions=positions)
    same = np.allclose(run(model_config, tokens()[:, ::-1])[:, ::-1], run(model_config, tokens()), atol=1e-5)
    assert same == (positions != "learned")


@pytest.mark.full
def test_alibi_weakens_what_is_far_on_both_sides():
    """Without it, the order of the other tokens does not matter."""
    swapped = jnp.asarray([[9, 3, 1, 7, 0, 5]], jnp.int32)
    for positions, moves in (("none", False), ("alibi", True)):
        model_config = config(depth=1, positions=positions)
        last = [run(model_config, x_BT)[0, 2] for x_BT in (DISTINCT, swapped)]
        assert np.allclose(*last, atol=1e-5) != moves


# Padding -------------------------------------------------------------------------------------------------------------


SIDES = [pytest.param(side, marks=[] if side == "hole" else pytest.mark.full) for side in VALID]


@pytest.mark.parametrize("side", SIDES)
def test_b04_ids_at_padded_places_change_no_bit(side):
    """Not even an id that is no token, whose embedding would be NaN."""
    valid_BT = np.asarray(VALID[side])
    got, *others = (
        run(BASE, jnp.where(valid_BT, tokens(), fill), jnp.asarray(valid_BT)) for fill in (0, 7, NOT_IN_TABLE)
    )
    for other in others:
        np.testing.assert_array_equal(got, other)
    bare = [run(BASE, jnp.where(valid_BT, tokens(), fill)) for fill in (0, 7, NOT_IN_TABLE)]
    assert not np.allclose(bare[0][valid_BT], bare[1][valid_BT], atol=1e-3)
    assert np.isnan(bare[2][0]).all()
    assert np.isfinite(bare[2][1]).all()


@pytest.mark.parametrize("side", SIDES)
def test_b04_vectors_at_padded_places_change_no_bit(side):
    """The vector that padding is embedded as is 1e4: the mask alone keeps it from what is real."""
    valid_BT, tokens_BT = np.asarray(VALID[side]), jnp.maximum(tokens(), 1)  # id 0 is padding alone
    params = params_of(BASE)
    table_VD = params["embedding"]["table"]
    loud = {**params, "embedding": {"table": table_VD.at[0].set(1e4 * (1 + jnp.arange(8.0)))}}
    apply = forward(BASE)
    got, other = (np.asarray(apply(p, tokens_BT, valid_BT)) for p in (params, loud))
    np.testing.assert_array_equal(got[valid_BT], other[valid_BT])
    assert not np.allclose(got[~valid_BT], other[~valid_BT], atol=1e-3)
    padded_BT = jnp.where(valid_BT, tokens_BT, 0)
    got, other = (np.asarray(apply(p, padded_BT)) for p in (params, loud))
    assert not np.allclose(got[valid_BT], other[valid_BT], atol=1e-3)


def test_b04_positions_at_padded_places_change_no_bit():
    """A position outside the table, as -1, would be NaN."""
    valid_BT = jnp.asarray(VALID["right"])
    places_BT = jnp.broadcast_to(jnp.arange(6)[None], (2, 6))
    model, params = Encoder(BASE), {"params": params_of(BASE)}

    @jax.jit
    def both(places_BT):
        bare_BTD = model.apply(params, tokens(), positions_BT=places_BT)
        return model.apply(params, tokens(), valid_BT=valid_BT, positions_BT=places_BT), bare_BTD

    (want, _), (got, bare) = both(places_BT), both(jnp.where(valid_BT, places_BT, -1))
    np.testing.assert_array_equal(np.asarray(got)[valid_BT], np.asarray(want)[valid_BT])
    assert np.isnan(np.asarray(bare)[0]).all()
    assert np.isfinite(np.asarray(bare)[1]).all()


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("bfloat16", 0.1)])
def test_b110_a_row_alone_and_in_a_padded_batch(dtype, bound):
    """Equal to round-off in float32; in bfloat16 (eps 2^-7, states of size 1) to a tenth, no fault of the mask."""
    model_config = config(dtype=dtype, stream_dtype=dtype)
    both = run(model_config, tokens(), jnp.asarray(VALID["right"])).astype(np.float32)
    alone = run(model_config, tokens()[:1, :4]).astype(np.float32)
    np.testing.assert_allclose(both[:1, :4], alone, atol=bound)
    unmasked = run(model_config, tokens()).astype(np.float32)
    assert np.abs(unmasked[:1, :4] - alone).max() > 3 * bound


SOME = {
    "pre_norm": {"norm": "layer_norm", "bias": True},
    "attention_residual": {"feed_forward": "swiglu", "kv_heads": 1},
}


@pytest.mark.parametrize(
    "residual", [pytest.param(name, marks=[] if name in SOME else pytest.mark.full) for name in KINDS]
)
def test_b04_every_connection_is_blind_to_padding(residual):
    model_config = config(residual=residual, positions="rope", **SOME.get(residual, {}))
    valid_BT = np.asarray(VALID["hole"])
    tokens_BT, params = jnp.maximum(tokens(), 1), params_of(model_config)
    loud = {**params, "embedding": {"table": params["embedding"]["table"].at[0].set(1e4)}}
    got, other, bare = (
        np.asarray(forward(model_config)(p, x_BT, jnp.asarray(mask_BT)))
        for p, x_BT, mask_BT in (
            (params, tokens_BT, valid_BT),
            (loud, tokens_BT, valid_BT),
            (loud, jnp.where(valid_BT, tokens_BT, 0), valid_BT | True),
        )
    )
    assert np.isfinite(got).all()
    np.testing.assert_array_equal(got[valid_BT], other[valid_BT])
    assert not np.allclose(got[valid_BT], bare[valid_BT], atol=1e-3)


@pytest.mark.full
def test_packed_documents_equal_each_alone():
    segments_BT = jnp.asarray([[4, 4, 4, 9, 9, 9]])
    packed, alone = tokens(1, 6), tokens(1, 6).reshape(2, 3)
    got = run(BASE, packed, None, segments_BT).reshape(2, 3, -1)
    np.testing.assert_allclose(got, run(BASE, alone), rtol=1e-5, atol=1e-5)
    as_one = run(BASE, packed, None, jnp.zeros_like(segments_BT)).reshape(2, 3, -1)
    assert not np.allclose(as_one[0], got[0], atol=1e-3)
    assert not np.allclose(as_one[1], got[1], atol=1e-3)


# How it is run, and what it is made of -------------------------------------------------------------------------------


@functools.cache
def objective(model_config, execution):
    def loss(params, key):
        states_BTD = Encoder(model_config, execution).apply(
            {"params": params}, tokens(), valid_BT=jnp.asarray(VALID["right"]), rngs={"dropout": key}
        )
        return jnp.sum(jnp.sin(states_BTD)), states_BTD

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


@pytest.mark.parametrize(
    ("residual", "execution"),
    [
        ("pre_norm", ExecutionConfig(scan_unroll=2, remat="full")),
        pytest.param("pre_norm", ExecutionConfig(scan_unroll=2), marks=pytest.mark.full),
        pytest.param("pre_norm", ExecutionConfig(remat="full"), marks=pytest.mark.full),
        pytest.param("pre_norm", ExecutionConfig(remat="dots"), marks=pytest.mark.full),
        pytest.param("pre_norm", ExecutionConfig(attention="blocked"), marks=pytest.mark.full),
        pytest.param("attention_residual", ExecutionConfig(scan_unroll=2), marks=pytest.mark.full),
        pytest.param("dense_former", ExecutionConfig(history="plain", remat="full"), marks=pytest.mark.full),
    ],
)
def test_every_execution_equals_the_scan(residual, execution):
    rates = {"hidden_dropout": 0.2, "branch_dropout": 0.2}
    model_config = config(residual=residual, **rates)
    params, key = params_of(model_config), jax.random.key(3, impl="unsafe_rbg")
    (_, want), want_gradients = objective(model_config, ExecutionConfig())(params, key)
    (_, got), gradients = objective(model_config, execution)(params, key)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    chex.assert_trees_all_close(gradients, want_gradients, rtol=1e-4, atol=1e-5)
    assert not np.allclose(
        want, run(model_config, tokens(), jnp.asarray(VALID["right"])), atol=1e-3
    )  # dropout is on


@pytest.mark.parametrize(
    "residual", [pytest.param(name, marks=[] if name in SOME else pytest.mark.full) for name in KINDS]
)
def test_its_parameters_are_the_decoders_without_a_head(residual):
    model_config = config(residual=residual, head="untied")

    def described(model):
        shapes = jax.eval_shape(model.init, jax.random.key(0), tokens(1, 2))["params"]
        leaves = jax.tree_util.tree_leaves_with_path(shapes)
        return {path_name(path): (leaf.shape, leaf.dtype) for path, leaf in leaves}

    wanted = described(Decoder(model_config))
    del wanted["head/kernel"]
    assert described(Encoder(model_config)) == wanted


class CausalTrunk(Trunk):
    """A trunk with a tied head: a decoder."""

    causal: ClassVar[bool] = True

    @nn.compact
    def __call__(self, tokens_BT):
        """Return logits."""
        x_BTD, embedding = self.states(tokens_BT)
        return embedding.attend(x_BTD)


@pytest.mark.full
@pytest.mark.parametrize("residual", ["pre_norm", "dense_former"])
def test_a_causal_trunk_with_a_head_is_the_decoder(residual):
    """Logits and intermediates, to the bit: the encoder differs in its mask and in nothing else."""
    model_config = config(residual=residual, positions="rope")
    model, params = built(model_config)

    def collect(model):
        return jax.jit(lambda p: model.apply({"params": p}, tokens(), mutable=["intermediates"]))(params)

    chex.assert_trees_all_equal(collect(CausalTrunk(model_config)), collect(model))


def test_what_it_cannot_read_is_refused():
    model, params = Encoder(BASE), {"params": params_of(BASE)}
    with pytest.raises(ValueError, match="key_valid_BT has dtype int32; masks are boolean"):
        model.apply(params, tokens(), valid_BT=jnp.ones((2, 6), jnp.int32))
    with pytest.raises(ValueError, match="key_valid_BT has shape"):
        model.apply(params, tokens(), valid_BT=jnp.ones((2, 5), bool))
    with pytest.raises(ValueError, match="9 positions and the position table 8 rows"):
        model.apply(params, tokens(2, 9))
    with pytest.raises(AssertionError):
        model.apply(params, jnp.ones((2, 6)))
    with pytest.raises(TypeError, match="topology is 'pre_norm'"):
        Encoder(BASE, topology="pre_norm").apply(params, tokens())  # pyright: ignore[reportArgumentType]

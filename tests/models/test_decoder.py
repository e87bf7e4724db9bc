"""The decoder: causal to the bit, blind to padding and to other documents, initialised by role, counted exactly."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblock import Decoder, ModelConfig
from jaxblock.config import POSITIONS
from tests.small import KINDS, built, config, tokens

DISTINCT = jnp.asarray([[3, 9, 1, 7, 0, 5]], jnp.int32)


@functools.cache
def started(model_config: ModelConfig, parts: tuple[str, ...] = ()):
    """Return the initial parameters, or parts of them; only tests of the start need it, compiling it is slow."""

    def init(key):
        params = Decoder(model_config).init(key, tokens(1, 2))["params"]
        return {name: params[name] for name in parts or params}

    return jax.jit(init)(jax.random.key(0))


def drawn(model_config: ModelConfig):
    """Return parameters of the right shapes, quickly."""
    return built(model_config)[1]


@functools.cache
def forward(model_config: ModelConfig):
    """Return (params, tokens, valid, segments) -> logits, compiled once per config and shapes."""
    model = Decoder(model_config)
    return jax.jit(
        lambda params, tokens, valid=None, segments=None: model.apply(
            {"params": params}, tokens, valid_BT=valid, segments_BT=segments
        )
    )


def run(model_config: ModelConfig, tokens_BT, valid_BT=None, segments_BT=None) -> np.ndarray:
    return np.asarray(forward(model_config)(drawn(model_config), tokens_BT, valid_BT, segments_BT))


def abstract(model_config: ModelConfig):
    params = jax.eval_shape(Decoder(model_config).init, jax.random.key(0), tokens(1, 2))["params"]
    return params, sum(leaf.size for leaf in jax.tree.leaves(params))


# Causality -----------------------------------------------------------------------------------------------------------


def influence(model_config: ModelConfig) -> np.ndarray:
    """Return |d logits[t] / d embedding of token s|, [T, T]: no token occurs twice, and the head is untied."""
    assert model_config.head == "untied"
    params = drawn(model_config)

    def outputs(table_VD):
        changed = {**params, "embedding": {"table": table_VD}}
        logits_BTV = Decoder(model_config).apply({"params": changed}, DISTINCT)
        return jnp.sum(jnp.sin(logits_BTV), axis=(0, 2))

    jacobian_TVD = jax.jit(jax.jacrev(outputs))(params["embedding"]["table"])
    return np.abs(np.asarray(jacobian_TVD)[:, np.asarray(DISTINCT[0])]).sum(-1)


def is_causal(influence_TT: np.ndarray) -> bool:
    past = np.tril(np.ones(influence_TT.shape, bool))
    return bool(np.all(influence_TT[~past] == 0.0) and np.all(influence_TT[past] > 0.0))


# One row per connection and per kind of position; the other switches take turns.
SOME = {
    ("pre_norm", "learned"): {},
    ("post_norm", "rope"): {"kv_heads": 1, "feed_forward": "swiglu", "norm": "rms_norm"},
    ("peri_norm", "alibi"): {"wiring": "parallel"},
    ("branch_norm", "sinusoidal"): {"soft_cap": 5.0},
    ("none", "none"): {"window": (6, 0)},
}


@pytest.mark.parametrize(
    ("residual", "positions"),
    [
        pytest.param(*pair, marks=[] if pair in SOME else pytest.mark.full)
        for pair in itertools.product(KINDS, POSITIONS)
    ],
)
def test_no_logit_depends_on_a_later_token(residual, positions):
    others = SOME.get((residual, positions), {})
    assert is_causal(
        influence(config(residual=residual, positions=positions, head="untied", depth=2, **others))
    )


def test_a_pattern_that_is_not_causal_is_noticed(monkeypatch):
    monkeypatch.setattr(Decoder, "causal", False)
    influence_TT = influence(config(head="untied", depth=1))
    assert not is_causal(influence_TT)
    assert np.all(influence_TT > 0)


# Padding, rows, documents --------------------------------------------------------------------------------------------

BASE = config(depth=2)
VALID = {
    "right": [[True, True, True, True, False, False], [True] * 6],
    "left": [[False, False, True, True, True, True], [True] * 6],
    "hole": [[True, True, False, False, True, True], [True] * 6],
}


@pytest.mark.parametrize("side", VALID)
def test_padding_is_not_read(side):
    """Other ids at the padded places leave every real position as it is, bit for bit."""
    valid_BT = np.asarray(VALID[side])
    first, second = (jnp.where(valid_BT, tokens(seed=0), fill) for fill in (0, 7))
    got, other = (run(BASE, x_BT, jnp.asarray(valid_BT)) for x_BT in (first, second))
    np.testing.assert_array_equal(got[valid_BT], other[valid_BT])
    # Without the mask they are read by what follows them; on the right, nothing real follows.
    got, other = (run(BASE, x_BT, jnp.ones((2, 6), bool)) for x_BT in (first, second))
    assert np.array_equal(got[valid_BT], other[valid_BT]) == (side == "right")


def test_right_padding_equals_the_short_sequence():
    padded = run(BASE, tokens(), jnp.asarray(VALID["right"]))
    short = run(BASE, tokens()[:, :4], jnp.ones((2, 4), bool))
    np.testing.assert_allclose(padded[0, :4], short[0], rtol=1e-5, atol=1e-5)


def test_rows_of_a_batch_are_independent():
    both = run(BASE, tokens())
    changed = run(BASE, tokens().at[1].set(jnp.asarray(DISTINCT[0])))
    np.testing.assert_array_equal(both[0], changed[0])
    assert not np.allclose(both[1], changed[1])


@pytest.mark.parametrize("positions", ["learned", "rope"])
def test_packed_documents_equal_each_alone(positions):
    model_config = config(depth=2, positions=positions)
    packed, alone = tokens(1, 6), tokens(1, 6).reshape(2, 3)
    segments_BT = jnp.asarray([[4, 4, 4, 9, 9, 9]])
    got = run(model_config, packed, None, segments_BT).reshape(2, 3, -1)
    np.testing.assert_allclose(got, run(model_config, alone), rtol=1e-5, atol=1e-5)
    as_one = run(model_config, packed, None, jnp.zeros_like(segments_BT)).reshape(2, 3, -1)
    np.testing.assert_allclose(as_one[0], got[0], rtol=1e-5, atol=1e-5)
    assert not np.allclose(as_one[1], got[1], atol=1e-3)


# Keys and initial values ---------------------------------------------------------------------------------------------


def test_b42_evaluation_needs_no_key_and_is_the_same_twice():
    model_config = config(depth=2, attention_dropout=0.5, hidden_dropout=0.5, branch_dropout=0.5)
    first, second = (run(model_config, tokens()) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(first, run(BASE, tokens()))


def test_b44_the_seed_decides_the_parameters():
    init = jax.jit(Decoder(BASE).init)
    first, other, again = (init(jax.random.key(seed), tokens(1, 2))["params"] for seed in (0, 1, 0))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(first), jax.tree.leaves(other), strict=True):
        same = np.asarray(x) == np.asarray(y)
        assert same.all() if path[-1].key in ("scale", "bias") else not same.any(), path


WIDE = config(depth=2, width=32, heads=4, vocab_size=97, head="untied")


@pytest.mark.parametrize(("rule", "std"), [("plain", 32**-0.5), ("gpt2(std=0.5)", 0.5)])
def test_b48_embedding_and_head_do_not_know_the_depth(rule, std):
    shallow, deep = (
        started(dataclasses.replace(WIDE, depth=depth, initialization=rule), ("embedding", "head"))
        for depth in (2, 48)
    )
    jax.tree.map(np.testing.assert_array_equal, shallow, deep)
    for leaf in jax.tree.leaves(shallow):
        assert np.std(leaf) == pytest.approx(std, rel=0.05)


@pytest.mark.parametrize("depth", [2, 48])
def test_b48_gpt2_divides_only_what_writes_to_the_stream(depth):
    blocks = started(dataclasses.replace(WIDE, depth=depth, initialization="gpt2"), ("blocks",))["blocks"]
    for part, names in (("attention", ("query", "key", "value", "output")), ("feed_forward", ("up", "down"))):
        for name in names:
            std = 0.02 / np.sqrt(2 * depth) if name in ("output", "down") else 0.02
            assert np.std(blocks[part][name]["kernel"]) == pytest.approx(std, rel=0.08), name


@pytest.mark.parametrize(
    "residual",
    ["pre_norm", *(pytest.param(name, marks=pytest.mark.full) for name in ("peri_norm", "branch_norm"))],
)
def test_b48_zero_output_makes_every_stack_the_identity(residual):
    """The logits of six blocks are those of two, bit for bit: what the final norm reads is the embedding."""
    sixfold = config(depth=6, residual=residual, initialization="zero_output")
    double = dataclasses.replace(sixfold, depth=2)
    params = started(sixfold)
    first_two = {**params, "blocks": jax.tree.map(lambda x: x[:2], params["blocks"])}
    deep = forward(sixfold)(params, tokens())
    np.testing.assert_array_equal(deep, forward(double)(first_two, tokens()))
    other = {**first_two, "blocks": drawn(double)["blocks"]}
    assert not np.allclose(deep, forward(double)(other, tokens()), atol=1e-2)


# Lengths and ids -----------------------------------------------------------------------------------------------------


def test_b88_more_tokens_than_position_rows_is_an_error_when_traced():
    model_config = config(positions="learned")
    with pytest.raises(ValueError, match=r"9 positions and the position table 8 rows"):
        jax.eval_shape(Decoder(model_config).apply, {"params": abstract(model_config)[0]}, tokens(1, 9))
    jax.eval_shape(Decoder(model_config).apply, {"params": abstract(model_config)[0]}, tokens(1, 8))


@pytest.mark.parametrize("positions", [name for name in POSITIONS if name != "learned"])
def test_other_positions_go_beyond_the_context(positions):
    model_config = config(positions=positions)
    params, _ = abstract(model_config)
    logits = jax.eval_shape(Decoder(model_config).apply, {"params": params}, tokens(1, 9))
    assert logits.shape == (1, 9, 11)


@pytest.mark.parametrize("bad", [11, 15, 16, -1])
def test_a_bad_token_id_gives_nan(bad):
    """Ids from the vocabulary's end on, in the padded rows or beyond them, are no token; nor is -1 the last."""
    model_config = config(depth=2, vocab_multiple=8)
    logits = run(model_config, tokens().at[0, 3].set(bad))
    assert np.all(np.isnan(logits[0, 3]))
    assert not np.any(np.isnan(run(model_config, tokens().at[0, 3].set(10))))
    np.testing.assert_array_equal(logits[1], run(model_config, tokens())[1])


def test_padded_vocabulary_leaves_the_real_logits():
    padded = config(depth=2, vocab_multiple=8)
    assert padded.padded_vocab_size == 16
    params = drawn(padded)
    cut = {**params, "embedding": {"table": params["embedding"]["table"][:11]}}
    logits = forward(padded)(params, tokens())
    assert logits.shape == (2, 6, 16)
    np.testing.assert_allclose(logits[..., :11], forward(BASE)(cut, tokens()), rtol=1e-5, atol=1e-6)


# Counts --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bias", "count"), [(True, 124_439_808), (False, 124_337_664)])
def test_gpt2_small_has_its_published_size(bias, count):
    model_config = ModelConfig(vocab_size=50257, context=1024, depth=12, width=768, heads=12, bias=bias)
    assert abstract(model_config)[1] == count
    assert abstract(dataclasses.replace(model_config, heads=6))[1] == count
    assert abstract(dataclasses.replace(model_config, depth=13))[1] != count


@pytest.mark.parametrize(
    ("changes", "attention", "feed_forward"),
    [
        ({}, 4 * 64, 8 * 64),
        ({"heads": 4, "kv_heads": 1}, 2 * 64 + 2 * 8 * 2, 8 * 64),
        ({"feed_forward": "swiglu", "hidden": 12}, 4 * 64, 3 * 8 * 12),
        ({"hidden": 5, "wiring": "parallel"}, 4 * 64, 2 * 8 * 5),
    ],
    ids=["plain", "grouped", "gated", "parallel"],
)
def test_kernels_of_a_block_are_counted_by_their_formula(changes, attention, feed_forward):
    """4 D^2 and 8 D^2 per block for the plain one, D = 8 and three blocks."""
    blocks = abstract(config(bias=False, **changes))[0]["blocks"]
    sizes = {
        part: sum(leaf.size for leaf in jax.tree.leaves(blocks[part]))
        for part in ("attention", "feed_forward")
    }
    assert sizes == {"attention": 3 * attention, "feed_forward": 3 * feed_forward}


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint32"])
def test_tokens_of_any_integer_type_are_the_same_tokens(dtype):
    model, params = built(config(vocab_size=256))
    tokens_BT = jnp.asarray([[200, 5, 255, 0]])
    want = model.apply({"params": params}, tokens_BT)
    np.testing.assert_array_equal(model.apply({"params": params}, tokens_BT.astype(dtype)), want)


def test_sinusoidal_positions_may_start_anywhere_in_the_context():
    model, params = built(config(positions="sinusoidal"))
    tokens_BT = jnp.asarray([[1, 2, 3]])
    shifted = model.apply({"params": params}, tokens_BT, positions_BT=jnp.asarray([[5, 6, 7]]))
    assert np.isfinite(shifted).all()
    assert not np.allclose(shifted, model.apply({"params": params}, tokens_BT))

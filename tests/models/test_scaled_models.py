"""Models whose branches and logits are scaled by depth and width: the standard model with other kernels, everywhere.

A branch is linear in its last kernel and bias, logits in the head's kernel: multiply those by the factors, and the
standard model has to give the same numbers. With powers of 2 it gives the same bits.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblock import Classifier, Decoder, Encoder, ExecutionConfig
from jaxblock.axes import path_name
from jaxblock.functional import Scaling
from jaxblock.models import init_cache
from jaxblock.modules import scaling
from tests.small import SIZES, built, config, tokens

# Three blocks of width 8: m_L = 4 and 2 as powers of 2, m_N = 4.
HALF = "depth_mup(base_depth=1)"  # branches times 4^-0.5 = 0.5, exactly
DEEP = {"depth": 4}
BOTH = "complete_p(base_depth=2, base_width=2)"  # branches times 0.5, logits times 0.25
CASES = {HALF: (0.5, 1.0), BOTH: (0.5, 0.25)}


def kernels_scaled(params: Any, *, branch: float, head: float) -> Any:
    """Return the parameters with what ends a branch, and an untied head, multiplied."""

    def leaf(path: tuple, x: jax.Array) -> jax.Array:
        name = path_name(path)
        if "/output/" in name or "/down/" in name:
            return branch * x
        return head * x if name in ("head/kernel", "classifier/kernel") else x

    return jax.tree_util.tree_map_with_path(leaf, params)


@functools.cache
def forward(model: Any):
    return jax.jit(lambda params, *rest: model.apply({"params": params}, tokens(), *rest))


# ---------------------------------------------------------------- what the factors are


def test_the_factors_follow_from_the_sizes():
    assert scaling(config()) == Scaling()
    assert scaling(config(depth=16, parametrization="depth_mup(base_depth=4)")) == Scaling(
        branch=0.5, hidden_rate=0.5, vector_rate=0.5, block_epsilon=0.5
    )
    text = "complete_p(base_depth=4, base_width=2, alpha=1.0, scale_epsilon=False)"
    assert scaling(config(depth=16, parametrization=text)) == Scaling(
        branch=0.25, logits=0.25, table_gain=2.0, hidden_rate=0.25, vector_rate=1.0, hidden_decay=4.0
    )
    for text in ("depth_mup(base_depth=3)", "complete_p(base_depth=3, base_width=8, alpha=0.3)"):
        assert scaling(config(parametrization=text)) == Scaling() == Decoder(config()).scaling


# ---------------------------------------------------------------- the same numbers


@pytest.mark.parametrize("text", [BOTH, pytest.param(HALF, marks=pytest.mark.full)])
@pytest.mark.parametrize("unroll", [1, 4], ids=["scan", "loop"])
@pytest.mark.parametrize("wiring", ["serial", pytest.param("parallel", marks=pytest.mark.full)])
def test_a_decoder_is_the_standard_one_with_smaller_kernels(text, unroll, wiring):
    branch, head = CASES[text]
    sizes = {**DEEP, "wiring": wiring, "head": "untied"}
    _, params = built(config(**sizes))
    model = Decoder(config(parametrization=text, **sizes), ExecutionConfig(scan_unroll=unroll))
    got = forward(model)(params)
    standard = forward(Decoder(config(**sizes)))
    np.testing.assert_array_equal(got, standard(kernels_scaled(params, branch=branch, head=head)))
    # control: each factor by itself is seen
    assert not np.allclose(got, standard(kernels_scaled(params, branch=1.0, head=head)), rtol=1e-2)
    if head != 1.0:
        assert not np.allclose(got, standard(kernels_scaled(params, branch=branch, head=1.0)), rtol=1e-2)


def test_a_tied_heads_logits_are_scaled_and_its_embedding_is_not():
    _, params = built(config(**DEEP))
    got = forward(Decoder(config(parametrization=BOTH, **DEEP)))(params)
    want = 0.25 * forward(Decoder(config(**DEEP)))(kernels_scaled(params, branch=0.5, head=1.0))
    np.testing.assert_array_equal(got, want)


def test_decoding_with_a_cache_has_the_factors_too():
    model_config = config(parametrization=BOTH, **DEEP)
    model, (_, params) = Decoder(model_config), built(config(**DEEP))
    whole = np.asarray(forward(model)(params))
    call = jax.jit(lambda cache, tokens_BT: model.apply({"params": params}, tokens_BT, cache=cache))
    cache, found = init_cache(model_config, 2), []
    for piece in (tokens()[:, :3], tokens()[:, 3:]):
        logits_BTV, cache = call(cache, piece)
        found.append(logits_BTV)
    np.testing.assert_allclose(np.concatenate(found, axis=1), whole, rtol=1e-5, atol=1e-5)


def test_encoder_and_classifier_have_the_factors_and_a_classifiers_bias_has_none():
    sizes, rng = {**DEEP}, np.random.default_rng(1)
    for make in (Encoder, functools.partial(Classifier, classes=3)):
        model = make(config(parametrization=BOTH, **sizes))
        shapes = jax.eval_shape(model.init, jax.random.key(0), tokens(1, 2))["params"]
        params = jax.tree.map(lambda x: jnp.asarray(rng.normal(scale=0.35, size=x.shape), x.dtype), shapes)
        got = forward(model)(params)
        standard = forward(make(config(**sizes)))
        np.testing.assert_array_equal(got, standard(kernels_scaled(params, branch=0.5, head=0.25)))
        assert not np.allclose(got, standard(params), rtol=1e-2)


# ---------------------------------------------------------------- coordinates


@functools.cache
def first_block(model_config: Any) -> dict[str, np.ndarray]:
    """Return what the first block read and wrote, with the standard model's parameters."""
    _, params = built(config(**DEEP))
    run = jax.jit(
        lambda params: Decoder(model_config).apply({"params": params}, tokens(), mutable=["intermediates"])
    )
    blocks = run(params)[1]["intermediates"]["blocks"]
    return {name: np.asarray(leaf[0]) for name, leaf in blocks.items()}


REST = [pytest.param(0.3, False, marks=pytest.mark.full), pytest.param(0.0, True, marks=pytest.mark.full)]


@pytest.mark.parametrize(("alpha", "exact"), [(1.0, True), (0.5, True), *REST])
def test_a_branch_contributes_m_to_the_minus_alpha_of_what_it_did(alpha, exact):
    """Same parameters, same input: in the first sublayer, the stream gets factor times the standard branch."""
    text = f"complete_p(base_depth=1, base_width=8, alpha={alpha})"
    found, standard = first_block(config(parametrization=text, **DEEP)), first_block(config(**DEEP))
    np.testing.assert_array_equal(found["attention_in"], standard["attention_in"])
    want = np.float32(4.0**-alpha) * standard["attention_out"]
    np.testing.assert_allclose(found["attention_out"], want, rtol=0 if exact else 1e-6)
    np.testing.assert_array_equal(found["resid_mid"], found["resid_pre"] + found["attention_out"])
    assert (4.0**-alpha == 1) == np.array_equal(found["attention_out"], standard["attention_out"])


def test_initial_values_at_four_times_the_width():
    """The blocks' kernels are drawn half as large as at the base, tables and head as large as there."""
    sizes = {"width": 64, "heads": 8, "vocab_size": 64, "context": 64, "head": "untied"}
    model = Decoder(config(**sizes, parametrization="complete_p(base_depth=3, base_width=16)"))
    params = jax.jit(model.init)(jax.random.key(0), tokens(1, 2))["params"]
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = path_name(path)
        if path[-1].key in ("kernel", "table"):
            fan_in = 4 * 16 if "down" in name else 16  # at the base
            want = fan_in**-0.5 * (0.5 if name.startswith("blocks/") else 1.0)
            assert float(jnp.std(leaf)) == pytest.approx(want, rel=0.12), name


@pytest.mark.full
def test_a_classifiers_head_starts_as_large_as_at_the_base():
    model_config = config(parametrization="complete_p(base_depth=3, base_width=2)")
    found, standard = (
        jax.jit(Classifier(c, classes=3).init)(jax.random.key(0), tokens(1, 2))["params"]["classifier"][
            "kernel"
        ]
        for c in (model_config, config())
    )
    np.testing.assert_array_equal(found, 2.0 * standard)


# ---------------------------------------------------------------- at the base nothing changes


def lowered(**changes: Any) -> str:
    return jax.jit(Decoder(config(**changes)).init).lower(jax.random.key(0), tokens(1, 2)).as_text()


def test_at_the_base_a_model_is_drawn_by_the_standard_program():
    """Of a whole step, gradient included, `test_scaled_updates` shows the same."""
    base = f"complete_p(base_depth={SIZES['depth']}, base_width={SIZES['width']})"
    standard = lowered()
    assert lowered(parametrization=base) == standard
    other = base.replace("base_width=8", "base_width=2")
    assert lowered(parametrization=other) != standard  # the measure sees a factor

"""The stream's value checks: finite per sublayer with the first bad one named, and the telescoping sum to the bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxblock.invariants import (
    explain_stream,
    inspect_stream,
    require_finite,
    require_telescoping,
    telescope,
)
from tests.small import built, config, tokens

SHAPE = (3, 2, 4, 8)  # [L, B, T, D]
TENSORS = {
    "attention_in": (0, "input"),
    "attention_out": (0, "output"),
    "resid_mid": (0, "stream"),
    "feed_forward_in": (1, "input"),
    "feed_forward_out": (1, "output"),
    "resid_post": (1, "stream"),
}


@functools.cache
def forward(residual: str, wiring: str = "serial", stream_dtype: str = "float32"):
    """Return parameters -> what the model collects, compiled once."""
    model, _ = built(config(residual=residual, wiring=wiring, stream_dtype=stream_dtype))
    return jax.jit(
        lambda params: model.apply({"params": params}, tokens(), mutable=["intermediates"])[1][
            "intermediates"
        ]
    )


def collect(residual: str, wiring: str = "serial", stream_dtype: str = "float32"):
    model_config = config(residual=residual, wiring=wiring, stream_dtype=stream_dtype)
    return forward(residual, wiring, stream_dtype)(built(model_config)[1])


def finite_values() -> dict:
    draw = np.random.default_rng(0)
    names = ("resid_pre", *TENSORS)
    blocks = {name: draw.normal(size=SHAPE).astype(np.float32) for name in names}
    return {"blocks": blocks, "resid_final": blocks["resid_post"][-1].copy()}


def updates(collected, wiring: str) -> np.ndarray:
    names = ("parallel",) if wiring == "parallel" else ("attention", "feed_forward")
    u = np.stack([collected["blocks"][f"{name}_out"] for name in names], axis=1)
    return u.reshape(-1, *u.shape[2:])


# Finite --------------------------------------------------------------------------------------------------------------

inspect = jax.jit(inspect_stream)


@settings(deadline=None, max_examples=40)
@given(
    name=st.sampled_from(sorted(TENSORS)),
    block=st.integers(0, 2),
    value=st.sampled_from([np.nan, np.inf, -np.inf]),
    later=st.booleans(),
    spot=st.tuples(st.integers(0, 1), st.integers(0, 3), st.integers(0, 7)),
)
def test_s1_53_one_bad_value_is_found_in_its_sublayer_and_tensor(name, block, value, later, spot):
    collected = finite_values()
    collected["blocks"][name][(block, *spot)] = value
    if later:  # what comes after the first bad value changes nothing
        collected["blocks"]["resid_post"][2] = np.nan
        collected["resid_final"][0] = np.nan
    place, kind = TENSORS[name]
    report = inspect(collected)
    assert report.first_bad == 2 * block + place
    sentence = explain_stream(report)
    branch = ("attention", "feed-forward")[place]
    assert sentence.startswith(f"block {block}, {branch} (sublayer {2 * block + place}): {kind} not finite")


def test_all_finite_is_minus_one_and_raises_nothing():
    report = inspect(finite_values())
    assert report.first_bad == -1
    assert report.first_bad.dtype == jnp.int32
    require_finite(report)
    assert explain_stream(report).startswith("finite")


def test_a_bad_embedding_and_a_bad_closed_stream_have_their_own_sentences():
    opened, closed = finite_values(), finite_values()
    opened["blocks"]["resid_pre"][0, 0, 0, 0] = np.inf
    closed["resid_final"][0, 0, 0] = np.nan
    with pytest.raises(ValueError, match=r"^embedding: the stream is not finite before the first sublayer"):
        require_finite(inspect(opened))
    assert inspect(closed).first_bad == 6
    with pytest.raises(ValueError, match=r"^closed stream: not finite while every sublayer was"):
        require_finite(inspect(closed))


def test_reports_are_made_per_member_under_vmap():
    good, bad = finite_values(), finite_values()
    bad["blocks"]["attention_out"][1] = np.nan
    both = jax.tree.map(lambda x, y: np.stack([x, y, x]), good, bad)
    np.testing.assert_array_equal(jax.vmap(inspect_stream)(both).first_bad, [-1, 2, -1])


@pytest.mark.parametrize(
    ("leaf", "place", "value", "sentence"),
    [
        # The hidden activations overflow: the branch's fault.
        (
            ("feed_forward", "up", "kernel"),
            1,
            1e38,
            r"block 1, feed-forward \(sublayer 3\): output not finite",
        ),
        # A norm's scale: what the branch reads is bad though the stream is not.
        (
            ("attention_connection", "norm", "scale"),
            2,
            np.nan,
            r"block 2, attention \(sublayer 4\): input not",
        ),
        # Two outputs of 2e38 in one feature: each is finite, and so is what norms make of them; their sum is not.
        (
            ("attention", "output", "bias"),
            (slice(0, 2), 0),
            2e38,
            r"block 1, attention \(sublayer 2\): stream not",
        ),
    ],
    ids=["branch", "norm", "sum"],
)
def test_s1_53_the_identity_path_stops_no_bad_value(leaf, place, value, sentence):
    """One bad parameter: the closed stream is bad too, and the report says where it came from."""
    params = built(config())[1]
    blocks = jax.tree.map(np.array, params["blocks"])
    target = blocks
    for name in leaf:
        target = target[name]
    target[place] = value
    collected = forward("pre_norm")({**params, "blocks": blocks})
    assert not np.isfinite(collected["resid_final"]).all()
    with pytest.raises(ValueError, match=f"^{sentence}"):
        require_finite(inspect(collected))


def test_a_parallel_block_is_one_sublayer():
    collected = jax.tree.map(np.array, collect("pre_norm", "parallel"))
    assert inspect_stream(collected).inputs_S.shape == (3,)
    collected["blocks"]["parallel_out"][2] = np.inf
    report = inspect_stream(collected)
    assert explain_stream(report).startswith(
        "block 2, parallel branch (sublayer 2): output not finite while its input was"
    )


def test_a_stream_that_is_no_array_is_checked_by_its_branches():
    collected = jax.tree.map(np.array, collect("attention_residual"))
    report = inspect_stream(collected)
    assert report.streams_S is None
    assert report.opened is None
    assert report.first_bad == -1
    collected["blocks"]["feed_forward_in"][1] = np.nan
    sentence = explain_stream(inspect_stream(collected))
    assert sentence.startswith(
        "block 1, feed-forward (sublayer 3): input not finite while every branch output"
    )
    with pytest.raises(ValueError, match=r"telescoping is about a stream that is one \[B, T, D\] array"):
        telescope(collected)


def test_what_collected_nothing_is_refused():
    for collected in ({}, {"blocks": {}}):
        with pytest.raises(ValueError, match=r"nothing was collected"):
            inspect_stream(collected)


def test_a_token_mixer_in_attentions_place_is_named():
    model, params = built(config(token_mixer="convolution(size=3)", bias=False))
    collected = model.apply({"params": params}, tokens(), mutable=["intermediates"])[1]["intermediates"]
    assert telescope(collected).equal
    collected = jax.tree.map(np.array, collected)
    collected["blocks"]["token_mixer_out"][1] = np.nan
    assert explain_stream(inspect_stream(collected)).startswith(
        "block 1, token mixer (sublayer 2): output not"
    )


# Telescoping ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wiring", ["serial", "parallel"])
def test_s0_22_the_closed_stream_is_the_sum_of_the_updates_bit_for_bit(wiring):
    collected = collect("pre_norm", wiring)
    report = jax.jit(telescope)(collected)
    assert report.equal
    assert (report.error, report.first_bad) == (0.0, -1)
    require_telescoping(report, residual="pre_norm")
    u = updates(collected, wiring)
    exact = np.asarray(collected["blocks"]["resid_pre"][0], np.float64) + u.astype(np.float64).sum(axis=0)
    final = np.asarray(collected["resid_final"])
    assert np.abs(final - exact).max() <= np.sqrt(len(u)) * np.spacing(np.abs(final).max())


def test_s0_22_the_order_of_the_sum_matters():
    """The control of "in the same order": added from the last sublayer back, some bits differ."""
    collected = collect("pre_norm")
    x = np.asarray(collected["blocks"]["resid_pre"][0])
    for u in updates(collected, "serial")[::-1]:
        x = x + u
    np.testing.assert_allclose(x, collected["resid_final"], rtol=1e-5, atol=1e-5)
    assert not np.array_equal(x, collected["resid_final"])


@pytest.mark.parametrize("residual", ["post_norm", "peri_norm", "branch_norm", "none"])
def test_s0_22_other_rules_miss_by_order_one_and_are_refused(residual):
    report = telescope(collect(residual))
    assert not report.equal
    assert report.first_bad == 0
    assert report.relative > 0.1
    with pytest.raises(ValueError, match=f"residual is '{residual}'.*does not apply to it.*pre_norm"):
        require_telescoping(report, residual=residual)


def test_updates_are_cast_to_the_streams_dtype_before_they_are_added():
    """float32 branches on a bfloat16 stream: u is rounded first; the sum of unrounded updates is another number."""
    collected = collect("pre_norm", "serial", "bfloat16")
    assert collected["blocks"]["attention_out"].dtype == jnp.float32
    assert telescope(collected).equal
    x, x_lifted = (collected["blocks"]["resid_pre"][0] for _ in range(2))
    for u in updates(collected, "serial"):
        x, x_lifted = x + u.astype(x.dtype), (x_lifted + u).astype(x.dtype)
    np.testing.assert_array_equal(x, collected["resid_final"])
    assert not np.array_equal(x_lifted, collected["resid_final"])


def test_the_first_sublayer_that_does_not_add_is_named():
    collected = jax.tree.map(np.array, collect("pre_norm"))
    collected["blocks"]["feed_forward_out"][1, 0, 0, 0] *= 1.01
    report = telescope(collected)
    assert report.first_bad == 3
    with pytest.raises(
        ValueError, match=r"^block 1, feed-forward \(sublayer 3\): the stream after it is not"
    ):
        require_telescoping(report, residual="pre_norm")
    collected = jax.tree.map(np.array, collect("pre_norm"))
    collected["resid_final"] *= 1.01
    with pytest.raises(ValueError, match=r"the closed stream differs by .* between or after the blocks"):
        require_telescoping(telescope(collected), residual="pre_norm")

"""Blocks named from their behaviour: every placement by its name, every wrong wiring planted once and caught.

The planted blocks are written out here in numpy, one line per sum, independently of what they are compared with.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxblock.invariants import WIRINGS, describe_block, require_structure, switch_block
from jaxblock.invariants.structure import _agree, _known_signatures, _name
from tests.small import built, config

X = np.random.default_rng(1).normal(size=(2, 4, 8))
PLACEMENTS = ("none", "pre_norm", "post_norm", "peri_norm", "branch_norm")
NORMS = ("layer_norm", "rms_norm")


class Parts:
    """Two branches and four norms of random parameters, in numpy; biases of norms only where they are asked for."""

    def __init__(self, norm: str = "layer_norm", *, seed: int = 0, shifted: bool = True):
        draw = np.random.default_rng(seed)
        self.kernels = [draw.normal(scale=8**-0.5, size=(8, 8)) for _ in range(4)]
        self.up, self.down = draw.normal(scale=8**-0.5, size=(8, 24)), draw.normal(scale=0.2, size=(24, 8))
        self.biases = draw.normal(scale=0.3, size=(2, 8))
        self.centred = norm == "layer_norm"
        self.scales = 1 + 0.3 * draw.normal(size=(4, 8))
        self.shifts = 0.3 * draw.normal(size=(4, 8)) * (shifted and self.centred)

    def attend(self, h):
        query, key, value = (h @ kernel for kernel in self.kernels[:3])
        scores = np.where(np.tri(h.shape[1], dtype=bool), query @ np.swapaxes(key, 1, 2) / 8**0.5, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return weights / weights.sum(-1, keepdims=True) @ value @ self.kernels[3] + self.biases[0]

    def feed(self, h):
        z = h @ self.up
        return z / (1 + np.exp(-np.clip(z, -50, 50))) @ self.down + self.biases[1]

    def norm(self, i, x):
        centred = x - x.mean(-1, keepdims=True) if self.centred else x
        y = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
        return y * self.scales[i] + self.shifts[i]


def planted(sublayers, parts):
    """Return the block that `sublayers(x, f, g, n)` writes out: f, g the branches with their gains, n(i, x) norms."""

    def apply(x, attention, feed_forward):
        x, attention, feed_forward = (np.asarray(value, np.float64) for value in (x, attention, feed_forward))
        f, g = (lambda h: attention * parts.attend(h)), (lambda h: feed_forward * parts.feed(h))
        return sublayers(x, f, g, parts.norm)

    return apply


def second_norm(x, f, g, n):
    x = n(1, x + f(n(0, x)))
    return n(3, x + g(n(2, x)))


def norm_on_the_path(x, f, g, n):
    x = n(0, x)
    x = x + f(x)
    x = n(1, x)
    return x + g(x)


def no_attention_skip(x, f, g, n):
    x = f(n(0, x))
    return x + g(n(1, x))


def no_feed_forward_skip(x, f, g, n):
    x = x + f(n(0, x))
    return g(n(1, x))


def post_norm_without_attention_skip(x, f, g, n):
    x = n(0, f(x))
    return n(1, x + g(x))


def no_norm(x, f, g, n):
    x = x + f(x)
    return x + g(x)


WRONG = {
    "second norm after the add": second_norm,
    "norm on the skip path": norm_on_the_path,
    "only the feed-forward sublayer has a skip": no_attention_skip,
    "only the attention sublayer has a skip": no_feed_forward_skip,
    "no_norm": no_norm,
}


# Right placements ----------------------------------------------------------------------------------------------------


@functools.cache
def block(residual: str, norm: str, wiring: str = "serial"):
    """Return (params, x, gains) -> x, compiled once. RMSNorm comes without biases and with the homogeneous ReLU."""
    plain = {"bias": False, "feed_forward": "relu"} if norm == "rms_norm" else {}
    model_config = config(residual=residual, norm=norm, wiring=wiring, **plain)
    return jax.jit(switch_block(built(model_config)[0], block=1)), built(model_config)[1]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("residual", PLACEMENTS)
def test_placements_are_named_with_norms_off_and_at_their_start(residual, norm):
    apply, params = block(residual, norm)
    started = jax.tree_util.tree_map_with_path(
        lambda path, x: {"scale": jnp.ones_like(x)}.get(path[-1].key, x) if "norm" in str(path[-2]) else x,
        params,
    )
    for values in (params, started):
        structure = describe_block(functools.partial(apply, values), X)
        assert (structure.name, structure.order) == (residual, "serial")
    others = set(WIRINGS) - {residual}
    for other in others:
        with pytest.raises(ValueError, match=f"the block is '{residual}' and was expected to be '{other}'"):
            require_structure(structure, other)
    require_structure(structure, residual)


@pytest.mark.parametrize("residual", PLACEMENTS)
def test_parallel_blocks_are_named_and_said_to_be_parallel(residual):
    apply, params = block(residual, "layer_norm", "parallel")
    structure = describe_block(functools.partial(apply, params), X)
    assert (structure.name, structure.order) == (residual, "parallel")


@settings(deadline=None, max_examples=8)
@given(
    seed=st.integers(0, 10**6),
    norm=st.sampled_from(NORMS),
    size=st.floats(0.01, 100.0),
    length=st.integers(2, 5),
)
def test_names_depend_on_neither_weights_nor_inputs(seed, norm, size, length):
    parts = Parts(norm, seed=seed)
    x = size * np.random.default_rng(seed + 1).normal(size=(2, length, 8))
    right = {
        "pre_norm": lambda x, f, g, n: (m := x + f(n(0, x))) + g(n(1, m)),
        "post_norm": lambda x, f, g, n: n(1, (m := n(0, x + f(x))) + g(m)),
        "peri_norm": lambda x, f, g, n: (m := x + n(1, f(n(0, x)))) + n(3, g(n(2, m))),
        "branch_norm": lambda x, f, g, n: (m := x + n(0, f(x))) + n(1, g(m)),
    }
    for name, sublayers in {**right, **WRONG}.items():
        assert describe_block(planted(sublayers, parts), x).name == name


# Wrong wirings -------------------------------------------------------------------------------------------------------


def caught(name, norm):
    structure = describe_block(planted(WRONG[name], Parts(norm)), X)
    assert structure.name == name
    with pytest.raises(
        ValueError, match=f"the block is '{name}' and was expected to be 'pre_norm'; measured"
    ):
        require_structure(structure, "pre_norm")
    return structure.measures


@pytest.mark.parametrize("norm", NORMS)
def test_s1_27_a_second_norm_after_the_add_is_a_third_structure(norm):
    measures = caught("second norm after the add", norm)
    assert measures.identity > 0.1  # not pre-norm: no identity path
    assert measures.attention.traded_scale < 1e-4  # not post-norm: attention reads a normalized stream


def test_s1_27_one_extra_norm_at_the_end_of_a_pre_norm_block_is_seen_too():
    def extra(x, f, g, n):
        x = x + f(n(0, x))
        return n(2, x + g(n(1, x)))

    structure = describe_block(planted(extra, Parts()), X)
    assert structure.name == "attention: pre_norm, feed-forward: second norm after the add"


@pytest.mark.parametrize("norm", NORMS)
def test_a_norm_on_the_skip_path_is_caught(norm):
    measures = caught("norm on the skip path", norm)
    assert measures.identity > 0.1
    assert measures.feed_forward.linear < 1e-5  # not a norm of the sum: the update is still proportional


@pytest.mark.parametrize("norm", NORMS)
def test_s1_49_only_one_skip_is_caught_and_the_other_one_named(norm):
    for name, dead in (
        ("only the feed-forward sublayer has a skip", "feed_forward"),
        ("only the attention sublayer has a skip", "attention"),
    ):
        measures = caught(name, norm)
        assert measures.constant < 1e-6  # zero branches: nothing of x arrives
        # With the branch before (after) the missing skip at 0, nothing of x gets through the other one.
        assert getattr(measures, dead).constant < 1e-6


def test_s1_49_it_is_caught_in_a_post_norm_block_as_well():
    structure = describe_block(planted(post_norm_without_attention_skip, Parts()), X)
    assert structure.name == "only the feed-forward sublayer has a skip"


def test_a_missing_norm_is_caught():
    caught("no_norm", "layer_norm")


def test_mixed_placements_are_named_sublayer_by_sublayer():
    def mixed(x, f, g, n):
        x = x + f(n(0, x))
        return x + n(1, g(x))

    structure = describe_block(planted(mixed, Parts(shifted=False)), X)
    assert structure.name == "attention: pre_norm, feed-forward: branch_norm"

    def post_then_pre(x, f, g, n):
        x = n(0, x + f(x))
        return x + g(n(1, x))

    structure = describe_block(planted(post_then_pre, Parts()), X)
    assert "attention: post_norm, feed-forward: pre_norm" in structure.name.split(" or ")
    assert "norm on the skip path" not in structure.name.split(" or ")


# Never a guess -------------------------------------------------------------------------------------------------------

STRANGE = {
    "a shrunken skip": lambda x, f, g, n: 0.99 * (m := 0.99 * x + f(n(0, x))) + g(n(1, m)),
    "a skip of another token": lambda x, f, g, n: (m := np.roll(x, 1, axis=1) + f(n(0, x))) + g(n(1, m)),
    "a projected skip": lambda x, f, g, n: (m := x @ np.diag([1.0] * 7 + [0.5]) + f(n(0, x))) + g(n(1, m)),
    "a branch behind a closed gate": lambda x, f, g, n: (m := x + 0 * f(n(0, x))) + g(n(1, m)),
    "a gain that is squashed": lambda x, f, g, n: (m := x + np.arctan(f(n(0, x)))) + g(n(1, m)),
    "a squashed branch beside a normalized skip": lambda x, f, g, n: (
        (m := n(1, (h := n(0, x)) + np.arctan(f(h)))) + np.arctan(g(m))
    ),
    "norms at the branch and at the sum": lambda x, f, g, n: n(
        3, (m := n(2, x + n(1, f(n(0, x))))) + n(0, g(m))
    ),
    "a normalized skip and a normalized branch": lambda x, f, g, n: n(0, x) + n(1, f(x)) + n(2, g(x)),
}


@pytest.mark.parametrize("name", STRANGE)
def test_an_unknown_block_is_unknown_with_its_measurements(name):
    structure = describe_block(planted(STRANGE[name], Parts(shifted=False)), X)
    assert (structure.name, structure.order, structure.candidates) == ("unknown", "unknown", ())
    assert structure.measures.output_rms[0] > 0
    with pytest.raises(ValueError, match=r"the block is 'unknown'.*BlockMeasures\(identity="):
        require_structure(structure, "pre_norm")


def test_every_hypothesis_finds_itself_and_every_uniform_one_has_its_name():
    for hypothesis, signature in _known_signatures():
        candidates = tuple(other for other, reference in _known_signatures() if _agree(signature, reference))
        assert hypothesis in candidates
        assert "unclear" not in signature
        if hypothesis.attention == hypothesis.feed_forward:
            assert _name(candidates) == hypothesis.name
            assert {other.order for other in candidates} == {hypothesis.order}


def test_no_two_correct_placements_behave_alike():
    serial = {
        h.name: s for h, s in _known_signatures() if h.attention == h.feed_forward and h.order == "serial"
    }
    for one, other in itertools.combinations(WIRINGS, 2):
        assert not _agree(serial[one], serial[other])


def test_statistics_of_the_output_come_along():
    parts = Parts(shifted=False)
    parts.scales[:] = 1.0
    post = describe_block(planted(lambda x, f, g, n: n(1, (m := n(0, x + f(x))) + g(m)), parts), X).measures
    assert post.output_mean < 1e-5
    assert post.output_rms == pytest.approx((1.0, 1.0), abs=1e-4)
    pre = describe_block(planted(lambda x, f, g, n: (m := x + f(n(0, x))) + g(n(1, m)), parts), X).measures
    assert pre.output_mean > 0.05
    assert pre.output_rms[1] - pre.output_rms[0] > 0.1


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(ValueError, match=r"x_BTD has shape \(1, 1, 8\)"):
        describe_block(planted(no_norm, Parts()), X[:1, :1])
    with pytest.raises(ValueError, match="x_BTD must be finite and not all 0"):
        describe_block(planted(no_norm, Parts()), 0 * X)
    with pytest.raises(ValueError, match="returned bfloat16"):
        describe_block(lambda x, a, f: x.astype(jnp.bfloat16), X)
    with pytest.raises(ValueError, match=r"given float32 \(2, 4, 8\) and returned float32 \(2, 4, 4\)"):
        describe_block(lambda x, a, f: x[..., :4], X)
    with pytest.raises(ValueError, match="not finite at attention gain 0 and feed-forward gain 0"):
        describe_block(lambda x, a, f: x / a, X)

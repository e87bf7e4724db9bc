"""History topologies against their papers, written again in numpy float64 as loops over lists."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblock.residual import topology
from tests.residual.battery.structure import measured_mixing
from tests.residual.battery.subject import PLAIN
from tests.residual.given import Entry, GivenModel, draw, given_branch, position_wise
from tests.small import config

EPSILON = 1e-3  # large enough to show if it were misplaced
DEPTH, WIDTH = 3, 8
SUBLAYERS = 2 * DEPTH


def rms(x, scale=1.0):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON) * scale


def grouped(x, heads):
    return x.reshape(*x.shape[:-1], heads, -1)


def read(sources, p, options, keys):
    """sources: list of [B, T, D]; returns sum_i a_i v_i."""
    heads, newest = options.get("heads", 1), sources[-1]
    window = options.get("window", 0)
    kept = [i for i in range(len(sources)) if not window or i == 0 or i >= len(sources) - window]
    scores = []
    for i in kept:
        if "logits" in p:
            score = np.broadcast_to(p["logits"][i], (*newest.shape[:-1], heads))
        else:
            q = p["query"] if "query" in p else rms(newest) @ p["query_kernel"]
            k = rms(sources[i], p["key_scale"]) if "key_scale" in p else sources[i]
            if keys is not None:
                k = np.broadcast_to(keys[i], newest.shape)
            score = grouped(q * k, heads).sum(-1)
        scores.append(score)
    s = np.stack(scores)
    if options.get("score") == "sigmoid":
        a = 1 / (1 + np.exp(-s))
    else:
        e = np.exp(s - s.max(0))
        a = e / e.sum(0)
    return sum(
        (grouped(sources[i], heads) * w[..., None]).reshape(newest.shape)
        for i, w in zip(kept, a, strict=True)
    )


def block_attention(x, weights, params, options, group):
    """Sums of `group` outputs are sources; the running sum restarts from nothing."""
    keys = params.get("shared", {}).get("keys")
    sums, partial, filled = [x], None, 0
    for n in range(SUBLAYERS):
        p = layer(params, n)
        h = read(sums + ([partial] if filled else []), p["reader"], options, keys)
        u = np.tanh(rms(h, p["norm"]["scale"]) @ weights[n])
        partial, filled = (u if not filled else partial + u), filled + 1
        if filled == group:
            sums, partial, filled = [*sums, partial], None, 0
    return read(sums + ([partial] if filled else []), params["close"]["reader"], options, keys)


def full_attention(x, weights, params, options):
    keys = params.get("shared", {}).get("keys")
    outputs = [x]
    for n in range(SUBLAYERS):
        p = layer(params, n)
        h = read(outputs, p["reader"], options, keys)
        outputs.append(np.tanh(rms(h, p["norm"]["scale"]) @ weights[n]))
    return read(outputs, params["close"]["reader"], options, keys)


def dense_former(x, weights, params, dilation, period):
    flat, states, taken = params.get("shared", {"weight": ()})["weight"], [x], 0
    for i in range(1, DEPTH + 1):
        for n in (2 * i - 2, 2 * i - 1):
            x = x + np.tanh(rms(x, layer(params, n)["norm"]["scale"]) @ weights[n])
        states.append(x)
        if i % period == 0:
            terms = [j for j in range(i + 1) if j % dilation == i % dilation]
            x = sum((flat[taken + n] + (j == i)) * states[j] for n, j in enumerate(terms))
            taken += len(terms)
    assert taken == len(flat)
    return x


def layer(params, n):
    name = ("attention_connection", "feed_forward_connection")[n % 2]
    return jax.tree.map(lambda leaf: leaf[n // 2], params["blocks"][name])


@functools.cache
def run(name):
    """Return (closed, x, weights, params), parameters off their start."""
    model_config = config(**PLAIN, norm_epsilon=EPSILON)
    model = GivenModel(model_config, topology(name), position_wise)
    x, weights = draw(2, 3, WIDTH), draw(SUBLAYERS, WIDTH, WIDTH, seed=1)
    params = jax.jit(model.init)(jax.random.key(0), x, weights)["params"]
    rng = np.random.default_rng(2)

    def moved(path, leaf):
        scale = 0.25 if path[-1].key == "query_kernel" else 0.7  # both make scores of a few units
        return leaf + jnp.asarray(rng.normal(scale=scale, size=leaf.shape), leaf.dtype)

    params = jax.tree_util.tree_map_with_path(moved, params)
    closed, _ = jax.jit(model.apply)({"params": params}, x, weights)
    as_float64 = functools.partial(np.asarray, dtype=np.float64)
    return np.asarray(closed), as_float64(x), as_float64(weights), jax.tree.map(as_float64, params)


OPTIONS = (
    {},
    {"score": "sigmoid"},
    {"key_norm": "none"},
    {"window": 2},
    {"window": 1, "score": "sigmoid"},
    {"heads": 4},
    {"query": "dynamic"},
    {"query": "dynamic", "heads": 2, "window": 3},
    {"key": "layer"},
    {"key": "layer", "heads": 2},
    {"query": "dynamic", "key": "layer"},
    {"query": "dynamic", "key": "layer", "heads": 2},
)


def text(name, options):
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in options.items())})"


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: text("", options))
def test_attention_residual_equals_its_paper(options):
    closed, *given = run(text("attention_residual", options))
    want = full_attention(*given, options)
    np.testing.assert_allclose(closed, want, rtol=2e-5, atol=2e-5)
    other = full_attention(*given, {**options, "window": 5 if options.get("window") else 4})
    assert not np.allclose(closed, other, atol=1e-3)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7])
def test_block_attention_residual_equals_its_paper(group):
    """Ragged for 4 and 5; one sum for 6; never a whole one for 7."""
    closed, *given = run(f"block_attention_residual(sublayers={group})")
    np.testing.assert_allclose(closed, block_attention(*given, {}, group), rtol=2e-5, atol=2e-5)
    other = block_attention(*given, {}, group + 1 if group < 6 else group - 1)
    assert group == 7 or not np.allclose(closed, other, atol=1e-3)


@pytest.mark.full
@pytest.mark.parametrize("options", OPTIONS[1:], ids=lambda options: text("", options))
def test_block_attention_residual_takes_the_same_options(options):
    closed, *given = run(text("block_attention_residual", {"sublayers": 2, **options}))
    np.testing.assert_allclose(closed, block_attention(*given, options, 2), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("dilation", "period"), [(1, 1), (2, 1), (1, 2), (2, 3), (3, 2), (1, 4)])
def test_dense_former_equals_its_paper(dilation, period):
    closed, *given = run(f"dense_former(dilation={dilation}, period={period})")
    np.testing.assert_allclose(closed, dense_former(*given, dilation, period), rtol=2e-5, atol=2e-5)


def test_i39_one_sublayer_per_block_is_the_full_form_and_one_block_has_two_sources():
    full, *_ = run("attention_residual")
    single, *_ = run("block_attention_residual(sublayers=1)")
    np.testing.assert_allclose(single, full, rtol=1e-5, atol=1e-5)
    entry = Entry("one", topology(f"block_attention_residual(sublayers={SUBLAYERS})"))
    table = measured_mixing(entry, config(**PLAIN, norm_epsilon=1.0))
    np.testing.assert_allclose(table[1:], 0.5 * np.tri(SUBLAYERS + 1)[1:])


def test_i41_one_head_is_the_paper_and_four_are_not():
    full, *_ = run("attention_residual")
    one, *_ = run("attention_residual(heads=1)")
    four, *_ = run("attention_residual(heads=4)")
    np.testing.assert_array_equal(one, full)
    assert not np.allclose(four, full, atol=1e-3)


def test_i39_the_running_sum_starts_from_nothing_at_each_boundary():
    """A cumulative sum, as some reproductions keep it, would weigh early outputs twice."""
    entry = Entry("block", topology("block_attention_residual(sublayers=2)"))
    table = measured_mixing(entry, config(**PLAIN, norm_epsilon=1.0))
    # Reader 4 (after 3 outputs) has sources: embedding, v1 + v2, v3.
    np.testing.assert_allclose(table[3], [1 / 3, 1 / 3, 1 / 3, 1 / 3, 0, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(table[2], [1 / 2, 1 / 2, 1 / 2, 0, 0, 0, 0], rtol=1e-6)


def test_i35_a_one_hot_average_gives_the_next_block_the_embedding():
    """alpha_1 = (1, 0): after the first block, its state is dropped for the embedding."""
    model_config = config(**PLAIN, norm_epsilon=1.0)
    model = GivenModel(model_config, topology("dense_former"), given_branch)
    sources = jnp.eye(SUBLAYERS + 1, WIDTH) * 2.0**-30
    x, given = sources[0].reshape(1, 1, -1), sources[1:]
    params = jax.jit(model.init)(jax.random.key(0), x, given)["params"]
    weight = params["shared"]["weight"].at[:2].set(jnp.asarray([1.0, -1.0]))
    _, reads = model.apply({"params": {**params, "shared": {"weight": weight}}}, x, given)
    np.testing.assert_array_equal(reads["read_0"][1, 0, 0] * 2.0**30, np.eye(WIDTH)[0])

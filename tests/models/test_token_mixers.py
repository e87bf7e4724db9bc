"""An MLP and convolutions in attention's place: the equation, causality, padding, parameters, what is refused."""

import functools
import math
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblock.accounting import (
    abstract_parameters,
    count_parameters,
    decoder_parameters,
    kept_bytes,
    kv_cache_bytes,
)
from jaxblock.accounting.flops import flop_parts
from jaxblock.accounting.token_mixing import mixing_parameters
from jaxblock.axes import path_name, roles
from jaxblock.config import ExecutionConfig, ModelConfig
from jaxblock.functional.masks import AttentionPattern
from jaxblock.models import Classifier, Decoder, Encoder, init_cache
from jaxblock.modules import TokenMixer
from jaxblock.residual import Topology, Views
from jaxblock.training.diagnosis import first_not_finite
from tests.small import config, tokens

MLP, GRID, ROW = "mlp(hidden=3)", "convolution(rows=2)", "convolution(size=2)"
MIXERS = (MLP, GRID, ROW)


def slow(*given: Any) -> Any:
    return pytest.param(*given, marks=pytest.mark.full)


def small(mixer: str, **changes: Any) -> ModelConfig:
    return config(**{"depth": 2, "context": 6, "width": 4, "heads": 1, "token_mixer": mixer, **changes})


@functools.cache
def drawn(model: Any, length: int = 6) -> Any:
    """Return parameters off their initial zeros and ones, drawn by numpy."""
    shapes = jax.eval_shape(model.init, jax.random.key(0), tokens(1, length))["params"]
    rng = np.random.default_rng(0)
    leaf = lambda path, x: jnp.asarray(rng.normal(size=x.shape) * 0.5 + (path[-1].key == "scale"), x.dtype)  # noqa: E731
    return jax.tree_util.tree_map_with_path(leaf, shapes)


@functools.cache
def forward(model: Any):
    return jax.jit(
        lambda params, tokens_BT, valid_BT=None: model.apply({"params": params}, tokens_BT, valid_BT=valid_BT)
    )


def run(model: Any, tokens_BT, valid_BT=None) -> np.ndarray:
    return np.asarray(forward(model)(drawn(model, model.config.context), tokens_BT, valid_BT))


# The equation --------------------------------------------------------------------------------------------------------


def norm(x, p):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]


def gelu(x):
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def convolve(x_BTD, p, rows):
    """Two loops over taps, zeros around the grid, in float64."""
    kernel, (batch, length, width) = p["kernel"], x_BTD.shape
    x, y = x_BTD.reshape(batch, rows, -1, width), np.zeros((batch, rows, length // rows, width)) + p["bias"]
    for r, c, i, j in np.ndindex(rows, length // rows, *kernel.shape[:2]):
        row, column = r + i - (kernel.shape[0] - 1) // 2, c + j - (kernel.shape[1] - 1) // 2
        if 0 <= row < rows and 0 <= column < length // rows:
            y[:, r, c] += x[:, row, column] @ kernel[i, j]
    return y.reshape(x_BTD.shape)


def mix(h_BTD, p, mixer):
    if mixer == MLP:
        up = gelu(h_BTD.swapaxes(1, 2) @ p["mlp_up"]["kernel"] + p["mlp_up"]["bias"])
        return (up @ p["mlp_down"]["kernel"] + p["mlp_down"]["bias"]).swapaxes(1, 2)
    rows = 2 if mixer == GRID else 1
    return convolve(gelu(convolve(h_BTD, p["convolution_in"], rows)), p["convolution_out"], rows)


@pytest.mark.parametrize("mixer", [MLP, GRID, slow(ROW)])
def test_a_block_is_x_plus_f_of_its_norm_twice(mixer):
    """Embedding, positions, two pre-norm blocks of mixer and feed-forward, final norm, in numpy float64."""
    model = Encoder(small(mixer))
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), drawn(model))
    x = p["embedding"]["table"][np.asarray(tokens(2, 6))] + p["positions"]["table"]
    for layer in range(2):
        block = jax.tree.map(lambda x, i=layer: x[i], p["blocks"])
        x = x + mix(norm(x, block["token_mixer_connection"]["norm"]), block["token_mixer"], mixer)
        h, feed = norm(x, block["feed_forward_connection"]["norm"]), block["feed_forward"]
        up = gelu(h @ feed["up"]["kernel"] + feed["up"]["bias"])
        x = x + up @ feed["down"]["kernel"] + feed["down"]["bias"]
    want = norm(x, p["final_norm"])
    np.testing.assert_allclose(run(model, tokens(2, 6)), want, rtol=1e-4, atol=1e-4)
    other = run(Encoder(small(mixer, residual="none")), tokens(2, 6))  # control: no skip is another function
    assert np.abs(other - want).max() > 0.1


@functools.cache
def gradients(model: Any):
    def objective(params):
        return jnp.sum(jnp.sin(model.apply({"params": params}, tokens(2, 6))))

    return jax.jit(jax.value_and_grad(objective))(drawn(model))


@pytest.mark.parametrize(
    ("mixer", "residual"),
    [
        (GRID, "pre_norm"),
        *(
            slow(mixer, residual)
            for mixer in (MLP, GRID)
            for residual in ("post_norm", "dense_former", "attention_residual")
        ),
    ],
)
def test_scan_loop_and_remat_are_one_function(mixer, residual):
    few = {"norm": "rms_norm", "bias": False, "positions": "none", "feed_forward": "relu"}  # few operations
    model_config = small(mixer, residual=residual, **few)
    want, want_gradients = gradients(Encoder(model_config))
    assert all(np.any(leaf) for leaf in jax.tree.leaves(want_gradients["blocks"]["token_mixer"]))
    got, found = gradients(Encoder(model_config, ExecutionConfig(scan_unroll=2, remat="full")))
    np.testing.assert_allclose(got, want, rtol=1e-5)
    chex.assert_trees_all_close(found, want_gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.full
def test_a_parallel_block_adds_both_branches_of_one_norm():
    model = Encoder(small(GRID, depth=1, wiring="parallel", positions="none"))
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), drawn(model))
    block = jax.tree.map(lambda x: x[0], p["blocks"])
    x = p["embedding"]["table"][np.asarray(tokens(2, 6))]
    h, feed = norm(x, block["connection"]["norm"]), block["feed_forward"]
    up = gelu(h @ feed["up"]["kernel"] + feed["up"]["bias"])
    x = x + mix(h, block["token_mixer"], GRID) + up @ feed["down"]["kernel"] + feed["down"]["bias"]
    np.testing.assert_allclose(run(model, tokens(2, 6)), norm(x, p["final_norm"]), rtol=1e-4, atol=1e-4)


# Causality and padding -----------------------------------------------------------------------------------------------


def test_a_decoder_with_a_convolution_reads_no_later_token():
    """The logits before a changed token keep every bit; in an encoder they do not."""
    base = tokens(1, 6)
    for position in (2, 5):
        other = base.at[:, position].set((base[:, position] + 1) % 11)
        for model in (Decoder(small(ROW)), Encoder(small("convolution(size=3)"))):
            same = np.asarray(run(model, base) == run(model, other)).all(axis=(0, 2))
            assert same[:position].all() == isinstance(model, Decoder)
            assert not same[position]


def test_a_causal_convolution_reaches_as_far_as_its_kernels():
    """Two kernels of size 2 in each of 2 blocks: 2 * 2 * (2 - 1) = 4 tokens back, and not 5."""
    model = Decoder(small(ROW))
    base = tokens(1, 6)
    change = np.abs(run(model, base) - run(model, base.at[0, 0].set((base[0, 0] + 1) % 11))).max(axis=(0, 2))
    assert (change[:5] > 0).all()
    assert change[5] == 0


@pytest.mark.parametrize("mixer", [slow(MLP), GRID, slow(ROW)])
def test_b04_padding_changes_no_bit_of_the_logits(mixer):
    model = Classifier(small(mixer), classes=3)
    valid_BT = jnp.asarray([[True, True, False, True, False, False], [False, True, True, True, True, True]])
    got, *others = (run(model, jnp.where(valid_BT, tokens(2, 6), fill), valid_BT) for fill in (0, 7, 10_000))
    for other in others:
        np.testing.assert_array_equal(got, other)
    everything = run(model, tokens(2, 6), jnp.ones((2, 6), bool))
    assert not np.allclose(got, everything, atol=1e-3)


def test_padding_on_the_right_is_the_end_of_a_sequence():
    """Both convolutions read zeros there, as beyond the end; states of the real tokens are those of the shorter one."""
    model = Encoder(small("convolution(size=3)"))
    valid_BT = jnp.arange(6)[None] < jnp.asarray([[4], [4]])
    padded, alone = run(model, tokens(2, 6), valid_BT)[:, :4], run(model, tokens(2, 6)[:, :4])
    np.testing.assert_allclose(padded, alone, rtol=1e-5, atol=1e-5)
    assert np.abs(run(model, tokens(2, 6))[:, :4] - alone).max() > 1e-2


@pytest.mark.parametrize("mixer", [MLP, GRID])
def test_nothing_that_stands_at_a_padded_place_leaks(mixer):
    """Into the branch itself, where a NaN times 0 would be one."""
    branch = TokenMixer(small(mixer))
    x = np.random.default_rng(0).normal(size=(2, 6, 4)).astype(np.float32)
    valid = np.array([[True] * 4 + [False] * 2, [True] * 6])
    shapes = jax.eval_shape(branch.init, jax.random.key(0), x, AttentionPattern())
    params = jax.tree.map(
        lambda x: jnp.asarray(np.random.default_rng(1).normal(size=x.shape), x.dtype), shapes
    )
    apply = jax.jit(lambda x: branch.apply(params, x, AttentionPattern(key_valid_BT=jnp.asarray(valid))))
    clean, dirty = (np.asarray(apply(np.where(valid[..., None], x, bad))) for bad in (np.float32(0), np.nan))
    np.testing.assert_array_equal(clean, dirty)
    assert np.isfinite(clean).all()


# Parameters ----------------------------------------------------------------------------------------------------------


def two_convolutions(*taps: int) -> dict[str, tuple[int, ...]]:
    names = ("convolution_in", "convolution_out")
    return {f"{name}/kernel": (*taps, 4, 4) for name in names} | {f"{name}/bias": (4,) for name in names}


SHAPES = {
    MLP: {"mlp_up/kernel": (6, 3), "mlp_up/bias": (3,), "mlp_down/kernel": (3, 6), "mlp_down/bias": (6,)},
    GRID: two_convolutions(3, 3),
    ROW: two_convolutions(1, 2),
}


@pytest.mark.parametrize("mixer", MIXERS)
def test_every_parameter_has_a_role_and_is_counted(mixer):
    shapes = jax.eval_shape(Encoder(small(mixer)).init, jax.random.key(0), tokens(1, 6))["params"]
    block = shapes["blocks"]["token_mixer"]
    found = {path_name(path): x.shape[1:] for path, x in jax.tree_util.tree_leaves_with_path(block)}
    assert found == SHAPES[mixer]
    assert mixing_parameters(small(mixer)) == sum(map(math.prod, found.values()))
    of = roles(shapes)["blocks"]["token_mixer"]
    first, second = sorted(of, key=lambda name: name.endswith(("down", "out")))
    assert (of[first], of[second]) == ({"kernel": "up", "bias": "bias"}, {"kernel": "down", "bias": "bias"})
    bare = jax.eval_shape(Encoder(small(mixer, bias=False)).init, jax.random.key(0), tokens(1, 6))["params"]
    kernels = sum(leaf.size for leaf in jax.tree.leaves(bare["blocks"]["token_mixer"])) // 2
    assert mixing_parameters(small(mixer, bias=False)) == kernels


def test_a_decoder_with_a_convolution_is_counted_by_its_formula_and_has_no_cache():
    model_config = small(ROW)
    counted = count_parameters(abstract_parameters(model_config))
    assert counted.total == decoder_parameters(model_config)
    assert counted.per_block["token_mixer"] == mixing_parameters(model_config)
    assert kv_cache_bytes(model_config, 1, 6) == 0
    assert kv_cache_bytes(config(), 1, 6) > 0
    with pytest.raises(
        ValueError, match=r"model.token_mixer is 'convolution\(size=2\)', and a cache holds attention's"
    ):
        init_cache(model_config, 1)
    cache = init_cache(small("attention"), 1)
    with pytest.raises(ValueError, match="a cache holds attention's keys and values"):
        jax.eval_shape(
            lambda p: Decoder(model_config).apply({"params": p}, tokens(1, 2), cache=cache),
            abstract_parameters(model_config),
        )


def test_a_larger_kernel_keeps_no_more_for_the_backward_pass():
    """x is kept, and not one shifted copy of it for every tap."""
    kept = []
    for size in (1, 4):
        model_config = small(f"convolution(size={size})")
        params = abstract_parameters(model_config)
        kept.append(kept_bytes(model_config, ExecutionConfig(), params, batch=64, length=6).blocks)
    assert kept[0] == kept[1]


@pytest.mark.parametrize("mixer", MIXERS)
def test_flops_are_those_of_the_products(mixer):
    """2 * rows * columns * inner of every product in the branch's program, per token; taps beyond the edge counted."""
    model_config = small(mixer, depth=1)
    branch, x_BTD = TokenMixer(model_config), jax.ShapeDtypeStruct((2, 6, 4), jnp.float32)
    params = jax.eval_shape(branch.init, jax.random.key(0), x_BTD, AttentionPattern())
    traced = jax.make_jaxpr(lambda p, x: branch.apply(p, x, AttentionPattern()))(params, x_BTD)
    flops, inner = 0, [traced.jaxpr]
    while inner:
        for equation in inner.pop().eqns:
            given = equation.params.values()
            inner += [getattr(p, "jaxpr", p) for p in given if hasattr(getattr(p, "jaxpr", p), "eqns")]
            if equation.primitive.name == "dot_general":
                ((contracted,), _), _ = equation.params["dimension_numbers"]
                shape = equation.invars[0].aval.shape
                flops += 2 * math.prod(equation.outvars[0].aval.shape) * shape[contracted]
    parts = flop_parts(model_config)
    assert parts.projections == flops / 12
    assert parts.scores_full == parts.scores_causal == 0
    assert flop_parts(small("attention")).scores_full > 0


@pytest.mark.parametrize("mixer", [slow(MLP), GRID])
def test_initial_kernels_follow_their_roles_and_fan_in(mixer):
    """plain: 1 / sqrt(fan_in), of a convolution size^2 D; zero_output: the second is 0; gains by role."""
    wide = small(mixer, context=64, width=16) if mixer == GRID else small("mlp(hidden=48)", context=64)
    pattern, x = AttentionPattern(), jnp.zeros((1, 1, wide.width))
    gains = TokenMixer(wide, gain=lambda role: {"up": 2.0, "down": 3.0}[role])
    made = jax.jit(gains.init)(jax.random.key(0), x, pattern)["params"]
    fan_in = {"mlp_up": 64, "mlp_down": 48, "convolution_in": 144, "convolution_out": 144}
    for name, leaves in made.items():
        want = (2.0 if name in ("mlp_up", "convolution_in") else 3.0) / math.sqrt(fan_in[name])
        assert np.std(leaves["kernel"]) == pytest.approx(want, rel=0.1)
        assert not np.any(leaves["bias"])
    quiet = TokenMixer(small(mixer, initialization="zero_output"))
    zero = jax.jit(quiet.init)(jax.random.key(0), jnp.zeros((1, 1, 4)), pattern)["params"]
    first, second = sorted(zero, key=lambda name: name.endswith(("down", "out")))
    assert np.any(zero[first]["kernel"])
    assert not np.any(zero[second]["kernel"])


def test_parameters_depend_on_no_length():
    """A stack makes them from one token: the same as from the whole context."""
    branch, key = TokenMixer(small(MLP)), jax.random.key(0)
    one, whole = (
        jax.jit(branch.init)(key, jnp.zeros((1, length, 4)), AttentionPattern()) for length in (1, 6)
    )
    chex.assert_trees_all_equal(one, whole)


@pytest.mark.parametrize(("mixer", "width"), [(MLP, 3), slow(GRID, 4)])
def test_the_inner_norm_stands_before_the_last_kernel(mixer, width):
    """Scaling the first kernel of a network of relus then changes nothing; without the norm it does."""
    x = np.random.default_rng(0).normal(size=(1, 6, 4)).astype(np.float32)
    for inner_norm in (True, False):
        branch = TokenMixer(small(mixer, feed_forward="relu", norm_epsilon=1e-12), inner_norm=inner_norm)
        shapes = jax.eval_shape(branch.init, jax.random.key(0), x, AttentionPattern())["params"]
        rng = np.random.default_rng(1)
        params = jax.tree.map(lambda s, rng=rng: np.abs(rng.normal(size=s.shape)).astype(np.float32), shapes)
        first = next(name for name in params if name in ("mlp_up", "convolution_in"))
        louder = {**params, first: jax.tree.map(lambda x: 3 * x, params[first])}
        apply = jax.jit(lambda p, branch=branch: branch.apply({"params": p}, x, AttentionPattern()))
        if inner_norm:
            assert shapes["inner_norm"]["scale"].shape == (width,)
            np.testing.assert_allclose(apply(louder), apply(params), rtol=1e-4, atol=1e-5)
        else:
            assert not np.allclose(apply(louder), apply(params), atol=0.1)


@pytest.mark.parametrize("mixer", [MLP, slow(GRID)])
def test_dropout_of_hidden_activations_is_on_exactly_when_a_key_is_passed(mixer):
    x, pattern = np.ones((1, 6, 4), np.float32), AttentionPattern()
    plain, branch = (TokenMixer(small(mixer, hidden_dropout=rate)) for rate in (0.0, 0.5))
    shapes = jax.eval_shape(branch.init, jax.random.key(0), x, pattern)
    params = jax.tree.map(lambda s: np.full(s.shape, 0.3, np.float32), shapes)
    key = jax.random.key(0, impl="unsafe_rbg")

    @jax.jit
    def three(params):
        rngs = {"dropout": key}
        return (
            plain.apply(params, x, pattern, rngs=rngs),
            branch.apply(params, x, pattern),
            branch.apply(params, x, pattern, rngs=rngs),
        )

    base, without, dropped = three(params)
    np.testing.assert_array_equal(without, base)
    assert not np.allclose(dropped, without, atol=1e-3)


# What is refused, and what is found ----------------------------------------------------------------------------------


class GivesViews(nn.Module):
    """x + f(Views(h, h, h))."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x, f):
        return x + f(Views(x, x, x))


def traced(model: Any, length: int = 6, **given: Any) -> Any:
    return jax.eval_shape(lambda p: model.apply({"params": p}, tokens(1, length), **given), drawn(model))


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda: drawn(Decoder(small(MLP))), "the model is causal: an MLP over positions reads them all"),
        (lambda: drawn(Decoder(small(GRID))), "the model is causal: a grid has no order.*rows must be 1"),
        (lambda: traced(Encoder(small(MLP)), 5), r"5 tokens came; .*exactly model.context = 6 positions"),
        (lambda: traced(Encoder(small(GRID)), 5), "5 positions came, and the grid has 2 rows"),
        (
            lambda: traced(Encoder(small(ROW)), segments_BT=jnp.ones((1, 6), jnp.int32)),
            "mixes every position of a row, and segments_BT was given",
        ),
        (
            lambda: drawn(Encoder(small(MLP), topology=Topology(GivesViews, "", "a test"))),
            r"model.token_mixer is 'mlp\(hidden=3\)', which reads one array, and its connection gave it Views",
        ),
    ],
)
def test_what_cannot_be_mixed_is_refused(attempt, message):
    with pytest.raises(ValueError, match=message):
        attempt()


def test_a_mask_of_pairs_is_refused():
    mask = AttentionPattern(mask=jnp.ones((1, 1, 6, 6), bool))
    with pytest.raises(ValueError, match="mixes every position of a row, and mask was given"):
        jax.eval_shape(lambda: TokenMixer(small(ROW)).init(jax.random.key(0), jnp.zeros((1, 6, 4)), mask))


def test_a_broken_parameter_is_put_down_to_the_token_mixer():
    params = jax.tree.map(jnp.asarray, drawn(Encoder(small(GRID))))
    kernel = params["blocks"]["token_mixer"]["convolution_out"]["kernel"]
    broken = {**params["blocks"]["token_mixer"], "convolution_out": {"kernel": kernel.at[1, 0].set(jnp.nan)}}
    params["blocks"] = {**params["blocks"], "token_mixer": broken}
    fault = first_not_finite(None, params, None, None)  # pyright: ignore[reportArgumentType]
    assert fault is not None
    assert (fault.place, fault.layer) == ("block 1, token_mixer", 1)
    assert fault.tensor == "blocks/token_mixer/convolution_out/kernel"

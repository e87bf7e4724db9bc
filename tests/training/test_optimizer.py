"""The optimizer: the schedule to the update, the clip, decay by role, and Adam against a reference in float64."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxblock import Decoder, axes
from jaxblock.axes import parameter_rule, path_name
from jaxblock.config import POSITIONS
from jaxblock.training.config import OptimizerConfig
from jaxblock.training.config_file import build_config, fields
from jaxblock.training.optimizer import decay_mask, decay_table, learning_rate_schedule, make_optimizer
from jaxblock.training.step import make_step
from tests.small import CONNECTIONS, built, config, tokens
from tests.small_training import Bigram, batch, bigram_params, state_of, training

B57 = [1 / 4, 2 / 4, 3 / 4, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0]
LINEAR = {"learning_rate": 1.0, "schedule": "linear(final=0.0)", "warmup": 0.4}


def rates(steps: int, **options) -> np.ndarray:
    """Return the learning rate of updates 1 to `steps`."""
    schedule = learning_rate_schedule(OptimizerConfig(**options), steps)
    values = schedule(jnp.arange(steps))
    assert values.dtype == jnp.float32
    return np.asarray(values)


# Schedule --------------------------------------------------------------------------------------------------


def test_b57_warm_up_4_of_10_then_linear_to_0():
    np.testing.assert_allclose(rates(10, **LINEAR), B57, rtol=1e-6, atol=0)
    assert rates(10, **LINEAR)[-1] == 0


@pytest.mark.parametrize("shift", [-1, 1])
def test_b57_control_one_update_early_or_late_is_another_list(shift):
    schedule = learning_rate_schedule(OptimizerConfig(**LINEAR), 10)
    assert not np.allclose(schedule(jnp.arange(10) + shift), B57, atol=0.05)


@pytest.mark.parametrize(
    ("name", "last"),
    [
        ("cosine", 0),
        ("cosine(final=0.1)", 0.1),
        ("linear(final=0.25)", 0.25),
        ("linear(final=1)", 1),
        ("constant", 1),
    ],
)
@pytest.mark.parametrize("warmup", [0.0, 0.3, 1.0])
def test_end_points(name, last, warmup):
    """The peak is reached at the last update of the warm-up, the final value at the last update."""
    values = rates(10, learning_rate=2.0, schedule=name, warmup=warmup)
    warm = round(10 * warmup)
    assert values[max(warm - 1, 0)] == pytest.approx(2.0 if warm else values[0])
    assert values[-1] == pytest.approx(2.0 if warm == 10 else 2.0 * last, abs=1e-7)
    assert (np.diff(values[:warm]) > 0).all()
    assert (np.diff(values[max(warm - 1, 0) :]) <= 1e-7).all()
    assert values[0] > 0


def test_the_cosine_is_half_way_down_half_way_through():
    values = rates(12, learning_rate=1.0, schedule="cosine(final=0.2)", warmup=1 / 6)
    assert values[6] == pytest.approx((1 + 0.2) / 2)
    assert values[4] == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * 0.3)))


# A step in float64 -----------------------------------------------------------------------------------------


def bigram_gradient(table_VD, kernel_DV, data):
    """Return the loss and its derivative in E and K."""
    inputs_N, targets_N = data.inputs_BT[data.valid_BT], data.targets_BT[data.valid_BT]
    h_ND = table_VD[inputs_N]
    logits_NV = h_ND @ kernel_DV
    p_NV = np.exp(logits_NV) / np.exp(logits_NV).sum(1, keepdims=True)
    loss = -np.log(p_NV[np.arange(len(targets_N)), targets_N]).mean()
    error_NV = (p_NV - np.eye(p_NV.shape[1])[targets_N]) / len(targets_N)
    table_gradient_VD = np.zeros_like(table_VD)
    np.add.at(table_gradient_VD, inputs_N, error_NV @ kernel_DV.T)
    return loss, [table_gradient_VD, h_ND.T @ error_NV]


@functools.cache
def bigram_step(clip: float):
    options = {**LINEAR, "learning_rate": 0.5, "weight_decay": 0.3, "beta2": 0.95, "clip": clip}
    run = training(steps=10, optimizer=options)
    return jax.jit(make_step(Bigram(), run)), state_of(run, bigram_params()), run.optimizer


@pytest.mark.parametrize("clip", [0.0, 0.2])
def test_b57_ten_steps_equal_adamw_written_out_and_apply_the_logged_rate(clip):
    step, state, options = bigram_step(clip)
    values = [np.float64(leaf) for leaf in jax.tree.leaves(state.params)]
    first, second = [np.zeros_like(x) for x in values], [np.zeros_like(x) for x in values]
    norms = []
    for n, rate in enumerate(B57, start=1):
        loss, gradients = bigram_gradient(*values, batch(seed=n))
        norms.append(math.sqrt(sum((g**2).sum() for g in gradients)))
        shrink = min(1.0, clip / norms[-1]) if clip else 1.0
        for i, g in enumerate(gradients):
            first[i] = options.beta1 * first[i] + (1 - options.beta1) * shrink * g
            second[i] = options.beta2 * second[i] + (1 - options.beta2) * (shrink * g) ** 2
            mean = first[i] / (1 - options.beta1**n)
            square = second[i] / (1 - options.beta2**n)
            decay = options.weight_decay * values[i] if i == 1 else 0.0  # the kernel's alone
            values[i] = values[i] - 0.5 * rate * (mean / (np.sqrt(square) + options.epsilon) + decay)
        state, metrics = step(state, batch(seed=n), jax.random.key(0))
        np.testing.assert_allclose(metrics.loss, loss, rtol=1e-4)
        np.testing.assert_allclose(metrics.gradient_norm, norms[-1], rtol=1e-4)
        np.testing.assert_allclose(metrics.learning_rate, 0.5 * rate, rtol=1e-6)
        assert int(metrics.tokens) == 11
    for got, want in zip(jax.tree.leaves(state.params), values, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    assert max(norms) > 0.2  # else the clip did nothing
    assert int(state.step) == 10


# Clip ------------------------------------------------------------------------------------------------------


def update(gradient, params, **options):
    optimizer = make_optimizer(OptimizerConfig(**options), 10)
    return optimizer.update(gradient, optimizer.init(params), params)


def pair(table: float, kernel: float) -> dict:
    """Return two leaves of one shape: outside of jit every shape is compiled for."""
    return {"embedding": {"table": jnp.full(2, table)}, "head": {"kernel": jnp.full(2, kernel)}}


def test_b50_zero_gradients_under_a_clip_give_a_zero_update():
    updates, _ = update(pair(0.0, 0.0), pair(1.0, 2.0), clip=1.0, weight_decay=0.0)
    assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(updates))


@pytest.mark.parametrize(("clip", "norm"), [(0.0, 10.0), (1.0, 1.0), (30.0, 10.0)])
def test_b50_zero_is_no_clip(clip, norm):
    gradient = pair(math.sqrt(18), math.sqrt(32))  # of norm sqrt(2 * 18 + 2 * 32) = 10
    _, moments = update(gradient, pair(1.0, 2.0), clip=clip, beta1=0.5)
    means = [np.float64(leaf) for leaf in jax.tree.leaves(optax.tree.get(moments, "mu"))]
    assert 2 * math.sqrt(sum((leaf**2).sum() for leaf in means)) == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("clip", [-1.0, math.nan, math.inf, "1.0", True])
def test_b50_a_clip_that_is_no_norm_is_refused(clip):
    with pytest.raises(ValueError, match=r"optimizer\.clip is .* must be"):
        build_config({"optimizer": {"clip": clip}})


def test_b50_what_zero_means_is_said():
    (text,) = [field.description for field in fields() if field.path == "optimizer.clip"]
    assert "0 = no clipping" in text


# Decay by role ---------------------------------------------------------------------------------------------

KERNELS = {"query", "key", "value", "output", "gate", "up", "down", "head"}


def all_roles() -> dict:
    """Return a leaf for every parameter of a model, those of a connection included, all of one shape."""
    _, params = built(config(residual="peri_norm", feed_forward="swiglu", head="untied"))
    connection = {**params["blocks"]["attention_connection"], "branch_scale": None}
    params = {**params, "blocks": {**params["blocks"], "attention_connection": connection}}
    return jax.tree.map(lambda _: jnp.full(2, 3.0), params, is_leaf=lambda leaf: leaf is None)


def test_a_step_without_gradient_shrinks_the_kernels_and_nothing_else():
    params = all_roles()
    gradient = jax.tree.map(jnp.zeros_like, params)
    updates, _ = update(
        gradient, params, learning_rate=0.5, warmup=0.0, weight_decay=0.2, schedule="constant"
    )
    roles = jax.tree.leaves(axes.roles(params))
    assert set(roles) == KERNELS | {"bias", "norm", "embedding", "position", "connection"}
    for role, leaf, moved in zip(roles, jax.tree.leaves(params), jax.tree.leaves(updates), strict=True):
        want = -0.1 * np.asarray(leaf) if role in KERNELS else np.zeros(2)
        np.testing.assert_allclose(moved, want, rtol=1e-6, err_msg=role)


def test_the_mask_is_true_for_kernels():
    params = all_roles()
    flat_mask = jax.tree.leaves(decay_mask(params))
    assert flat_mask == [role in KERNELS for role in jax.tree.leaves(axes.roles(params))]


def test_the_decay_table_counts_every_parameter_once():
    _, params = built(config())
    assert decay_table(params).split("\n") == [
        "weight decay on: down 768, key 192, output 192, query 192, up 768, value 192",
        "no weight decay on: bias 216, embedding 88, norm 112, position 64",
    ]
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 2304 + 480
    assert decay_table({}).split("\n") == ["weight decay on: nothing", "no weight decay on: nothing"]


# The table of parameters -----------------------------------------------------------------------------------

HEADS, NORMS = ("tied", "untied"), ("layer_norm", "rms_norm")
PRODUCT = list(itertools.product(CONNECTIONS, ("serial", "parallel"), POSITIONS, ("gelu", "swiglu")))


def covering() -> list[tuple[str, str, str, str]]:
    """Return part of the product in which every pair of values stands together at least once."""
    missing = {(a, b) for case in PRODUCT for a, b in itertools.combinations(case, 2)}
    chosen = []
    while missing:
        best = max(PRODUCT, key=lambda case: len(missing & set(itertools.combinations(case, 2))))
        missing -= set(itertools.combinations(best, 2))
        chosen.append(best)
    return chosen


COVERING = covering()
REST = [pytest.param(*case, marks=pytest.mark.full) for case in PRODUCT if case not in COVERING]


@pytest.mark.parametrize(("residual", "wiring", "positions", "feed_forward"), [*COVERING, *REST])
def test_every_parameter_has_one_row_and_a_name_for_each_axis(residual, wiring, positions, feed_forward):
    number = PRODUCT.index((residual, wiring, positions, feed_forward))
    sizes = {"depth": 3, "width": 8, "heads": 4, "kv_heads": 2, "head_dim": 2, "hidden": 20, "vocab": 12}
    model_config = config(
        residual=residual,
        wiring=wiring,
        positions=positions,
        feed_forward=feed_forward,
        heads=4,
        kv_heads=2,
        hidden=20,
        vocab_multiple=4,
        head=HEADS[number % 2],
        norm=NORMS[number % 2],
    )
    params = jax.eval_shape(Decoder(model_config).init, jax.random.key(0), tokens(1, 2))["params"]
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        rule = parameter_rule(path_name(path))
        assert (rule.role == "connection") == (rule.axes is None)
        if rule.axes is None:  # what a topology declares of its own is replicated
            assert residual in ("dense_former", "attention_residual", "block_attention_residual")
            continue
        assert leaf.shape == tuple({**sizes, "position": 8}[name] for name in rule.axes), path_name(path)


@pytest.mark.parametrize(
    "path",
    ["embedding/tables", "blocks/attention/query", "xblocks/attention/query/kernel", "head/kernel/x", ""],
)
def test_an_unknown_parameter_is_refused(path):
    with pytest.raises(ValueError, match=r"must match exactly one row .* it matches: none"):
        parameter_rule(path)


def test_an_ambiguous_parameter_is_refused(monkeypatch):
    extra = axes.ParameterRule("head/.*", "head", None)
    monkeypatch.setattr(axes, "PARAMETERS", (*axes.PARAMETERS, extra))
    with pytest.raises(
        ValueError, match=r"'head/kernel' must match exactly one row .*: head/kernel, head/\.\*"
    ):
        parameter_rule("head/kernel")
    with pytest.raises(ValueError, match="exactly one row"):
        decay_mask(bigram_params())


def test_a_connection_may_declare_what_it_likes_and_its_norms_stay_norms():
    for name in ("branch_scale", "norm_gate/weights", "gate/kernel"):
        rule = parameter_rule(f"blocks/attention_connection/{name}")
        assert (rule.role, rule.axes) == ("connection", None)
    assert parameter_rule("blocks/connection/norm_out/scale").role == "norm"

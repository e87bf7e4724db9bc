"""The optimizer: AdamW and Lion in float64, layers apart, the clip, decay and rates by role."""

import functools
import inspect
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxblock import Decoder, axes
from jaxblock.axes import Label, parameter_rule, path_name
from jaxblock.config import POSITIONS
from jaxblock.training.config import ALGORITHMS, OptimizerConfig
from jaxblock.training.config_file import build_config, fields
from jaxblock.training.optimizer import decay_mask, decay_table, make_optimizer, optimizer_table, rate_factors
from jaxblock.training.optimizer.update import MAKERS
from jaxblock.training.step import make_step
from tests.small import built, config, tokens
from tests.small_training import Bigram, batch, bigram_params, state_of, training
from tests.training.optimizer_reference import (
    SHAPES,
    adam_direction,
    as_params,
    assert_same,
    compiled,
    distances,
    draws,
    flattened,
    three_references,
    three_updates,
)

B57 = [1 / 4, 2 / 4, 3 / 4, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0]
LINEAR = {"learning_rate": 1.0, "schedule": "linear(final=0.0)", "warmup": 0.4}

# Against float64 -------------------------------------------------------------------------------------------


def lion_direction(beta1: float, beta2: float):
    """Return Lion's direction."""

    def direction(g, moments, n):
        mean = moments.get("mean", 0.0)
        moments["mean"] = beta2 * mean + (1 - beta2) * g
        return np.sign(beta1 * mean + (1 - beta1) * g)

    return direction


@pytest.mark.parametrize("clip", [pytest.param(0.0, marks=pytest.mark.full), 50.0])
def test_three_updates_of_adamw_equal_the_reference(clip):
    """With clip, decay by role and label, and rates by role and label, all written out."""
    text = "adamw(beta1=0.8, beta2=0.9, epsilon=0.01)"
    found = three_updates(text, clip=clip)
    want = three_references(lambda _: adam_direction(0.8, 0.9, 0.01), clip=clip)
    assert_same(found, want)
    for less in ((0.9, 0.9, 0.01), (0.8, 0.95, 0.01), (0.8, 0.9, 1e-8)):  # control: each option is read
        others = three_references(lambda _, options=less: adam_direction(*options), clip=clip)
        assert max(distances(found, others).values()) > 1e-3
    unclipped = three_references(lambda _: adam_direction(0.8, 0.9, 0.01))
    assert (max(distances(found, unclipped).values()) > 1e-3) == (clip > 0)


def test_three_updates_of_lion_equal_the_reference():
    found = three_updates("lion(beta1=0.7, beta2=0.8)")
    assert_same(found, three_references(lambda _: lion_direction(0.7, 0.8)))
    for less in ((0.9, 0.8), (0.7, 0.99)):
        others = three_references(lambda _, options=less: lion_direction(*options))
        assert max(distances(found, others).values()) > 1e-2


def test_every_algorithm_takes_the_options_its_config_has():
    assert set(MAKERS) == set(ALGORITHMS)
    for name, maker in MAKERS.items():
        parameters = inspect.signature(maker).parameters.values()
        required = {p.name for p in parameters if p.default is p.empty}
        assert required <= set(ALGORITHMS[name]) <= {p.name for p in parameters}, name


# Layers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_layer_moves_as_if_it_were_alone(name):
    """Without a clip nothing of layer 0 depends on other layers' gradients: scanned and looped blocks move alike."""
    optimizer, params = compiled(name), as_params(draws(0))
    state = optimizer.init(params)
    gradient = draws(1)
    others = {
        path: np.concatenate([g[:1], -3.0 * g[1:]]) if path.startswith("blocks") else g
        for path, g in gradient.items()
    }
    ours, theirs = (flattened(optimizer.update(as_params(g), state, params)[0]) for g in (gradient, others))
    for path in SHAPES:
        if path.startswith("blocks"):
            np.testing.assert_allclose(ours[path][0], theirs[path][0], rtol=1e-6, err_msg=path)
            assert not np.allclose(ours[path][1:], theirs[path][1:], rtol=1e-3), (
                path
            )  # control: the others do move


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
    options = {**LINEAR, "learning_rate": 0.5, "weight_decay": 0.3, "clip": clip}
    run = training(steps=10, optimizer=options)
    return jax.jit(make_step(Bigram(), run)), state_of(run, bigram_params()), run.optimizer


@pytest.mark.parametrize("clip", [0.0, 0.2])
def test_b57_ten_steps_equal_adamw_written_out_and_apply_the_logged_rate(clip):
    step, state, options = bigram_step(clip)
    beta1, beta2, epsilon = (options.algorithm_choice.options[name] for name in ("beta1", "beta2", "epsilon"))
    values = [np.float64(leaf) for leaf in jax.tree.leaves(state.params)]
    first, second = [np.zeros_like(x) for x in values], [np.zeros_like(x) for x in values]
    norms = []
    for n, rate in enumerate(B57, start=1):
        loss, gradients = bigram_gradient(*values, batch(seed=n))
        norms.append(math.sqrt(sum((g**2).sum() for g in gradients)))
        shrink = min(1.0, clip / norms[-1]) if clip else 1.0
        for i, g in enumerate(gradients):
            first[i] = beta1 * first[i] + (1 - beta1) * shrink * g
            second[i] = beta2 * second[i] + (1 - beta2) * (shrink * g) ** 2
            mean = first[i] / (1 - beta1**n)
            square = second[i] / (1 - beta2**n)
            decay = options.weight_decay * values[i] if i == 1 else 0.0  # the kernel's alone
            values[i] = values[i] - 0.5 * rate * (mean / (np.sqrt(square) + epsilon) + decay)
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
    optimizer = make_optimizer(OptimizerConfig(**options))
    return optimizer.update(gradient, optimizer.init(params), params)


def pair(table: float, kernel: float) -> dict:
    """Return two leaves of one shape: outside of jit every shape is compiled for."""
    return {"embedding": {"table": jnp.full(2, table)}, "head": {"kernel": jnp.full(2, kernel)}}


@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_b50_zero_gradients_under_a_clip_give_a_zero_update(name):
    """Under `jax_debug_nans` too: no NaN is made on the way and selected away."""
    with jax.debug_nans(True):
        updates, _ = update(pair(0.0, 0.0), pair(1.0, 2.0), algorithm=name, clip=1.0, weight_decay=0.0)
    assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(updates))


@pytest.mark.parametrize(("clip", "norm"), [(0.0, 10.0), (1.0, 1.0), (30.0, 10.0)])
def test_b50_zero_is_no_clip(clip, norm):
    gradient = pair(math.sqrt(18), math.sqrt(32))  # of norm sqrt(2 * 18 + 2 * 32) = 10
    _, moments = update(gradient, pair(1.0, 2.0), clip=clip, algorithm="adamw(beta1=0.5)")
    means = [np.float64(leaf) for leaf in jax.tree.leaves(optax.tree.get(moments, "mu"))]
    assert 2 * math.sqrt(sum((leaf**2).sum() for leaf in means)) == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("clip", [-1.0, math.nan, math.inf, "1.0", True])
def test_b50_a_clip_that_is_no_norm_is_refused(clip):
    with pytest.raises(ValueError, match=r"optimizer\.clip is .* must be"):
        build_config({"optimizer": {"clip": clip}})


def test_b50_what_zero_means_is_said():
    (text,) = [field.description for field in fields() if field.path == "optimizer.clip"]
    assert "0 = no clipping" in text


# Decay and rates by role -----------------------------------------------------------------------------------

KERNELS = {"query", "key", "value", "output", "gate", "up", "down", "head"}


def all_roles() -> dict:
    """Return a leaf for every parameter of a model, those of a connection included, all of one shape."""
    _, params = built(config(residual="peri_norm", feed_forward="swiglu", head="untied"))
    connection = {**params["blocks"]["attention_connection"], "branch_scale": None}
    params = {**params, "blocks": {**params["blocks"], "attention_connection": connection}}
    return jax.tree.map(lambda _: jnp.full(2, 3.0), params, is_leaf=lambda leaf: leaf is None)


@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_a_step_without_gradient_shrinks_the_kernels_and_nothing_else(name):
    params = all_roles()
    gradient = jax.tree.map(jnp.zeros_like, params)
    updates, _ = update(gradient, params, algorithm=name, weight_decay=0.2)
    roles = jax.tree.leaves(axes.roles(params))
    assert set(roles) == KERNELS | {"bias", "norm", "embedding", "position", "connection"}
    for role, leaf, change in zip(roles, jax.tree.leaves(params), jax.tree.leaves(updates), strict=True):
        want = -0.2 * np.asarray(leaf) if role in KERNELS else np.zeros(2)
        np.testing.assert_allclose(change, want, rtol=1e-6, err_msg=role)


def test_the_mask_is_true_for_kernels():
    params = all_roles()
    flat_mask = jax.tree.leaves(decay_mask(params))
    assert flat_mask == [role in KERNELS for role in jax.tree.leaves(axes.roles(params))]


def test_a_factor_is_the_roles_times_the_labels():
    params = all_roles()
    labels = (Label("blocks/.*/(query|key)/kernel", learning_rate=0.5), Label(".*/branch_scale", decay=True))
    factors = flattened(rate_factors(params, labels, role_rates={"query": 3.0, "connection": 0.0}))
    want = {"query": 1.5, "key": 0.5, "connection": 0.0}
    for path, factor in factors.items():
        assert factor == want.get(parameter_rule(path).role, 1.0), path
    assert set(jax.tree.leaves(rate_factors(params))) == {1.0}


def test_a_role_rate_for_a_role_the_model_does_not_have_is_refused():
    optimizer = make_optimizer(OptimizerConfig(role_rates={"gate": 0.5}))
    message = r"optimizer\.role_rates names 'gate', .* no such parameter; its roles: embedding, head"
    with pytest.raises(ValueError, match=message):
        optimizer.init(bigram_params())


def test_the_decay_table_counts_every_parameter_once():
    _, params = built(config())
    assert decay_table(params).split("\n") == [
        "weight decay on: down 768, key 192, output 192, query 192, up 768, value 192",
        "no weight decay on: bias 216, embedding 88, norm 112, position 64",
    ]
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 2304 + 480
    assert decay_table({}).split("\n") == ["weight decay on: nothing", "no weight decay on: nothing"]


def test_a_runs_log_lists_the_rates_that_are_not_1():
    _, params = built(config())
    rates = OptimizerConfig(role_rates={"embedding": 0.3, "norm": 2.0, "bias": 1.0})
    labels = (Label("blocks/attention/query/.*", learning_rate=0.3, decay=False),)
    assert optimizer_table(rates, params, labels).split("\n") == [
        "weight decay on: down 768, key 192, output 192, up 768, value 192",
        "no weight decay on: bias 216, embedding 88, norm 112, position 64, query 192",
        "learning rate times 0.3 on: bias 24, embedding 88, query 192",
        "learning rate times 2 on: norm 112",
    ]
    assert optimizer_table(OptimizerConfig(), params) == decay_table(params)


# The table of parameters -----------------------------------------------------------------------------------

DECLARING = {
    "pre_norm": False,
    "post_norm": False,
    "sub_norm": False,
    "rezero": True,
    "resi_dual": True,
    "dense_former": True,
    "attention_residual": True,
    "block_attention_residual": True,
    "muddformer": True,
    "manifold_hyper_connections": True,
}
"""Whether a topology declares more than norms, which are in the table one by one."""
HEADS, NORMS = ("tied", "untied"), ("layer_norm", "rms_norm")
PRODUCT = list(itertools.product(DECLARING, ("serial", "parallel"), POSITIONS, ("gelu", "swiglu")))


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
            assert DECLARING[residual]
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

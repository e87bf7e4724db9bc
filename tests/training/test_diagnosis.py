"""A bad step is put down to the right part of the model: faults of every kind planted, and healthy steps cleared."""

import functools
import math
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblock import ModelConfig
from jaxblock.functional.losses import LossOptions, cross_entropy
from jaxblock.models.classifier import Classifier
from jaxblock.modules import Norm
from jaxblock.residual import Topology
from jaxblock.training.diagnosis import Fault, _loss_and_gradients, find_fault, first_not_finite
from jaxblock.training.objectives import language_loss
from tests.small import SCANNED, built, config
from tests.small_training import batch

KEY = jax.random.key(3)


class Root(nn.Module):
    """x + |gate|^(1/4) f(norm(x)): finite at gate = 0, where its gradient is not."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x, f):
        gate = self.param("gate", nn.initializers.ones, ())
        y = f(Norm(self.config, name="norm")(x))
        return x + (jnp.sqrt(jnp.sqrt(jnp.abs(gate))) * y.astype(jnp.float32)).astype(x.dtype)


ROOT = Topology(Root, "x + |gate|^(1/4) f(norm(x))", source="this test")
GATE = "blocks/attention_connection/gate"


class Searched(NamedTuple):
    """What the diagnosis reads of a task."""

    loss: Any
    forward: Any


@functools.cache
def searched(model_config: ModelConfig, topology: Topology | None = None) -> tuple[Searched, Any]:
    """Return the language model's task, one per config so that it is compiled once, and its parameters."""
    model, params = built(model_config, SCANNED, topology)
    options = LossOptions(vocab_size=model_config.vocab_size)

    def loss(params, batch, key):
        return language_loss(model, params, batch, options=options, dropout_key=key)

    def forward(params, batch, key):
        rngs = {} if key is None else {"dropout": key}
        variables = {"params": params}
        logits, found = model.apply(variables, batch.inputs_BT, rngs=rngs, mutable=["intermediates"])
        return logits, found["intermediates"]

    return Searched(loss, forward), params


def small(*, dtype: str = "float32") -> tuple[Searched, Any]:
    """Return the model that most tests share: a topology whose gradient can be infinite, with dropout."""
    return searched(config(feed_forward="relu", branch_dropout=0.1, dtype=dtype), ROOT)


def planted(params: Any, path: str, index: tuple[int, ...], value: float) -> Any:
    """Return the parameters with one entry changed."""

    def leaf(where: tuple, x: jax.Array) -> jax.Array:
        return (
            x.at[index].set(value) if jax.tree_util.keystr(where, simple=True, separator="/") == path else x
        )

    changed = jax.tree_util.tree_map_with_path(leaf, params)
    same = jax.tree.map(lambda a, b: bool(jnp.array_equal(a, b)), params, changed)
    assert not all(jax.tree.leaves(same)), path
    return changed


def leaf_of(params: Any, path: str, layer: int | None) -> np.ndarray:
    for name in path.split("/"):
        params = params[name]
    return np.asarray(params if layer is None else params[layer])


def where(fault: Fault | None) -> tuple:
    assert fault is not None
    return fault.kind, fault.quantity, fault.place, fault.tensor, fault.layer


def test_a_healthy_step_has_no_fault_and_its_worst_has_a_name():
    task, params = small()
    assert first_not_finite(task, params, batch(), KEY) is None
    fault = find_fault(task, params, batch(), KEY, kind="non_finite")
    assert where(fault) == ("non_finite", "update", "optimizer", "update", None)
    with pytest.raises(ValueError, match=r"kind is 'spikes'.*did you mean 'spike'"):
        find_fault(task, params, batch(), KEY, kind="spikes")


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("path", "index", "place", "layer"),
    [
        ("blocks/attention/query/kernel", (2, 1, 0, 3), "block 2, attention", 2),
        ("blocks/feed_forward/down/bias", (1, 5), "block 1, feed_forward", 1),
        ("blocks/feed_forward_connection/norm/scale", (0, 7), "block 0, feed_forward", 0),
        ("embedding/table", (4, 2), "embedding", None),
        ("final_norm/scale", (3,), "final_norm", None),
    ],
)
def test_a_parameter_that_is_not_finite_is_named_with_its_layer(path, index, place, layer, value):
    task, params = small()
    fault = find_fault(task, planted(params, path, index, value), batch(), KEY, kind="non_finite")
    assert where(fault) == ("non_finite", "parameter", place, path, layer)
    entry = list(index if layer is None else index[1:])
    assert "(1 of " in fault.sentence
    assert f"the first at {entry}" in fault.sentence
    others = np.abs(leaf_of(params, path, layer))
    others[tuple(entry)] = 0.0
    assert fault.value == pytest.approx(float(others.max()))


def test_the_first_of_two_broken_parameters_is_named():
    task, params = small()
    both = planted(params, "blocks/attention/value/kernel", (2, 0, 0, 0), math.nan)
    both = planted(both, "blocks/feed_forward/up/kernel", (1, 0, 0), math.nan)
    fault = find_fault(task, both, batch(), KEY, kind="spike")
    assert where(fault)[2:] == ("block 1, feed_forward", "blocks/feed_forward/up/kernel", 1)


@pytest.mark.parametrize("sublayer", [pytest.param("attention", marks=pytest.mark.full), "feed_forward"])
def test_an_overflow_in_float16_is_found_in_its_sublayer(sublayer):
    """Half precision's largest number is 65504: a kernel of 3e4 overflows in a branch that float32 carries."""
    path = {"attention": "attention/output/kernel", "feed_forward": "feed_forward/down/kernel"}[sublayer]
    task, params = small(dtype="float16")
    assert first_not_finite(task, params, batch(), KEY) is None
    huge = planted(params, f"blocks/{path}", (1,), 3e4)
    huge = (
        planted(huge, f"blocks/{path.replace('down', 'up')}", (1,), 30.0)
        if sublayer == "feed_forward"
        else planted(huge, "blocks/attention/value/kernel", (1,), 30.0)
    )
    fault = find_fault(task, huge, batch(), KEY, kind="non_finite")
    tensor = f"blocks/{sublayer}_out"
    assert where(fault) == ("non_finite", "activation", f"block 1, {sublayer}", tensor, 1)
    assert fault.sentence.startswith(f"block 1, {sublayer}: {sublayer}_out is not finite first")
    wide, _ = small()
    assert first_not_finite(wide, huge, batch(), KEY) is None


def test_a_bad_token_id_is_found_at_the_embedding():
    task, params = small()
    bad = batch()
    inputs_BT = bad.inputs_BT.copy()
    inputs_BT[1, 2] = 11
    fault = find_fault(task, params, bad._replace(inputs_BT=inputs_BT), KEY, kind="non_finite")
    assert where(fault) == ("non_finite", "activation", "embedding", "blocks/resid_pre", 0)
    assert fault.sentence.startswith("embedding: its output, resid_pre of block 0, is not finite first")
    assert fault.sentence.endswith("look for an id that is no token in the batch, row 1, position 2")


def test_a_bad_target_id_is_found_at_the_loss():
    task, params = small()
    bad = batch()
    targets_BT = bad.targets_BT.copy()
    targets_BT[1, 2] = 11
    fault = find_fault(task, params, bad._replace(targets_BT=targets_BT), KEY, kind="non_finite")
    assert where(fault) == ("non_finite", "loss", "loss", "loss", None)
    targets_BT[1, 2], targets_BT[0, -1] = 3, 11  # that target is not real
    assert first_not_finite(task, params, bad._replace(targets_BT=targets_BT), KEY) is None


def test_a_gradient_that_is_not_finite_is_named_though_the_loss_is_finite():
    task, params = small()
    assert first_not_finite(task, params, batch(), KEY) is None
    zero = planted(params, GATE, (1,), 0.0)
    fault = find_fault(task, zero, batch(), KEY, kind="non_finite")
    assert math.isfinite(float(_loss_and_gradients(task.loss, zero, batch(), KEY)[0]))
    assert where(fault) == ("non_finite", "gradient", "block 1, attention", GATE, 1)


def test_of_two_gradients_the_one_nearer_to_the_loss_is_named():
    task, params = small()
    both = planted(params, GATE, (2,), 0.0)
    both = planted(both, "blocks/feed_forward_connection/gate", (0,), 0.0)
    fault = find_fault(task, both, batch(), KEY, kind="non_finite")
    assert where(fault)[2:] == ("block 2, attention", GATE, 2)


def test_a_norm_that_overflows_is_told_from_a_gradient_that_does():
    task, params = small()
    tiny = planted(params, GATE, (1,), 1e-30)
    fault = find_fault(task, tiny, batch(), KEY, kind="non_finite")
    assert where(fault) == ("non_finite", "gradient", "block 1, attention", GATE, 1)
    assert fault.sentence.startswith("the global gradient norm overflows float32")
    assert fault.value is not None
    assert 1e19 < fault.value < math.inf


def test_a_spike_names_the_largest_gradient_and_the_largest_branches():
    """Against numpy: the leaf and layer, its norm, its share; the branches' sizes."""
    task, params = small()
    steep = planted(params, "blocks/feed_forward_connection/norm/scale", (2,), 40.0)
    fault = find_fault(task, steep, batch(), KEY, kind="spike")
    _, gradients = _loss_and_gradients(task.loss, steep, batch(), KEY)
    squares = {}
    for path, x in jax.tree_util.tree_leaves_with_path(gradients):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        x = np.asarray(x, np.float64)
        for layer, row in enumerate(x) if name.startswith("blocks/") else [(None, x)]:
            squares[name, layer] = np.square(row).sum()
    top = max(squares, key=lambda name: squares[name])
    assert (fault.tensor, fault.layer) == top
    assert (fault.kind, fault.quantity) == ("spike", "gradient")
    assert fault.value == pytest.approx(math.sqrt(squares[top]), rel=1e-5)
    share = squares[top] / sum(squares.values())
    assert f"{share:.0%} of the square" in fault.sentence
    _, recorded = jax.jit(task.forward)(steep, batch(), KEY)
    for name in ("attention", "feed_forward"):
        largest_L = np.abs(np.asarray(recorded["blocks"][f"{name}_out"])).max((1, 2, 3))
        assert f"{name} {largest_L.max():.4g} in block {largest_L.argmax()}" in fault.sentence


@pytest.mark.full
@pytest.mark.parametrize(
    ("residual", "wiring", "sublayer"),
    [
        ("attention_residual", "serial", "feed_forward"),
        ("block_attention_residual(sublayers=2)", "serial", "feed_forward"),
        ("dense_former", "serial", "feed_forward"),
        ("post_norm", "parallel", "parallel"),
    ],
)
def test_other_streams_and_wirings_are_searched_the_same_way(residual, wiring, sublayer):
    task, params = searched(config(feed_forward="relu", residual=residual, wiring=wiring))
    assert first_not_finite(task, params, batch(), None) is None
    huge = planted(params, "blocks/feed_forward/down/kernel", (1, ...), 3e38)
    huge = planted(huge, "blocks/feed_forward/down/bias", (1, ...), 3e38)
    fault = find_fault(task, huge, batch(), None, kind="non_finite")
    assert where(fault) == ("non_finite", "activation", f"block 1, {sublayer}", f"blocks/{sublayer}_out", 1)
    bad = batch()
    inputs_BT = bad.inputs_BT.copy()
    inputs_BT[1, 2] = 11
    fault = find_fault(task, params, bad._replace(inputs_BT=inputs_BT), None, kind="non_finite")
    assert fault.layer == 0
    assert "look for an id that is no token in the batch" in fault.sentence


@pytest.mark.full
def test_a_classifier_is_searched_too():
    """Another model, another batch and loss: all that is read of it is its loss and its forward function."""
    model = Classifier(config(feed_forward="relu"), classes=3)
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
    draw = np.random.default_rng(0)
    params = jax.tree.map(lambda x: jnp.asarray(draw.normal(size=x.shape, scale=0.3), x.dtype), shapes)
    rows = batch()
    labels_B = np.array([0, 2])

    def forward(params, batch, key):
        tokens_BT, valid_BT, _ = batch
        variables = {"params": params}
        logits, found = model.apply(variables, tokens_BT, valid_BT=valid_BT, mutable=["intermediates"])
        return logits, found["intermediates"]

    def loss(params, batch, key):
        logits_BC, _ = forward(params, batch, key)
        return cross_entropy(logits_BC[:, None], batch[2][:, None])

    task, given = Searched(loss, forward), (rows.inputs_BT, rows.valid_BT, labels_B)
    assert first_not_finite(task, params, given, None) is None
    broken = planted(params, "classifier/kernel", (0, 0), math.nan)
    assert where(first_not_finite(task, broken, given, None))[2:] == ("classifier", "classifier/kernel", None)
    huge = planted(planted(params, "classifier/kernel", (..., 1), 3e38), "final_norm/bias", (...,), 10.0)
    assert where(first_not_finite(task, huge, given, None))[1:] == ("activation", "logits", "logits", None)
    unknown = (*given[:2], np.array([0, 3]))
    assert where(first_not_finite(task, params, unknown, None))[1:3] == ("loss", "loss")

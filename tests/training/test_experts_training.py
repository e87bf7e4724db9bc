"""Training with experts: balance in what is minimised and nowhere else, however a batch is split; each expert alone."""

import functools
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblock import Classifier, Decoder
from jaxblock.functional import LossOptions, Scaling
from jaxblock.modules.experts import ROUTING
from jaxblock.training.batches import Batch
from jaxblock.training.classifier_task import classifier_loss
from jaxblock.training.config import OptimizerConfig
from jaxblock.training.labelled import LabelledExamples, pad_examples
from jaxblock.training.objectives import balance_weight, evaluation_loss, language_loss, training_loss
from jaxblock.training.optimizer import make_optimizer, optimizer_table
from jaxblock.training.optimizer.roles import decay_rates, rate_factors
from jaxblock.training.step import make_step
from tests.simulated_devices import environment
from tests.small import built, config, tokens
from tests.small_training import state_of, training
from tests.training.optimizer_reference import flattened, nested

BALANCE = 0.3
FEW = {
    "depth": 2,
    "norm": "rms_norm",
    "bias": False,
    "feed_forward": "relu",
    "hidden": 6,
    "positions": "none",
}
EXPERTS = {**FEW, "experts": f"dropless(experts=3, active=2, balance={BALANCE})"}
PLAIN = {"schedule": "constant", "warmup": 0.0, "clip": 0.0, "algorithm": "adamw(epsilon=1.0)"}
RUN = training(optimizer=PLAIN, data={"batch": 4}, **EXPERTS)
KEY = jax.random.key(3, impl="unsafe_rbg")


def ragged() -> Batch:
    """Return four rows with 6, 1, 0 and 4 real targets."""
    tokens_BT = np.asarray(tokens(4, 7))
    return Batch(
        tokens_BT[:, :-1], tokens_BT[:, 1:], np.arange(6)[None] < np.array([[6], [1], [0], [4]]), None
    )


@functools.cache
def losses():
    """Return `(params, batch) -> (training's loss, evaluation's, the collection "routing")`, jitted."""
    model = Decoder(RUN.model)
    trained, evaluated = training_loss(model, RUN), evaluation_loss(model, RUN)

    def run(params, batch):
        _, collected = model.apply({"params": params}, jnp.asarray(batch.inputs_BT), mutable=[ROUTING])
        return trained(params, batch, None), evaluated(params, batch), collected[ROUTING]["blocks"]["experts"]

    return jax.jit(run)


# What is minimised ----------------------------------------------------------------------------------------


def test_the_objective_has_the_balance_and_the_cross_entropy_has_not():
    _, params = built(RUN.model)
    found, evaluated, routing = losses()(params, ragged())
    weight_B = ragged().valid_BT.sum(1)
    balance = (np.asarray(routing["balance_loss_B"]).mean(0) * weight_B).sum() / weight_B.sum()
    np.testing.assert_allclose(found.loss - evaluated.loss, BALANCE * balance, rtol=1e-5)
    np.testing.assert_allclose(found.total, found.loss * found.weight, rtol=1e-6)
    np.testing.assert_allclose(evaluated.loss, evaluated.nats / evaluated.weight, rtol=1e-6)
    assert found.nats == evaluated.nats
    assert found.weight == evaluated.weight == 11
    # Rows differ, so that a mean which weighs them otherwise is another number.
    assert np.std(routing["balance_loss_B"]) > 0.02
    assert balance_weight(config()) == 0.0
    assert balance_weight(RUN.model) == BALANCE


def test_what_rows_add_to_the_objective_adds_up_however_they_are_split():
    """What accumulation, sharded rows and pmap all rest on."""
    _, params = built(RUN.model)
    whole, _, routing = losses()(params, ragged())
    parts = [jax.tree.map(lambda x, r=rows: x[r], ragged()) for rows in ([0, 0, 1, 1], [2, 2, 3, 3])]
    twice = [losses()(params, part)[0] for part in parts]  # every row twice, so that one program serves
    np.testing.assert_allclose(sum(part.total for part in twice) / 2, whole.total, rtol=1e-5)
    # Control: with one number a batch, a mean over its rows, it would depend on the split.
    means = [np.asarray(losses()(params, part)[2]["balance_loss"]).mean() for part in parts]
    by_batch = sum(mean * part.weight / 2 for mean, part in zip(means, twice, strict=True))
    assert abs(by_batch - np.asarray(routing["balance_loss"]).mean() * whole.weight) > 1e-3


@pytest.mark.full  # the test above is its reason
@pytest.mark.parametrize("pieces", [2, 4])
def test_pieces_give_the_update_of_the_whole(pieces):
    model, params = built(RUN.model)
    found = []
    for accumulation in (1, pieces):
        run = training(optimizer=PLAIN, data={"batch": 4, "accumulation": accumulation}, **EXPERTS)
        found.append(jax.jit(make_step(model, run))(state_of(run, params), ragged(), KEY))
    (whole, metrics), (parts, same) = found
    for ours, theirs in zip(jax.tree.leaves(parts.params), jax.tree.leaves(whole.params), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(same.objective, metrics.objective, rtol=1e-5)
    assert metrics.objective > metrics.loss + 0.5 * BALANCE


@pytest.mark.full
def test_the_balance_alone_evens_a_skewed_router_out():
    model, params = built(RUN.model)
    router = params["blocks"]["experts"]["router"]["kernel"]
    params = {**params, "blocks": {**params["blocks"], "experts": {**params["blocks"]["experts"]}}}
    batch = ragged()._replace(valid_BT=np.ones((4, 6), bool))

    def balance(router):
        experts = {**params["blocks"]["experts"], "router": {"kernel": router}}
        variables = {**params, "blocks": {**params["blocks"], "experts": experts}}
        result = language_loss(model, variables, batch, options=LossOptions(), balance=1.0)
        return (result.total - result.nats) / result.weight

    step, router = jax.jit(jax.value_and_grad(balance)), 4 * router
    values = []
    for _ in range(60):
        value, gradient = step(router)
        router = router - 2.0 * gradient
        values.append(float(value))
    assert values[0] > 1.1
    assert values[-1] < 1.0 + 0.5 * (values[0] - 1.0)


# A classifier -----------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_classifiers_rows_weigh_the_same_and_padded_ones_nothing():
    model = Classifier(config(**{**EXPERTS, "depth": 1, "vocab_size": 256}), classes=3)
    shapes = jax.eval_shape(model.init, jax.random.key(0), tokens(1, 2))["params"]
    draw = np.random.default_rng(0)
    params = jax.tree.map(lambda x: jnp.asarray(draw.normal(size=x.shape), x.dtype), shapes)
    examples = LabelledExamples.of([b"abc", b"defgh", b"q"], [0, 1, 2], ("a", "b", "c"))
    batch = pad_examples(examples, [1, None, 2, 0], context=8)

    @jax.jit
    def run(params):
        found = [classifier_loss(model, params, batch, balance=balance) for balance in (0.0, BALANCE)]
        inputs_BT, valid_BT = jnp.asarray(batch.inputs_BT), jnp.asarray(batch.valid_BT)
        _, collected = model.apply({"params": params}, inputs_BT, valid_BT=valid_BT, mutable=[ROUTING])
        return found, collected[ROUTING]["blocks"]["experts"]

    (plain, balanced), routing = run(params)
    loss_B = np.asarray(routing["balance_loss_B"])[0]
    assert loss_B[1] == 0
    np.testing.assert_allclose(balanced.loss - plain.loss, BALANCE * loss_B.sum() / 3, rtol=1e-4)
    assert balanced.nats == plain.nats
    assert (
        abs(loss_B.sum() / 3 - float(routing["balance_loss"][0])) > 1e-3
    )  # control: by tokens it is another mean


# Many devices -----------------------------------------------------------------------------------------------

EIGHT_DEVICES = """
import json, sys, jax, numpy as np
from jaxblock.functional import LossOptions
from jaxblock.parallel import data_mesh, mean_and_gradient, pmap_mean_and_gradient, replicate, shard_batch
from jaxblock.training.objectives import language_loss
from tests.parallel.ragged import ragged_batch
from tests.small import built, config
from tests.training.test_experts_training import FEW

model, params = built(config(**{**FEW, "experts": sys.argv[1]}))

def loss_sums(params, batch):
    result = language_loss(model, params, batch, options=LossOptions(), balance=0.3)
    return result.total, result.weight

batch, mesh = ragged_batch(16), data_mesh()
jitted = jax.jit(mean_and_gradient(loss_sums))
everywhere, shards = replicate(params, mesh), shard_batch(batch, mesh)
sharded = jitted.lower(everywhere, shards).compile()
want = jitted(params, batch)
forms = {"jit": sharded(everywhere, shards), "pmap": pmap_mean_and_gradient(loss_sums, 8)(params, batch)}
pairs = lambda found: zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True)
print(json.dumps({
    "devices": jax.device_count(),
    "collectives": [name for name in ("all-reduce", "all-gather", "all-to-all", "collective-permute")
                    if f" {name}(" in sharded.as_text() or f" {name}-start(" in sharded.as_text()],
    **{name: max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs(found))
       for name, found in forms.items()},
}))
"""


@pytest.mark.full
@pytest.mark.parametrize("experts", ["dropless(experts=3)", "capacity(experts=3, factor=0.5)"])
def test_eight_devices_give_the_loss_and_gradient_of_one(experts):
    """Balance is global in every form, as it is a mean of the rows' own. Only a capacity keeps rows where they are."""
    run = subprocess.run(
        [sys.executable, "-c", EIGHT_DEVICES, experts],
        env=environment(8),
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    report = json.loads(run.stdout)
    assert report["devices"] == 8
    assert report["jit"] < 1e-5
    assert report["pmap"] < 1e-5
    if experts.startswith("capacity"):
        assert report["collectives"] == ["all-reduce"]


# Optimizers --------------------------------------------------------------------------------------------------

SHAPES = {
    "router": (2, 4, 3),
    "up": (2, 3, 4, 6),
    "down": (2, 3, 6, 4),
}  # [L, D, E], [L, E, D, F], [L, E, F, D]
MUON, ADAFACTOR = "muon", "adafactor(clipping=1e9)"


def kernels(seed: int) -> dict[str, np.ndarray]:
    """Return kernels whose experts differ in scale."""
    draw = np.random.default_rng(seed)
    flat = {name: draw.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    for name in ("up", "down"):
        flat[name] *= 10.0 ** np.arange(3, dtype=np.float32).reshape(1, 3, 1, 1)
    return flat


@functools.cache
def updates_of(algorithm: str):
    """Return `gradients -> the last update's directions`, jitted."""
    optimizer = make_optimizer(OptimizerConfig(algorithm=algorithm, weight_decay=0.0, clip=0.0))

    def run(trees):
        updates, state = None, optimizer.init(trees[0])
        for tree in trees:
            updates, state = optimizer.update(tree, state, trees[0])
        return updates

    return jax.jit(run)


def directions(algorithm: str, place: str, gradients: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Return the second update's directions of the kernels in this place of a block."""
    trees = [
        nested({f"blocks/{place}/{n}/kernel": jnp.asarray(g) for n, g in of.items()}) for of in gradients
    ]
    return {path.split("/")[2]: leaf for path, leaf in flattened(updates_of(algorithm)(trees)).items()}


@pytest.mark.parametrize("algorithm", [MUON, ADAFACTOR])
def test_each_experts_kernel_moves_as_it_would_alone(algorithm):
    gradients = [kernels(seed) for seed in (1, 2)]
    stacked = directions(algorithm, "experts", gradients)
    names = ("up", "down")
    for e in range(3):
        own = [{name: of[name][:, e] for name in names} for of in gradients]
        alone = directions(algorithm, "feed_forward", own)
        for name in names:
            np.testing.assert_allclose(stacked[name][:, e], alone[name], rtol=1e-4, atol=1e-5)
    # Control: read as one matrix of all experts they move elsewhere.
    merged = [{"up": of["up"].reshape(2, 12, 6)} for of in gradients]
    other = directions(algorithm, "feed_forward", merged)["up"].reshape(SHAPES["up"])
    assert np.abs(other - stacked["up"]).max() > 0.05


def test_the_router_is_a_dense_kernel_that_muon_leaves_to_adamw():
    _, params = built(RUN.model)
    lines = optimizer_table(OptimizerConfig(algorithm="muon"), params).split("\n")
    assert (
        lines[0] == "weight decay on: down 288, key 128, output 128, query 128, router 48, up 288, value 128"
    )
    assert lines[2] == "orthogonalised by Muon: down 288, key 128, output 128, query 128, up 288, value 128"
    assert "router 48" in lines[3]
    square = jax.eval_shape(make_optimizer(OptimizerConfig(algorithm="adafactor")).init, params)
    shapes = {
        leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(square) if "'router'" in str(path)
    }
    assert shapes == {(2, 8, 1), (2, 1, 3)}


def test_the_router_sums_over_the_width_as_the_other_kernels_of_a_block_do():
    _, params = built(RUN.model)
    scaling = Scaling(hidden_rate=0.25, vector_rate=0.5, hidden_decay=4.0)
    rates = rate_factors(params, scaling=scaling)["blocks"]
    decays = decay_rates(params, weight_decay=0.1, scaling=scaling)["blocks"]
    router = (rates["experts"]["router"]["kernel"], decays["experts"]["router"]["kernel"])
    assert router == (rates["experts"]["up"]["kernel"], decays["experts"]["up"]["kernel"]) == (0.25, 0.4)
    assert rates["feed_forward_connection"]["norm"]["scale"] == 0.5  # control

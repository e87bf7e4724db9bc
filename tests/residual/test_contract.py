"""The contract, from outside the package: invented topologies pass the battery, wrong ones fail with a sentence."""

import dataclasses
import functools
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblock import Decoder, ModelConfig
from jaxblock.functional.depth_mixing import mix_sources
from jaxblock.modules import Norm
from jaxblock.residual import (
    History,
    Label,
    NoGradient,
    PostNorm,
    PreNorm,
    Topology,
    Views,
    open_history,
    place,
    read_once,
    topology,
)
from jaxblock.residual import contract as contract_page
from jaxblock.training.guard import GOOD
from jaxblock.training.step import first_state, make_step
from tests.residual.battery import CHEAP, CHECKS
from tests.residual.battery.subject import PLAIN
from tests.residual.given import Entry, GivenModel, draw, given_branch
from tests.small import built, config, tokens
from tests.small_training import batch, training

# ---------------------------------------------------------------- two inventions, as a stranger would write them


class Scaled(nn.Module):
    """x + scale * f(norm(x)), with a scale per channel that starts at 1."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x, f):
        norm = Norm(self.config, name="norm")
        scale = self.param("scale", nn.initializers.ones, (self.config.width,))
        return x + scale.reshape(1, 1, -1).astype(x.dtype) * f(norm(x))


class Looking(NamedTuple):
    x: jax.Array
    outputs: History


class LooksBack(nn.Module):
    """x + f(norm(x + gate_l * (mean of all outputs before))), gate_l a parameter of the whole stack, from 0."""

    config: ModelConfig

    @nn.compact
    def __call__(self, stream, f):
        norm, here = Norm(self.config, name="norm"), place(self)
        gate = here.shared[here.sublayer]

        def read(x, outputs, gate):
            sources = outputs.sources()
            weights = sources.present / jnp.sum(sources.present)
            return x + (gate * mix_sources(sources, weights)).astype(x.dtype)

        update = f(norm(read_once(read, stream.x, stream.outputs, gate)))
        return Looking(stream.x + update, stream.outputs.push(update))


class Gates(nn.Module):
    config: ModelConfig

    @nn.compact
    def __call__(self):
        return self.param("gate", nn.initializers.zeros, (self.config.sublayers,))


class TakesX(nn.Module):
    config: ModelConfig

    @nn.compact
    def __call__(self, stream, shared):
        return stream.x


SCALED = Topology(Scaled, "x + scale * f(norm(x))", "a test", reduces_to="pre_norm")
LOOKS_BACK = Topology(
    LooksBack,
    "x + f(norm(x + gate * mean(outputs)))",
    "a test",
    open=lambda config, x: Looking(x, open_history(x, config.sublayers + 1)),
    shared=Gates,
    close=TakesX,
    reduces_to="pre_norm",
    mixing=lambda config: np.tri(config.sublayers + 1),
)


def some_by_default(*also):
    """Return the checks, those that are neither cheap nor named marked full."""
    by_default = (*CHEAP, *also)
    return [pytest.param(x, marks=() if x in by_default else (pytest.mark.full,)) for x in CHECKS]


@pytest.mark.parametrize("check", some_by_default("every_leaf_learns"))
def test_an_invented_connection_passes_the_battery_unchanged(check):
    CHECKS[check](Entry("scaled", SCALED))


@pytest.mark.parametrize("check", some_by_default())
def test_an_invented_history_passes_the_battery_unchanged(check):
    CHECKS[check](Entry("looks_back", LOOKS_BACK))


def test_the_page_a_stranger_reads_works_as_it_stands():
    """The code in the docstring of `residual.contract`, and the two topologies it makes."""
    lines = contract_page.__doc__.splitlines()
    code = "\n".join(line.removeprefix("    ") for line in lines if line.startswith("    ") or not line)
    names: dict = {}
    exec(code, names)
    for topology_of_page in (names["gated"], names["looks_back"]):
        for check in ("zero_branch", "positions_and_rows_stay_apart"):
            CHECKS[check](Entry("page", topology_of_page))


# ---------------------------------------------------------------- wrong ones


class ReadsTwice(Scaled):
    @nn.compact
    def __call__(self, x, f):
        return x + f(x) + f(x)


class MixesPositions(Scaled):
    @nn.compact
    def __call__(self, x, f):
        return x + f(Norm(self.config, name="norm")(x - jnp.mean(x, axis=1, keepdims=True)))


class MixesRows(Scaled):
    @nn.compact
    def __call__(self, x, f):
        return x + f(Norm(self.config, name="norm")(x)) + 0.1 * jnp.mean(x, axis=0, keepdims=True)


class MixesRowsLater(Scaled):
    """A factor that starts at 0 hides the mixing at the start."""

    @nn.compact
    def __call__(self, x, f):
        gate = self.param("gate", nn.initializers.zeros, ())
        return x + f(Norm(self.config, name="norm")(x)) + gate * jnp.mean(x, axis=0, keepdims=True)


class LoopsOverItsBranch(Scaled):
    @nn.compact
    def __call__(self, x, f):
        return jax.lax.scan(lambda c, _: (c + f(c), None), x, None, length=2)[0]


class FilesItself(LooksBack):
    """Pushes, and then files the row: what only the stack may do."""

    @nn.compact
    def __call__(self, stream, f):
        update = f(Norm(self.config, name="norm")(stream.x))
        return Looking(stream.x + update, stream.outputs.push(update).filed())


class DropsStream(Scaled):
    @nn.compact
    def __call__(self, x, f):
        return f(Norm(self.config, name="norm")(x))


class StartsShut(Scaled):
    """A gate that starts at 0, and says nothing about branches that do."""

    @nn.compact
    def __call__(self, x, f):
        gate = self.param("gate", nn.initializers.zeros, ())
        return x + gate * f(Norm(self.config, name="norm")(x))


class LearnsWithoutEffect(Scaled):
    """A weight with a gradient and no value: what a mix that is left out of the sum looks like to an optimizer."""

    @nn.compact
    def __call__(self, x, f):
        mix = self.param("mix", nn.initializers.ones, ())
        return x + f(Norm(self.config, name="norm")(x)) + (mix - jax.lax.stop_gradient(mix))


class Buffer(NamedTuple):
    x: jax.Array
    rows: jax.Array
    count: jax.Array


class CarriesItsHistory(Scaled):
    """A history in a plain array of the stream: what `History` exists to avoid."""

    @nn.compact
    def __call__(self, stream, f):
        weights = self.param("weights", nn.initializers.ones, stream.rows.shape[:1])
        h = jnp.sum(jnp.tanh(stream.rows) * weights.reshape(-1, 1, 1, 1), axis=0)
        x = stream.x + f(Norm(self.config, name="norm")(stream.x + h))
        rows = jax.lax.dynamic_update_index_in_dim(stream.rows, x, stream.count, axis=0)
        return Buffer(x, rows, stream.count + 1)


CARRIES = Topology(
    CarriesItsHistory,
    "",
    "a test",
    open=lambda config, x: Buffer(
        x, jnp.zeros((config.sublayers + 1, *x.shape), x.dtype), jnp.zeros((), jnp.int32)
    ),
    close=TakesX,
)


def of(connection, **declared):
    return Topology(connection, "", "a test", **declared)


WRONG = {
    "reads_twice": (
        of(ReadsTwice),
        "zero_branch",
        "ReadsTwice called its branch twice; it must call f exactly once",
    ),
    "mixes_positions": (
        of(MixesPositions),
        "positions_and_rows_stay_apart",
        "never positions or rows of a batch",
    ),
    "mixes_rows": (of(MixesRows), "positions_and_rows_stay_apart", "never positions or rows of a batch"),
    "mixes_rows_off_its_start": (
        of(MixesRowsLater),
        "positions_and_rows_stay_apart",
        "never positions or rows of a batch",
    ),
    "calls_its_branch_in_a_loop": (
        of(LoopsOverItsBranch),
        "one_block",
        "called its branch inside a transformation",
    ),
    "changes_its_history": (
        dataclasses.replace(LOOKS_BACK, connection=FilesItself),
        "one_block",
        "FilesItself changed a history other than by push",
    ),
    "drops_the_stream": (of(DropsStream), "zero_branch", "is not what `zero_branch` declares"),
    "counts_wrong": (of(Scaled, parameters=lambda config: 7), "parameter_count", "its formula gives 7"),
    "mixing_wrong": (
        of(Scaled, mixing=lambda config: np.eye(config.sublayers + 1)),
        "mixing_matrix",
        "not the declared depth-mixing matrix",
    ),
    "reduces_to_something_else": (
        of(PostNorm, reduces_to="pre_norm", final_norm=False),
        "reduces_to",
        "at its start is not pre_norm",
    ),
    "b47_hides_a_dead_parameter": (
        of(type("Dead", (Scaled,), {"__call__": nn.compact(lambda self, x, f: dead(self, x, f))})),
        "every_leaf_learns",
        "connection/dead of block 0 gets no gradient, and `no_gradient` does not list it",
    ),
    "b47_learns_a_mix_that_changes_nothing": (
        of(LearnsWithoutEffect),
        "every_own_leaf_matters",
        "connection/mix moved by up to 0.1 leaves every logit as it was",
    ),
    "never_moves_from_zero_output": (
        of(StartsShut),
        "moves_from_zero_output",
        "starts at 0 with the initialization zero_output and gets no gradient there",
    ),
    "lists_a_living_parameter": (
        of(Scaled, no_gradient=(NoGradient("blocks/attention_connection/scale", 0, "a lie"),)),
        "every_leaf_learns",
        "is declared to get no gradient and gets",
    ),
    "lists_nothing_there": (
        of(Scaled, no_gradient=(NoGradient("blocks/attention_connection/gate", None, "a lie"),)),
        "every_leaf_learns",
        "which match no parameter",
    ),
    "memory_is_quadratic": (CARRIES, "memory_is_linear", r"gradient memory grows as L\^1\.[2-9]"),
}


def dead(self, x, f):
    self.param("dead", nn.initializers.ones, (3,))
    return x + f(Norm(self.config, name="norm")(x))


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_connection_fails_with_a_sentence_that_says_why(name):
    wrong, check, sentence = WRONG[name]
    with pytest.raises((AssertionError, ValueError), match=sentence):
        CHECKS[check](Entry(name, wrong))


# ---------------------------------------------------------------- the parts of the record, one by one


def test_gain_scales_the_kernels_of_its_roles_and_no_other():
    quarter = dataclasses.replace(
        topology("pre_norm"), gain=lambda config, role: 0.25 if role in ("value", "down") else 1.0
    )
    key = jax.random.key(0)
    plain, scaled = (
        jax.jit(lambda key, t=t: Decoder(config(), topology=t).init(key, tokens())["params"]["blocks"])(key)
        for t in (topology("pre_norm"), quarter)
    )
    for module, role, factor in (
        ("attention", "value", 0.25),
        ("attention", "query", 1.0),
        ("attention", "output", 1.0),
        ("feed_forward", "down", 0.25),
        ("feed_forward", "up", 1.0),
    ):
        np.testing.assert_allclose(
            scaled[module][role]["kernel"], factor * plain[module][role]["kernel"], rtol=1e-6
        )


def one_step(rule, **optimizer):
    """Return parameters before and after one training step of a small model with this topology."""
    settings = training(optimizer={"weight_decay": 0.1, "warmup": 0.0, **optimizer})
    model, params = built(settings.model, topology=rule)
    state = first_state(model, settings, params)
    after, metrics = jax.jit(make_step(model, settings))(state, batch(), jax.random.key(1))
    assert metrics.alarm == GOOD
    return state.params, after.params


@pytest.mark.full
def test_labels_decay_a_parameter_and_give_it_its_own_rate():
    where = "blocks/(attention|feed_forward)_connection/scale"
    kept, plain = one_step(SCALED)
    _, decayed = one_step(dataclasses.replace(SCALED, labels=(Label(where, decay=True),)))
    _, slow = one_step(dataclasses.replace(SCALED, labels=(Label(where, learning_rate=0.5),)))
    scale = lambda params: params["blocks"]["attention_connection"]["scale"]  # noqa: E731
    kernel = lambda params: params["blocks"]["attention"]["query"]["kernel"]  # noqa: E731
    rate = 0.03
    np.testing.assert_allclose(scale(plain) - scale(decayed), 0.1 * rate * scale(kept), rtol=2e-2)
    np.testing.assert_allclose(
        scale(slow) - scale(kept), 0.5 * (scale(plain) - scale(kept)), rtol=1e-3, atol=1e-7
    )
    for other in (decayed, slow):
        np.testing.assert_array_equal(kernel(other), kernel(plain))


def test_a_label_that_matches_nothing_is_refused():
    lost = dataclasses.replace(SCALED, labels=(Label("blocks/connection/gate"),))
    with pytest.raises(ValueError, match="label 'blocks/connection/gate' matches no parameter"):
        one_step(lost)


def test_project_runs_after_the_optimizer_step():
    def unit(config, params):
        table = params["embedding"]["table"]
        return {**params, "embedding": {"table": table / jnp.linalg.norm(table, axis=-1, keepdims=True)}}

    _, plain = one_step(SCALED)
    _, projected = one_step(dataclasses.replace(SCALED, project=unit))
    np.testing.assert_allclose(np.linalg.norm(projected["embedding"]["table"], axis=-1), 1.0, rtol=1e-6)
    assert not np.allclose(np.linalg.norm(plain["embedding"]["table"], axis=-1), 1.0, rtol=1e-2)


class GivesViews(nn.Module):
    """Pre-norm whose attention reads its values from `factor` times the norm."""

    config: ModelConfig
    factor: float
    everywhere: bool = False

    @nn.compact
    def __call__(self, x, f):
        h = Norm(self.config, name="norm")(x)
        views = Views(h, h, self.factor * h)
        return x + f(views if self.everywhere or "attention" in self.name else h)


def test_attention_reads_named_views_and_the_feed_forward_refuses_them():
    def logits(factor, **options):
        rule = Topology(functools.partial(GivesViews, factor=factor, **options), "", "a test")
        model, params = built(config(bias=False), topology=rule)
        return model.apply({"params": params}, tokens())

    plain, params = built(config(bias=False))
    want = plain.apply({"params": params}, tokens())
    np.testing.assert_allclose(logits(1.0), want, rtol=1e-5, atol=1e-5)
    halved = jax.tree.map(lambda x: x, params)
    halved["blocks"]["attention"]["value"]["kernel"] = 0.5 * params["blocks"]["attention"]["value"]["kernel"]
    np.testing.assert_allclose(logits(0.5), plain.apply({"params": halved}, tokens()), rtol=1e-5, atol=1e-5)
    assert not np.allclose(logits(0.5), want, atol=1e-3)
    with pytest.raises(ValueError, match=r"feed-forward reads one array and its connection gave it Views"):
        logits(1.0, everywhere=True)


class Counts(nn.Module):
    """Adds (block, sublayer) to the stream."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x, f):
        here = place(self)
        return x + f(x) + jnp.zeros_like(x).at[..., :2].set(jnp.stack([here.block, here.sublayer]))


@pytest.mark.parametrize(("wiring", "want"), [("serial", [6, 15]), ("parallel", [3, 3])])
def test_a_connection_is_told_its_block_and_its_sublayer(wiring, want):
    model_config = config(**PLAIN, wiring=wiring)
    model = GivenModel(model_config, of(Counts), given_branch)
    x = jnp.zeros((1, 1, 8))
    (closed, reads), _ = model.init_with_output(jax.random.key(0), x, jnp.zeros((6, 8)))
    np.testing.assert_array_equal(closed[0, 0, :2], want)
    np.testing.assert_array_equal(
        reads["read_0"][2, 0, 0, :2], {"serial": [2, 6], "parallel": [1, 1]}[wiring]
    )


def test_place_outside_a_stack_says_what_to_pass():
    x = draw(1, 2, 8)
    with pytest.raises(ValueError, match=r"Counts asks for its place in the stack and none was given"):
        Counts(config()).init(jax.random.key(0), x, jnp.zeros_like)
    given = {"place": {"block": jnp.int32(3), "sublayer": jnp.int32(7)}}
    after = Counts(config()).apply(given, x, jnp.zeros_like)
    np.testing.assert_allclose(after[..., :2] - x[..., :2], np.broadcast_to([3, 7], (1, 2, 2)), rtol=1e-6)


def test_the_record_needs_three_fields_only():
    mine = Topology(PreNorm, "x + f(norm(x))", "a test")
    assert (mine.shared, mine.after_block, mine.close, mine.project, mine.labels) == (
        None,
        None,
        None,
        None,
        (),
    )
    assert mine.gain(config(), "value") == 1.0
    assert mine.open(config(), 5) == 5
    assert hash(mine) == hash(dataclasses.replace(mine))


def test_what_was_forgotten_is_named():
    abstract = lambda rule: jax.eval_shape(Decoder(config(), topology=rule).init, jax.random.key(0), tokens())  # noqa: E731
    with pytest.raises(
        ValueError, match="closed stream is a Looking; a stream that is not one array needs `close`"
    ):
        abstract(dataclasses.replace(LOOKS_BACK, close=None))
    short = dataclasses.replace(
        LOOKS_BACK, open=lambda config, x: Looking(x, open_history(x, config.sublayers))
    )
    with pytest.raises(ValueError, match=r"capacity of 6 rows; it starts with one and 3 steps push 6 more"):
        abstract(short)
    for not_one in (Scaled, lambda: SCALED):
        with pytest.raises(TypeError, match=r"it must be a jaxblock\.residual\.Topology"):
            abstract(not_one)
    with pytest.raises(ValueError, match="factory of 'mine' has scale without a default"):
        topology("mine", {"mine": lambda scale: SCALED})
    with pytest.raises(ValueError, match=r"factory of 'mine' has \*\*options without a default"):
        topology("mine", {"mine": lambda **options: SCALED})


def test_a_gain_or_a_rate_that_is_no_number_is_refused():
    rule = dataclasses.replace(SCALED, gain=lambda config, role: float("nan"))
    with pytest.raises(ValueError, match="gain of role 'query' is nan"):
        jax.eval_shape(Decoder(config(), topology=rule).init, jax.random.key(0), tokens())
    bad = dataclasses.replace(
        SCALED, labels=(Label("blocks/.*connection/scale", learning_rate=float("inf")),)
    )
    with pytest.raises(ValueError, match=r"learning_rate of label .* is inf"):
        one_step(bad)


def test_a_projection_keeps_shapes_and_dtypes():
    rule = dataclasses.replace(SCALED, project=lambda config, params: jax.tree.map(lambda x: x[:1], params))
    with pytest.raises(AssertionError, match="shape"):
        one_step(rule)


@pytest.mark.full
def test_a_period_longer_than_the_stack_learns_no_average_and_is_pre_norm():
    rule = topology("dense_former(period=99)")
    shapes = jax.eval_shape(Decoder(config(), topology=rule).init, jax.random.key(0), tokens())["params"]
    assert "shared" not in shapes
    for check in ("parameter_count", "reduces_to"):
        CHECKS[check](Entry("long", rule))


def test_rows_of_a_history_have_one_form():
    history = open_history(draw(1, 2, 8), 3)
    for wrong in (draw(1, 2, 4), jnp.ones((1, 2, 8), jnp.int32)):
        with pytest.raises(AssertionError):
            history.push(wrong)
    with pytest.raises(AssertionError):
        history.push(draw(1, 2, 8), when=jnp.float32(0.5))
    assert bool(history.push(draw(1, 2, 8), when=True).recent[0].present)
    with pytest.raises(AssertionError):
        open_history(draw(2, 8), 3)
    with pytest.raises(ValueError, match="history: capacity is 0"):
        open_history(draw(1, 2, 8), 0)

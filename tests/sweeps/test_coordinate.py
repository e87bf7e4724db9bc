"""Coordinate checks: what is measured is what the trainer's own steps make, and the verdict is the stated rule."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblock import Decoder
from jaxblock.sweeps import coordinate
from jaxblock.sweeps.coordinate import coordinate_check, measure, plan_check, run_check
from jaxblock.sweeps.coordinate_slopes import JUDGED_IN_DEPTH, CoordinateCheck, NonFinite, number
from jaxblock.sweeps.statistics.estimate import Estimate, Refusal
from jaxblock.training.config import DataConfig, InitConfig, OptimizerConfig, RunConfig, TrainConfig
from jaxblock.training.language_task import language_task
from jaxblock.training.prepare import init_state, run_keys
from jaxblock.training.step import make_step
from tests.small import config, tokens
from tests.small_corpus import write_folder

STEPS, SEEDS = 2, (0, 7)
RATE = 0.02


@pytest.fixture(scope="module", autouse=True)
def unoptimized():
    """As everything else in the tests; a fixture of the whole file, as programs are shared."""
    before, coordinate.COMPILER_OPTIONS = coordinate.COMPILER_OPTIONS, None
    yield
    coordinate.COMPILER_OPTIONS = before


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> TrainConfig:
    folder = write_folder(tmp_path_factory.mktemp("text"), ["a.txt", "b.txt", "c.txt"])
    simple = {"bias": False, "norm": "rms_norm", "positions": "none", "feed_forward": "relu"}
    scaled = {"parametrization": "complete_p(base_depth=1, base_width=8)"}
    return TrainConfig(
        run=RunConfig(steps=50),
        model=config(vocab_size=256, **simple, **scaled),
        data=DataConfig(path=str(folder), batch=2, validation_tokens=20),
        optimizer=OptimizerConfig(learning_rate=RATE, schedule="cosine", warmup=0.5),
    )


@pytest.fixture(scope="module")
def checked(run) -> CoordinateCheck:
    """One size of two, as each is a program of its own to compile."""
    plan = plan_check(run, axis="depth", sizes=(3, 2), seeds=SEEDS, steps=STEPS)
    assert plan.sizes == (2, 3)
    return run_check(plan._replace(sizes=plan.sizes[:1], configs=plan.configs[:1]))


def test_it_measures_what_the_trainers_steps_make_at_the_peak_rate(run, checked):
    """What a branch writes is the difference of the stream after and before: half the branch's own output here."""
    optimizer = run.optimizer.model_copy(update={"schedule": "constant", "warmup": 0.0})
    run = run.model_copy(update={"model": dataclasses.replace(run.model, depth=2), "optimizer": optimizer})
    task, keys = language_task(run), run_keys(SEEDS[1])
    batch = task.train[0]
    state = jax.jit(lambda key: init_state(task, run, key))(keys.init)

    @jax.jit
    def step(state):
        logits, collected = task.forward(state.params, batch, None)
        state, metrics = make_step(task.model, run, task.loss)(state, batch, keys.dropout)
        return state, (logits, collected, metrics.learning_rate)

    start = None
    for t in range(STEPS + 1):
        state, (logits, collected, rate) = step(state)
        blocks, final = collected["blocks"], np.asarray(collected["resid_final"], np.float64)
        start = final if start is None else start
        assert rate == np.float32(RATE) == np.float32(checked.learning_rate)
        attention = np.asarray(blocks["resid_mid"] - blocks["resid_pre"], np.float64)
        wanted = {
            "embedding": blocks["resid_pre"][0],
            "last_attention": attention[-1],
            "last_feed_forward": blocks["resid_post"][-1] - blocks["resid_mid"][-1],
            "final_stream": final,
            "logits": logits,
            "change": final - start,
        }
        for name, value in wanted.items():
            y = np.asarray(value, np.float64)
            assert checked.mean_abs[name][0, 1, t] == pytest.approx(np.abs(y).mean(), rel=1e-4), name
            assert checked.rms[name][0, 1, t] == pytest.approx(np.sqrt((y**2).mean()), rel=1e-4), name
        of_blocks = [np.sqrt((y**2).mean()) for y in attention]
        assert checked.rms["attention"][0, 1, t] == pytest.approx(np.mean(of_blocks), rel=1e-4)
        other = checked.rms["embedding"][0, 0, t]
        assert other != pytest.approx(checked.rms["embedding"][0, 1, t], rel=1e-4)  # seeds differ
    assert (checked.rms["change"][..., 0] == 0).all()
    assert (checked.rms["change"][..., 1:] > 0).all()


@pytest.mark.parametrize(
    ("wiring", "residual", "recorded"),
    [
        ("parallel", "dense_former", {"parallel", "last_parallel"}),  # its stream is no array
        (
            "serial",
            "pre_norm",
            {"embedding", "attention", "last_attention", "feed_forward", "last_feed_forward"},
        ),
    ],
)
def test_quantities_by_topology_and_wiring(wiring, residual, recorded):
    model = Decoder(config(depth=2, residual=residual, wiring=wiring))

    def sizes(key):
        params = model.init(key, tokens(1, 2))["params"]
        logits, collected = model.apply({"params": params}, tokens(), mutable=["intermediates"])
        return measure(logits, collected["intermediates"], jnp.zeros((2, 6, 8)))

    found = jax.eval_shape(sizes, jax.random.key(0))
    assert set(found) == recorded | {"final_stream", "logits", "change"}
    assert all(size.shape == (2,) and size.dtype == jnp.float32 for size in found.values())


def synthetic(
    slopes: dict[str, float], *, noise: float = 0.01, axis: str = "depth", **changes
) -> CoordinateCheck:
    """y = size^slope, with a factor for each size and seed; 1 where no slope is given."""
    sizes = changes.get("sizes", (2, 4, 8, 16, 32))
    draw = np.random.default_rng(0)
    rms = {}
    for name in ("embedding", "attention", "last_attention", "final_stream", "logits", "change"):
        law_N = np.array(sizes, float) ** slopes.get(name, 0.0)
        rms[name] = law_N[:, None, None] * np.exp(noise * draw.normal(size=(len(sizes), 3, 5)))
    given = {
        "axis": axis,
        "sizes": sizes,
        "seeds": (0, 1, 2),
        "steps": 4,
        "learning_rate": 0.1,
        "non_finite": (),
    }
    return CoordinateCheck(**{**given, "mean_abs": rms, "rms": rms, **changes})


def test_slopes_are_those_of_the_law():
    check = synthetic({"final_stream": 0.5, "attention": -1.0}, noise=1e-3)
    for name, wanted in (("final_stream", 0.5), ("attention", -1.0), ("logits", 0.0)):
        for t in range(5):
            found = check.slope(name, t).found
            assert isinstance(found, Estimate)
            assert found.value == pytest.approx(wanted, abs=2e-3)
            assert found.low < found.value < found.high


@pytest.mark.parametrize(
    ("slopes", "noise", "axis", "wanted"),
    [
        ({}, 0.01, "depth", "pass"),
        ({"attention": -1.0}, 0.01, "depth", "pass"),  # a branch is smaller on purpose
        ({"attention": -1.0}, 0.01, "width", "fail"),
        ({"embedding": 0.2}, 0.01, "width", "fail"),
        ({"logits": -0.5}, 0.01, "width", "pass"),  # initial logits fall on purpose
        ({"logits": -0.5}, 0.01, "depth", "fail"),
        ({"logits": 0.5}, 0.01, "width", "fail"),
        ({"last_attention": 0.5}, 0.01, "width", "pass"),  # shown; its mean over blocks is judged
        ({"final_stream": 0.2}, 0.01, "depth", "fail"),
        ({"change": -0.2}, 0.01, "depth", "fail"),  # lazy
        ({"logits": 0.1}, 0.01, "depth", "not resolved"),
        ({}, 0.2, "depth", "not resolved"),
    ],
)
def test_the_verdict_compares_whole_intervals_with_the_band(slopes, noise, axis, wanted):
    check = synthetic(slopes, noise=noise, axis=axis)
    assert check.verdict == wanted
    assert all(slope.verdict is None for slope in check.slopes if slope.t < 2)
    judged = {slope.quantity for slope in check.slopes if slope.verdict is not None}
    assert judged == (set(JUDGED_IN_DEPTH) if axis == "depth" else set(check.rms) - {"last_attention"})
    assert check.sentences()[0].startswith(wanted)


def test_only_slopes_from_the_second_update_on_are_judged():
    early = synthetic({})
    early.rms["final_stream"][:, :, 1] *= np.array([1.0, 2, 4, 8, 16])[:, None]
    assert early.verdict == "pass"
    late = synthetic({})
    late.rms["final_stream"][:, :, 2] *= np.array([1.0, 2, 4, 8, 16])[:, None]
    assert late.verdict == "fail"
    assert late.sentences() == ("fail: final stream has slope +1.00 [+0.99, +1.01] at t = 2, outside +-0.1",)


def test_fewer_than_five_sizes_or_two_seeds_give_no_slope():
    few = synthetic({"final_stream": 3.0}, sizes=(2, 4, 8))
    found = few.slope("final_stream", 2).found
    assert isinstance(found, Refusal)
    assert found.rule == "few_depths"
    assert number(found) == "-"
    assert few.verdict == "not resolved"
    assert "final stream has no slope in depth from 3 sizes; at least 5 are needed" in few.sentences()[0]
    alone = synthetic({})
    alone = dataclasses.replace(alone, rms={name: y[:, :1] for name, y in alone.rms.items()}, seeds=(0,))
    assert alone.verdict == "not resolved"
    assert "another seed" in alone.sentences()[0]


def test_what_is_zero_has_no_slope():
    check = synthetic({})
    check.rms["change"][...] = 0.0  # a learning rate of 0
    assert check.verdict == "not resolved"
    assert "change has no slope: a value is not above zero" in check.sentences()[0]


def test_a_run_that_is_not_finite_fails_and_is_named():
    check = synthetic({}, non_finite=(NonFinite(16, 1, 3),))
    check.rms["final_stream"][3, 1, 3:] = np.nan
    assert check.verdict == "fail"
    assert check.sentences()[0] == "fail: depth 16, seed 1: not finite after 3 updates"
    assert "final stream has no slope, as a run was not finite" in check.sentences()[1]


def test_records_end_where_a_run_was_not_finite(run, monkeypatch):
    """By an alarm of the step, or by a value: the record after the update that raised the alarm is gone."""
    plan = plan_check(run, axis="depth", sizes=(1, 3), seeds=(0, 7), steps=STEPS)
    sizes = {name: np.ones((2, STEPS + 1, 2)) for name in ("final_stream", "logits", "change")}
    broken = {name: y.copy() for name, y in sizes.items()}
    broken["logits"][0, 2] = np.inf
    alarms, calm = np.zeros((2, STEPS + 1), int), np.zeros((2, STEPS + 1), int)
    alarms[1, 0] = 1
    alarms[0, STEPS] = 1  # of the update that nobody measures
    found = coordinate._gather(plan, [(sizes, alarms), (broken, calm)])
    assert found.non_finite == (NonFinite(1, 7, 1), NonFinite(3, 0, 2))
    assert tuple(found.rms) == ("final_stream", "logits", "change")
    np.testing.assert_array_equal(np.isnan(found.rms["final_stream"][0]), [[0, 0, 0], [0, 1, 1]])
    np.testing.assert_array_equal(np.isnan(found.rms["final_stream"][1]), [[0, 0, 1], [0, 0, 0]])


def test_a_head_keeps_its_size_when_the_model_gets_wider(run):
    model = config(vocab_size=256, width=8, heads=2, kv_heads=1, hidden=12)
    wide = coordinate._resized(run.model_copy(update={"model": model}), "width", 24).model
    assert (wide.width, wide.heads, wide.head_dim, wide.kv_heads, wide.hidden) == (24, 6, 4, 1, 36)
    grouped = dataclasses.replace(model, heads=4, kv_heads=2, hidden=None)
    wide = coordinate._resized(run.model_copy(update={"model": grouped}), "width", 16).model
    assert (wide.heads, wide.head_dim, wide.kv_heads, wide.num_hidden) == (8, 2, 4, 64)
    gated = dataclasses.replace(model, hidden=None, feed_forward="swiglu")
    wide = coordinate._resized(run.model_copy(update={"model": gated}), "width", 24).model
    assert (gated.num_hidden, wide.num_hidden) == (32, 96)  # in proportion; its own default would be 64


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"axis": "dept"}, r"axis is 'dept'.*did you mean 'depth'"),
        ({"sizes": (2,)}, "sizes are"),
        ({"sizes": (2, 2)}, "all different"),
        ({"sizes": (0, 2)}, "each of sizes is 0"),
        ({"seeds": ()}, "seeds are"),
        ({"steps": 1}, "steps is 1"),
        ({"axis": "width", "sizes": (8, 10)}, "width 10 is no multiple of the head size 4"),
        (
            {"axis": "width", "sizes": (4, 8), "model": {"hidden": 3}},
            "model.hidden is 3 .* 1.5 in proportion",
        ),
        ({"run": {"task": "classifier"}}, "trains language models"),
        ({"init": "runs/a"}, "init.from is 'runs/a'"),
    ],
)
def test_refusals(run, given, message):
    changes = {
        "run": run.run.model_copy(update=given.pop("run", {})),
        "init": InitConfig.model_validate({"from": given.pop("init", None)}),
        "model": dataclasses.replace(run.model, **given.pop("model", {})),
    }
    with pytest.raises(ValueError, match=message):
        plan_check(
            run.model_copy(update=changes), **{"axis": "depth", "sizes": (1, 3), "seeds": (0,), **given}
        )


@pytest.mark.full
def test_without_a_depth_factor_a_large_learning_rate_fails(run):
    """Negative control: 2 L branches of full size; and CompleteP on the same five depths, which is far flatter."""
    sizes, found = (1, 2, 4, 8, 16), {}
    for name in ("standard", "complete_p(base_depth=1, base_width=8)"):
        model = dataclasses.replace(run.model, parametrization=name)
        config = run.model_copy(update={"model": model})
        found[name] = coordinate_check(config, axis="depth", sizes=sizes, seeds=(0, 1, 2), steps=3)
    wrong, right = found.values()
    assert wrong.verdict == "fail"
    assert any("final stream" in line or "change" in line for line in wrong.sentences())
    slopes = [check.slope("final_stream", 3).found for check in (wrong, right)]
    assert all(isinstance(slope, Estimate) for slope in slopes)
    assert slopes[0].low > slopes[1].high

"""[probe] in a sweep: one profile a run, after its last step, in the results, the report's figure and its table."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblock import Decoder
from jaxblock.probes import StreamProbe, stream_profile
from jaxblock.sweeps.analysis import analyse
from jaxblock.sweeps.lanes import Lane, LaneProgram
from jaxblock.sweeps.plan import notes_of
from jaxblock.sweeps.reading import read_sweep
from jaxblock.sweeps.report.figures.probes import OFF, probe_figure, profiles_of
from jaxblock.sweeps.report.marks import Line
from jaxblock.sweeps.report.material import Material
from jaxblock.sweeps.runner import prepare_sweep, run_sweep
from jaxblock.training.prepare import TASKS
from tests.small import built
from tests.sweeps.small_sweeps import plan
from tests.sweeps.test_report_sweep import synthetic_sweep

PROBE = {"every": 1, "statistics": ["sizes", "branch", "gradient"]}


@functools.cache
def material(*, probed: bool = True) -> Material:
    sweep = synthetic_sweep(depths=(2, 4, 8))
    if not probed:
        runs = tuple(dataclasses.replace(run, probe={}) for run in sweep.results)
        sweep = dataclasses.replace(sweep, results=runs)
    return Material(sweep, analyse(sweep))


def test_every_lane_has_the_profile_of_its_own_parameters(tmp_path):
    config = plan(tmp_path, probe=PROBE).runs()[0].config
    task = TASKS["language_model"](config)
    program = LaneProgram(task, config, (Lane(0, 1e-3, 0.0), Lane(1, 1e-3, 0.0)))
    _, one = built(config.model)
    params = jax.tree.map(lambda x: jnp.stack([x, 1.5 * x]), one)
    found = program.probe(params)
    assert found["stream_rms"].shape == (2, 2)
    assert found["stream_gradient"].shape == (2, 3)
    batch, model = next(iter(task.validation)), Decoder(config.model, observe=StreamProbe(("sizes",)))
    for lane in (0, 1):
        own = jax.tree.map(lambda x, lane=lane: x[lane], params)
        apply = functools.partial(model.apply, segments_BT=batch.segments_BT, mutable=["observed"])
        want = stream_profile(apply({"params": own}, jnp.asarray(batch.inputs_BT))[1]["observed"])
        np.testing.assert_allclose(found["stream_rms"][lane], want.values["stream_rms"], rtol=1e-5)
    assert np.abs(found["stream_rms"][0] / found["stream_rms"][1] - 1).max() > 1e-4  # control: lanes differ


@pytest.mark.full
def test_a_run_s_profile_goes_from_the_worker_to_its_record(tmp_path):
    for name, probe in (("on", PROBE), ("off", {"every": 0})):
        made = prepare_sweep(plan(tmp_path, probe=probe))
        assert run_sweep(made, tmp_path / name) == 0
    for run in read_sweep(tmp_path / "on").results:
        assert run.outcome in ("ok", "plateau", "diverged")
        assert {"stream_rms", "relative_update", "branch_gain", "stream_gradient"} <= run.probe.keys()
        assert all(value is not None and value > 0 for value in run.probe["stream_rms"])
        assert run.end is not None
        assert run.probe["stream_rms"][-1] == pytest.approx(run.end.stream[-1], rel=1e-4)
    assert all(run.probe == {} for run in read_sweep(tmp_path / "off").results)


def test_a_plan_says_what_every_means_in_a_sweep(tmp_path):
    (sentence,) = notes_of(plan(tmp_path, probe=PROBE))
    assert "measured once, after its last step" in sentence
    assert notes_of(plan(tmp_path)) == ()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"axes": {"probe.every": [0, 1]}}, "probe.every is an axis, and what is measured changes no run"),
        ({"probe": {"every": 1, "statistics": ["update"]}}, "in a sweep it must be without 'update'"),
        ({"probe": {"every": 1, "statistics": ["size"]}}, "did you mean 'sizes'"),
        ({"probe": {"evry": 1}}, "did you mean 'probe.every'"),
    ],
)
def test_what_a_sweep_cannot_measure_is_refused(tmp_path, changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        plan(tmp_path, **changes)


def test_a_profile_is_the_median_over_seeds_of_what_is_finite():
    run = synthetic_sweep(depths=(2,)).results[0]
    values = [(1.0, 5.0, None), (2.0, None, None), (30.0, 7.0, None)]
    runs = [dataclasses.replace(run, probe={"stream_rms": row}) for row in values]
    profile = profiles_of(runs)["stream_rms"]
    assert profile.values[:2] == (2.0, 6.0)
    assert math.isnan(profile.values[2])
    assert profile.counts == (3, 2, 0)


def test_the_figure_has_a_line_a_depth_against_relative_depth():
    figure = probe_figure(material())
    assert [panel.title.split(":")[0] for panel in figure.panels] == ["Stream", "Stream", "Update", "Update"]
    for panel in figure.panels:
        lines = [mark for mark in panel.marks if isinstance(mark, Line)]
        assert [line.label for line in lines] == ["L=2", "L=4", "L=8"]
        assert [len(line.at) for line in lines] == [4, 8, 16]
        assert all(line.at[-1][0] == 1.0 for line in lines)
    sizes = [row for row in figure.table.rows if row[0] == figure.series[0] and row[2] == "stream_rms"]
    assert [row[3] for row in sizes if row[1] == 2] == [0.25, 0.5, 0.75, 1.0]
    assert sizes[-1][4] == pytest.approx((1 + 0.45 * 8) ** 0.5 * 1.01)  # the median seed of three
    updates = [row for row in figure.table.rows if row[2] == "relative_update" and row[3] == 0.25]
    assert all(row[4] is None and row[5] == 0 for row in updates if row[1] == 2)
    assert "n = 0 to 3 seeds" in figure.caption


def test_a_sweep_without_probes_says_so_in_the_figure_s_place():
    figure = probe_figure(material(probed=False))
    assert figure.panels == ()
    assert figure.table.rows == ()
    assert any(OFF in sentence for sentence in figure.refusals)

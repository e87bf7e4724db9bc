"""A plan is the product of its axes, and whatever is wrong with it is one sentence before anything is written."""

import json
import re

import pytest

from jaxblock.residual import REGISTRY
from jaxblock.sweeps.identity import program_key, run_id
from jaxblock.sweeps.plan import build_plan, read_plan
from tests.sweeps.small_sweeps import plan, values


def test_runs_are_the_product_with_the_first_axis_slowest(tmp_path):
    axes = {"model.depth": [1, 2], "optimizer.learning_rate": [1e-3, 1e-2], "run.seed": [0, 1, 2]}
    runs = plan(tmp_path, model={"depth": None}, axes=axes).runs()
    assert len(runs) == 12
    assert [(run.config.model.depth, run.config.run.seed) for run in runs[:4]] == [
        (1, 0),
        (1, 1),
        (1, 2),
        (1, 0),
    ]
    assert {run.config.optimizer.learning_rate for run in runs} == {1e-3, 1e-2}
    assert all(
        run.config.model.width == 8 and run.axes["model.depth"] == run.config.model.depth for run in runs
    )


def test_any_field_of_the_config_can_be_an_axis(tmp_path):
    axes = {"model.residual": ["pre_norm", "post_norm"], "optimizer.weight_decay": [0.0, 0.1]}
    assert {run.config.optimizer.weight_decay for run in plan(tmp_path, axes=axes).runs()} == {0.0, 0.1}


def test_s3_24_the_topology_is_an_axis_of_the_depth_sweep(tmp_path):
    """Every entry of the registry, in one plan, each at every depth and in a program of its own."""
    axes = {"model.residual": sorted(REGISTRY), "model.depth": [1, 2], "run.seed": [0, 1]}
    runs = plan(tmp_path, axes=axes, model={"depth": None}).runs()
    found = {(run.config.model.residual, run.config.model.depth): program_key(run.config) for run in runs}
    assert set(found) == {(name, depth) for name in REGISTRY for depth in (1, 2)}
    assert len(set(found.values())) == len(found)


def test_heads_follow_the_width(tmp_path):
    changes = {
        "sweep": {"head_dim": 4},
        "axes": {"model.width": [8, 16]},
        "model": {"width": None, "heads": None},
    }
    assert {(run.config.model.width, run.config.model.heads) for run in plan(tmp_path, **changes).runs()} == {
        (8, 2),
        (16, 4),
    }


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"sweep": {"name": None}}, "sweep.name is missing"),
        ({"sweep": {"chunks": 3}}, "did you mean 'chunk'"),
        ({"sweep": {"chunk": 0}}, "sweep.chunk is 0"),
        ({"sweep": {"chunk": 2.0}}, "sweep.chunk is 2.0"),
        ({"axes": {"model.deepth": [1]}}, "did you mean 'model.depth'"),
        ({"axes": {"model": {"depth": [1]}}}, "written with quotes"),
        ({"axes": {"run.seed": 3}}, "must be a list"),
        ({"axes": {"run.seed": []}}, "at least one value"),
        ({"axes": {"run.seed": [1, 1]}}, "2 times"),
        ({"axes": {"run.seed": [1, -1]}}, "run.seed is -1"),
        ({"axes": {"run.seed": [0, "1"]}}, "run.seed"),
        ({"axes": {"optimizer.learning_rate": [1.0, 1.00000001]}}, "1.0 and 1.00000001, which are the same"),
        (
            {"axes": {"model.residual": ["pre_norm", "pre_norm()"]}},
            "'pre_norm' and 'pre_norm()', which are the same",
        ),
        ({"axes": {"optimizer.learning_rate": [1e-40]}}, "from 1e-37 to 3e+38"),
        ({"axes": {"model.vocab_size": [256, 512]}, "model": {"vocab_size": None}}, "cannot be compared"),
        ({"axes": {"run.dir": ["a"]}}, "a sweep does not read it"),
        ({"watch": {"figure_seconds": 1.0}}, "a sweep does not read it"),
        ({"run": {"seed": 1}}, "run.seed is an axis and also"),
        ({"run": {"stepz": 1}}, "did you mean 'run.steps'"),
        ({"modle": {"depth": 1}}, "did you mean 'model'"),
        ({"model": {"width": 7, "heads": 2}}, "heads must divide width"),
        ({"guard": {"non_finite": "skip"}}, "guard.non_finite must be stop"),
        ({"optimizer": {"average": 0.9}}, "optimizer.average is 0.9"),
        ({"axes": {"optimizer.learning_rate": [0.0]}}, "must be above 0 in a sweep"),
        ({"sweep": {"head_dim": 4}}, "model.width is no axis"),
        (
            {
                "axes": {"run.seed": list(range(101)), "run.steps": list(range(1, 101))},
                "run": {"steps": None},
            },
            "at most",
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(tmp_path, changes, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)) as error:
        plan(tmp_path, **changes)
    assert "\n" not in str(error.value)


def test_a_plan_needs_axes_and_a_name(tmp_path):
    whole = values(tmp_path)
    for section, sentence in (("axes", "no [axes]"), ("sweep", "no section [sweep]")):
        with pytest.raises(ValueError, match=re.escape(sentence)):
            build_plan({name: entries for name, entries in whole.items() if name != section})


def test_a_plan_survives_its_file(tmp_path):
    import tomli_w

    ours = plan(tmp_path)
    (tmp_path / "plan.toml").write_text(tomli_w.dumps(ours.values()))
    assert read_plan(tmp_path / "plan.toml") == ours


def test_lane_fields_share_a_program_and_no_other_field_does(tmp_path):
    axes = {"optimizer.warmup": [0.0, 0.5], "model.depth": [1, 2]}
    runs = plan(tmp_path, axes=axes, model={"depth": None}).runs()
    keys = {json.dumps([run.axes["model.depth"]]): {program_key(run.config)} for run in runs}
    for run in runs:
        assert program_key(run.config) in keys[json.dumps([run.axes["model.depth"]])]
    assert len({program_key(run.config) for run in runs}) == 2
    assert len({run_id(run.config, data="d") for run in runs}) == len(runs)


def test_an_id_depends_on_config_and_data_and_not_on_names(tmp_path):
    first, second = plan(tmp_path).runs()[:2]
    renamed = first.config.model_copy(update={"run": first.config.run.model_copy(update={"name": "other"})})
    assert run_id(first.config, data="d") == run_id(renamed, data="d")
    assert run_id(first.config, data="d") != run_id(first.config, data="e")
    assert run_id(first.config, data="d") != run_id(second.config, data="d")

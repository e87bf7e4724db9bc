"""What rounds say: medians of rounds, ratios within a round to the one fastest peer, and who is missing."""

import argparse
import io
import itertools
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from experiments.benchmarks import vocabulary_loss
from experiments.benchmarks.arguments import figure_path, positive
from experiments.benchmarks.contest import AbsentError, Job, need, serve, turn_order
from experiments.benchmarks.depth_cost import Arm, Cost, checks_of
from experiments.benchmarks.import_time import package_shares
from experiments.benchmarks.sizes import PRESETS, Sizes
from experiments.benchmarks.summary import (
    fastest_peer,
    ratio_of,
    ratio_words,
    spread_of,
    summarise,
    table,
    verdict,
)
from experiments.benchmarks.train_step import candidates, execution_of, library_flops, parse

# Rounds in which the machine slows down threefold: 1, 3, 2 times what it takes.
SLOWED = (1.0, 3.0, 2.0)
ROUNDS = {
    "ours": [[0.4 * slow, 0.5 * slow, 9.0] for slow in SLOWED],
    "quick": [[1.0 * slow] for slow in SLOWED],
    "slow": [[2.0 * slow] for slow in SLOWED],
    "best": [[0.25 * slow, 0.3 * slow] for slow in SLOWED],
}


def test_a_ratio_is_of_one_round_so_a_slower_machine_changes_none():
    rows = {row.name: row for row in summarise(ROUNDS, peers=["slow", "quick"], ceiling="best")}
    assert list(rows) == ["ours", "quick", "slow"]
    assert {name: row.ratio.spread for name, row in rows.items() if row.ratio} == {
        "ours": (0.5, 0.5, 0.5),
        "quick": (1.0, 1.0, 1.0),
        "slow": (2.0, 2.0, 2.0),
    }
    assert rows["ours"].seconds == (1.0, 0.75, 1.25)  # the median step of a round; 9.0 moves nothing
    assert rows["ours"].share == (0.5, 0.5, 0.5)  # the ceiling is the best of its round
    shuffled = {
        **ROUNDS,
        "quick": ROUNDS["quick"][::-1],
    }  # negative control: rounds that do not belong together
    (ours, *_) = summarise(shuffled, peers=["quick"], ceiling="best")
    assert ours.ratio is not None
    assert ours.ratio.spread.low < ours.ratio.spread.high


def test_the_spread_is_of_rounds_and_the_interval_holds_the_median():
    rng = np.random.default_rng(1)
    rounds = {"ours": [[x] for x in 1 + rng.random(40)], "peer": [[1.0]] * 40}
    (ours, _) = summarise(rounds, peers=["peer"])
    values = [one[0] for one in rounds["ours"]]
    assert ours.seconds == spread_of(values) == tuple(np.quantile(values, [0.5, 0.25, 0.75]))
    assert ours.ratio is not None
    assert ours.ratio.spread == ours.seconds
    low, high = ours.ratio.interval
    assert ours.seconds.low < low < ours.ratio.spread.median < high < ours.seconds.high


def test_without_a_peer_or_a_ceiling_there_is_no_ratio_and_no_share():
    rows = summarise({"ours": [[1.0], [2.0]]}, peers=["torch"], ceiling=None)
    assert [(row.ratio, row.share) for row in rows] == [(None, None)]
    assert (fastest_peer(rows, ["torch"]), ratio_words(None)) == (None, "-")
    rows = summarise(ROUNDS, peers=["slow", "torch"])
    assert fastest_peer(rows, ["slow", "torch"]) == "slow"
    assert rows[0].ratio is not None
    assert rows[0].ratio.spread.median == 0.25
    for unpaired in ({**ROUNDS, "late": [[1.0]]}, {"ours": []}):
        with pytest.raises(ValueError, match="rounds of contenders"):
            summarise(unpaired)


def test_each_is_first_once_and_none_always_follows_the_same():
    names = ["a", "b", "c", "d"]
    orders = [turn_order(names, number) for number in range(8)]
    assert {order[0] for order in orders} == set(names)
    assert all(sorted(order) == names for order in orders)
    before = {(one, other) for order in orders for one, other in itertools.pairwise(order)}
    assert {("a", "b"), ("b", "a")} <= before
    assert turn_order([], 3) == []


def test_one_that_is_not_installed_or_fails_says_so_and_one_that_runs_answers(monkeypatch):
    def answers(prepare, requests=""):
        monkeypatch.setitem(sys.modules, "a_contender", SimpleNamespace(prepare=prepare))
        out = io.StringIO()
        serve("a_contender", {"depth": 3}, io.StringIO(requests), out)
        return [json.loads(line) for line in out.getvalue().splitlines()]

    assert answers(lambda options: need("no_such_library")) == [
        {"left_out": "no_such_library is not installed"}
    ]
    with pytest.raises(AbsentError):
        need("no_such_library.part")

    def broken(options):
        raise RuntimeError("first line\nsecond")

    assert answers(broken) == [{"left_out": "RuntimeError: first line"}]
    ready, block, memory = answers(
        lambda options: Job(lambda: 0.5, {"depth": options["depth"]}, lambda: 7),
        '{"steps": 2}\n{"memory": true}\n',
    )
    assert ready["facts"]["depth"] == 3
    assert (block, memory) == ({"seconds": [0.5, 0.5]}, {"peak_bytes": 7})


@pytest.mark.parametrize("name", PRESETS)
def test_the_flops_stated_are_those_the_library_counts(name):
    assert PRESETS[name].flops == library_flops(PRESETS[name])
    assert Sizes(depth=7).flops != library_flops(Sizes(depth=6))


def test_settings_tried_start_with_the_ones_given_and_keep_remat():
    given = {"scan_unroll": 3, "remat": "dots", "attention": "xla", "loss": "blocked"}
    shared = {"depth": 6, "platform": "cpu", "dtype": "float32"}
    tried = candidates(shared, given)
    assert tried[0] == given
    assert {(one["remat"], one["loss"]) for one in tried} == {("dots", "blocked")}
    assert {one["scan_unroll"] for one in tried} == {1, 3, 6}
    assert {one["scan_unroll"] for one in candidates({**shared, "depth": 96}, given)} == {1, 3}
    assert "cudnn" not in {one["attention"] for one in tried}
    on_gpu = candidates({**shared, "platform": "gpu", "dtype": "bfloat16"}, given)
    assert "cudnn" in {one["attention"] for one in on_gpu}


def cost(
    depth: int, *, text: int = 1000, compile_s: float = 1.0, block_s: float = 1.0, streams: float = 1.0
) -> Cost:
    """Return what a depth costs: one compiled block, unless told otherwise; a stream is 4 * 2048 * 256 bytes."""
    memory = int(1000 + streams * depth * 4 * 2048 * 256)
    steps = [depth * block_s * slow for slow in SLOWED]
    compiles = [compile_s * slow for slow in SLOWED]
    return Cost(50, text, memory, memory, compiles, [compile_s] * len(SLOWED), steps)


def test_what_has_to_hold_over_depth_holds_for_one_block_and_not_for_a_loop():
    arm, depths = Arm("1", "full"), (4, 6, 48, 96)
    good = checks_of(arm, {depth: cost(depth) for depth in depths}, Sizes())
    assert [round(check.value, 6) for check in good] == [1.0, 1.0, 1.0, 1.0]
    assert all(check.verdict == "holds" for check in good)
    loop = {
        depth: cost(depth, text=100 * depth, compile_s=0.1 * depth, block_s=1 + depth / 100, streams=1.2)
        for depth in depths
    }
    assert {check.verdict for check in checks_of(arm, loop, Sizes())} == {"does not hold"}
    assert checks_of(Arm("depth", "full"), loop, Sizes()) == []
    assert len(checks_of(Arm("1", "none"), {4: cost(4), 96: cost(96)}, Sizes())) == 1
    assert Arm("depth", "none").unroll(7) == 7


def test_own_times_of_modules_are_added_by_package():
    log = "import time: self [us] | cumulative | imported package\n"
    log += "import time:       300 |        300 |   jax.numpy\nimport time:       100 |        400 | jax\n"
    log += "import time:       600 |        600 | flax.linen\nnoise\n"
    assert package_shares(log) == {"flax": 0.6, "jax": 0.4}


def test_a_table_stands_in_columns():
    assert table(("a", "bb"), [("long", "1"), ("x", "22")]) == "a     bb\nlong   1\nx     22"


def test_a_bound_inside_the_interval_is_not_resolved():
    bounds = {"low": 0.9, "high": 1.1}
    assert [verdict(one, **bounds) for one in ((0.9, 1.1), (1.2, 1.3), (0.7, 0.8))] == [
        "holds",
        "does not hold",
        "does not hold",
    ]
    assert {verdict(one, **bounds) for one in ((1.05, 1.15), (0.85, 1.0), (0.5, 2.0))} == {"not resolved"}
    assert verdict((0.0, 0.1), high=1.1) == "holds"


def test_what_cannot_be_counted_or_written_is_refused_before_anything_runs(tmp_path, capsys):
    assert positive("3") == 3
    for word in ("0", "-2", "1.5", "many"):
        with pytest.raises(argparse.ArgumentTypeError, match="not a whole number of at least 1"):
            positive(word)
    assert figure_path(str(tmp_path / "a.png")) == tmp_path / "a.png"
    for path, why in (
        (tmp_path / "no" / "a.png", "no folder"),
        (tmp_path, "is a folder"),
        (tmp_path / "a.docx", "must end in"),
    ):
        with pytest.raises(argparse.ArgumentTypeError, match=why):
            figure_path(str(path))
    for words in (["--rounds", "0"], ["--depth", "0"], ["--remat", "all"], ["--dtype", "int8"]):
        with pytest.raises(SystemExit):
            parse(words)
        assert words[0] in capsys.readouterr().err
    assert execution_of(parse(["--loss", "blocked"]))["loss"] == "blocked"
    assert execution_of(parse([]))["loss"] == "whole"


def test_the_blocked_loss_is_judged_only_where_there_is_more_than_one_block():
    found = vocabulary_loss.Found(
        summarise({"whole": [[2.0]] * 3, "blocked": [[1.0]] * 3}, peers=["whole"]),
        {"whole": 400, "blocked": 100},
        {"whole": 2.0, "blocked": 2.0},
        0.0,
        ratio_of([1.0] * 3, [2.0] * 3),
        block=4,
    )
    checks = vocabulary_loss.checks_of(found, 8)
    assert [check.verdict for check in checks] == ["holds"] * 3
    assert checks[0].interval == (0.25, 0.25)
    assert checks[2].interval == (0.5, 0.5)
    worse = found._replace(
        rows=summarise({"whole": [[1.0]] * 3, "blocked": [[2.0]] * 3}, peers=["whole"]),
        memory={"whole": 100, "blocked": 100},
        loss={"whole": 2.0, "blocked": 2.1},
    )
    assert [check.verdict for check in vocabulary_loss.checks_of(worse, 8)] == ["does not hold"] * 3
    assert vocabulary_loss.checks_of(worse, 4) == []
    sizes = vocabulary_loss.parse(["--length", "4"])
    assert "nothing is compared" in vocabulary_loss.text(sizes, found, [])
    assert "nothing is compared" not in vocabulary_loss.text(sizes, found, checks)

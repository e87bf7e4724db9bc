"""Static or dynamic: the query and the key of attention over depth, a 2 x 2 grid of equal parameters.

    python -m experiments.query_key_grid [--store sweeps/query_key_grid] [--json]

h = sum_i a_i v_i,  a = softmax_i(q . k_i)  over the outputs v_i of all sublayers before (arXiv 2603.15031), with

                   key of the layer, k_i learned      key of the content, k_i = rms_norm(v_i)
    static query   learned scalar logits              the paper's default, q learned
    dynamic query  the cell no paper has filled       q = W rms_norm(newest v), the paper's ablation

and pre_norm as the reference. Parameters are equal within 0.5 %: a dynamic query costs D^2 for each of 13 readers, and
the feed-forward's width pays. (The first reader has one source; its query is counted and does nothing.)

Expected from the paper's 436M models (1.766 pre_norm, 1.749 scalar logits, 1.737 default, 1.731 dynamic query, whose
D^2 there comes on top): content keys better by about 0.01 nats, a dynamic query by 0.006 less what 47 of 192 hidden
units are worth. 3 seeds resolve a few hundredths at best: most of it should read "not resolved".

Found: dynamic queries are worse by 0.25 to 0.3 nats, tune at a quarter of the others' rate and scatter so much that
dynamic_content has no fitted optimum. Resolved are dynamic_layer above pre_norm (at fitted optima alone) and
static_content below it by 0.07 (at measured rates alone, barely); query, key and interaction are not.

Each arm has 7 rates a factor 2 apart. They were 5, from 2e-3 on; the two lowest were added for all arms when neither
dynamic arm had an optimum. Arms are compared at fitted optima and, since one has none, at best measured rates. A
difference is resolved where its interval (t over seeds, Bonferroni for all 7, refused or not) leaves 0 out; p is
Holm's. Writes results/query_key_grid.csv, .md and figures/query_key_grid.png. Killed, the same command goes on. Wall
time: about 35 minutes on two quiet cores (estimated from 61 CPU minutes used on a busy machine).
"""

import argparse
import csv
import functools
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxblock.accounting import decoder_parameters
from jaxblock.config import ModelConfig
from jaxblock.sweeps.analysis import plain
from jaxblock.sweeps.findings.arms import Losses, Measured, measure_arm
from jaxblock.sweeps.plan import Plan, build_plan
from jaxblock.sweeps.reading import read_sweep
from jaxblock.sweeps.results import Result, Sweep
from jaxblock.sweeps.runner import prepare_sweep, run_sweep
from jaxblock.sweeps.statistics import Estimate, Paired, Refusal, holm, paired_difference
from jaxblock.sweeps.statistics.basin import Basin

HERE = Path(__file__).parent
NAME, STEPS, REFERENCE, FULL_HIDDEN = "query_key_grid", 300, "pre_norm", 192
RATES, SEEDS = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2), (0, 1, 2)
COLORS = ("#666666", "#9ecae1", "#08519c", "#fdae6b", "#cb181d")
MODEL: Mapping[str, Any] = {
    "vocab_size": 256,
    "context": 64,
    "depth": 6,
    "width": 64,
    "heads": 4,
    "feed_forward": "swiglu",
    "norm": "rms_norm",
    "bias": False,
    "positions": "rope",
    "initialization": "plain",
}


class Cell(NamedTuple):
    """An arm."""

    name: str
    query: str
    key: str
    residual: str


CELLS = (
    Cell(REFERENCE, "", "", REFERENCE),
    Cell("static_layer", "static", "layer", 'attention_residual(key="layer")'),
    Cell("static_content", "static", "content", "attention_residual()"),
    Cell("dynamic_layer", "dynamic", "layer", 'attention_residual(query="dynamic", key="layer")'),
    Cell("dynamic_content", "dynamic", "content", 'attention_residual(query="dynamic")'),
)
_GRID = tuple(cell for cell in CELLS if cell.query)
_QUERY = {cell.name: 0.5 if cell.query == "dynamic" else -0.5 for cell in _GRID}
_KEY = {cell.name: 0.5 if cell.key == "content" else -0.5 for cell in _GRID}
CONTRASTS: Mapping[str, Mapping[str, float]] = {
    "query: dynamic less static": _QUERY,
    "key: content less layer": _KEY,
    "interaction": {name: 4 * _QUERY[name] * _KEY[name] for name in _QUERY},
    **{f"{cell.name} less {REFERENCE}": {cell.name: 1.0, REFERENCE: -1.0} for cell in _GRID},
}
"""Name -> arm -> weight. Main effects are means over the other factor; the interaction is the query's effect under
content keys less its effect under layer keys."""


@functools.cache
def model_of(cell: Cell) -> ModelConfig:
    """Return the model whose feed-forward width brings the parameters nearest to pre-norm's with 192 hidden units."""
    total = decoder_parameters(ModelConfig(**MODEL, residual=REFERENCE, hidden=FULL_HIDDEN))
    models = [
        ModelConfig(**MODEL, residual=cell.residual, hidden=hidden) for hidden in range(1, FULL_HIDDEN + 1)
    ]
    return min(models, key=lambda model: abs(decoder_parameters(model) - total))


def plan_of(cell: Cell, *, steps: int = STEPS) -> Plan:
    """Return the sweep of one arm: rates and seeds are lanes of one program."""
    model = model_of(cell)
    return build_plan(
        {
            "sweep": {"name": f"{NAME}_{cell.name}", "workers": 1, "lanes": 21, "chunk": 25, "extend": 2},
            "axes": {"optimizer.learning_rate": list(RATES), "run.seed": list(SEEDS)},
            "run": {"steps": steps},
            "model": {**MODEL, "residual": cell.residual, "hidden": model.num_hidden},
            "execution": {"remat": "none"},
            "data": {"batch": 8, "validation_tokens": 32768},
        }
    )


def train(store: Path, *, steps: int = STEPS) -> dict[str, Sweep] | int:
    """Run what has no result yet, one store an arm; return every arm's sweep, or the code of an interrupted one."""
    prepared = {cell.name: prepare_sweep(plan_of(cell, steps=steps)) for cell in CELLS}
    for name, one in prepared.items():
        begun = time.perf_counter()
        code = run_sweep(one, store / name)
        if code:
            return code
        print(f"{name}: {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)
    return {name: read_sweep(store / name) for name in prepared}


class Comparison(NamedTuple):
    """A contrast between arms, paired by seed; less is better."""

    name: str
    at: str
    """Where each side is read: the "fitted" optimum, or the best "measured" rate."""
    difference: Estimate | Refusal
    p: float | None
    """Holm's, over all comparisons read there."""
    detectable: float | None
    """Found with 80 % power at level .05 / comparisons, misfits added."""

    @property
    def verdict(self) -> str:
        """Whether the sign is shown."""
        if isinstance(self.difference, Refusal):
            return f"refused, {self.difference.sentence}"
        if not self.difference.excludes(0.0):
            return "not resolved"
        return "resolved, lower" if self.difference.value < 0 else "resolved, higher"


def measure(sweeps: Mapping[str, Sweep]) -> dict[str, Measured]:
    """Return every arm with its basin."""
    losses = Losses.of(sweeps[REFERENCE])
    return {name: measure_arm(one.results, losses=losses, common=RATES) for name, one in sweeps.items()}


def compare(arms: Mapping[str, Measured], *, at: str) -> dict[str, Comparison]:
    """Return all contrasts, each side at its "fitted" optimum or its best "measured" rate.

    All are adjusted for all, refused ones included: what is refused depends on the losses.
    """
    rows, p_values = {}, []
    for name, weights in CONTRASTS.items():
        found = paired(arms, weights, at=at, comparisons=len(CONTRASTS))
        if isinstance(found, Refusal):
            rows[name] = Comparison(name, at, found, None, None)
        else:
            rows[name] = Comparison(name, at, found.difference, found.p, found.detectable)
        p_values.append(1.0 if isinstance(found, Refusal) else found.p)
    adjusted = zip(rows.items(), holm(p_values), strict=True)
    return {name: row if row.p is None else row._replace(p=p) for (name, row), p in adjusted}


def tuned(one: Measured, *, at: str) -> tuple[Mapping[int, float], float] | Refusal:
    """Return an arm's losses by seed at its own rate and the misfit of what they were read from."""
    basin, place = one.arm.basin, one.grid.best
    if at == "fitted":
        return basin if isinstance(basin, Refusal) else (one.optimum_losses, basin.misfit)
    if place is None or place in (0, len(one.grid.rates_R) - 1):
        return Refusal(rule="no_optimum", sentence="the lowest mean is at the grid's edge")
    return one.arm.best_losses, 0.0


def paired(
    arms: Mapping[str, Measured], weights: Mapping[str, float], *, at: str, comparisons: int
) -> Paired | Refusal:
    """Return sum_a w_a loss_a(seed) over seeds, the arms with positive weights against the others."""
    sides, misfit = {1: np.zeros(len(SEEDS)), -1: np.zeros(len(SEEDS))}, 0.0
    for name, weight in weights.items():
        found = tuned(arms[name], at=at)
        if isinstance(found, Refusal):
            return Refusal(rule="no_optimum", sentence=f"{name} is not tuned: {found.rule}")
        losses_S = np.array([found[0].get(seed, np.nan) for seed in SEEDS])
        sides[1 if weight > 0 else -1] += abs(weight) * losses_S
        misfit += abs(weight) * found[1]
    return paired_difference(sides[1], sides[-1], comparisons=comparisons, misfit=misfit)


def seconds_of(results: Sequence[Result], *, steps: int) -> float:
    """Return what an arm's programs took: compiling and steps; evaluation, saving and start are not counted."""
    programs = {(run.lanes, run.compile_s or 0.0, run.step_s or 0.0) for run in results if run.lanes}
    return sum(compile_s + step_s * steps for _, compile_s, step_s in programs)


def write_runs(path: Path, sweeps: Mapping[str, Sweep]) -> None:
    """Write one row per run."""
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        file.write("arm,hidden,parameters,learning_rate,seed,outcome,val_loss,train_loss\n")
        for cell in CELLS:
            head = (cell.name, model_of(cell).num_hidden, decoder_parameters(model_of(cell)))
            for run in sorted(sweeps[cell.name].results, key=lambda run: (run.learning_rate, run.seed)):
                losses = ("" if x is None else f"{x:.6f}" for x in (run.val_loss, run.last_loss))
                table.writerow((*head, run.learning_rate, run.seed, run.outcome, *losses))


def bounds(found: Estimate | Refusal, digits: int = 4, *, sign: str = "") -> str:
    """Write value and interval, or that there is none."""
    if isinstance(found, Refusal):
        return "refused"
    value, low, high = (f"{x:{sign}.{digits}f}" for x in (found.value, found.low, found.high))
    return f"{value} [{low}, {high}]"


def number(x: float | None) -> str:
    """Write a number of a comparison, or nothing."""
    return "" if x is None else f"{x:.3g}"


def arm_rows(arms: Mapping[str, Measured], measured: Mapping[str, Comparison]) -> list[str]:
    """Return the table of the arms."""
    base = decoder_parameters(model_of(CELLS[0]))
    rows = []
    for cell in CELLS:
        model, arm = model_of(cell), arms[cell.name].arm
        total, fit = decoder_parameters(model), ["refused"] * 2
        if isinstance(arm.basin, Basin):
            fit = [bounds(arm.basin.optimum), bounds(arm.basin.loss)]
        against = ["", "", "reference"]
        if cell.query:
            one = measured[f"{cell.name} less {REFERENCE}"]
            against = [bounds(one.difference, sign="+"), number(one.detectable), one.verdict]
        size = [str(model.num_hidden), f"{total:,} ({total / base - 1:+.2%})"]
        rows.append([*cell[:3], *size, *fit, f"{arm.best_rate:g}", bounds(arm.best_loss), *against])
    heads = "arm|query|key|hidden|parameters|fitted rate|loss there|best measured rate|loss there|less pre_norm, there"
    return table([*heads.split("|"), "MDE", "verdict"], rows)


def effect_rows(comparisons: Mapping[str, Comparison]) -> list[str]:
    """Return the table of the comparisons."""
    rows = [
        [one.name, bounds(one.difference, sign="+"), number(one.p), number(one.detectable), one.verdict]
        for one in comparisons.values()
    ]
    return table(["comparison", "difference, nats", "p (Holm)", "MDE", "verdict"], rows)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a markdown table."""
    return [f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows)]


PAGE = """# Static or dynamic query, key of the layer or of the content: attention over depth, equal parameters

Made by `python -m experiments.query_key_grid`: {size};
rates {rates}, each with seeds {seeds}. Validation loss in nats per byte; a
uniform guess has {uniform:.3f}. Brackets are 95 % intervals, less is better.

{arms}

Main effects are means over the other factor; the interaction is the query's effect under content keys less that under
layer keys. Differences are paired by seed; intervals and MDE (found with 80 % power) are Bonferroni's for all
comparisons of a table, refused ones included.

Each arm at its fitted optimum (the vertex of a parabola in log rate), intervals widened by the misfits:

{fitted}

Each arm at its best measured rate, chosen on the same seeds, which flatters the noisier arms most:

{measured}

{notes}
{events}
Seconds of compiling and steps, one worker, on a machine that others used too: {seconds}.
{environment}.
"""
NOTES = """What this does not say:

- A dynamic query is paid for with feed-forward width: its effect is query less hidden units, not the query's alone.
  Parameters are equal; operations and time are not.
- All parameters of an arm have one learning rate. AdamW moves an entry by about the rate a step, so that a scalar
  logit moves by the rate, q . k by up to 64 times and (W x) . k by up to 4,096 times as much: a static query with a
  layer key may learn too slowly, a dynamic query saturate its softmax, for that reason alone.
- 300 steps are early in training, and longer training may order the arms otherwise.
- The rates were 2e-3 to 3.2e-2 at first; 5e-4 and 1e-3 were added for all arms after both dynamic arms were refused.
"""


def page(sweeps: Mapping[str, Sweep], arms: Mapping[str, Measured]) -> str:
    """Return the markdown page: what was run, the arms, the comparisons, and what they do not say."""
    first, measured = sweeps[REFERENCE], compare(arms, at="measured")
    steps = first.results[0].planned_steps
    seconds = {name: seconds_of(sweep.results, steps=steps) for name, sweep in sweeps.items()}
    events = [(name, event) for name, sweep in sweeps.items() for event in sweep.events]
    size = ", ".join(f"{name} {MODEL[name]}" for name in ("depth", "width", "context", "heads"))
    return PAGE.format(
        size=f"{size}, {steps} steps of {first.tokens_per_step} bytes of the standard library's source",
        rates=", ".join(f"{rate:g}" for rate in RATES),
        seeds=", ".join(map(str, SEEDS)),
        uniform=first.uniform_loss,
        arms="\n".join(arm_rows(arms, measured)),
        fitted="\n".join(effect_rows(compare(arms, at="fitted"))),
        measured="\n".join(effect_rows(measured)),
        notes=NOTES,
        events="".join(f"- {name}, {event.time}: {event.sentence}.\n" for name, event in events),
        seconds=", ".join(f"{name} {value:.0f}" for name, value in seconds.items()),
        environment=", ".join(f"{name} {value}" for name, value in first.environment.items()),
    )


def draw(path: Path, arms: Mapping[str, Measured]) -> None:
    """Draw the basins, and the grid as an interaction plot: points are seeds at each arm's best rate."""
    figure, colors = Figure(figsize=(11, 4.5), layout="constrained"), dict(zip(arms, COLORS, strict=True))
    left, right = figure.subplots(1, 2)
    for name, one in arms.items():
        _basin(left, one, name=name, color=colors[name])
    left.set_xscale("log", base=2)
    left.set_xticks(RATES, [f"{rate:g}" for rate in RATES])
    left.set(xlabel="learning rate", ylabel="validation loss", title="mean and seeds; star: fitted optimum")
    left.legend(frameon=False, fontsize=8)
    _interaction(right, arms, colors)
    for panel in (left, right):
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def _basin(panel: Axes, one: Measured, *, name: str, color: str) -> None:
    grid, basin = one.grid, one.arm.basin
    panel.plot(grid.rates_R, grid.effects, color=color, label=name)
    for losses_R in grid.losses_RS.T:
        panel.plot(grid.rates_R, losses_R, ".", color=color, ms=4)
    if isinstance(basin, Basin):
        panel.plot(basin.optimum.value, basin.loss.value, "*", color=color, ms=11, mec="black", mew=0.5)


def _interaction(panel: Axes, arms: Mapping[str, Measured], colors: Mapping[str, str]) -> None:
    keys = ("layer", "content")
    losses = {name: list(one.arm.best_losses.values()) for name, one in arms.items()}
    for query, style in (("static", "--"), ("dynamic", "-")):
        cells = [cell for key in keys for cell in _GRID if (cell.query, cell.key) == (query, key)]
        means = [np.mean(losses[cell.name]) for cell in cells]
        panel.plot(keys, means, style, color="black", label=f"{query} query")
        for place, cell in enumerate(cells):
            values = losses[cell.name]
            panel.plot([place] * len(values), values, "o", color=colors[cell.name], ms=5)
    band = min(losses[REFERENCE]), max(losses[REFERENCE])
    panel.axhspan(*band, color=colors[REFERENCE], alpha=0.25, lw=0, label=REFERENCE)
    panel.set(xlabel="key", ylabel="loss at the best rate", title="points: seeds; band: pre_norm's seeds")
    panel.set_xlim(-0.3, 1.3)
    panel.legend(frameon=False, fontsize=8)


def main() -> int:
    """Train what is missing, write table, page and figure; return the code of a sweep that was interrupted, else 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", type=Path, default=Path("sweeps") / NAME)
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of the page")
    arguments = parser.parse_args()
    sweeps = train(arguments.store)
    if isinstance(sweeps, int):
        print(f"interrupted; the same command goes on from {arguments.store}", file=sys.stderr)
        return sweeps
    arms = measure(sweeps)
    text = page(sweeps, arms)
    write_runs(HERE / "results" / f"{NAME}.csv", sweeps)
    (HERE / "results" / f"{NAME}.md").write_text(text, encoding="utf-8")
    draw(HERE / "figures" / f"{NAME}.png", arms)
    if arguments.json:
        found = [one for at in ("fitted", "measured") for one in compare(arms, at=at).values()]
        rows = [{**plain(one._asdict()), "verdict": one.verdict} for one in found]
        print(json.dumps({"arms": {name: plain(one.arm) for name, one in arms.items()}, "comparisons": rows}))
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Static or dynamic: the query and the key of attention over depth, a 2 x 2 grid of equal parameters.

    python -m experiments.query_key_grid [--store sweeps/query_key_grid] [--json]

h = sum_i a_i v_i,  a = softmax_i(q . k_i)  over the outputs v_i of all sublayers before (arXiv 2603.15031), with

                   key of the layer, k_i learned      key of the content, k_i = rms_norm(v_i)
    static query   learned scalar logits              the paper's default, q learned
    dynamic query  the cell no paper has filled       q = W rms_norm(newest v), the paper's ablation

and pre_norm as the reference. The same parameters for all (within 0.5 %): a dynamic query costs D^2 per reader, 13
readers, and the feed-forward's width pays for it. Of the 13, the first reads one source, which no query changes: its
parameters are counted and do nothing. Learning rate tuned per arm: 5 rates a factor 2 apart, up to 2 more where the
best lies at the edge; each side is read at its own fitted optimum and paired by seed.

Expected, if the paper's 436M models (1.766 pre_norm, 1.749 scalar logits, 1.737 default, 1.731 dynamic query, which
there pays nothing for its D^2) tell anything of 0.3M parameters and 154k tokens: pre_norm worst, a content key better
by about 0.01 nats, a dynamic query better by about 0.006 less what 47 of 192 hidden units are worth, which may well be
more. 3 seeds resolve differences of a few hundredths at best, so that most of the table should read "not resolved".

A difference is resolved where its interval leaves 0 out: t over seeds, Bonferroni for the 7 comparisons, widened by
the misfits of the parabolas, as in `jaxblock sweep`'s report; p is Holm's over the 7. MDE is the difference found with
80 % power on the same terms, from the spread of these very seeds. Writes results/query_key_grid.csv, .md and
figures/query_key_grid.png. Killed, the same command goes on. Wall time: about 30 minutes on two quiet cores.
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
    Cell(REFERENCE, "", "", "pre_norm"),
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
    """A contrast between arms, each at its own fitted optimum, paired by seed; less is better."""

    name: str
    difference: Estimate | Refusal
    p: float | None
    """Holm's, over all comparisons."""
    detectable: float | None
    """Found with 80 % power at level .05 / comparisons, misfits added."""
    detectable_alone: float | None
    """The same were this the only comparison and the parabolas exact."""

    @property
    def verdict(self) -> str:
        """Whether the sign is shown."""
        if isinstance(self.difference, Refusal):
            return f"refused: {self.difference.sentence}"
        if not self.difference.excludes(0.0):
            return "not resolved"
        return "resolved, lower" if self.difference.value < 0 else "resolved, higher"


def measure(sweeps: Mapping[str, Sweep]) -> dict[str, Measured]:
    """Return every arm with its basin."""
    return {
        name: measure_arm(sweep.results, losses=Losses.of(sweep), common=RATES)
        for name, sweep in sweeps.items()
    }


def compare(arms: Mapping[str, Measured]) -> list[Comparison]:
    """Return all contrasts, adjusted together."""
    alone = {name: paired(arms, weights) for name, weights in CONTRASTS.items()}
    count = max(1, sum(not isinstance(found, Refusal) for found in alone.values()))
    rows = []
    for name, weights in CONTRASTS.items():
        found, first = paired(arms, weights, comparisons=count, misfits=True), alone[name]
        if isinstance(found, Refusal) or isinstance(first, Refusal):
            assert isinstance(found, Refusal)
            rows.append(Comparison(name, found, None, None, None))
        else:
            rows.append(Comparison(name, found.difference, found.p, found.detectable, first.detectable))
    adjusted = iter(holm([row.p for row in rows if row.p is not None]))
    return [row if row.p is None else row._replace(p=next(adjusted)) for row in rows]


def paired(
    arms: Mapping[str, Measured], weights: Mapping[str, float], *, comparisons: int = 1, misfits: bool = False
) -> Paired | Refusal:
    """Return sum_a w_a loss_a(seed) over seeds, the arms with positive weights against the others."""
    for name in weights:
        basin = arms[name].arm.basin
        if isinstance(basin, Refusal):
            return Refusal(rule="no_optimum", sentence=f"{name}: {basin.sentence}")
    seeds = sorted({seed for name in weights for seed in arms[name].seeds})
    sides = {1: np.zeros(len(seeds)), -1: np.zeros(len(seeds))}
    misfit = 0.0
    for name, weight in weights.items():
        losses = arms[name].optimum_losses
        sides[1 if weight > 0 else -1] += abs(weight) * np.array([losses.get(seed, np.nan) for seed in seeds])
        basin = arms[name].arm.basin
        assert isinstance(basin, Basin)
        misfit += abs(weight) * basin.misfit if misfits else 0.0
    return paired_difference(sides[1], sides[-1], comparisons=comparisons, misfit=misfit)


def seconds_of(results: Sequence[Result], *, steps: int) -> float:
    """Return what an arm's programs took: compiling and steps; evaluation, saving and start are not counted."""
    programs = {(run.lanes, run.compile_s or 0.0, run.step_s or 0.0) for run in results if run.lanes}
    return sum(compile_s + step_s * steps for _, compile_s, step_s in programs)


def write_runs(path: Path, sweeps: Mapping[str, Sweep]) -> None:
    """Write one row per run."""
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(
            ("arm", "hidden", "parameters", "learning_rate", "seed", "outcome", "val_loss", "train_loss")
        )
        for cell in CELLS:
            model = model_of(cell)
            head = (cell.name, model.num_hidden, decoder_parameters(model))
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


def arm_rows(arms: Mapping[str, Measured], comparisons: Sequence[Comparison]) -> list[str]:
    """Return the table of the arms."""
    by_name = {one.name: one for one in comparisons}
    base = decoder_parameters(model_of(CELLS[0]))
    rows = []
    for cell in CELLS:
        model, arm = model_of(cell), arms[cell.name].arm
        basin, total = arm.basin, decoder_parameters(model)
        share = f"{total:,} ({(total - base) / base:+.2%})"
        if isinstance(basin, Refusal):
            tuned = [f"refused: {basin.sentence}", f"{bounds(arm.best_loss)} at {arm.best_rate}, not tuned"]
        else:
            tuned = [bounds(basin.optimum), bounds(basin.loss)]
        against = ["", "", "", "reference"]
        if cell.query:
            one = by_name[f"{cell.name} less {REFERENCE}"]
            against = [bounds(one.difference, sign="+"), number(one.p), number(one.detectable), one.verdict]
        rows.append([cell.name, cell.query, cell.key, str(model.num_hidden), share, *tuned, *against])
    heads = "arm|query|key|hidden|parameters|best rate, fitted|loss there|less pre_norm|p (Holm)|MDE|verdict"
    return table(heads.split("|"), rows)


def effect_rows(comparisons: Sequence[Comparison]) -> list[str]:
    """Return the table of the comparisons."""
    rows = []
    for one in comparisons:
        detectable = (number(one.detectable), number(one.detectable_alone))
        rows.append([one.name, bounds(one.difference, sign="+"), number(one.p), *detectable, one.verdict])
    return table(["comparison", "difference, nats", "p (Holm)", "MDE", "MDE, alone", "verdict"], rows)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a markdown table."""
    return [f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows)]


PAGE = """# Static or dynamic query, key of the layer or of the content: attention over depth, equal parameters

Made by `python -m experiments.query_key_grid`. {size}; rates {rates}, each with seeds {seeds}. Validation loss in nats
per byte; a uniform guess has {uniform:.3f}. Brackets are 95 % intervals.

{arms}

Rate and loss: vertex of a parabola in log rate, intervals of Fieller and of t over seeds. Differences, at those
vertices: paired by seed, Bonferroni for all comparisons of the table below, widened by the parabolas' misfits. MDE:
found with 80 % power on these terms; alone: at level .05, were it the only comparison and the parabolas exact.

{effects}

Main effects are means over the other factor; the interaction is the query's effect under content keys less that under
layer keys. Less is better. What this does not say:

- A dynamic query is paid for with feed-forward width: its effect is query less hidden units, not the query's alone.
  Parameters are equal; operations and time are not.
- One scalar logit is one number, which AdamW moves by about the rate a step; q . k sums {width} products. static_layer
  can leave the uniform mean more slowly than the others for that reason alone.
- {steps} steps are early in training, and longer training may order the arms otherwise. Slope of the training loss over
  the last tenth, nats per 1,000 steps: {falling}.
{widened}
Seconds of compiling and steps, one worker, on a machine that others used too: {seconds}. {environment}.
"""


def page(sweeps: Mapping[str, Sweep], arms: Mapping[str, Measured], found: Sequence[Comparison]) -> str:
    """Return the markdown page: what was run, the arms, the comparisons, and what they do not say."""
    first = sweeps[REFERENCE]
    steps = first.results[0].planned_steps
    seconds = {name: seconds_of(sweep.results, steps=steps) for name, sweep in sweeps.items()}
    events = [event.sentence for sweep in sweeps.values() for event in sweep.events]
    size = ", ".join(f"{name} {MODEL[name]}" for name in ("depth", "width", "context", "heads"))
    falling = [f"{name} {bounds(one.arm.still_falling, 2, sign='+')}" for name, one in arms.items()]
    return PAGE.format(
        size=f"{size}, {steps} steps of {first.tokens_per_step} bytes of the standard library's source",
        rates=", ".join(f"{rate:g}" for rate in RATES),
        seeds=", ".join(map(str, SEEDS)),
        uniform=first.uniform_loss,
        arms="\n".join(arm_rows(arms, found)),
        effects="\n".join(effect_rows(found)),
        width=MODEL["width"],
        steps=steps,
        falling=", ".join(falling),
        widened="".join(f"- {sentence}.\n" for sentence in events),
        seconds=", ".join(f"{name} {value:.0f}" for name, value in seconds.items()),
        environment=", ".join(f"{name} {value}" for name, value in first.environment.items()),
    )


def draw(path: Path, arms: Mapping[str, Measured]) -> None:
    """Draw the basins, and the grid as an interaction plot: points are seeds at each arm's optimum."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    colors = dict(zip(arms, ("#666666", "#9ecae1", "#08519c", "#fdae6b", "#cb181d"), strict=True))
    for name, one in arms.items():
        _basin(left, one, name=name, color=colors[name])
    left.set_xscale("log", base=2)
    left.set_xticks(RATES, [f"{rate:g}" for rate in RATES])
    left.set(
        xlabel="learning rate", ylabel="validation loss, nats", title="mean and seeds; star: fitted optimum"
    )
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
    for query, style in (("static", "--"), ("dynamic", "-")):
        cells = [cell for key in keys for cell in _GRID if (cell.query, cell.key) == (query, key)]
        means = [np.mean(list(arms[cell.name].optimum_losses.values()) or [np.nan]) for cell in cells]
        panel.plot(keys, means, style, color="black", label=f"{query} query")
        for place, cell in enumerate(cells):
            losses = list(arms[cell.name].optimum_losses.values())
            panel.plot([place] * len(losses), losses, "o", color=colors[cell.name], ms=5)
    reference = list(arms[REFERENCE].optimum_losses.values())
    if reference:
        panel.axhspan(
            min(reference), max(reference), color=colors[REFERENCE], alpha=0.25, lw=0, label=REFERENCE
        )
    panel.set(
        xlabel="key", ylabel="loss at the fitted optimum, nats", title="points: seeds; band: pre_norm's seeds"
    )
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
    found = compare(arms)
    text = page(sweeps, arms, found)
    write_runs(HERE / "results" / f"{NAME}.csv", sweeps)
    (HERE / "results" / f"{NAME}.md").write_text(text, encoding="utf-8")
    draw(HERE / "figures" / f"{NAME}.png", arms)
    if arguments.json:
        rows = [{**plain(row._asdict()), "verdict": row.verdict} for row in found]
        print(json.dumps({"arms": {name: plain(one.arm) for name, one in arms.items()}, "comparisons": rows}))
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

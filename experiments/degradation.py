"""Degradation outside attention: does a deeper net without skips train worse than with them, and than a shallow one?

    python -m experiments.degradation [--store sweeps/degradation] [--workers 1]

After He et al. (arXiv 1512.03385, figures 1 and 6): plain networks of 56 layers had a higher TRAINING error than those
of 20, residual ones did not. Here both branches of `jaxblock.modules.token_mixer` stand in attention's place:

    x + f(norm(x))     pre_norm        f: two 3 x 3 convolutions, or an MLP over positions (arXiv 2105.01601); then the
    f(norm(x))         none               feed-forward; a norm before each, so that no signal vanishes on its way up

on scikit-learn's digits at 2, 4, 8, 16 and 32 blocks, 120 steps of 8 images, width 16. Every arm (mixer, depth, with or
without skip) has its own best learning rate, of 4 a factor 3 apart and one more where the best lies at their edge; the
loss is the mean training loss of the last 12 steps, over 5 seeds that the two sides share.

Expected: at 2 blocks the two hardly differ; without skips the loss rises with depth up to a uniform guess (log 10 =
2.30 nats) at 32 blocks, and with them it does not rise.

Found: without skips the loss is worse from 8 blocks on with convolutions (there by 0.43 [0.15, 0.70] nats) and from 4
on with the MLP (by 0.68 [0.07, 1.30]); at 2 blocks neither is resolved; from 16 on, nets without skips are at a uniform
guess at every rate. NOT as expected: with skips the loss rises with depth too, 1.49 to 1.92 with convolutions (32
blocks less 2: +0.43 [+0.14, +0.72]), not resolved with the MLP (+0.27 [-0.36, +0.90]). 120 steps show how fast a net
begins to learn, and not where it ends. One best rate lies at the edge of its grid, 1e-3 for 8 blocks of convolutions
without skips (2.196); 3e-4, run apart from the table, gave 2.295.

A difference is resolved where its interval leaves 0 out: t over paired seeds, Bonferroni for all 14 comparisons (6.1
standard errors to each side with 5 seeds; with 3 it would be 16.7); p is Holm's over the 14. The best of several
measured rates is chosen and read on the same seeds: too good by a little, on both sides alike. Writes
results/degradation.csv, .md and figures/degradation.png. Killed, the same command goes on. Wall time: 52 minutes of
compiling and steps while some ten other jobs shared the two cores; about 20 alone is an estimate from processor time.
"""

import argparse
import csv
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from jaxblock.sweeps.plan import Plan, build_plan
from jaxblock.sweeps.reading import read_sweep
from jaxblock.sweeps.results import Result, Sweep
from jaxblock.sweeps.runner import prepare_sweep, run_sweep
from jaxblock.sweeps.statistics import Estimate, Paired, Refusal, holm, paired_difference

HERE = Path(__file__).parent
NAME, STEPS = "degradation", 120
DEPTHS, SEEDS, RATES = (2, 4, 8, 16, 32), (0, 1, 2, 3, 4), (1e-3, 3e-3, 1e-2, 3e-2)
SKIP, PLAIN = "pre_norm", "none"
MIXERS: Mapping[str, str] = {"convolution": "convolution(size=3, rows=8)", "mlp": "mlp(hidden=32)"}
UNIFORM = math.log(10)


class Arm(NamedTuple):
    """What is compared: each at its own best rate."""

    mixer: str
    residual: str
    depth: int


class Best(NamedTuple):
    """An arm at its best measured rate."""

    rate: float
    at_edge: bool
    """Whether no higher, or no lower, rate was measured."""
    losses_R: np.ndarray
    """Training loss of each seed, nats."""


class Comparison(NamedTuple):
    """One arm less another, paired by seed."""

    first: Arm
    second: Arm
    difference: Estimate | Refusal
    p: float | None
    """Holm's, over all comparisons."""

    @property
    def verdict(self) -> str:
        """Whether the sign is shown."""
        if isinstance(self.difference, Refusal):
            return f"refused: {self.difference.sentence}"
        if not self.difference.excludes(0.0):
            return "not resolved"
        return "worse" if self.difference.value > 0 else "better"


def plan_of(mixer: str, *, workers: int = 1, steps: int = STEPS) -> Plan:
    """Return the sweep of one mixer: rates and seeds are lanes of one program."""
    axes: dict[str, Sequence[Any]] = {
        "model.depth": list(DEPTHS),
        "model.residual": [SKIP, PLAIN],
        "optimizer.learning_rate": list(RATES),
        "run.seed": list(SEEDS),
    }
    model = {
        "vocab_size": 17,
        "context": 64,
        "width": 16,
        "heads": 1,
        "hidden": 32,
        "token_mixer": MIXERS[mixer],
        "initialization": "plain",
    }
    return build_plan(
        {
            "sweep": {"name": f"{NAME}_{mixer}", "workers": workers, "lanes": 20, "chunk": 30, "extend": 1},
            "axes": axes,
            "run": {"task": "classifier", "steps": steps},
            "model": model,
            "execution": {"remat": "none"},
            "data": {"path": "digits", "batch": 8},
            "optimizer": {"schedule": "cosine(final=0.1)", "warmup": 0.1, "weight_decay": 0.0, "clip": 1.0},
        }
    )


def train(store: Path, *, workers: int) -> dict[str, Sweep] | int:
    """Run what has no result yet, one store a mixer; return the sweeps, or the code of an interrupted one."""
    prepared = {mixer: prepare_sweep(plan_of(mixer, workers=workers)) for mixer in MIXERS}
    for mixer, one in prepared.items():
        code = run_sweep(one, store / mixer)
        if code:
            return code
    return {mixer: read_sweep(store / mixer) for mixer in prepared}


def best_of(results: Sequence[Result]) -> Best | Refusal:
    """Return an arm's best rate, by the mean training loss over all its seeds; rates where a run failed do not count.

    Args:
      results: the arm's runs.
    """
    seeds, rates = sorted({run.seed for run in results}), sorted({run.learning_rate for run in results})
    losses = {(run.learning_rate, run.seed): run.last_loss for run in results}
    table_NR = np.array([[_number(losses.get((rate, seed))) for seed in seeds] for rate in rates])
    mean_N = table_NR.mean(axis=1)
    if not np.isfinite(mean_N).any():
        return Refusal(rule="all_failed", sentence="no learning rate has a finite loss for every seed")
    best = int(np.nanargmin(mean_N))
    return Best(rates[best], best in (0, len(rates) - 1), table_NR[best])


def measure(sweeps: Mapping[str, Sweep]) -> dict[Arm, Best | Refusal]:
    """Return every arm at its best rate."""
    arms = (Arm(mixer, residual, depth) for mixer in sweeps for residual in (SKIP, PLAIN) for depth in DEPTHS)
    return {
        arm: best_of(
            [
                run
                for run in sweeps[arm.mixer].results
                if (run.residual, run.depth) == (arm.residual, arm.depth)
            ]
        )
        for arm in arms
    }


def pairs(mixers: Sequence[str]) -> list[tuple[Arm, Arm]]:
    """Return what is compared: no skip less skip at every depth, and the deepest less the shallowest of each."""
    across = [(Arm(mixer, PLAIN, depth), Arm(mixer, SKIP, depth)) for mixer in mixers for depth in DEPTHS]
    along = [
        (Arm(mixer, residual, DEPTHS[-1]), Arm(mixer, residual, DEPTHS[0]))
        for mixer in mixers
        for residual in (PLAIN, SKIP)
    ]
    return across + along


def compare(arms: Mapping[Arm, Best | Refusal]) -> list[Comparison]:
    """Return all comparisons, adjusted together."""
    asked = pairs(list(dict.fromkeys(arm.mixer for arm in arms)))
    found = [_paired(arms[first], arms[second], comparisons=len(asked)) for first, second in asked]
    adjusted = iter(holm([one.p for one in found if isinstance(one, Paired)]))
    return [
        Comparison(first, second, one, None)
        if isinstance(one, Refusal)
        else Comparison(first, second, one.difference, next(adjusted))
        for (first, second), one in zip(asked, found, strict=True)
    ]


def _paired(first: Best | Refusal, second: Best | Refusal, *, comparisons: int) -> Paired | Refusal:
    for side in (first, second):
        if isinstance(side, Refusal):
            return side
    assert isinstance(first, Best)
    assert isinstance(second, Best)
    return paired_difference(first.losses_R, second.losses_R, comparisons=comparisons)


def conclusions(comparisons: Sequence[Comparison]) -> list[str]:
    """Return the answers in sentences, two a mixer: from which depth no skip is worse, and what depth does to each."""
    lines = []
    for mixer in dict.fromkeys(one.first.mixer for one in comparisons):
        own = [one for one in comparisons if one.first.mixer == mixer]
        across = [one for one in own if one.first.depth == one.second.depth]
        from_depth = None
        for one in reversed(across):
            if one.verdict != "worse":
                break
            from_depth = one.first.depth
        other = [f"{one.first.depth}: {one.verdict}" for one in across if one.verdict != "worse"]
        lines.append(
            f"{mixer}: without a skip the training loss is "
            + (
                "not shown to be worse at the end"
                if from_depth is None
                else f"worse from {from_depth} blocks on"
            )
            + (f" ({'; '.join(other)})" if other else ", at every depth")
        )
        along = [one for one in own if one.first.depth != one.second.depth]
        ends = f"{DEPTHS[-1]} blocks against {DEPTHS[0]}"
        said = [f"{one.first.residual} {one.verdict} ({interval(one.difference)})" for one in along]
        lines.append(f"{mixer}: {ends}: {'; '.join(said)}")
    return lines


def interval(found: Estimate | Refusal) -> str:
    """Write a difference and its interval."""
    if isinstance(found, Refusal):
        return "refused"
    return f"{found.value:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"


def write_runs(path: Path, sweeps: Mapping[str, Sweep]) -> None:
    """Write one row per run."""
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(
            ("mixer", "residual", "depth", "learning_rate", "seed", "outcome", "train_loss", "val_loss")
        )
        for mixer, sweep in sweeps.items():
            for run in sorted(
                sweep.results, key=lambda run: (run.residual, run.depth, run.learning_rate, run.seed)
            ):
                head = (mixer, run.residual, run.depth, run.learning_rate, run.seed, run.outcome)
                losses = ("" if x is None else f"{x:.6f}" for x in (run.last_loss, run.val_loss))
                table.writerow((*head, *losses))


PAGE = """# Degradation: training loss with and without skips, two mixers other than attention

Made by `python -m experiments.degradation`: {steps} steps of 8 digits, mean training loss of the last tenth in nats (a
uniform guess has {uniform:.3f}), each arm at its own best learning rate, seeds {seeds}. Brackets are 95 % t intervals
over paired seeds, Bonferroni for {count} comparisons; p is Holm's.

{answers}

{arms}

"edge": no higher, or no lower, rate was measured.

{rows}

What this does not say: {steps} steps are the beginning of training, and a net that has only begun may yet be the better
one; on these images 2 blocks are enough.

{seconds:.0f} s of compiling and training by one worker, on a machine that others may have used too: {environment}.
"""


def page(
    sweeps: Mapping[str, Sweep], arms: Mapping[Arm, Best | Refusal], comparisons: Sequence[Comparison]
) -> str:
    """Return the markdown page."""
    first = next(iter(sweeps.values()))
    return PAGE.format(
        steps=first.results[0].planned_steps,
        uniform=UNIFORM,
        seeds=", ".join(map(str, SEEDS)),
        count=len(comparisons),
        answers="\n".join(f"- {line}" for line in conclusions(comparisons)),
        arms="\n".join(_arm_rows(arms)),
        rows="\n".join(_comparison_rows(comparisons)),
        seconds=sum(map(seconds_of, sweeps.values())),
        environment=", ".join(f"{name} {value}" for name, value in first.environment.items()),
    )


def seconds_of(sweep: Sweep) -> float:
    """Return what a sweep's programs took: compiling and steps."""
    programs = {
        (run.depth, run.residual, run.lanes, run.compile_s or 0.0, run.step_s or 0.0, run.planned_steps)
        for run in sweep.results
    }
    return sum(compile_s + step_s * steps for *_, compile_s, step_s, steps in programs)


def _arm_rows(arms: Mapping[Arm, Best | Refusal]) -> list[str]:
    rows = [("mixer", "residual", *(f"{depth} blocks" for depth in DEPTHS)), ("---",) * (2 + len(DEPTHS))]
    for mixer, residual in dict.fromkeys((arm.mixer, arm.residual) for arm in arms):
        rows.append((mixer, residual, *(_cell(arms[Arm(mixer, residual, depth)]) for depth in DEPTHS)))
    return [f"| {' | '.join(row)} |" for row in rows]


def _cell(best: Best | Refusal) -> str:
    if isinstance(best, Refusal):
        return best.sentence
    return f"{best.losses_R.mean():.3f} at {best.rate:g}{' (edge)' if best.at_edge else ''}"


def _comparison_rows(comparisons: Sequence[Comparison]) -> list[str]:
    rows = [("comparison", "difference, nats", "p (Holm)", "verdict"), ("---",) * 4]
    for one in comparisons:
        first, second = (f"{arm.residual}, {arm.depth} blocks" for arm in (one.first, one.second))
        p = "" if one.p is None else f"{one.p:.2g}"
        rows.append((f"{one.first.mixer}: {first} less {second}", interval(one.difference), p, one.verdict))
    return [f"| {' | '.join(row)} |" for row in rows]


def draw(path: Path, arms: Mapping[Arm, Best | Refusal]) -> None:
    """Draw the training loss against depth, a panel for each mixer: the line is the mean, points are seeds."""
    mixers = list(dict.fromkeys(arm.mixer for arm in arms))
    figure = Figure(figsize=(4.8 * len(mixers), 3.8), layout="constrained")
    (panels,) = figure.subplots(1, len(mixers), sharey=True, squeeze=False)
    for panel, mixer in zip(panels, mixers, strict=True):
        for residual, color, words in (
            (SKIP, "#1f77b4", "x + f(norm(x))"),
            (PLAIN, "#d62728", "f(norm(x)), no skip"),
        ):
            found = {depth: arms[Arm(mixer, residual, depth)] for depth in DEPTHS}
            shown = {depth: best.losses_R for depth, best in found.items() if isinstance(best, Best)}
            panel.plot(
                list(shown), [losses_R.mean() for losses_R in shown.values()], color=color, label=words
            )
            for depth, losses_R in shown.items():
                panel.plot([depth] * len(losses_R), losses_R, "o", color=color, ms=4, alpha=0.6)
        panel.axhline(UNIFORM, color="#888888", lw=1, ls=":")
        panel.set_xscale("log", base=2)
        panel.set_xticks(DEPTHS, [str(depth) for depth in DEPTHS])
        panel.set(xlabel="L, blocks", title=MIXERS[mixer])
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("training loss, nats, each at its best rate")
    panels[0].legend(frameon=False, fontsize=8, title="dotted: a uniform guess", title_fontsize=8)
    figure.savefig(path, dpi=120)


def _number(x: float | None) -> float:
    return math.nan if x is None else x


def main() -> int:
    """Train what is missing, write table, page and figure; return the code of a sweep that was interrupted, else 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", type=Path, default=Path("sweeps") / NAME)
    parser.add_argument("--workers", type=int, default=1)
    arguments = parser.parse_args()
    sweeps = train(arguments.store, workers=arguments.workers)
    if isinstance(sweeps, int):
        print(f"interrupted; the same command goes on from {arguments.store}", file=sys.stderr)
        return sweeps
    arms = measure(sweeps)
    comparisons = compare(arms)
    text = page(sweeps, arms, comparisons)
    write_runs(HERE / "results" / f"{NAME}.csv", sweeps)
    (HERE / "results" / f"{NAME}.md").write_text(text, encoding="utf-8")
    draw(HERE / "figures" / f"{NAME}.png", arms)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

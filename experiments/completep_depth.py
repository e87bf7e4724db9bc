"""Coordinate check in depth for three depth exponents: does the stream keep its size, before and after training?

    python -m experiments.completep_depth [--seeds 3] [--learning_rates 1e-3,4e-3]

After CompleteP, figure 7 (arXiv 2505.01618; EleutherAI/nanoGPT-mup, branch completep, coord_check_shakespeare_char):
mean |x_S| of the final stream against L = 2, 4, ..., 64 blocks, base depth 2, a constant learning rate from the first
update on, AdamW(0.9, 0.95) with decay 0.1 and clip 1. Published: width 256, rate 1e-3, entries drawn with standard
deviation 0.02, a new batch each step. Here: width 64, one fixed batch of 4 x 64 bytes of the standard library's source,
and initialization "plain" (1 / sqrt(fan_in)): our default "zero_output" starts branches at 0, so that at t = 0 no
stream depends on L and nothing is to be seen. The rates are the published one, and 4e-3, which muP's rule (rate ~ 1 /
width, arXiv 2203.03466) makes of it for a quarter of the width.

The published runs record the forward pass before each update, so their "step 1" is t = 0 here and "step 10" is t = 9.
Their alpha = 0 is the standard parametrization: it has no depth factor on the learning rate either, which
complete_p(alpha=0) would have.

Expected, slope d log mean |x_S| / d log L (published: read off the figure):

    alpha 0     t = 0         0.35 to 0.65     a sum of 2 L independent branches, sqrt(L); published about 0.54
                t = 9         above the slope at t = 0 by 0.3 or more; published about 1.25
    alpha 1/2   t = 0 to 9    within +-0.1; published: flat
    alpha 1     t = 0         -0.55 to -0.30   each branch is 1 / L, their sum 1 / sqrt(L) over the embedding; published
                                               about -0.42
                t = 9         within +-0.1: updates add up in one direction, L of size 1 / L; published about 0

Found, 3 seeds: at 1e-3, too small a rate for this width and these initial values, alpha = 0 rises from +0.60 by 0.20
only and alpha = 1 stays at -0.37, both outside; alpha = 1/2 stays at +0.04 to +0.09. At 4e-3 alpha = 0 goes from +0.60
to +1.33 and alpha = 1 from -0.43 to +0.10, as published; alpha = 1/2 drifts from +0.07 to +0.17. Most intervals of 3
seeds reach across a bound of their band: not resolved, exit code 1. At 1.25e-2 (an earlier run, 8 rows) alpha = 1 went
on to +0.36: where the slope of ten steps crosses 0 depends on the rate; the order of the arms does not.

An expectation holds where the whole 95 % t interval over seeds lies in its band, is OUTSIDE where all of it lies
outside, else not resolved; the exit code is 1 unless all hold. Writes experiments/results/completep_depth.csv and
experiments/figures/completep_depth.png. Wall time: about 8 minutes on two cores.
"""

import argparse
import csv
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxblock.config import ModelConfig
from jaxblock.sweeps.coordinate import coordinate_check
from jaxblock.sweeps.coordinate_slopes import CoordinateCheck, number
from jaxblock.sweeps.statistics.estimate import Estimate, Refusal
from jaxblock.sweeps.statistics.fits import power_law
from jaxblock.training.config import DataConfig, OptimizerConfig, TrainConfig

HERE = Path(__file__).parent
DEPTHS, LAST, STEPS = (2, 4, 8, 16, 32, 64), 9, 10
ARMS = {
    "0": "standard",
    "1/2": "complete_p(base_depth=2, base_width=64, alpha=0.5)",
    "1": "complete_p(base_depth=2, base_width=64, alpha=1.0)",
}
Results = dict[float, dict[str, CoordinateCheck]]
"""Learning rate -> arm -> what was measured."""
BAND, START, SHRINKING, RISE = (-0.1, 0.1), (0.35, 0.65), (-0.55, -0.3), (0.3, math.inf)


def config_of(parametrization: str, learning_rate: float) -> TrainConfig:
    """Return what is trained: GPT-2's block at width 64."""
    model = ModelConfig(
        vocab_size=256,
        context=64,
        depth=2,
        width=64,
        heads=4,
        initialization="plain",
        parametrization=parametrization,
    )
    optimizer = OptimizerConfig(learning_rate=learning_rate, weight_decay=0.1)
    return TrainConfig(model=model, data=DataConfig(batch=4), optimizer=optimizer)


def rise(check: CoordinateCheck) -> Estimate | Refusal:
    """Return the slope at t = 9 less the slope at t = 0, paired by seed."""
    values_NRT = check.mean_abs["final_stream"]
    ratio_NR = values_NRT[..., LAST] / values_NRT[..., 0]  # its slope is the difference of the two
    if not np.isfinite(ratio_NR).all():
        return Refusal(rule="no_values", sentence="a run was not finite")
    found = power_law(np.array(check.sizes, np.float64), ratio_NR)
    return found if isinstance(found, Refusal) else found.exponent


def report(checks: Mapping[str, CoordinateCheck]) -> tuple[list[str], bool]:
    """Return a line for every expectation and whether all hold."""

    def at(arm: str, t: int) -> Estimate | Refusal:
        return checks[arm].slope("final_stream", t, measure="mean_abs").found

    rows = [
        ("alpha 0, t = 0", at("0", 0), START),
        ("alpha 0, t = 9 less t = 0", rise(checks["0"]), RISE),
        *((f"alpha 1/2, t = {t}", at("1/2", t), BAND) for t in range(LAST + 1)),
        ("alpha 1, t = 0", at("1", 0), SHRINKING),
        ("alpha 1, t = 9", at("1", LAST), BAND),
    ]
    lines, good = [], True
    for name, found, (low, high) in rows:
        verdict = placed(found, low, high)
        expected = f"at least {low}" if high == math.inf else f"{low} to {high}"
        lines.append(f"{name:26} {number(found)}; expected {expected}: {verdict}")
        good = good and verdict == "inside"
    lines += [f"alpha {arm}: {lost}" for arm, check in checks.items() for lost in check.non_finite]
    return lines, good


def placed(found: Estimate | Refusal, low: float, high: float) -> str:
    """Return where an interval lies: inside the band, OUTSIDE, or across a bound of it."""
    if isinstance(found, Refusal):
        return "not resolved"
    if found.low >= low and found.high <= high:
        return "inside"
    return "OUTSIDE" if found.low > high or found.high < low else "not resolved"


def write_table(path: Path, results: Results) -> None:
    """Write one row per learning rate, arm, depth, seed, t and quantity."""
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("learning_rate", "alpha", "depth", "seed", "t", "quantity", "mean_abs", "rms"))
        for rate, checks in results.items():
            for arm, check in checks.items():
                for name, values_NRT in check.mean_abs.items():
                    for n, r, t in np.ndindex(values_NRT.shape):
                        pair = (f"{x[name][n, r, t]:.6g}" for x in (check.mean_abs, check.rms))
                        table.writerow((rate, arm, check.sizes[n], check.seeds[r], t, name, *pair))


def draw(path: Path, results: Results) -> None:
    """Draw mean |x_S| against depth, a line for each t: mean over seeds, smallest to largest seed as a band."""
    figure = Figure(figsize=(11, 0.5 + 3.6 * len(results)), layout="constrained")
    panels_RA = figure.subplots(len(results), len(ARMS), sharey=True, squeeze=False)
    for panels, (rate, checks) in zip(panels_RA, results.items(), strict=True):
        for panel, (arm, check) in zip(panels, checks.items(), strict=True):
            _panel(panel, check)
            ends = [number(check.slope("final_stream", t, measure="mean_abs").found) for t in (0, LAST)]
            title = (
                f"alpha = {arm}, learning rate {rate:g}\nslope {ends[0]} at t = 0\n{ends[1]} at t = {LAST}"
            )
            panel.set_title(title, fontsize=9)
        panels[0].set_ylabel("mean |x_S|, final stream")
    for panel in panels_RA[-1]:
        panel.set_xlabel("L, blocks")
    panels_RA[0, 0].legend(title="updates t", frameon=False, fontsize=7, ncols=2)
    figure.savefig(path, dpi=120)


def _panel(panel: Axes, check: CoordinateCheck) -> None:
    """Draw one check: a line for each t."""
    values_NRT = check.mean_abs["final_stream"]
    for t in range(LAST + 1):
        color, y_NR = colormaps["viridis"](t / LAST), values_NRT[..., t]
        panel.plot(check.sizes, y_NR.mean(1), color=color, marker=".", label=f"{t}")
        panel.fill_between(check.sizes, y_NR.min(1), y_NR.max(1), color=color, alpha=0.25, lw=0)
    panel.set_yscale("log")
    panel.set_xscale("log", base=2)
    panel.spines[["top", "right"]].set_visible(False)


def main() -> int:
    """Measure, write, draw, and return 1 where an expectation does not hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--learning_rates", default="1e-3,4e-3")
    arguments = parser.parse_args()
    begun, seeds = time.perf_counter(), range(arguments.seeds)
    results: Results = {}
    for rate in map(float, arguments.learning_rates.split(",")):
        results[rate] = {}
        for arm, parametrization in ARMS.items():
            config = config_of(parametrization, rate)
            results[rate][arm] = coordinate_check(
                config, axis="depth", sizes=DEPTHS, seeds=seeds, steps=STEPS
            )
            print(f"rate {rate:g}, alpha {arm}: {time.perf_counter() - begun:.0f} s", file=sys.stderr)
    write_table(HERE / "results" / "completep_depth.csv", results)
    draw(HERE / "figures" / "completep_depth.png", results)
    good = True
    for rate, checks in results.items():
        lines, holds = report(checks)
        print("\n".join([f"learning rate {rate:g}", *lines]))
        good = good and holds
    print(f"{'as expected' if good else 'NOT as expected'}; {time.perf_counter() - begun:.0f} s")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

"""How a stack starts: growth of the stream along the sublayers, and of the gradient along and with depth. No training.

    python -m experiments.residual_growth [--seeds 12] [--json]

x_l is the stream after sublayer l of S = 2 L, RMS its root mean square, sigma0 = RMS(x_0), s that of a branch. Where
branches add up uncorrelated and s is the same for all, RMS(x_l)^2 = sigma0^2 + s^2 sum of g^2 over sublayers to l:

    item 1              law for RMS(x_l)                 g                             slope in log l
    pre_norm            sqrt(sigma0^2 + l s^2)           1                             1/2 (arXiv 2002.04745)
    post_norm           1                                                              0
    gpt2                ends at sqrt(sigma0^2 + s^2)     1 / sqrt(S), initial values   no claim
    layer_norm_scaling  to sqrt(sigma0^2 + 2 s^2 H_L)    1 / sqrt(block), for a ReLU   no claim
    peri_norm           sqrt(sigma0^2 + l), s = 1        1                             1/2
    complete_p, residual_multiplier                      2 / L, base depth 2           0, "flat"
    attention_residual  sqrt(sigma0^2 + (l - 1) s^2) / l, what is read with w = 0      -1/2
    rezero              sigma0                           0                             0

Three numbers per arm: `slope`, l >= 4; `slope less the law's`, the law with measured sigma0 and s fitted alike: 0 where
s does not change along the way; `end over the law's`: 1 where branches are uncorrelated. `end against L` is 1/2, but 0
for post_norm and gpt2 and about -0.42 for complete_p (arXiv 2505.01618, figure 7).

    item 2  last feed-forward's gradient against L: pre_norm -1/2, post_norm 0 (arXiv 2002.04745, theorem 1)
    item 3  gradient against the block: post_norm rises toward the output (a factor 2 at least), pre_norm is near flat
            (within a factor 2); and, derived from the Jacobians I + J / sqrt(l), pre_norm falls as block^-1/2
    item 4  the first block's gradient against L: off (`none`, f(norm(x)); `bare`, f(x), has no norm either) it vanishes
            or explodes like c^24, by a decade at least; on (pre_norm) it stays within a decade

A prediction is a band, fixed beforehand, that leaves its alternative out. "as predicted": the whole 95 % t interval
over seeds lies in it; "not as predicted": all of it lies outside; else "not resolved". The exit code is 0 for all.

Found, 12 seeds: 36 of 45 as predicted. Ends are 0.93 to 1 of the law's: branches add up uncorrelated; attention's s
grows on the way (up to +0.07 in the slope; attention_residual -0.39, not resolved), presumably as tokens become alike.
Not as predicted: complete_p is not flat along l (+0.43: its branches are not small beside sigma0 = 0.125; against L it
falls as published); post_norm's gradient is level, pre_norm's falls by 1.9 doublings, as block^-0.54; that of `none`
stays (c = 1.00 a block, `bare` has 0.71): as long as norms stay, it does not take a skip.

Writes results/residual_growth.csv and .md and figures/residual_growth.png. Wall time: 5 minutes on two cores.
"""

import argparse
import csv
import functools
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxblock import Decoder, ModelConfig, __version__
from jaxblock.functional import cross_entropy
from jaxblock.residual import Topology
from jaxblock.sweeps.statistics.estimate import Estimate, Refusal
from jaxblock.sweeps.statistics.fits import power_law
from jaxblock.sweeps.statistics.means import mean_interval
from jaxblock.types import Array, Branch, Params

HERE, NAME = Path(__file__).parent, "residual_growth"
DEPTHS, DEPTH = (2, 6, 12, 24, 48), 24
WIDTH, LENGTH, BATCH = 128, 32, 4
SIZES = {"vocab_size": 256, "context": LENGTH, "width": WIDTH, "heads": 4, "feed_forward": "relu"}
LEAST_SEEDS, FIRST = 5, 4  # slopes along the sublayers from the 4th on: the embedding bends the first
AS, NOT, OPEN = "as predicted", "not as predicted", "not resolved"
Sizes = Mapping[str, np.ndarray]
Measured = Mapping[str, Mapping[int, Sizes]]
"""Arm -> L -> what was measured, [R, ...], R seeds: `stream_sizes` and `gradient_sizes`."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What a number is predicted to be: in a band [low, high], or with `outside` not in it; never the alternative."""

    low: float
    high: float
    alternative: float | None = None
    outside: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError for a claim that allows its alternative."""
        if self.alternative is not None and (self.low <= self.alternative <= self.high) != self.outside:
            raise ValueError(f"{self.words} allows the alternative {self.alternative:g}")

    @property
    def words(self) -> str:
        """The prediction as it is printed."""
        if self.outside:
            return f"below {self.low:g} or above {self.high:g}"
        if self.high == np.inf:
            return f"at least {self.low:g}"
        if self.low == -np.inf:
            return f"at most {self.high:g}"
        return f"{(self.low + self.high) / 2:.3g} ± {(self.high - self.low) / 2:.3g}"

    def verdict(self, found: Estimate | Refusal) -> str:
        """Return `AS`, `NOT` or `OPEN`, by where the whole interval lies."""
        if isinstance(found, Refusal):
            return OPEN
        inside = self.low <= found.low and found.high <= self.high
        beyond = found.high < self.low or found.low > self.high
        good, bad = (beyond, inside) if self.outside else (inside, beyond)
        return AS if good else NOT if bad else OPEN


def near(value: float, tolerance: float, alternative: float | None = None) -> Claim:
    """Return the claim that a number is `value`, give or take the tolerance."""
    return Claim(low=value - tolerance, high=value + tolerance, alternative=alternative)


COLUMNS = ("item", "arm", "quantity", "found", "low", "high", "seeds", "predicted", "alternative", "verdict")


def row(place: tuple[int, str, str], found: Estimate | Refusal, *, claim: Claim) -> dict[str, Any]:
    """Return what is printed of a number at (item, arm, quantity), by `COLUMNS`; a refused number is None."""
    numbers = (None,) * 4 if isinstance(found, Refusal) else (found.value, found.low, found.high, found.n)
    predicted = (claim.words, claim.alternative, claim.verdict(found))
    return dict(zip(COLUMNS, (*place, *numbers, *predicted), strict=True))


class Bare(nn.Module):
    """f(x), the control without skip and without norm."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: Array, f: Branch) -> Array:
        """Return the branch of the stream."""
        return f(x)


class Arm(NamedTuple):
    """One way to connect branches: fields of the config, L -> g where the stream is such a sum, what is claimed of
    RMS(x_l) along the sublayers and of the last stream against L, a topology that has no name, and the arm whose
    initial values it shares."""

    changes: Mapping[str, str]
    factors: Callable[[int], Any] | None = None
    slope: Claim | None = None
    end: Claim | None = None
    topology: Topology | None = None
    drawn: str = ""

    def model(self, depth: int) -> Decoder:
        """Return the model of L blocks."""
        return Decoder(ModelConfig(**{**SIZES, "depth": depth, **self.changes}), topology=self.topology)


MULTIPLIED = lambda depth: 2 / depth  # noqa: E731
HARMONIC = lambda depth: np.repeat(np.arange(1.0, depth + 1), 2) ** -0.5  # noqa: E731
HALF, FLAT = near(0.5, 0.1, alternative=0.0), near(0.0, 0.1, alternative=0.5)
FALLING, PUBLISHED = near(-0.5, 0.1, alternative=0.0), near(-0.425, 0.125, alternative=0.0)
MULTIPLIER = {"residual": "residual_multiplier(base_depth=2)"}
COMPLETE_P = {"parametrization": f"complete_p(base_depth=2, base_width={WIDTH})"}
BARE = Topology(Bare, "f(x)", "control, neither skip nor norm", final_norm=False)
ARMS: Mapping[str, Arm] = {
    "pre_norm": Arm({"residual": "pre_norm"}, lambda depth: 1.0, HALF, HALF),
    "complete_p": Arm(COMPLETE_P, MULTIPLIED, FLAT, PUBLISHED, drawn="pre_norm"),
    "residual_multiplier": Arm(MULTIPLIER, MULTIPLIED, FLAT, drawn="pre_norm"),
    "layer_norm_scaling": Arm({"residual": "layer_norm_scaling"}, HARMONIC, drawn="pre_norm"),
    "none": Arm({"residual": "none"}, drawn="pre_norm"),
    "post_norm": Arm({"residual": "post_norm"}, None, FLAT, FLAT),
    "gpt2": Arm({"initialization": "gpt2"}, lambda depth: (2 * depth) ** -0.5, None, FLAT),
    "peri_norm": Arm({"residual": "peri_norm"}, lambda depth: 1.0, HALF),
    "attention_residual": Arm({"residual": "attention_residual"}, None, FALLING),
    "rezero": Arm({"residual": "rezero"}, lambda depth: 0.0, FLAT),
    "bare": Arm({}, topology=BARE),
}
STREAMS = [arm for arm in ARMS if arm not in ("none", "bare")]
GRADIENTS = ("pre_norm", "post_norm", "none", "bare")  # taken at every depth
LAST = {"pre_norm": near(-0.5, 0.15, alternative=0.0), "post_norm": near(0.0, 0.15, alternative=-0.5)}
RISES, LEVEL = Claim(low=1.0, high=np.inf, alternative=0.0), Claim(low=-1.0, high=1.0)
COMPOUNDS = Claim(low=-1.0, high=1.0, alternative=0.0, outside=True)


def rms(x: Array, *, leading: int) -> Array:
    """Return the root mean square over all axes but the first `leading`."""
    return jnp.sqrt(jnp.mean(jnp.square(x), axis=tuple(range(leading, x.ndim))))


def stream_sizes(embedded_BTD: Array, intermediates: Mapping[str, Any]) -> dict[str, Array]:
    """Return "stream", RMS(x_l) from l = 0, [S + 1], and "added", RMS(x_l - x_(l-1)), [S].

    Of a history: what is read with equal weights, from sublayer 1 to the read that closes the stack, what sublayers
    wrote, and "closed", the size of that last read as the model made it.
    """
    blocks = intermediates["blocks"]
    both = ("resid_mid", "resid_post") if "resid_mid" in blocks else ("attention_out", "feed_forward_out")
    after_SBTD = jnp.stack([blocks[name] for name in both], 1).reshape(-1, *embedded_BTD.shape)
    rows_NBTD = jnp.concatenate([embedded_BTD[None], after_SBTD])
    if "resid_mid" in blocks:
        return {"stream": rms(rows_NBTD, leading=1), "added": rms(jnp.diff(rows_NBTD, axis=0), leading=1)}
    read_N = rms(jnp.cumsum(rows_NBTD, axis=0), leading=1) / jnp.arange(1, len(rows_NBTD) + 1)
    closed = rms(intermediates["resid_final"], leading=0)
    return {"stream": read_N, "added": rms(after_SBTD, leading=1), "closed": closed}


def gradient_sizes(blocks: Params) -> dict[str, Array]:
    """Return norms of gradients, [L]: the feed-forward's second kernel, all of the feed-forward, all of the block."""

    def norm(tree: Params) -> Array:
        squares = [jnp.sum(jnp.square(x), axis=tuple(range(1, x.ndim))) for x in jax.tree.leaves(tree)]
        return jnp.sqrt(jnp.sum(jnp.stack(squares), axis=0))

    down, whole = blocks["feed_forward"]["down"]["kernel"], blocks["feed_forward"]
    return {"down": norm(down), "feed_forward": norm(whole), "block": norm(blocks)}


@functools.lru_cache(maxsize=2)
def initial(arm: str, depth: int, seeds: int) -> Params:
    """Return initial parameters, every leaf [R, ...]. A block's depend on its own key alone: the first of them, from a
    deep model, are a shallower one's (but for gpt2), and compiling this takes as long as all the rest."""
    init = lambda seed: ARMS[arm].model(depth).init(jax.random.key(seed), jnp.zeros((1, 1), int))  # noqa: E731
    return jax.jit(lambda seeds_R: jax.lax.map(init, seeds_R))(jnp.arange(seeds))["params"]


def measure(arm: str, depth: int, seeds: int) -> Sizes:
    """Return the sizes of an arm at its initial values; each seed has parameters, tokens and targets of its own."""
    model = ARMS[arm].model(depth)

    def loss(params: Params, tokens_BT: Array, targets_BT: Array) -> tuple[Array, dict[str, Array]]:
        logits_BTV, kept = model.apply({"params": params}, tokens_BT, mutable=["intermediates"])
        embedded_BTD = params["embedding"]["table"][tokens_BT] + params["positions"]["table"][None]
        return cross_entropy(logits_BTV, targets_BT).loss, stream_sizes(embedded_BTD, kept["intermediates"])

    def of_seed(given: tuple[Array, Params]) -> dict[str, Array]:
        key, params = jax.random.key(1000 + given[0]), dict(given[1])
        params["blocks"] = jax.tree.map(lambda x: x[:depth], params["blocks"])
        batch = jax.random.randint(key, (2, BATCH, LENGTH), 0, model.config.vocab_size)
        if arm not in GRADIENTS:
            return loss(params, *batch)[1]
        gradient, sizes = jax.grad(loss, has_aux=True)(params, *batch)
        return {**sizes, **gradient_sizes(gradient["blocks"])}

    params_R = initial(ARMS[arm].drawn or arm, depth if arm == "gpt2" else DEPTHS[-1], seeds)
    of_all = jax.jit(lambda given_R: jax.lax.map(of_seed, given_R))  # vmap takes twice as long to compile
    return {name: np.asarray(x, np.float64) for name, x in of_all((jnp.arange(seeds), params_R)).items()}


def law(arm: str, depth: int, sizes: Sizes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return RMS(x_l) from l = 1 on, [l, R], the same by the law with measured sigma0 and s, and s, [R]."""
    start_R, stream_NR, added_SR = sizes["stream"][:, 0], sizes["stream"].T, sizes["added"].T
    root_mean = lambda x_SR: np.sqrt(np.mean(np.square(x_SR), axis=0))  # noqa: E731
    factors = ARMS[arm].factors
    if "closed" in sizes:
        if not np.allclose(sizes["closed"], stream_NR[-1], rtol=1e-4):
            raise RuntimeError(f"{arm}: the stack closes with another read than the mean of its history")
        s_R, l_N = root_mean(added_SR), np.arange(1.0, len(stream_NR) + 1)[:, None]
        return stream_NR, np.sqrt(start_R**2 + (l_N - 1) * s_R**2) / l_N, s_R
    if factors is None:
        return stream_NR[1:], np.ones_like(added_SR), root_mean(added_SR)
    g_S = np.broadcast_to(factors(depth), len(added_SR))
    s_R = root_mean(added_SR / g_S[:, None]) if g_S.any() else np.zeros_like(start_R)
    return stream_NR[1:], np.sqrt(start_R**2 + np.outer(np.cumsum(g_S**2), s_R**2)), s_R


def exponent(x: Sequence[float] | np.ndarray, y_NR: np.ndarray) -> Estimate | Refusal:
    """Return d log y / d log x, a slope per seed, mean and t interval; for x = 10^z that is the decades of y per z."""
    found = power_law(np.asarray(x, np.float64), y_NR)
    return found if isinstance(found, Refusal) else found.exponent


def over_depths(measured: Measured, arm: str, name: str, place: int) -> np.ndarray:
    """Return a quantity at one place of the stack, [L, R], for every L in `DEPTHS`."""
    return np.stack([measured[arm][depth][name][:, place] for depth in DEPTHS])


def stream_rows(measured: Measured) -> list[dict[str, Any]]:
    """Return item 1: along the sublayers at L = 24, then the last stream against L."""
    rows = []
    for name in STREAMS:
        slope, end = ARMS[name].slope, ARMS[name].end
        stream_NR, law_NR, _ = law(name, DEPTH, measured[name][DEPTH])
        ratio_NR = stream_NR / law_NR  # its slope is the difference of the two
        l_N, kept = np.arange(FIRST, len(stream_NR) + 1), slice(FIRST - 1, None)
        found, less = exponent(l_N, stream_NR[kept]), exponent(l_N, ratio_NR[kept])
        if slope is not None:
            rows.append(row((1, name, "slope"), found, claim=slope))
        rows.append(row((1, name, "slope less the law's"), less, claim=near(0.0, 0.1)))
        rows.append(row((1, name, "end over the law's"), mean_interval(ratio_NR[-1]), claim=near(1.0, 0.1)))
        if end is not None:
            found = exponent(DEPTHS, over_depths(measured, name, "stream", -1))
            rows.append(row((1, name, "end against L"), found, claim=end))
    return rows


def gradient_rows(measured: Measured) -> list[dict[str, Any]]:
    """Return items 2 to 4."""
    rows, l_L = [], np.arange(1, DEPTH + 1)
    for arm, claim in LAST.items():
        for name in ("down", "feed_forward"):
            found = exponent(DEPTHS, over_depths(measured, arm, name, -1))
            rows.append(row((2, arm, f"last {name} against L"), found, claim=claim))
    for arm, claim in (("post_norm", RISES), ("pre_norm", LEVEL)):
        for name in ("down", "block"):
            y_LR = measured[arm][DEPTH][name].T
            doublings, slope = exponent(2.0 ** (l_L / (DEPTH - 1)), y_LR), exponent(l_L, y_LR)
            rows.append(row((3, arm, f"{name}, doublings from first to last"), doublings, claim=claim))
            if arm == "pre_norm":
                rows.append(row((3, arm, f"{name}, slope in log block"), slope, claim=LAST[arm]))
    for arm, claim in (("none", COMPOUNDS), ("bare", COMPOUNDS), ("pre_norm", LEVEL)):
        found = mean_interval(np.log10(measured[arm][DEPTH]["block"][:, 0]))
        rows.append(row((4, arm, f"first block, log10 at L = {DEPTH}"), found, claim=claim))
        found = exponent(10.0 ** (np.array(DEPTHS) / DEPTH), over_depths(measured, arm, "block", 0))
        rows.append(row((4, arm, f"first block, decades in {DEPTH} blocks"), found, claim=claim))
    return rows


def write(folder: Path, rows: Sequence[dict[str, Any]], measured: Measured, *, run: str) -> str:
    """Write the table and the page, a line per item, arm and quantity; return the page."""
    shown = lambda x: "" if x is None else f"{x:+.3f}" if isinstance(x, float) else str(x)  # noqa: E731
    cells = [[shown(x) for x in record.values()] for record in rows]
    with (folder / f"{NAME}.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *cells])
    versions = f"jaxblock {__version__}, jax {jax.__version__}, flax {flax.__version__}"
    counts = ", ".join(f"{sum(x['verdict'] == word for x in rows)} {word}" for word in (AS, NOT, OPEN))
    middle = [(arm, measured[arm][DEPTH]) for arm in STREAMS]
    sizes = [f"{arm} {x['stream'][:, 0].mean():.3f}, {law(arm, DEPTH, x)[2].mean():.3f}" for arm, x in middle]
    lines = [
        "# How a stack starts",
        f"{run} on {jax.default_backend()}; {versions}, numpy {np.__version__}, Python {sys.version.split()[0]}.",
        f"Width {WIDTH}, 4 heads, ReLU, {BATCH} x {LENGTH} random tokens, L = {DEPTH} blocks, or "
        f"{', '.join(map(str, DEPTHS))} where a number is against L. Mean and 95 % t interval over seeds. Predictions "
        f"and sources: `python -m pydoc experiments.{NAME}`. Figure: `experiments/figures/{NAME}.png`.",
        f"{len(rows)} predictions: {counts}.",
        "\n".join(f"| {' | '.join(line)} |" for line in [COLUMNS, ["---"] * len(COLUMNS), *cells]),
        f"Measured sigma0 and s: {'; '.join(sizes)}.",
    ]
    text = "\n\n".join(lines) + "\n"
    (folder / f"{NAME}.md").write_text(text, encoding="utf-8")
    return text


def band(panel: Axes, x_N: Sequence[int] | np.ndarray, y_NR: np.ndarray, arm: str, label: str = "") -> None:
    """Draw the geometric mean over seeds, and smallest to largest seed as a band."""
    color = "black" if arm == "bare" else f"C{list(ARMS).index(arm)}"
    panel.plot(x_N, np.exp(np.log(y_NR).mean(1)), color=color, marker=".", ms=4, lw=1.2, label=label or arm)
    panel.fill_between(x_N, y_NR.min(1), y_NR.max(1), color=color, alpha=0.2, lw=0)


def draw(path: Path, measured: Measured) -> None:
    """Draw an item per panel."""
    figure = Figure(figsize=(12, 9), layout="constrained")
    one, two, three, four = figure.subplots(2, 2).flat
    for arm in STREAMS:
        stream_NR, law_NR, _ = law(arm, DEPTH, measured[arm][DEPTH])
        band(one, np.arange(1, len(stream_NR) + 1), stream_NR, arm)
        one.plot(np.arange(1, len(stream_NR) + 1), law_NR.mean(1), "k--", lw=0.7)
    one.set(title=f"1  RMS(x_l), L = {DEPTH}; dashed: the law", xlabel="l, sublayers", xscale="log")
    one.set_ylim(0.02, 60)
    for arm, slope in (("pre_norm", -0.5), ("post_norm", 0.0)):
        last_LR = over_depths(measured, arm, "down", -1)
        band(two, DEPTHS, last_LR, arm)
        two.plot(DEPTHS, last_LR[0].mean() * (np.array(DEPTHS) / DEPTHS[0]) ** slope, "k--", lw=0.7)
        band(three, np.arange(1, DEPTH + 1), measured[arm][DEPTH]["down"].T, arm)
    two.set(title="2  gradient of the last down kernel; dashed: predicted", xlabel="L, blocks", xscale="log")
    three.set(title=f"3  gradient of each down kernel, L = {DEPTH}", xlabel="block, from the input")
    for arm, words in (("pre_norm", "x + f(norm(x))"), ("none", "f(norm(x))"), ("bare", "f(x)")):
        band(four, DEPTHS, over_depths(measured, arm, "block", 0), arm, f"{arm}, {words}")
    four.set(title="4  gradient of the first block, skip on and off", xlabel="L, blocks")
    two.set_xticks(DEPTHS, map(str, DEPTHS))
    two.xaxis.minorticks_off()
    for panel in (one, two, three, four):
        panel.set_yscale("log")
        panel.set_ylabel("root mean square" if panel is one else "gradient norm")
        panel.legend(frameon=False, fontsize=8, ncols=3 if panel is one else 1)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def main() -> int:
    """Measure, write, draw, print; a verdict of any kind is a result."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=12, help=f"at least {LEAST_SEEDS}")
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of the page")
    arguments = parser.parse_args()
    if arguments.seeds < LEAST_SEEDS:
        parser.error(f"--seeds is {arguments.seeds}; an interval over seeds needs at least {LEAST_SEEDS}")
    begun = time.perf_counter()
    measured: dict[str, dict[int, Sizes]] = {}
    for name, arm in ARMS.items():
        depths = DEPTHS if name in GRADIENTS or arm.end is not None else (DEPTH,)
        measured[name] = {depth: measure(name, depth, arguments.seeds) for depth in depths}
        print(f"{name}: {time.perf_counter() - begun:.0f} s", file=sys.stderr)
    rows = stream_rows(measured) + gradient_rows(measured)
    spent = f"{time.perf_counter() - begun:.0f} s ({time.process_time():.0f} s of processor time)"
    run = f"`python -m experiments.{NAME} --seeds {arguments.seeds}`: {spent}"
    text = write(HERE / "results", rows, measured, run=run)
    draw(HERE / "figures" / f"{NAME}.png", measured)
    print(json.dumps(rows) if arguments.json else text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

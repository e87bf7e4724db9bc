"""What depth does in one trained model: growth of the stream, what each block is worth, how long its paths are.

    python -m experiments.trained_depth [--run DIR] [--work DIR] [--json]

One pre-norm model in GPT-2's form (L = 16 blocks, S = 32 sublayers, D = 64, 4 heads, T = 64), 1500 steps of 16 windows
of the standard library's source, measured at its initial values and trained, on 256 held-out windows spread evenly over
the validation slice. `--run DIR` measures a finished run, goes on with an unfinished one, or trains in DIR; without it
the run lies in a temporary folder under `--work` and is deleted. How a stack starts, and against depth (R1, R4, the
start of R5), is `experiments.residual_growth`. Items are those of the research notes; predictions, fixed beforehand:

    R11  r_s = RMS(x_s). AICc of log r_s = a + g s less that of r_s^2 = r_0^2 + b s: +2 or more at the start, -2 or less
         trained; nor is any third law better. A block's factor e^(2 g) above 1 trained; GPT-2 XL has 1.045. Position 0
         sticks out of the trained stream: its RMS at least twice that of the rest after some sublayer, and the largest
         entry of a window (over its RMS) at least 1.5 times as large with it as without
    R12  the second half of the stack contributes less (Csordas et al., 2505.13898): the mean of |u_s| / |x_s| and of
         lesions (one sublayer's gate 0) below that of the first half, with the first block and without; of M[s, l] =
         |u_l(without s) - u_l| / |u_l| rows of the second half are below 0.1, and below half the first half's
    R13  without one block (2403.03853, 2403.17887): the first is worst, the last worse than any in between, and some
         block in between costs less than 2 standard errors
    R14  S branches make C(S, k) paths of k branches, S / 2 on average; of 2^54 paths 98 % have 19 to 35 (1605.06431).
         The gradient lives on far shorter ones: its mean length is below S / 4, at the start and trained, forward as
         backward, and less than half of it has a length among the central 98 % of paths
    R23  logit lens, each x_s through the final norm and the head: the cross entropy falls smoothly with depth: all
         rises together below a tenth of the fall, no sublayer with half of it. With the norm's scale frozen at x_S's
         (what TransformerLens did, issues 1076 and 1077) early entropies are inflated toward log V: over the first
         quarter by a fourth of what is missing or more

"as predicted": the whole 95 % interval lies in the band; "not as predicted": all of it outside; else "not resolved". It
is a bootstrap over windows (percentiles of 400), for path lengths and differences of losses a t over (paired) windows,
for M, which sums over windows itself, a t over 8 groups of them. ALL OF IT IS ONE MODEL: one seed, one learning rate;
no interval says anything about other models.

Found, 19 of 28 as predicted: the late half does less (R12), paths are short (R14: 5.0 branches at first, 3.7 trained,
of 32), freezing the scale inflates early entropies (R23). Not as predicted: the trained stream's growth is no
exponential (a power law is best at the start, power and additive tie after; a factor 1.086 per block); position 0
sticks out less after training (1.5 times the rest) than before (2.0); late rows of M are 0.17; the last block is not
among the worst, and no block is free (the least costs 0.019 nats, 9 standard errors). Half of the lens's fall is at the
first sublayer: not resolved. Paths were first taken of 4 windows at once, where `path_cotangents` then was wrong
(jaxlib 0.10 gets a large vmapped vjp wrong; it takes them one by one since); that parts add up is checked. Bands stayed
as they were.

Writes results/trained_depth.csv and .md and figures/trained_depth.png.
Wall time: 27 minutes of training and 9 of measuring while others used the two cores (3 of processor time).
"""

import argparse
import csv
import dataclasses
import functools
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import flax
import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats

from jaxblock import Decoder, __version__
from jaxblock.functional.dense import logits
from jaxblock.modules import scaling
from jaxblock.probes.gates import gate_branches, lesion_losses
from jaxblock.probes.growth import growth_laws
from jaxblock.probes.interventions import skip_effects
from jaxblock.probes.lens import apply_final_norm, head_kernel, logit_lens
from jaxblock.probes.paths import path_cotangents, path_spectrum, path_tangents
from jaxblock.probes.stack import Stack, exit_of, norm, run_stack, scan_steps, stack_of
from jaxblock.sweeps.statistics.estimate import Estimate, Refusal
from jaxblock.sweeps.statistics.means import mean_interval
from jaxblock.training.config import TrainConfig
from jaxblock.training.config_file import build_config, differences
from jaxblock.training.loop import train
from jaxblock.training.prepare import init_state, prepare, run_keys
from jaxblock.training.run_folder import RunFolder, config_fingerprint
from jaxblock.training.task import Task
from jaxblock.training.weights import load_weights
from jaxblock.types import Array, Params

HERE, NAME = Path(__file__).parent, "trained_depth"
DEPTH, WIDTH, LENGTH, STEPS = 16, 64, 64, 1500
WINDOWS, GROUPS, SKIP_ROWS, PATHS = 256, 8, 8, 32
DRAWS, PUBLISHED = 400, 1.045
AS, NOT, OPEN = "as predicted", "not as predicted", "not resolved"
COLUMNS = (
    "item",
    "state",
    "quantity",
    "found",
    "low",
    "high",
    "n",
    "over",
    "predicted",
    "alternative",
    "verdict",
)
STATES = ("start", "trained")
Arrays = dict[str, np.ndarray]
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What a number is predicted to be: from `low` to `high`; never the alternative."""

    low: float = -math.inf
    high: float = math.inf
    alternative: float | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for a claim that allows its alternative."""
        if self.alternative is not None and self.low < self.alternative < self.high:
            raise ValueError(f"{self.words} allows the alternative {self.alternative:g}")

    @property
    def words(self) -> str:
        """The prediction as it is printed."""
        if self.high == math.inf:
            return f"above {self.low:g}"
        return f"below {self.high:g}" if self.low == -math.inf else f"{self.low:g} to {self.high:g}"

    def verdict(self, found: Estimate | Refusal) -> str:
        """Return `AS`, `NOT` or `OPEN`, by where the whole interval lies; an alternative can be the band's edge."""
        if isinstance(found, Refusal):
            return OPEN
        if found.high < self.low or found.low > self.high or found.low == found.high == self.alternative:
            return NOT
        allowed = self.alternative is not None and not found.excludes(self.alternative)
        return AS if self.low <= found.low and found.high <= self.high and not allowed else OPEN


def above(value: float, alternative: float | None = None) -> Claim:
    """Return the claim that a number is larger."""
    return Claim(low=value, alternative=alternative)


def below(value: float, alternative: float | None = None) -> Claim:
    """Return the claim that a number is smaller."""
    return Claim(high=value, alternative=alternative)


def row(place: tuple[str, str, str], found: Estimate | Refusal, claim: Claim | None = None) -> Row:
    """Return what is printed of a number at (item, state, quantity), by `COLUMNS`; without a claim it is no verdict."""
    refused = isinstance(found, Refusal)
    numbers = (None,) * 4 if refused else (found.value, found.low, found.high, found.n)
    over = found.sentence if refused else found.interval
    said = ("", None, "") if claim is None else (claim.words, claim.alternative, claim.verdict(found))
    return dict(zip(COLUMNS, (*place, *numbers, over, *said), strict=True))


def exact(value: float) -> Estimate:
    """Return a number that has no interval: arithmetic, or a count."""
    return Estimate(value=value, low=value, high=value, n=1, interval="none")


def resampled(statistic: Callable[..., float], *arrays: np.ndarray, seed: int = 0) -> Estimate:
    """Return a statistic of means over windows, with a percentile bootstrap over them.

    Args:
      statistic: of the arrays' means over their first axis.
      arrays: [W, ...], the same windows in each.
      seed: of the resampling.
    """
    windows = len(arrays[0])
    counts_RW = np.random.default_rng(seed).multinomial(windows, np.full(windows, 1 / windows), size=DRAWS)
    values_R = [statistic(*(np.tensordot(w_W, a, 1) for a in arrays)) for w_W in counts_RW / windows]
    low, high = np.percentile(values_R, [2.5, 97.5])
    value = float(statistic(*(a.mean(0) for a in arrays)))
    return Estimate(value=value, low=float(low), high=float(high), n=windows, interval="windows, bootstrap")


def paired(values_W: np.ndarray, words: str = "windows, t") -> Estimate | Refusal:
    """Return the mean of one number per window, or group of them, with its t interval."""
    found = mean_interval(np.asarray(values_W, np.float64))
    if isinstance(found, Refusal):
        return found
    return Estimate(value=found.value, low=found.low, high=found.high, n=found.n, interval=words)


# The run.


def train_config(folder: Path, *, depth: int = DEPTH, width: int = WIDTH, steps: int = STEPS) -> TrainConfig:
    """Return the run as a config."""
    run = {"name": NAME, "steps": steps, "seed": 0, "evaluate_every": steps, "dir": str(folder)}
    sizes = {"vocab_size": 256, "context": LENGTH, "depth": depth, "width": width, "heads": 4}
    form = {"feed_forward": "gelu", "norm": "layer_norm", "bias": True, "positions": "learned"}
    learning = {"learning_rate": 2e-3, "schedule": "cosine(final=0.1)", "warmup": 0.1, "weight_decay": 0.1}
    return build_config(
        {
            "run": run,
            "model": {**sizes, **form, "residual": "pre_norm", "initialization": "plain"},
            "execution": {"remat": "none"},
            "data": {"batch": 16},
            "optimizer": {**learning, "clip": 1.0},
        }
    )


def trained_run(config: TrainConfig) -> int:
    """Train in the config's folder, or go on there; return the run's code, 0 where it is done.

    Raises:
      ValueError: the folder holds another run.
    """
    path = Path(str(config.run.dir))
    if not path.exists():
        folder = RunFolder.check_new(config)
        prepared = prepare(config)
        folder.create(config)
        return train(prepared, folder)[0]
    folder = RunFolder.open(path)
    own = folder.read_config()
    if config_fingerprint(own) != config_fingerprint(config):
        found = [line for line in differences(config, own) if not line.startswith("run.dir")]
        raise ValueError(
            f"{str(path)!r} is another run than this experiment's; here, and there: {'; '.join(found)}"
        )
    if folder.summary.exists() and json.loads(folder.summary.read_text(encoding="utf-8"))["status"] == "done":
        return 0
    return train(prepare(own, continues=folder.has_checkpoint()), folder)[0]


def states_of(config: TrainConfig, task: Task) -> dict[str, Params]:
    """Return the run's parameters at the start, by the run's own draw, and trained."""
    state = jax.jit(functools.partial(init_state, task, config))(run_keys(config.run.seed).init)
    trained = load_weights(Path(str(config.run.dir)), state.params, which="last")
    return {"start": state.params, "trained": trained.params}


class Windows(NamedTuple):
    """What is read, and what comes next, [W, T]."""

    tokens_WT: np.ndarray
    targets_WT: np.ndarray

    def groups(self, count: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Return so many groups of so many windows, spread over all of them, [G, rows, T]."""
        places = np.linspace(0, len(self.tokens_WT) - 1, count * rows).astype(int)
        shape = (count, rows, self.tokens_WT.shape[1])
        return self.tokens_WT[places].reshape(shape), self.targets_WT[places].reshape(shape)


def held_out(task: Task, count: int) -> Windows:
    """Return windows of the validation slice, evenly spaced, without padding."""
    batches = list(task.validation)
    whole = np.concatenate([batch.valid_BT.all(1) for batch in batches])
    tokens, targets = (np.concatenate([batch[i] for batch in batches])[whole] for i in (0, 1))
    places = np.linspace(0, len(tokens) - 1, count).astype(int)
    return Windows(tokens[places], targets[places])


# What is measured.


def stack_and_exit(model: Decoder, params: Params, tokens_BT: Array) -> tuple[Stack, Callable[[Any], Array]]:
    """Return the model's stack on these tokens and what it makes of the last stream."""
    stack = stack_of(model, params, tokens_BT)
    if stack is None:
        raise ValueError(f"{model.config.residual} has no stack of one stream")
    return stack, exit_of(model, params, tokens_BT)


def window_losses(logits_WTV: Array, targets_WT: Array) -> Array:
    """Return the cross entropy of each window, [W]."""
    log_p = jax.nn.log_softmax(logits_WTV.astype(jnp.float32))
    return -jnp.take_along_axis(log_p, targets_WT[..., None], axis=-1)[..., 0].mean(-1)


def stream_numbers(model: Decoder, params: Params, tokens_WT: Array) -> dict[str, Array]:
    """Return mean_D x_s^2 and max_D |x_s|, [W, S + 1, T], and mean_D u_s^2, [W, S, T]."""
    stack, _ = stack_and_exit(model, params, tokens_WT)
    square = lambda x: jnp.mean(jnp.square(x), axis=-1)  # noqa: E731
    largest = lambda x: jnp.max(jnp.abs(x), axis=-1)  # noqa: E731

    def visit(f: Any, x: Array, _: None) -> tuple[Array, tuple[Array, ...]]:
        y = f(x)
        return y, (square(y), largest(y), square(y - x))

    _, (size, peak, update) = scan_steps(stack, visit, stack.stream)
    size, peak = (jnp.concatenate([of(stack.stream)[None], x]) for of, x in ((square, size), (largest, peak)))
    return {name: jnp.moveaxis(x, 1, 0) for name, x in (("size", size), ("peak", peak), ("update", update))}


def lens_numbers(model: Decoder, params: Params, tokens_WT: Array, targets_WT: Array) -> dict[str, Array]:
    """Return the logit lens of x_0 to x_S, [W, S + 1]: cross entropy and entropy, by each x_s's own statistics and with
    the scale of the final norm frozen at x_S's (each x_s is centred, which is linear)."""
    stack, _ = stack_and_exit(model, params, tokens_WT)
    config, final, kernel_DV = model.config, params["final_norm"], head_kernel(params)
    centred = lambda x: x - x.mean(-1, keepdims=True)  # noqa: E731
    last_BTD = centred(run_stack(stack))
    scale_BT1 = jax.lax.rsqrt(jnp.mean(jnp.square(last_BTD), -1, keepdims=True) + config.norm_epsilon)

    def read(x: Array) -> dict[str, Array]:
        own = apply_final_norm(x, final, "layer_norm", config.norm_epsilon)
        frozen = centred(x) * scale_BT1 * final["scale"][None, None] + final["bias"][None, None]
        states = {"own": own, "frozen": frozen}
        found = {}
        for name, y in states.items():
            log_p = jax.nn.log_softmax(scaling(config).logits * logits(y, kernel_DV))
            found[f"{name}_loss"] = window_losses(log_p, targets_WT)
            found[f"{name}_entropy"] = -jnp.sum(jnp.exp(log_p) * log_p, -1).mean(-1)
        return found

    def visit(f: Any, x: Array, _: None) -> tuple[Array, dict[str, Array]]:
        y = f(x)
        return y, read(y)

    _, after = scan_steps(stack, visit, stack.stream)
    return jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]).T, read(stack.stream), after)


def removal_numbers(model: Decoder, params: Params, tokens_WT: Array, targets_WT: Array) -> dict[str, Array]:
    """Return each window's loss, [W], without one sublayer, [W, S], and without both of one block, [W, L]."""

    def loss(params: Params) -> Array:
        return window_losses(cast(Array, model.apply({"params": params}, tokens_WT)), targets_WT)

    blocks_LS = 1.0 - jnp.repeat(jnp.eye(model.config.depth), 2, axis=1)
    without = lambda gates_S: loss(gate_branches(model.config, params, gates_S))  # noqa: E731
    return {
        "loss": loss(params),
        "without_sublayer": lesion_losses(model.config, loss, params).T,
        "without_block": jax.lax.map(without, blocks_LS).T,
    }


def skip_numbers(model: Decoder, params: Params, tokens_GBT: Array) -> dict[str, Array]:
    """Return M[s, l] of each group of windows, [G, S, S]."""
    return {
        "skips": jax.lax.map(lambda x: skip_effects(stack_and_exit(model, params, x)[0]), tokens_GBT),
    }


def path_numbers(model: Decoder, params: Params, tokens_GBT: Array, targets_GBT: Array) -> dict[str, Array]:
    """Return share and mean length by group of the loss's gradient and of a random change of the embedding.

    With "gradient_error" and "change_error", |sum of the parts - vjp or jvp| over |vjp or jvp|: 0 up to round-off.
    """

    def group(given: tuple[Array, Array, Array]) -> dict[str, Array]:
        tokens_BT, targets_BT, key = given
        stack, exit = stack_and_exit(model, params, tokens_BT)
        run = lambda x: run_stack(dataclasses.replace(stack, stream=x))  # noqa: E731
        change = jax.random.normal(key, stack.stream.shape)
        last, pull = jax.vjp(run, stack.stream)
        slope = jax.grad(lambda x: window_losses(exit(x), targets_BT).mean())(last)
        parts = {"gradient": path_cotangents(stack, slope), "change": path_tangents(stack, change)}
        wanted = {"gradient": pull(slope)[0], "change": jax.jvp(run, (stack.stream,), (change,))[1]}
        found = {}
        for name, part in parts.items():
            spectrum = path_spectrum(part)
            found |= {f"{name}_share": spectrum.share, f"{name}_length": spectrum.length}
            found[f"{name}_error"] = norm(part.sum(0) - wanted[name]) / norm(wanted[name])
        return found

    return jax.lax.map(group, (tokens_GBT, targets_GBT, jax.random.split(jax.random.key(1), len(tokens_GBT))))


def check_paths(found: Arrays) -> None:
    """Raise RuntimeError where parts do not add up to what they are parts of."""
    for name in ("gradient_error", "change_error"):
        if not found[name].max() < 1e-4:
            raise RuntimeError(f"paths: {name} is {found[name].max():.2g}; the parts are not the whole")


def measure(model: Decoder, params: Params, windows: Windows, *, whole: bool) -> Arrays:
    """Return what is measured of one state of the model, float64; removals, skips and the lens with `whole`."""
    begun, found = time.perf_counter(), {}
    parts: list[tuple[Callable[..., dict[str, Array]], tuple[np.ndarray, ...]]] = [
        (stream_numbers, windows[:1]),
        (path_numbers, windows.groups(PATHS, 1)),
    ]
    if whole:
        parts += [
            (lens_numbers, windows),
            (removal_numbers, windows),
            (skip_numbers, windows.groups(GROUPS, SKIP_ROWS)[:1]),
        ]
    for part, given in parts:
        found |= jax.device_get(jax.jit(functools.partial(part, model))(params, *given))
        print(f"  {part.__name__}: {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)
    check_paths(found)
    return {name: np.asarray(x, np.float64) for name, x in found.items()}


def check_lens(model: Decoder, params: Params, windows: Windows, found: Arrays) -> float:
    """Return the largest difference of the cross entropies from `probes.logit_lens`, on the same windows.

    Raises:
      RuntimeError: they differ by more than round-off.
    """
    profile = jax.jit(functools.partial(logit_lens, model))(params, *windows)
    far = float(np.max(np.abs(found["own_loss"].mean(0)[1:] - np.asarray(profile.cross_entropy, np.float64))))
    if not far < 1e-3:
        raise RuntimeError(f"the logit lens and its probe differ by {far:.2g} nats")
    return far


# The numbers and their verdicts.


def law_difference(size_ST: np.ndarray, first: str, others: Sequence[str]) -> float:
    """Return the AICc of one law less the least of the others, for mean squares by sublayer and position."""
    aicc = {law.name: law.aicc for law in growth_laws(np.sqrt(size_ST.mean(-1)))}
    return aicc[first] - min(aicc[name] for name in others)


def factor_per_block(size_ST: np.ndarray) -> float:
    """Return e^(2 g) of the exponential law."""
    (law,) = (law for law in growth_laws(np.sqrt(size_ST.mean(-1))) if law.name == "exponential")
    return math.exp(2 * law.number)


def first_over_rest(size_ST: np.ndarray) -> float:
    """Return the RMS of position 0 over that of the rest, after the sublayer where it is largest."""
    return float(np.sqrt(size_ST[1:, 0] / size_ST[1:, 1:].mean(-1)).max())


def outlier_numbers(found: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """Return max |x_s| over RMS(x_s) of each window, [W, S + 1]: with position 0, and without."""
    of = lambda first: found["peak"][..., first:].max(-1) / np.sqrt(found["size"][..., first:].mean(-1))  # noqa: E731
    return of(0), of(1)


def late_over_early(values_S: np.ndarray, *, skip: int = 0) -> float:
    """Return the mean of the second half over that of the first, which leaves out its first `skip` places."""
    half = len(values_S) // 2
    return float(values_S[half:].mean() / values_S[skip:half].mean())


def growth_rows(found: Mapping[str, Arrays]) -> list[Row]:
    """Return R11."""
    start, trained = (found[state]["size"] for state in STATES)
    against = functools.partial(law_difference, first="exponential", others=("additive",))
    rows = []
    for state, size, claim in (("start", start, above(2.0, 0.0)), ("trained", trained, below(-2.0, 0.0))):
        rows.append(row(("R11", state, "AICc, exponential less additive"), resampled(against, size), claim))
    best = functools.partial(law_difference, first="additive", others=("exponential", "power"))
    rows.append(
        row(("R11", "start", "AICc, additive less the best other"), resampled(best, start), below(0.0))
    )
    best = functools.partial(law_difference, first="exponential", others=("additive", "power"))
    rows.append(
        row(
            ("R11", "trained", "AICc, exponential less the best other"), resampled(best, trained), below(-2.0)
        )
    )
    for state, claim in (("start", None), ("trained", above(1.0, 1.0))):
        factor = resampled(factor_per_block, found[state]["size"])
        rows.append(row(("R11", state, "factor per block"), factor, claim))
    for state, claim in (("start", None), ("trained", above(2.0, 1.0))):
        place = ("R11", state, "RMS of position 0 over the rest, where largest")
        rows.append(row(place, resampled(first_over_rest, found[state]["size"]), claim))
    for state, claim in (("start", None), ("trained", above(1.5, 1.0))):
        ratio = resampled(lambda a_S, b_S: float((a_S / b_S)[1:].max()), *outlier_numbers(found[state]))
        rows.append(row(("R11", state, "largest entry with over without position 0"), ratio, claim))
    return rows


def relative_updates(size_ST: np.ndarray, update_ST: np.ndarray) -> np.ndarray:
    """Return |u_s| / |x_s| from mean squares, [S]."""
    return np.sqrt(update_ST.mean(-1) / size_ST[:-1].mean(-1))


def half_rows(found: Mapping[str, Arrays]) -> list[Row]:
    """Return R12."""
    rows = []
    for state, claim in (("start", None), ("trained", below(1.0, 1.0))):
        for words, skip in (("", 0), (", without block 1", 2)):
            ratio = lambda x, u, skip=skip: late_over_early(relative_updates(x, u), skip=skip)  # noqa: E731
            number = resampled(ratio, found[state]["size"], found[state]["update"])
            rows.append(row(("R12", state, f"relative update, late over early{words}"), number, claim))
    trained = found["trained"]
    lesion_WS = trained["without_sublayer"] - trained["loss"][:, None]
    half = lesion_WS.shape[1] // 2
    for words, skip in (("", 0), (", without block 1", 2)):
        less_W = lesion_WS[:, half:].mean(1) - lesion_WS[:, skip:half].mean(1)
        rows.append(
            row(("R12", "trained", f"lesions, late less early{words}, nats"), paired(less_W), below(0.0, 0.0))
        )
    early_G, late_G = (np.array([mean_row(m, rows_) for m in trained["skips"]]) for rows_ in halves(2 * half))
    over = "groups of windows, t"
    rows.append(row(("R12", "trained", "M, mean of late rows"), paired(late_G, over), below(0.1)))
    rows.append(row(("R12", "trained", "M, mean of early rows"), paired(early_G, over)))
    rows.append(
        row(("R12", "trained", "M, late over early"), paired(late_G / early_G, over), below(0.5, 1.0))
    )
    near = [
        np.array([mean_row(m, rows_, reach=half // 2) for m in trained["skips"]])
        for rows_ in halves(2 * half)
    ]
    place = ("R12", "trained", f"M, late over early, at most {half // 2} sublayers on")
    return [*rows, row(place, paired(near[1] / near[0], over), below(1.0, 1.0))]


def halves(sublayers: int) -> tuple[range, range]:
    """Return the rows of M of the first half and of the second; the last sublayer has nothing behind it."""
    return range(sublayers // 2), range(sublayers // 2, sublayers - 1)


def mean_row(m_SS: np.ndarray, rows: Sequence[int], *, reach: int | None = None) -> float:
    """Return the mean over rows s of the mean of M[s, l] over l > s, at most `reach` further on."""
    end = lambda s: None if reach is None else s + 1 + reach  # noqa: E731
    return float(np.mean([m_SS[s, s + 1 : end(s)].mean() for s in rows]))


def block_rows(trained: Arrays) -> list[Row]:
    """Return R13."""
    cost_WL = trained["without_block"] - trained["loss"][:, None]
    mean_L, error_L = cost_WL.mean(0), cost_WL.std(0, ddof=1) / len(cost_WL) ** 0.5
    other, middle = 1 + int(mean_L[1:].argmax()), 1 + int(mean_L[1:-1].argmax())
    least = 1 + int((mean_L / error_L)[1:-1].argmin())
    place = lambda words: ("R13", "trained", words)  # noqa: E731
    of = lambda block: paired(cost_WL[:, block])  # noqa: E731
    first, last = cost_WL[:, 0] - cost_WL[:, other], cost_WL[:, -1] - cost_WL[:, middle]
    return [
        row(place("cost of block 1, nats"), of(0)),
        row(place(f"the same less the worst other's, {other + 1}"), paired(first), above(0.0, 0.0)),
        row(place(f"cost of the last, {len(mean_L)}"), of(-1)),
        row(place(f"the same less the worst in between, {middle + 1}"), paired(last), above(0.0, 0.0)),
        row(place(f"cost of the block in between nearest to 0, {least + 1}"), of(least)),
        row(place("the same in standard errors"), exact(float(mean_L[least] / error_L[least])), below(2.0)),
    ]


def central(sublayers: int) -> tuple[int, int]:
    """Return the lengths between which the central 98 % of all 2^S paths lie."""
    low, high = stats.binom.ppf([0.01, 0.99], sublayers, 0.5)
    return int(low), int(high)


def path_rows(found: Mapping[str, Arrays]) -> list[Row]:
    """Return R14."""
    share = float(stats.binom.cdf(35, 54, 0.5) - stats.binom.cdf(18, 54, 0.5))
    claim = Claim(low=0.975, high=0.985)
    rows = [row(("R14", "arithmetic", "share of paths with 19 to 35 of 54 branches"), exact(share), claim)]
    for state in STATES:
        sublayers = found[state]["gradient_share"].shape[-1] - 1
        low, high = central(sublayers)
        for name, words in (("gradient", "gradient"), ("change", "forward change")):
            relative_W = found[state][f"{name}_length"] / (sublayers / 2)
            place = ("R14", state, f"mean length of the {words} over S / 2")
            rows.append(row(place, paired(relative_W), below(0.5, 1.0)))
        share_W = found[state]["gradient_share"][:, low : high + 1].sum(1)
        place = ("R14", state, f"share of the gradient at {low} to {high} branches")
        rows.append(row(place, paired(share_W), below(0.5, 0.98)))
    return rows


def rises(loss_S: np.ndarray) -> float:
    """Return the sum of all rises over the whole fall."""
    return float(np.maximum(np.diff(loss_S), 0).sum() / (loss_S[0] - loss_S[-1]))


def largest_step(loss_S: np.ndarray) -> float:
    """Return the largest fall at one sublayer over the whole fall."""
    return float(-np.diff(loss_S).min() / (loss_S[0] - loss_S[-1]))


def inflation(own_S: np.ndarray, frozen_S: np.ndarray, *, most: float) -> float:
    """Return how much of the way to `most` freezing the scale moves the mean entropy of the first quarter."""
    own, frozen = (x[: len(x) // 4 + 1].mean() for x in (own_S, frozen_S))
    return float((frozen - own) / (most - own))


def lens_rows(trained: Arrays, vocab_size: int) -> list[Row]:
    """Return R23."""
    loss_WS, place = trained["own_loss"], lambda words: ("R23", "trained", words)
    moved = functools.partial(inflation, most=math.log(vocab_size))
    entropies = trained["own_entropy"], trained["frozen_entropy"]
    return [
        row(
            place("cross entropy, x_0 less x_S, nats"),
            paired(loss_WS[:, 0] - loss_WS[:, -1]),
            above(0.0, 0.0),
        ),
        row(place("all rises over the fall"), resampled(rises, loss_WS), below(0.1)),
        row(
            place("largest fall at one sublayer over the fall"),
            resampled(largest_step, loss_WS),
            below(0.5, 1.0),
        ),
        row(
            place("frozen scale: way of early entropies to log V"),
            resampled(moved, *entropies),
            above(0.25, 0.0),
        ),
    ]


def all_rows(found: Mapping[str, Arrays], vocab_size: int) -> list[Row]:
    """Return every number with its verdict."""
    trained = found["trained"]
    rows = growth_rows(found) + half_rows(found) + block_rows(trained)
    return rows + path_rows(found) + lens_rows(trained, vocab_size)


# Page and figure.


def write(folder: Path, name: str, rows: Sequence[Row], *, paragraphs: Sequence[str]) -> str:
    """Write the table and the page, a line per number; return the page."""
    shown = lambda x: "" if x is None else f"{x:.4g}" if isinstance(x, float) else str(x)  # noqa: E731
    cells = [[shown(x) for x in record.values()] for record in rows]
    with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *cells])
    versions = (
        f"jaxblock {__version__}, jax {jax.__version__}, flax {flax.__version__}, numpy {np.__version__}"
    )
    said = [record["verdict"] for record in rows if record["verdict"]]
    counts = ", ".join(f"{said.count(word)} {word}" for word in (AS, NOT, OPEN))
    lines = [
        *paragraphs,
        f"{versions}, Python {sys.version.split()[0]}, {jax.default_backend()}. Predictions and their sources: "
        f"`python -m pydoc experiments.{name}`. Figure: `experiments/figures/{name}.png`.",
        f"{len(said)} predictions: {counts}. Rows without one are there to compare with.",
        "\n".join(f"| {' | '.join(line)} |" for line in [COLUMNS, ["---"] * len(COLUMNS), *cells]),
    ]
    text = "\n\n".join(lines) + "\n"
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    return text


def law_words(found: Mapping[str, Arrays]) -> str:
    """Return the three laws of each state in a sentence."""
    said = []
    for state in STATES:
        laws = growth_laws(np.sqrt(found[state]["size"].mean((0, -1))))
        each = ", ".join(f"{law.name} {law.aicc:.1f} (misses by {law.residual:.1%})" for law in laws)
        said.append(f"{state}: {each}")
    return f"AICc of the laws, the best first: {'; '.join(said)}."


def draw(path: Path, found: Mapping[str, Arrays], vocab_size: int) -> None:
    """Draw six panels."""
    figure = Figure(figsize=(16, 9.5), layout="constrained")
    panels = figure.subplots(2, 3).flat
    for panel, one in zip(
        panels, (draw_growth, draw_updates, draw_blocks, draw_skips, draw_paths, draw_lens), strict=True
    ):
        one(panel, found)
        panel.spines[["top", "right"]].set_visible(False)
    figure.axes[5].axhline(math.log(vocab_size), color="#999999", lw=0.8, ls=":")
    figure.savefig(path, dpi=110)


def draw_growth(panel: Axes, found: Mapping[str, Arrays]) -> None:
    """R11: RMS of the stream with the fitted laws, position 0 apart."""
    for state, color in zip(STATES, ("#1f77b4", "#d62728"), strict=True):
        size_ST = found[state]["size"].mean(0)
        s_S = np.arange(len(size_ST))
        panel.plot(s_S, np.sqrt(size_ST.mean(-1)), ".-", ms=4, color=color, label=state)
        panel.plot(s_S, np.sqrt(size_ST[:, 0]), "--", lw=1, color=color, label=f"{state}, position 0")
        y_S = np.log(np.sqrt(size_ST.mean(-1)))[1:]
        slope, start = np.polyfit(s_S[1:], y_S, 1)
        panel.plot(s_S[1:], np.exp(start + slope * s_S[1:]), ":", lw=1, color=color)
    panel.set(
        yscale="log", xlabel="s, sublayers", ylabel="RMS(x_s)", title="R11  growth; dotted: exponential"
    )
    panel.legend(frameon=False, fontsize=8)


def draw_updates(panel: Axes, found: Mapping[str, Arrays]) -> None:
    """R12: relative updates."""
    for state, color in zip(STATES, ("#1f77b4", "#d62728"), strict=True):
        rho_S = relative_updates(found[state]["size"].mean(0), found[state]["update"].mean(0))
        places = np.arange(1, len(rho_S) + 1)
        panel.plot(places, rho_S, color=color, lw=0.8, alpha=0.6, label=state)
        for first, marker, words in ((0, "o", "attention"), (1, "s", "feed-forward")):
            panel.plot(
                places[first::2], rho_S[first::2], marker, ms=4, color=color, label=f"{state}, {words}"
            )
    panel.axvline(len(rho_S) / 2 + 0.5, color="#999999", lw=0.8, ls=":")
    panel.set(
        yscale="log", xlabel="sublayer", ylabel="|u| / |x|", title="R12  relative updates; dotted: half"
    )
    panel.legend(frameon=False, fontsize=8)


def draw_blocks(panel: Axes, found: Mapping[str, Arrays]) -> None:
    """R13: what a missing block, or sublayer, costs."""
    trained = found["trained"]
    cost_WL, lesion_WS = (
        trained[name] - trained["loss"][:, None] for name in ("without_block", "without_sublayer")
    )
    places, error = np.arange(1, cost_WL.shape[1] + 1), 2 / len(cost_WL) ** 0.5
    panel.bar(places, cost_WL.mean(0), yerr=error * cost_WL.std(0, ddof=1), color="#bbbbbb", label="block")
    for first, color, words in ((0, "#1f77b4", "attention alone"), (1, "#d62728", "feed-forward alone")):
        own = lesion_WS[:, first::2]
        shift = places + (0.2 if first else -0.2)
        panel.errorbar(
            shift, own.mean(0), error * own.std(0, ddof=1), fmt="o", ms=4, lw=1, color=color, label=words
        )
    panel.set_yscale("symlog", linthresh=0.01)
    panel.set_xticks(places)
    panel.set(xlabel="block", ylabel="loss without it less the loss, nats", title="R13  removed; bars: 2 SE")
    panel.legend(frameon=False, fontsize=8)


def draw_skips(panel: Axes, found: Mapping[str, Arrays]) -> None:
    """R12: M[s, l]."""
    m_SS = found["trained"]["skips"].mean(0)
    shown = np.ma.masked_where(np.tril(np.ones_like(m_SS)) > 0, m_SS)
    end = len(m_SS) + 0.5
    image = panel.imshow(
        shown, cmap="viridis", vmin=0, vmax=min(1.0, shown.max()), extent=(0.5, end, end, 0.5)
    )
    panel.set(
        xlabel="l, sublayer that reads", ylabel="s, sublayer left out", title="R12  M[s, l]: change of u_l"
    )
    panel.figure.colorbar(image, ax=panel, shrink=0.85, extend="max")


def draw_paths(panel: Axes, found: Mapping[str, Arrays]) -> None:
    """R14: where the gradient lives, and where paths are."""
    for state, color in zip(STATES, ("#1f77b4", "#d62728"), strict=True):
        share_WK, length = found[state]["gradient_share"], found[state]["gradient_length"].mean()
        k_K, error = np.arange(share_WK.shape[1]), 2 / len(share_WK) ** 0.5
        label = f"gradient, {state}: mean {length:.1f}"
        bars = error * share_WK.std(0, ddof=1)
        panel.errorbar(k_K, share_WK.mean(0), bars, fmt=".-", ms=4, lw=1, color=color, label=label)
    sublayers = int(k_K[-1])
    paths = stats.binom.pmf(k_K, sublayers, 0.5)
    panel.fill_between(k_K, paths, color="#bbbbbb", alpha=0.6, lw=0, label=f"paths: mean {sublayers // 2}")
    panel.set(
        xlabel="k, branches on a path", ylabel="share", title="R14  gradient by path length; bars: 2 SE"
    )
    panel.legend(frameon=False, fontsize=8)


def draw_lens(panel: Axes, found: Mapping[str, Arrays]) -> None:
    """R23: the lens by depth."""
    styles = {"own": ("#1f77b4", "own statistics"), "frozen": ("#ff7f0e", "scale frozen at x_S's")}
    for name, (color, words) in styles.items():
        loss_S = found["trained"][f"{name}_loss"].mean(0)
        panel.plot(loss_S, ".-", ms=4, color=color, label=f"cross entropy, {words}")
        panel.plot(found["trained"][f"{name}_entropy"].mean(0), "--", color=color, label=f"entropy, {words}")
    panel.set(xlabel="s, sublayers", ylabel="nats", title="R23  logit lens of x_s; dotted: log V")
    panel.legend(frameon=False, fontsize=8)


def study(
    config: TrainConfig, *, command: str, windows: int = WINDOWS
) -> tuple[list[Row], Mapping[str, Arrays], list[str]]:
    """Return rows, what was measured, and the page's first paragraphs, of a finished run."""
    begun, spent = time.perf_counter(), time.process_time()
    task = prepare(config, continues=True).task
    model, chosen = task.model, held_out(task, windows)
    params = states_of(config, task)
    found = {state: measure(model, params[state], chosen, whole=state == "trained") for state in STATES}
    far = check_lens(model, params["trained"], chosen, found["trained"])
    rows = all_rows(found, config.model.vocab_size)
    wall, cpu = time.perf_counter() - begun, time.process_time() - spent
    run = json.loads((Path(str(config.run.dir)) / "summary.json").read_text(encoding="utf-8"))
    sizes = config.model
    paragraphs = [
        "# What depth does in one trained model",
        f"`{command}`: {run['steps']} steps in {run['wall_s']:.0f} s (validation loss {run['val_loss']:.3f}, "
        f"{run['baseline']} {run['baseline_loss']:.3f}), measured in {wall:.0f} s ({cpu:.0f} s of processor time), on "
        "two cores that other jobs shared.",
        f"L = {sizes.depth} blocks, S = {sizes.sublayers} sublayers, width {sizes.width}, {sizes.heads} heads, layer "
        f"norm, GELU, learned positions; {windows} held-out windows of {LENGTH} bytes, of them {GROUPS * SKIP_ROWS} "
        f"for M and {PATHS} for paths. **One seed: intervals are over windows of one model, and say "
        "nothing about other models.** Start: the same seed's initial values.",
        f"{law_words(found)} GPT-2 XL's factor per block is {PUBLISHED}. The lens agrees with `probes.logit_lens` to "
        f"{far:.1g} nats. Paths are taken of one window at a time, and their parts add up to the vjp and the jvp.",
    ]
    return rows, found, paragraphs


def main() -> int:
    """Train what is missing, measure, write, draw, print; return the code of a run that was interrupted, else 0."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--run", type=Path, help="a run to measure, to go on with, or to make")
    parser.add_argument(
        "--work", type=Path, default=Path(tempfile.gettempdir()), help="where a run without --run lies"
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of the page")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix=f"{NAME}-", dir=arguments.work) as temporary:
        config = train_config(arguments.run or Path(temporary) / "run")
        try:
            code = trained_run(config)
        except ValueError as error:
            parser.error(str(error))
        if code:
            return code
        command = f"python -m experiments.{NAME}" + (" --run DIR" if arguments.run else "")
        rows, found, paragraphs = study(config, command=command)
    text = write(HERE / "results", NAME, rows, paragraphs=paragraphs)
    draw(HERE / "figures" / f"{NAME}.png", found, config.model.vocab_size)
    print(json.dumps(rows) if arguments.json else text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

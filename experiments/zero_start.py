"""Stacks that start as the identity, and where the gradient is once training has begun.

    python -m experiments.zero_start [--json]

R17, ReZero (2003.04887) and zero-initialised outputs: L = 64 blocks, D = 32, three seeds. Predicted, beforehand:

    step 0     `rezero` and `zero_output` (pre_norm, last kernel of each branch 0) are the model without blocks: logits
               and loss are those of the embedding through the final norm and the head, and of the same parameters with
               every branch at 0, within 1e-5; so all singular values of the stack are 1 (|log sigma| below 1e-5); and
               the gradients of query, key, value and up kernels are exactly 0, while that of what starts at 0 is not
    100 steps  the mean training loss of steps 1 to 100 is lower than that of `plain` (pre_norm with plain initial
               values): each arm at the better of two learning rates, the same batches, paired by seed

R5, gradients by layer after 200 steps (Xiong et al., 2002.04745; NormFormer, 2110.09456): L = 12, D = 32, three seeds.
The slope of log2 |gradient| from the first place to the last, of parameters by block and of the stream by sublayer:
post_norm rises toward the output (above 0); pre_norm is flat or falls (below 0.5, half a doubling). What it is at the
start has no prediction here (item 3 of `experiments.residual_growth` has, with 12 seeds and R1 and R4 beside it).

Verdicts as in `experiments.trained_depth`: the whole 95 % t interval over seeds in the band, or outside; three seeds
make it 2.5 standard deviations wide on each side. At step 0 the number is the largest over the seeds. `rezero` has no
norm inside, and its alphas a tenth of the learning rate, as `jaxblock topologies` advises: with one rate for all, runs
diverged.

Found: all of step 0, logits to the last bit; plain's differ by 8. The first 100 steps are not resolved: less plain's
loss, zero_output has -0.08 [-0.20, +0.04], rezero +0.02 [-0.11, +0.16]: it starts slower (its alphas have to grow) and
ends lower (-0.21 in the last 10 steps). All three are best at the higher rate, the edge of the two. After 200 steps
pre_norm's gradient falls toward the output in every seed (-1.4 to -2.0 doublings by block); post_norm's rises by 5.7
and 11.5 doublings in two seeds and is level in the third (-0.5): not resolved.

Writes results/zero_start.csv and .md and figures/zero_start.png. Wall time: 11 minutes while others used the two cores,
of 5 minutes of processor time.
"""

import argparse
import functools
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.trained_depth import (
    Claim,
    Row,
    Windows,
    above,
    below,
    exact,
    held_out,
    paired,
    row,
    stack_and_exit,
    window_losses,
    write,
)
from jaxblock import Decoder
from jaxblock.invariants.branches import zero_branches
from jaxblock.probes import gradient_profile
from jaxblock.probes.jacobians import subspace_spectrum
from jaxblock.sweeps.lanes import Lane, LaneProgram
from jaxblock.training.config import TrainConfig
from jaxblock.training.config_file import build_config
from jaxblock.training.language_task import language_task
from jaxblock.types import Array, Params

HERE, NAME = Path(__file__).parent, "zero_start"
SEEDS, RATES, WIDTH, LENGTH = (0, 1, 2), (1e-3, 4e-3), 32, 32
DEPTH, STEPS, BATCH, CHUNK = 64, 100, 4, 20
GRADIENT_DEPTH, GRADIENT_STEPS, GRADIENT_RATE, GRADIENT_BATCH = 12, 200, 1e-3, 8
DIRECTIONS, READ, SMOOTH = 8, 32, 10
IN_PROJECTIONS = (
    ("attention", "query"),
    ("attention", "key"),
    ("attention", "value"),
    ("feed_forward", "up"),
)
OUTPUTS = (("attention", "output"), ("feed_forward", "down"))
MOVES = "gradient of outputs or alphas"
ALPHAS = ("attention_connection", "feed_forward_connection")
COLORS = {"plain": "#666666", "rezero": "#1f77b4", "zero_output": "#d62728"}
OVER = "seeds, t"
Found = Mapping[str, np.ndarray]


class Arm(NamedTuple):
    """How a stack starts."""

    residual: str
    initialization: str
    role_rates: Mapping[str, float]


ARMS: Mapping[str, Arm] = {
    "plain": Arm("pre_norm", "plain", {}),
    "rezero": Arm("rezero", "plain", {"connection": 0.1}),
    "zero_output": Arm("pre_norm", "zero_output", {}),
}
AFTER: Mapping[str, Claim] = {"pre_norm": below(0.5, 1.0), "post_norm": above(0.0, 0.0)}


def config_of(arm: Arm, *, depth: int, steps: int, batch: int) -> TrainConfig:
    """Return the run of an arm; learning rate and seed are lanes."""
    sizes = {"vocab_size": 256, "context": LENGTH, "depth": depth, "width": WIDTH, "heads": 4}
    form = {"feed_forward": "gelu", "norm": "layer_norm", "bias": True, "positions": "learned"}
    start = {"residual": arm.residual, "initialization": arm.initialization}
    learning = {"schedule": "constant", "warmup": 0.1, "weight_decay": 0.1, "clip": 1.0}
    return build_config(
        {
            "run": {"name": NAME, "steps": steps},
            "model": {**sizes, **form, **start},
            "execution": {"remat": "none"},
            "data": {"batch": batch},
            "optimizer": {**learning, "role_rates": dict(arm.role_rates)},
        }
    )


def program_of(config: TrainConfig, rates: Sequence[float]) -> LaneProgram:
    """Return the compiled run of all rates and seeds, rate by rate."""
    lanes = [Lane(seed, rate, config.optimizer.warmup) for rate in rates for seed in SEEDS]
    return LaneProgram(language_task(config), config, lanes)


def trained(program: LaneProgram, state: Any, steps: int) -> tuple[Any, np.ndarray]:
    """Return the state after so many steps and the losses, [steps, lanes]."""
    losses = []
    for begun in range(0, steps, CHUNK):
        state, metrics = program.run(state, begun, CHUNK)
        losses.append(np.asarray(metrics.loss, np.float64))
    return state, np.concatenate(losses)


# R17.


def start_numbers(model: Decoder, windows: Windows, params: Params) -> dict[str, Array]:
    """Return how one model at its initial values differs from its embedding, final norm and head alone."""
    tokens_WT, targets_WT = map(jnp.asarray, windows)
    apply = lambda params: cast(Array, model.apply({"params": params}, tokens_WT))  # noqa: E731
    loss = lambda logits_WTV: window_losses(logits_WTV, targets_WT).mean()  # noqa: E731
    stack, exit = stack_and_exit(model, params, tokens_WT)
    own, none, zero = apply(params), exit(stack.stream), apply(zero_branches(params))
    blocks = jax.grad(lambda params: loss(apply(params)))(params)["blocks"]
    one_row, _ = stack_and_exit(model, params, tokens_WT[:1])
    spectrum = subspace_spectrum(one_row, jax.random.key(2), directions=DIRECTIONS)
    size = lambda leaves: jnp.max(jnp.stack([jnp.max(jnp.abs(x)) for x in leaves]))  # noqa: E731
    at_zero = [blocks[name]["alpha"] for name in ALPHAS if "alpha" in blocks[name]]
    return {
        "logits less no blocks": jnp.max(jnp.abs(own - none)),
        "logits less branches at 0": jnp.max(jnp.abs(own - zero)),
        "loss less no blocks": jnp.abs(loss(own) - loss(none)),
        "log sigma": jnp.max(jnp.abs(spectrum.log_singular)),
        "gradient of in-projections": size([blocks[a][b]["kernel"] for a, b in IN_PROJECTIONS]),
        MOVES: size(at_zero or [blocks[a][b]["kernel"] for a, b in OUTPUTS]),
        "log_singular_R": spectrum.log_singular,
    }


def start_claims() -> dict[str, Claim]:
    """Return what is predicted of a stack that starts as the identity."""
    nothing = ("logits less no blocks", "logits less branches at 0", "loss less no blocks", "log sigma")
    return {
        **{name: below(1e-5) for name in nothing},
        "gradient of in-projections": Claim(low=0.0, high=0.0),
        MOVES: above(0.0, 0.0),
    }


def better_rate(losses_NRS: np.ndarray) -> int:
    """Return the rate of the lower mean loss over steps and seeds; NaN where a lane failed never wins."""
    mean_R = losses_NRS.mean(axis=(0, 2))
    return int(np.nanargmin(np.where(np.isfinite(mean_R), mean_R, np.nan)))


def identity_rows(starts: Mapping[str, Found], losses: Mapping[str, np.ndarray]) -> list[Row]:
    """Return R17: numbers at step 0, largest over seeds, and losses, [steps, rates, seeds], less plain's."""
    rows = []
    for arm in starts:
        for name, claim in start_claims().items():
            moves = name == MOVES  # of what must not be 0 the least seed counts
            number = (np.min if moves else np.max)(starts[arm][name])
            words = f"step 0: {name}, {'least' if moves else 'largest'} seed"
            rows.append(row(("R17", arm, words), exact(float(number)), None if arm == "plain" else claim))
    best = {arm: losses[arm][:, better_rate(losses[arm])] for arm in losses}
    for arm in best:
        if arm == "plain":
            continue
        less_NS = best[arm] - best["plain"]
        rows.append(
            row(
                ("R17", arm, f"loss of steps 1 to {len(less_NS)} less plain's"),
                _over(less_NS),
                below(0.0, 0.0),
            )
        )
        last = len(less_NS) - len(less_NS) // 10
        rows.append(
            row(
                ("R17", arm, f"loss of steps {last + 1} to {len(less_NS)} less plain's"),
                _over(less_NS[last:]),
            )
        )
    return rows


def _over(values_NS: np.ndarray) -> Any:
    return paired(values_NS.mean(0), OVER)


# R5.


def gradient_numbers(model: Decoder, windows: Windows, params: Params) -> dict[str, Array]:
    """Return norms of the gradient: of parameters by block, [L], and of the stream, [S + 1]."""

    def loss(variables: Mapping[str, Any]) -> Array:
        logits_WTV = cast(Array, model.apply(variables, jnp.asarray(windows.tokens_WT)))
        return window_losses(logits_WTV, jnp.asarray(windows.targets_WT)).mean()

    profile = gradient_profile(model.config, loss, params)
    squares = [jnp.square(x).sum(range(1, x.ndim)) for x in jax.tree.leaves(profile.gradient["blocks"])]
    return {"parameters by block": jnp.sqrt(sum(squares)), "stream": profile.stream_S}


def doublings(norms_SL: np.ndarray) -> np.ndarray:
    """Return the slope of log2 from the first place to the last, of each seed."""
    place_L = np.linspace(0.0, 1.0, norms_SL.shape[1])
    return np.polyfit(place_L, np.log2(norms_SL).T, 1)[0]


def gradient_rows(profiles: Mapping[str, Mapping[int, Found]]) -> list[Row]:
    """Return R5: arm -> steps made -> norms by seed."""
    return [
        row(
            ("R5", arm, f"{name}, doublings, after {steps} steps"),
            paired(doublings(norms), OVER),
            AFTER[arm] if steps else None,
        )
        for arm, found in profiles.items()
        for steps, numbers in found.items()
        for name, norms in numbers.items()
    ]


def by_seed(measured: Any, params: Params) -> Found:
    """Return a function of one model's parameters for all lanes, float64 [lanes, ...]."""
    found = jax.device_get(jax.jit(lambda params: jax.lax.map(measured, params))(params))
    return {name: np.asarray(x, np.float64) for name, x in found.items()}


def measure_identity(arm: Arm, *, depth: int = DEPTH, steps: int = STEPS) -> tuple[Found, np.ndarray]:
    """Return an arm's numbers at step 0 by seed, and its losses, [steps, rates, seeds]."""
    program = program_of(config_of(arm, depth=depth, steps=steps, batch=BATCH), RATES)
    state, windows = program.first_state(), held_out(program.task, READ)
    first = jax.tree.map(lambda x: x[: len(SEEDS)], state.params)  # rates share a seed's initial values
    found = by_seed(functools.partial(start_numbers, program.task.model, windows), first)
    _, losses = trained(program, state, steps)
    return found, losses.reshape(steps, len(RATES), len(SEEDS))


def measure_gradients(
    residual: str, *, depth: int = GRADIENT_DEPTH, steps: int = GRADIENT_STEPS
) -> dict[int, Found]:
    """Return gradients at the start and after `steps`, with the last steps' loss as "loss"."""
    config = config_of(Arm(residual, "plain", {}), depth=depth, steps=steps, batch=GRADIENT_BATCH)
    program = program_of(config, (GRADIENT_RATE,))
    state, windows = program.first_state(), held_out(program.task, READ)
    measured = functools.partial(gradient_numbers, program.task.model, windows)
    start = by_seed(measured, state.params)
    state, losses = trained(program, state, steps)
    print(f"  {residual}: loss {losses[-CHUNK:].mean():.3f}", file=sys.stderr)
    return {0: start, steps: by_seed(measured, state.params)}


def opening(
    losses: Mapping[str, np.ndarray], profiles: Mapping[str, Mapping[int, Found]], *, spent: str
) -> list[str]:
    """Return the page's first paragraphs."""
    at_rates = "; ".join(
        f"{arm} " + ", ".join(f"{x:.3f} at {rate:g}" for x, rate in zip(own.mean((0, 2)), RATES, strict=True))
        for arm, own in losses.items()
    )
    seeds = [
        f"{arm}, {name}, " + ", ".join(f"{x:.2f}" for x in doublings(norms))
        for arm, found in profiles.items()
        for name, norms in found[max(found)].items()
    ]
    return [
        "# Stacks that start as the identity; gradients after the first steps",
        f"`python -m experiments.{NAME}`: {spent}, on two cores that other jobs shared.",
        f"Width {WIDTH}, 4 heads, {LENGTH} bytes of the standard library's source; R17: L = {DEPTH}, {STEPS} steps of "
        f"{BATCH} windows; R5: L = {GRADIENT_DEPTH}, {GRADIENT_STEPS} steps of {GRADIENT_BATCH} at {GRADIENT_RATE:g}; "
        f"seeds {', '.join(map(str, SEEDS))}. Gradients and step 0 are of {READ} held-out windows.",
        f"Mean loss of steps 1 to {STEPS}: {at_rates}. Each arm is read at the better of these two.",
        f"Doublings after {GRADIENT_STEPS} steps, by seed: {'; '.join(seeds)}.",
    ]


def draw(
    path: Path,
    starts: Mapping[str, Found],
    losses: Mapping[str, np.ndarray],
    profiles: Mapping[str, Mapping[int, Found]],
) -> None:
    """Draw the losses, the singular values, and the gradients."""
    figure = Figure(figsize=(12, 9), layout="constrained")
    one, two, three, four = figure.subplots(2, 2).flat
    for arm, color in COLORS.items():
        rate = better_rate(losses[arm])
        own = losses[arm][:, rate]
        smooth_NS = np.stack([np.convolve(x, np.full(SMOOTH, 1 / SMOOTH), "valid") for x in own.T], 1)
        steps_N = np.arange(SMOOTH, len(own) + 1)
        one.plot(steps_N, smooth_NS, color=color, lw=0.6, alpha=0.5)
        one.plot(steps_N, smooth_NS.mean(1), color=color, label=f"{arm}, at {RATES[rate]:g}")
        values_SR = starts[arm]["log_singular_R"]
        x_R = np.arange(1, values_SR.shape[1] + 1)
        style = "s-" if arm == "rezero" else "o-"  # larger, so that the third arm does not hide it
        labels = [arm, *[None] * (len(values_SR) - 1)]
        two.plot(x_R, values_SR.T, style, ms=8 if arm == "rezero" else 4, lw=0.8, color=color, label=labels)
    one.set(
        title=f"R17  training loss, L = {DEPTH}",
        xlabel="step",
        ylabel=f"nats, mean of {SMOOTH} steps; thin: seeds",
    )
    two.set(
        title="R17  singular values of the stack at step 0", xlabel="on random directions", ylabel="log sigma"
    )
    for panel, name, x in ((three, "parameters by block", "block"), (four, "stream", "s, sublayers")):
        for arm, color in (("pre_norm", "#1f77b4"), ("post_norm", "#d62728")):
            _profiles(panel, profiles[arm], name, arm=arm, color=color)
        panel.set(title=f"R5  gradient, {name}", xlabel=x, ylabel="norm; band: seeds", yscale="log")
    for panel in (one, two, three, four):
        panel.legend(frameon=False, fontsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def _profiles(panel: Axes, found: Mapping[int, Found], name: str, *, arm: str, color: str) -> None:
    for (steps, numbers), style in zip(found.items(), ("--", "-"), strict=True):
        norms = numbers[name]
        places = np.arange(norms.shape[1]) + (0 if name == "stream" else 1)
        panel.plot(places, np.exp(np.log(norms).mean(0)), style, color=color, label=f"{arm}, step {steps}")
        panel.fill_between(places, norms.min(0), norms.max(0), color=color, alpha=0.15, lw=0)


def main() -> int:
    """Train, measure, write, draw, print; a verdict of any kind is a result."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of the page")
    arguments = parser.parse_args()
    begun = time.perf_counter()
    starts, losses, profiles = {}, {}, {}
    for name, arm in ARMS.items():
        starts[name], losses[name] = measure_identity(arm)
        print(f"{name}: {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)
    for residual in AFTER:
        profiles[residual] = measure_gradients(residual)
        print(f"{residual}: {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)
    rows = identity_rows(starts, losses) + gradient_rows(profiles)
    spent = f"{time.perf_counter() - begun:.0f} s ({time.process_time():.0f} s of processor time)"
    text = write(HERE / "results", NAME, rows, paragraphs=opening(losses, profiles, spent=spent))
    draw(HERE / "figures" / f"{NAME}.png", starts, losses, profiles)
    print(json.dumps(rows) if arguments.json else text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""How far one Adam step on one weight leaves the linearised network, against depth, for three depth exponents.

    python -m experiments.linearisation [--seeds 20] [--deepest 1024]

The toy of CompleteP, figure 6 (arXiv 2505.01618; EleutherAI/nanoGPT-mup, branch completep, the notebook
relative_distance_from_linearization): L residual branches of two ReLU layers, N = 256, m = L / 2,

    x_0 = R x / sqrt(D),    x_(l+1) = x_l + m^-alpha h(x_l),    h(x) = c W2 relu(c W1 relu(x)),    c = sqrt(2 / N)

with all entries drawn from N(0, 1), logits (1 / N) U x_L, cross entropy against random labels. One Adam step moves W1
of the second branch alone, with rate 0.1 / sqrt(N) m^(alpha - 1) and epsilon 1e-8 m^-alpha (no factor on the rate
for alpha = 0, as in the notebook). h is that branch's output on the whole batch, J its derivative in W1, |.| the
Frobenius norm, h_lin = h_0 + J dW. Against the notebook: random inputs instead of MNIST, norms over the batch
instead of one entry, and a rate 1,000 times as large, so that the distance stands above float32's round-off.

Expected, slope in log L, for alpha = 1 and alpha = 1/2 (tolerance 0.1):

    weight_change   |dW|                            0   -1/2   the rate's own exponent
    linear_change   |J dW| / |h_lin|                0   -1/2   linear in it
    distance        |h_1 - h_lin| / |h_lin|         0   -3/4   a ReLU is linear but where its input changes sign:
                                                               a share ~ |dW| of units, each off by ~ |dW|, so that
                                                               the norm goes as |dW|^(3/2)
    laziness        |h_1 - h_lin| / |J dW|          0   -1/4   their ratio: alpha = 1/2 gets lazy, 1 does not
    notebook        distance, J (1 dW[0]) for J dW  0   -1/2   the published figure

The last line is what the notebook computes: its first-order term takes row 0 of dW for every row, so that most of the
first-order change stays in its "distance", whose published slope -1/2 is the one of linear_change. The conclusion
is the same in both. For alpha = 0 a branch doubles the stream's variance, 2^(L/2) leaves float32, and nothing is
finite from L = 256 on (published: the same).

Prints slopes per seed with 95 % t intervals and whether each lies in its band; an outcome that does not makes the
exit code 1. Writes experiments/results/linearisation.csv and experiments/figures/linearisation.png.
Wall time: about 5 minutes on two cores.
"""

import argparse
import csv
import functools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

from jaxblock.sweeps.statistics.estimate import Estimate, Refusal
from jaxblock.sweeps.statistics.fits import power_law
from jaxblock.types import Array

HERE = Path(__file__).parent
WIDTH, INPUTS, CLASSES, BATCH, BASE_DEPTH = 256, 64, 10, 32, 2
RATE, EPSILON = 0.1, 1e-8
ALPHAS = (0.0, 0.5, 1.0)
SEEDS_AT_ONCE = 5
QUANTITIES = ("weight_change", "linear_change", "distance", "laziness", "notebook")
EXPECTED: Mapping[float, Mapping[str, float]] = {
    1.0: dict.fromkeys(QUANTITIES, 0.0),
    0.5: dict(zip(QUANTITIES, (-0.5, -0.5, -0.75, -0.25, -0.5), strict=True)),
}
TOLERANCE, OVERFLOW = 0.1, 256


class Departure(NamedTuple):
    """How a function of parameters leaves its linearisation at a finite step; scalars."""

    linear: Array
    """|J step| / |f(p) + J step|."""
    distance: Array
    """|f(p + step) - f(p) - J step| / |f(p) + J step|."""


def departure(f: Callable[[Array], Array], param: Array, step: Array, tangent: Array) -> Departure:
    """Return how far f(param + step) lies from f(param) + J tangent; the linearisation has tangent = step."""
    chex.assert_equal_shape([param, step, tangent])
    start, change = jax.jvp(f, (param,), (tangent,))
    linear = start + change
    size = jnp.linalg.norm(linear)
    return Departure(jnp.linalg.norm(change) / size, jnp.linalg.norm(f(param + step) - linear) / size)


def branch(x_BN: Array, first_NN: Array, second_NN: Array) -> Array:
    """Return c relu(c relu(x) W1^T) W2^T, [B, N] -> [B, N]: it doubles neither mean square nor gradient."""
    c = (2.0 / x_BN.shape[-1]) ** 0.5
    return c * jax.nn.relu(c * jax.nn.relu(x_BN) @ first_NN.T) @ second_NN.T


def weights(key: Array, block: Array) -> Array:
    """Return both matrices of a branch, [2, N, N]: drawn where they are used, so that none is kept."""
    return jax.random.normal(jax.random.fold_in(key, block), (2, WIDTH, WIDTH))


def one_step(key: Array, alpha: Array, *, depth: int) -> tuple[Array, ...]:
    """Return the `QUANTITIES` of one network, scalars."""
    keys = jax.random.split(key, 5)
    ratio = depth / BASE_DEPTH
    multiplier = ratio**-alpha
    inputs_BD = jax.random.normal(keys[0], (BATCH, INPUTS))
    read_in_ND, read_out_CN = (
        jax.random.normal(k, shape)
        for k, shape in zip(keys[1:3], ((WIDTH, INPUTS), (CLASSES, WIDTH)), strict=True)
    )
    labels_B = jax.random.randint(keys[3], (BATCH,), 0, CLASSES)
    x_BN = inputs_BD @ read_in_ND.T / INPUTS**0.5
    x_BN = x_BN + multiplier * branch(x_BN, *weights(keys[4], jnp.int32(0)))
    moved_NN, second_NN = weights(keys[4], jnp.int32(1))

    @jax.checkpoint  # else the weights of all blocks would be kept for the backward pass
    def block(x_BN: Array, number: Array) -> tuple[Array, None]:
        return x_BN + multiplier * branch(x_BN, *weights(keys[4], number)), None

    def loss(first_NN: Array) -> Array:
        y_BN = x_BN + multiplier * branch(x_BN, first_NN, second_NN)
        y_BN, _ = jax.lax.scan(block, y_BN, jnp.arange(2, depth))
        logits_BC = y_BN @ read_out_CN.T / WIDTH
        return optax.softmax_cross_entropy_with_integer_labels(logits_BC, labels_B).mean()

    rate = RATE * WIDTH**-0.5 * jnp.where(alpha == 0, 1.0, ratio ** (alpha - 1.0))
    adam = optax.scale_by_adam(eps=EPSILON * multiplier)
    direction_NN, _ = adam.update(jax.grad(loss)(moved_NN), adam.init(moved_NN))
    step_NN = (moved_NN - rate * direction_NN) - moved_NN  # as rounded, or round-off would pass for curvature
    f = functools.partial(branch, x_BN, second_NN=second_NN)
    true = departure(f, moved_NN, step_NN, step_NN)
    published = departure(f, moved_NN, step_NN, jnp.broadcast_to(step_NN[:1], step_NN.shape))
    change = jnp.linalg.norm(step_NN)
    return change, true.linear, true.distance, true.distance / true.linear, published.distance


def measure(depth: int, seeds: int) -> np.ndarray:
    """Return all quantities, [Q, A, R]: quantity, alpha, seed. One program; seeds a few at a time for their memory."""

    def of_seed(seed: Array) -> tuple[Array, ...]:
        key = jax.random.fold_in(jax.random.key(0), seed)
        # alpha is mapped over and the key is not: the three networks share weights, which are drawn once.
        return jax.vmap(functools.partial(one_step, depth=depth), (None, 0))(key, jnp.array(ALPHAS))

    def of_all(numbers: Array) -> tuple[Array, ...]:
        return jax.lax.map(of_seed, numbers, batch_size=SEEDS_AT_ONCE)

    program = jax.jit(of_all).lower(jnp.arange(seeds)).compile()
    return np.stack([np.asarray(x, np.float64).T for x in program(jnp.arange(seeds))])


def slope(depths: Sequence[int], values_LR: np.ndarray) -> Estimate | Refusal:
    """Return d log value / d log L, one per seed, as mean and 95 % t interval."""
    if not np.isfinite(values_LR).all():
        return Refusal(rule="no_values", sentence="some values are not finite")
    found = power_law(np.array(depths, np.float64), values_LR)
    return found if isinstance(found, Refusal) else found.exponent


def verdict(name: str, alpha: float, found: Estimate | Refusal) -> tuple[str, bool]:
    """Return the line of a slope and whether it lies, interval and all, in its band."""
    wanted = EXPECTED[alpha][name]
    band = f"expected {wanted:+.2f} +- {TOLERANCE}"
    if isinstance(found, Refusal):
        return f"{name:14} alpha {alpha:3}: no slope, {found.sentence}; {band}: OUTSIDE", False
    inside = wanted - TOLERANCE <= found.low and found.high <= wanted + TOLERANCE
    numbers = f"{found.value:+.3f} [{found.low:+.3f}, {found.high:+.3f}] ({found.interval}, n = {found.n})"
    return f"{name:14} alpha {alpha:3}: {numbers}; {band}: {'inside' if inside else 'OUTSIDE'}", inside


def report(depths: Sequence[int], values_LQAR: np.ndarray) -> tuple[list[str], bool]:
    """Return the lines of every expectation and whether all hold."""
    lines, good = [], True
    for alpha in (1.0, 0.5):
        for q, name in enumerate(QUANTITIES):
            line, inside = verdict(name, alpha, slope(depths, values_LQAR[:, q, ALPHAS.index(alpha)]))
            lines.append(line)
            good = good and inside
    values_LR = values_LQAR[:, QUANTITIES.index("distance"), ALPHAS.index(0.0)]
    broken = [
        depth for depth, values_R in zip(depths, values_LR, strict=True) if not np.isfinite(values_R).all()
    ]
    wanted = [depth for depth in depths if depth >= OVERFLOW]
    lines.append(
        f"alpha 0 not finite at {broken}; expected {wanted}: {'' if broken == wanted else 'NOT '}as expected"
    )
    return lines, good and broken == wanted


def write_table(path: Path, depths: Sequence[int], values_LQAR: np.ndarray) -> None:
    """Write one row per depth, alpha and seed."""
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("depth", "alpha", "seed", *QUANTITIES))
        for number, depth in enumerate(depths):
            for a, alpha in enumerate(ALPHAS):
                for seed, row_Q in enumerate(values_LQAR[number, :, a].T):
                    table.writerow((depth, alpha, seed, *(f"{x:.6g}" for x in row_Q)))


def draw(path: Path, depths: Sequence[int], values_LQAR: np.ndarray) -> None:
    """Draw every quantity against depth: median over seeds, quartiles as a band, what is not finite as a cross."""
    titles = (
        "weight change |dW|",
        "|J dW| / |h_lin|",
        "distance |h_1 - h_lin| / |h_lin|",
        "the notebook's distance",
    )
    chosen = ("weight_change", "linear_change", "distance", "notebook")
    figure = Figure(figsize=(9, 7), layout="constrained")
    for panel, name, title in zip(figure.subplots(2, 2, sharex=True).flat, chosen, titles, strict=True):
        for a, color in zip(range(len(ALPHAS)), ("#cb181d", "#fd8d3c", "#08519c"), strict=True):
            values_LR = values_LQAR[:, QUANTITIES.index(name), a]
            finite_L = np.isfinite(values_LR).all(1)
            x_L, kept_LR = np.array(depths)[finite_L], values_LR[finite_L]
            panel.plot(
                x_L, np.median(kept_LR, 1), color=color, marker="o", ms=3, label=f"alpha = {ALPHAS[a]:g}"
            )
            panel.fill_between(
                x_L, *np.quantile(kept_LR, (0.25, 0.75), axis=1), color=color, alpha=0.25, lw=0
            )
            lost = np.array(depths)[~finite_L]
            panel.plot(
                lost, np.full(len(lost), 0.97), "x", color=color, transform=panel.get_xaxis_transform()
            )
        panel.set(xscale="log", yscale="log", title=title)
        panel.set_xscale("log", base=2)
        panel.spines[["top", "right"]].set_visible(False)
    axes = figure.axes
    axes[0].legend(frameon=False)
    seeds = values_LQAR.shape[-1]
    for panel in axes[2:]:
        panel.set_xlabel("L, branches")
    figure.suptitle(
        f"One Adam step on one weight: median and quartiles of {seeds} seeds; x = not finite", fontsize=10
    )
    figure.savefig(path, dpi=120)


def main() -> int:
    """Measure, write, draw, and return 1 where an expectation does not hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--deepest", type=int, default=1024, help="a power of two")
    arguments = parser.parse_args()
    begun = time.perf_counter()
    depths = [2**p for p in range(1, arguments.deepest.bit_length())]
    measured = []
    for depth in depths:
        measured.append(measure(depth, arguments.seeds))
        print(f"L = {depth}: {time.perf_counter() - begun:.0f} s", file=sys.stderr)
    values_LQAR = np.stack(measured)
    lines, good = report(depths, values_LQAR)
    write_table(HERE / "results" / "linearisation.csv", depths, values_LQAR)
    draw(HERE / "figures" / "linearisation.png", depths, values_LQAR)
    print("\n".join(lines))
    print(f"{'as expected' if good else 'NOT as expected'}; {time.perf_counter() - begun:.0f} s")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

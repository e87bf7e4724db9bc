"""The probes on a residual stack that is not ours: plain JAX, no module of this library in it.

    python -m experiments.own_stack [--depth 8] [--seed 0]

The stack: L blocks on x [B, T, D], each x + W mean of norm(x) over the tokens so far, then x + W2 relu(W1 norm(x)),
norm(x) = x / rms(x), weights normal with variance 1 / fan in (2 / fan in behind the relu). A `Stack` needs no more than
these two functions, their parameters stacked [L, ...] and the stream they start on; a Flax module is one function more.

Expected: the stream grows by the additive law, r_s^2 = r_0^2 (1 + b s), as branches start uncorrelated; so gains of
updates and influences fall with depth, and paths are far shorter than the S / 2 of the binomial. `feed` carries nothing
between tokens (cross 0). Wall time: 15 s on two cores, nearly all of it compiling.
"""

import argparse
from collections.abc import Callable
from math import comb
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxblock.probes import stream
from jaxblock.probes.growth import growth_laws
from jaxblock.probes.interventions import skip_effects
from jaxblock.probes.jacobians import gains, spectral_norms, token_shares
from jaxblock.probes.paths import path_spectrum, path_tangents
from jaxblock.probes.similarity import influences
from jaxblock.probes.stack import Stack, scan_steps

BATCH, LENGTH, WIDTH = 2, 16, 32


def unit(x: jax.Array) -> jax.Array:
    """Return x / rms(x)."""
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


def mix(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Return x + W mean of norm(x) over the tokens so far: the first sublayer."""
    count = jnp.arange(1, x.shape[1] + 1, dtype=x.dtype).reshape(1, -1, 1)
    return x + jnp.cumsum(unit(x), axis=1) / count @ p["mix"]


def feed(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Return x + W2 relu(W1 norm(x)): the second."""
    return x + jax.nn.relu(unit(x) @ p["up"]) @ p["down"]


def own_stack(depth: int, seed: int) -> Stack:
    """Return the stack with its first stream."""
    keys = jax.random.split(jax.random.key(seed), 4)
    shapes = {"mix": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    params = {
        name: jax.random.normal(key, (depth, *shape)) * np.sqrt((2 if name == "down" else 1) / shape[0])
        for key, (name, shape) in zip(keys[1:], shapes.items(), strict=True)
    }
    return Stack((mix, feed), params, jax.random.normal(keys[0], (BATCH, LENGTH, WIDTH)))


COLUMNS = ("rms", "u / x", "tokens", "influence", "gain", "+-", "sigma", "cross", "skip")


@jax.jit
def measure(stack: Stack, key: jax.Array) -> dict[str, Any]:
    """Return the profiles over sublayers, [S] by `COLUMNS`, and the path spectrum of a random change of the stream."""

    def statistics(f: Callable[[jax.Array], jax.Array], x: jax.Array, _: None) -> tuple:
        y = f(x)
        sizes = stream.root_mean_square(y), stream.relative_update(x, y - x)
        return y, (*sizes, stream.token_similarity(y))

    _, sizes = scan_steps(stack, statistics, stack.stream)
    gain, sigma = gains(stack, key).update, spectral_norms(stack, key).update.value
    skip = skip_effects(stack).sum(1) / jnp.maximum(jnp.arange(stack.sublayers)[::-1], 1)
    jacobians = (gain.value, gain.error, sigma, token_shares(stack, key).share.value)
    paths = path_spectrum(path_tangents(stack, jax.random.normal(key, stack.stream.shape)))
    profiles = dict(zip(COLUMNS, (*sizes, influences(stack), *jacobians, skip), strict=True))
    return {**profiles, "first": stream.root_mean_square(stack.stream), "paths": paths}


def report(found: dict[str, Any]) -> str:
    """Return the tables as text."""
    count, paths = len(found["rms"]), found["paths"]
    lines = ["sublayer  " + "".join(f"{name:>11}" for name in COLUMNS)]
    for s in range(count):
        numbers = "".join(f"{found[name][s]:11.4f}" for name in COLUMNS)
        lines.append(f"{s:4} {('mix', 'feed')[s % 2]:5}{numbers}")
    lines.append(
        "\ncross: share of |J|_F^2 between tokens; skip: mean effect on later updates of leaving it out\n"
    )
    for law in growth_laws(np.append(found["first"], found["rms"])):
        lines.append(f"{law.name:12} number {law.number:7.4f}   relative error {law.residual:.4f}")
    lines.append(f"\npaths: mean length {paths.length:.2f} of {count}\nlength     share  binomial      |P_k|")
    for k in range(count + 1):
        lines.append(f"{k:6} {paths.share[k]:9.4f} {comb(count, k) / 2**count:9.4f} {paths.norm[k]:10.4f}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Measure one stack and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    found = measure(own_stack(chosen.depth, chosen.seed), jax.random.key(chosen.seed + 1))
    print(report(jax.device_get(found)))


if __name__ == "__main__":
    main()

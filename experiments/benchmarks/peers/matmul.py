"""The ceiling: the FLOPs of the step at the best rate at which XLA multiplies matrices on this machine.

Tried are the shapes of the feed-forward, of the head, and a square of 2048; the best one of all counts.
"""

import math
import time
from collections.abc import Mapping
from typing import Any

from experiments.benchmarks.contest import Job
from experiments.benchmarks.peers.device import check_platform
from experiments.benchmarks.sizes import sizes_of

SQUARE = 2048
TRIES = 3
LEAST_S = 0.004


def prepare(options: Mapping[str, Any]) -> Job:
    """Return a job whose seconds are those of the step's FLOPs at the best rate found."""
    import jax
    import jax.numpy as jnp

    check_platform(options["platform"])
    sizes = sizes_of(options)
    multiply = jax.jit(jnp.matmul)
    shapes = {
        (sizes.tokens, sizes.width, 4 * sizes.width),
        (sizes.tokens, 4 * sizes.width, sizes.width),
        (sizes.tokens, sizes.width, sizes.vocab),
        (options.get("square", SQUARE),) * 3,
    }
    pairs = []
    for m, k, n in sorted(shapes):
        left, right = jax.random.split(jax.random.key(m + k + n))
        a, b = (jax.random.normal(left, (m, k), sizes.dtype), jax.random.normal(right, (k, n), sizes.dtype))
        begin = time.perf_counter()
        multiply(a, b).block_until_ready()
        multiply(a, b).block_until_ready()
        begin = time.perf_counter()
        multiply(a, b).block_until_ready()
        # Enough products in a row that starting the first does not count.
        times = math.ceil(LEAST_S / max(time.perf_counter() - begin, 1e-5))
        pairs.append((2 * m * k * n, a, b, times))

    def seconds_per_flop(flops: int, a: jax.Array, b: jax.Array, times: int) -> float:
        begin = time.perf_counter()
        for _ in range(times):
            result = multiply(a, b)
        result.block_until_ready()
        return (time.perf_counter() - begin) / (times * flops)

    def measure() -> float:
        return sizes.flops * min(seconds_per_flop(*pair) for pair in pairs for _ in range(TRIES))

    return Job(measure)

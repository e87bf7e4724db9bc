"""What the loss costs in blocks of positions and with whole logits: `python -m experiments.benchmarks.vocabulary_loss`.

The loss of states [B, T, D] and a tied table [V, D] with its gradient by both, float32: `functional.cross_entropy` of
`read_out` against `functional.cross_entropy_blocked`, compiled ahead. Memory is the compiler's temporary memory, which
is exact; the two run in turns on the same arrays, the order changing from round to round, so that a noisy machine is
noisy for both. A round gives one ratio of seconds and one of processor seconds (where other work shares the machine,
read the second).

Expected at the default sizes (V = 50257, 8 x 256 positions, width 256): memory 0.15 of the whole form's, the same loss
to 1e-6; on two CPU cores a ratio of processor seconds of about 0.8 (0.9 at --width 768, with 0.23 of the memory).
"""

import argparse
import json
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxblock.functional import CrossEntropy, Readout, cross_entropy, cross_entropy_blocked, read_out
from jaxblock.types import Array


def main() -> None:
    """Print one line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=50_257)
    sizes = parser.parse_args()
    draw = np.random.default_rng(0)
    given = (
        jnp.asarray(draw.normal(size=(sizes.batch, sizes.length, sizes.width)), jnp.float32),
        Readout(
            jnp.asarray(draw.normal(size=(sizes.vocabulary, sizes.width)) / sizes.width**0.5, jnp.float32)
        ),
        jnp.asarray(draw.integers(0, sizes.vocabulary, (sizes.batch, sizes.length)), jnp.int32),
    )
    forms = {name: compiled(loss, given) for name, loss in (("whole", whole), ("blocked", blocked))}
    memory = {name: form.memory_analysis().temp_size_in_bytes for name, form in forms.items()}
    (want, wanted), (got, gradient) = (form(*given) for form in forms.values())
    apart = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max() / jnp.abs(b).max()), gradient, wanted)
    rounds_R22 = np.array([turn(forms, given, number) for number in range(sizes.rounds)])
    seconds_2 = np.median(rounds_R22[..., 0], axis=0)
    print(
        json.dumps(
            {
                **vars(sizes),
                "memory_mb": {name: round(size / 1e6, 1) for name, size in memory.items()},
                "memory_ratio": round(memory["blocked"] / memory["whole"], 4),
                "loss": [float(want), float(got)],
                "gradient_apart": max(jax.tree.leaves(apart)),
                "seconds": dict(zip(forms, seconds_2.round(3).tolist(), strict=True)),
                "ratio": spread(rounds_R22[:, 1, 0] / rounds_R22[:, 0, 0]),
                "processor_ratio": spread(rounds_R22[:, 1, 1] / rounds_R22[:, 0, 1]),
            }
        )
    )


def whole(x_BTD: Array, readout: Readout, targets_BT: Array) -> CrossEntropy:
    """Return the loss of whole logits."""
    return cross_entropy(read_out(x_BTD, readout), targets_BT)


def blocked(x_BTD: Array, readout: Readout, targets_BT: Array) -> CrossEntropy:
    """Return the loss in blocks."""
    return cross_entropy_blocked(x_BTD, readout, targets_BT)


def compiled(loss: Any, given: tuple[Any, ...]) -> Any:
    """Return the compiled loss with its gradient by states and table."""
    both = jax.value_and_grad(lambda *given: loss(*given).loss, argnums=(0, 1))
    return jax.jit(both).lower(*given).compile()


def turn(forms: dict[str, Any], given: tuple[Any, ...], number: int) -> list[list[float]]:
    """Return seconds and processor seconds of each form, [2, 2]."""
    taken = {}
    for name in list(forms)[:: 1 if number % 2 else -1]:
        start, busy = time.perf_counter(), time.process_time()
        jax.block_until_ready(forms[name](*given))
        taken[name] = [time.perf_counter() - start, time.process_time() - busy]
    return [taken[name] for name in forms]


def spread(ratios_R: np.ndarray) -> dict[str, float]:
    """Return the median of the rounds' ratios, their quartiles and their range."""
    names = {"median": 50, "lower_quartile": 25, "upper_quartile": 75, "least": 0, "most": 100}
    return {name: round(float(np.percentile(ratios_R, at)), 3) for name, at in names.items()}


if __name__ == "__main__":
    main()

"""What became of a run, from its losses: exactly one outcome, and a sentence where it is not ok."""

import math
from collections.abc import Sequence
from typing import NamedTuple

LEAST_FALL = 0.01
"""A loss that ends within this fraction of where it began is on a plateau: batches differ by as much."""


class Outcome(NamedTuple):
    """An outcome of `jaxblock.sweeps.results.OUTCOMES`, and why."""

    name: str
    reason: str


def stopped(step: int, *, loss: float, gradient_norm: float) -> Outcome:
    """Return the outcome of a run that its guard stopped at `step`."""
    what = "the parameters were"
    if not math.isfinite(gradient_norm):
        what = "the gradient was"
    if not math.isfinite(loss):
        what = "the loss was"
    return Outcome("non_finite", f"{what} not finite at step {step}")


def finished(losses: Sequence[float], *, val_loss: float, uniform: float) -> Outcome:
    """Return the outcome of a run that made all its steps.

    Args:
      losses: training loss of every step, the first one before any update.
      val_loss: validation loss at the end.
      uniform: loss of guessing every token alike.
    """
    first, lowest = losses[0], min(losses)
    tail = losses[-max(1, len(losses) // 10) :]
    last = sum(tail) / len(tail)
    if not math.isfinite(val_loss):
        return Outcome("non_finite", "the validation loss at the end was not finite")
    if last > (1 + LEAST_FALL) * first:
        return Outcome("diverged", f"the training loss began at {first:.4f} and ended at {last:.4f}")
    if last > uniform > lowest:
        words = f"fell to {lowest:.4f} and ended at {last:.4f}, above a uniform guess ({uniform:.4f})"
        return Outcome("diverged", f"the training loss {words}")
    if first - last < LEAST_FALL * first:
        return Outcome("plateau", f"the training loss fell from {first:.4f} to {last:.4f} only")
    return Outcome("ok", "")

"""Does it learn: a few rows by heart, at the config's rate and at others.

Every lane trains the same rows from the same initial values, without dropout and decay. Control: rows whose inputs
are all one token have nothing to tell their targets by, and cannot be learnt.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxblock.diagnose.finding import FAIL, PASS, WARN, Control, Finding
from jaxblock.diagnose.subject import Subject
from jaxblock.training.config import GuardConfig
from jaxblock.training.optimizer import Tuned
from jaxblock.training.step import first_state, make_step

STEPS, LAST, WARMUP = 60, 5, 0.1
FACTORS = (0.1, 1.0, 10.0, 30.0)
"""Multiples of the config's learning rate."""
LEARNT = 0.1
"""Share of ln(classes), a guess's loss, below which rows are known by heart."""
WORSE = 2.0
"""How many times the loss of a smaller rate a rate may end at."""


class Curves(NamedTuple):
    """Losses of the same few rows, nats per target."""

    learning_rate: float
    guess: float
    """ln of the number of tokens, or classes."""
    lanes: dict[float, np.ndarray]
    """By the multiple of the learning rate, [STEPS]; what stopped being finite is inf from there on."""
    blind: np.ndarray
    """Of the control, at the rate that learnt most."""

    @property
    def known(self) -> float:
        """The loss below which rows are known by heart."""
        return LEARNT * self.guess

    def end(self, factor: float) -> float:
        """Return the mean of a lane's last losses."""
        return float(np.mean(self.lanes[factor][-LAST:]))

    @property
    def best(self) -> float:
        """The multiple that ends lowest."""
        return min(self.lanes, key=self.end)


def learn(subject: Subject) -> Curves:
    """Train every lane."""
    config, task = subject.config, subject.task
    still = {"schedule": "constant", "weight_decay": 0.0, "average": 0.0}
    run = config.model_copy(
        update={
            "run": config.run.model_copy(update={"steps": STEPS}),
            "optimizer": config.optimizer.model_copy(update=still),
            "data": config.data.model_copy(update={"accumulation": 1}),
            "guard": GuardConfig(),  # one against spikes would hold a rate that is too high at its last good step
        }
    )
    loss = lambda params, batch, key: task.loss(params, batch, None)  # noqa: E731

    def one(state, batch, rate):
        step = make_step(subject.model, run, loss, tuned=Tuned(rate, WARMUP))
        state, metrics = step(state, batch, jax.random.key(0))
        return state, metrics.loss

    compiled = jax.jit(one, donate_argnums=0)

    def lane(batch, factor: float) -> np.ndarray:
        state = first_state(subject.model, run, jax.tree.map(jnp.array, subject.initial))
        losses = []
        for _ in range(STEPS):
            state, value = compiled(state, batch, jnp.float32(factor * config.optimizer.learning_rate))
            losses.append(value)
        found = np.asarray(jax.device_get(losses), np.float64)
        broken = np.maximum.accumulate(~np.isfinite(found))
        return np.where(broken, np.inf, found)

    rate = config.optimizer.learning_rate
    guess = math.log(subject.model.config.vocab_size if subject.causal else subject.model.classes)
    curves = Curves(rate, guess, {factor: lane(subject.batch, factor) for factor in FACTORS}, np.zeros(STEPS))
    blind = subject.batch._replace(inputs_BT=jnp.zeros_like(subject.batch.inputs_BT))
    return curves._replace(blind=lane(blind, curves.best))


def overfits(curves: Curves) -> Finding:
    """Step 1: a few rows without dropout are learnt by heart, at some rate."""
    end, blind = curves.end(curves.best), float(np.mean(curves.blind[-LAST:]))
    return Finding(
        PASS if end < curves.known else FAIL,
        f"the same rows {STEPS} times, at {curves.best:g} times the learning rate: from {curves.lanes[1.0][0]:.3g} to "
        f"{end:.3g} nats",
        end,
        f"below {LEARNT:g} of a guess's {curves.guess:.3g} nats",
        Control("the inputs of all rows one token", blind, not blind < curves.known),
        "targets, masks and the order of norm and addition (the lines below); then the loss itself",
    )


def too_high(curves: Curves, end: float, smaller: float) -> bool:
    """Whether a rate whose loss ends at `end` is too high: a smaller one ends at half of it, and it knows no row."""
    return end > curves.known and end > WORSE * smaller


def learning_rate(curves: Curves) -> Finding:
    """Whether a much smaller rate would learn better: then this one is far too high."""
    low, own, ten, high = (curves.end(factor) for factor in FACTORS)
    slow = own > curves.known and own > WORSE * ten and own > WORSE * high
    return Finding(
        FAIL if too_high(curves, own, low) else WARN if slow else PASS,
        f"at {curves.learning_rate:g} the rows end at {own:.3g} nats, at a tenth of it at {low:.3g}, at ten times at "
        f"{ten:.3g}",
        own / low if low > 0 else math.inf,
        f"below {WORSE:g} times the loss at a tenth of the rate, or the rows known by heart",
        Control(
            f"30 times the rate ({30 * curves.learning_rate:g})",
            high / own if own > 0 else math.inf,
            too_high(curves, high, own),
        ),
        "a smaller optimizer.learning_rate or a longer warm-up; then jaxblock check depth"
        if too_high(curves, own, low)
        else "a larger optimizer.learning_rate: ten and thirty times as much learn better",
    )

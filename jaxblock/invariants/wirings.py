"""The wirings a block can be recognised as, each as a block of plain numpy that can be run: the hypotheses.

A sublayer is  y = norm_sum(skip(x) + norm_branch(gain * f(norm_read(x))))  with each norm there or not, and a skip
that is x, norm(x) or missing. What a wiring does when it is probed is not written down anywhere: it is measured on
these blocks by the function that measures the user's, so the two cannot disagree.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np


class Wiring(NamedTuple):
    """One sublayer, by what stands where."""

    skip: str
    """identity, norm (the stream is normalized before branch and skip part), or none."""
    norm_read: bool
    """Whether the branch reads a normalized stream."""
    norm_branch: bool
    """Whether the branch's output is normalized before it is added."""
    norm_sum: bool
    """Whether the sum is normalized."""


NO_SKIP = "none"
WIRINGS: Mapping[str, Wiring] = {
    NO_SKIP: Wiring("none", True, False, False),
    "no_norm": Wiring("identity", False, False, False),
    "pre_norm": Wiring("identity", True, False, False),
    "post_norm": Wiring("identity", False, False, True),
    "peri_norm": Wiring("identity", True, True, False),
    "branch_norm": Wiring("identity", False, True, False),
    "second norm after the add": Wiring("identity", True, False, True),
    "norm on the skip path": Wiring("norm", True, False, False),
}


class Hypothesis(NamedTuple):
    """What a block may be."""

    attention: str
    """A name of `WIRINGS`."""
    feed_forward: str
    """A name of `WIRINGS`."""
    order: str
    """serial: feed-forward reads what attention wrote; parallel: one sum, and one wiring, for both."""

    @property
    def name(self) -> str:
        """The wiring's name where both sublayers have the same, else what is wrong or mixed."""
        if self.attention == self.feed_forward:
            return self.attention
        if self.feed_forward == NO_SKIP:
            return "only the attention sublayer has a skip"
        if self.attention == NO_SKIP:
            return "only the feed-forward sublayer has a skip"
        return f"attention: {self.attention}, feed-forward: {self.feed_forward}"


def hypotheses() -> Iterator[tuple[Hypothesis, Callable]]:
    """Yield every hypothesis with a block of it, `(x_NBTD, attention gain, feed-forward gain) -> x_NBTD`.

    Most come twice: a feed-forward without biases whose activation is ReLU obeys f(c x) = c f(x), and then a norm
    behind it hides whether there was one before.
    """
    pairs = [Hypothesis(a, f, "serial") for a, f in itertools.product(WIRINGS, repeat=2)]
    for hypothesis in pairs + [Hypothesis(name, name, "parallel") for name in WIRINGS]:
        for feed in (_feed, _feed_homogeneous):
            yield hypothesis, _block(hypothesis, feed)


def _block(hypothesis: Hypothesis, feed: Callable) -> Callable:
    attention, feed_forward = WIRINGS[hypothesis.attention], WIRINGS[hypothesis.feed_forward]

    def serial(x: np.ndarray, attention_gain: np.ndarray, feed_forward_gain: np.ndarray) -> np.ndarray:
        x = _connect(attention, x, lambda h: attention_gain * _attend(h))
        return _connect(feed_forward, x, lambda h: feed_forward_gain * feed(h))

    def parallel(x: np.ndarray, attention_gain: np.ndarray, feed_forward_gain: np.ndarray) -> np.ndarray:
        return _connect(attention, x, lambda h: attention_gain * _attend(h) + feed_forward_gain * feed(h))

    return parallel if hypothesis.order == "parallel" else serial


def _connect(wiring: Wiring, x: np.ndarray, f: Callable) -> np.ndarray:
    y = f(_norm(x) if wiring.norm_read else x)
    y = _norm(y) if wiring.norm_branch else y
    skip = {"identity": lambda: x, "norm": lambda: _norm(x), "none": lambda: np.zeros_like(x)}[wiring.skip]()
    return _norm(skip + y) if wiring.norm_sum else skip + y


def _norm(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-12)


@functools.cache
def _weight(rows: int, columns: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(scale=rows**-0.5, size=(rows, columns))


def _attend(h: np.ndarray) -> np.ndarray:
    """Causal softmax attention of one head, with an output bias; not homogeneous, because its scores are quadratic."""
    width, length = h.shape[-1], h.shape[-2]
    query, key, value = (h @ _weight(width, width, seed) for seed in range(3))
    scores = np.where(np.tri(length, dtype=bool), query @ np.swapaxes(key, -1, -2), -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ value + _weight(1, width, 3)[0]


def _feed(h: np.ndarray) -> np.ndarray:
    """A SiLU feed-forward with biases."""
    width = h.shape[-1]
    z = h @ _weight(width, 4 * width, 4) + _weight(1, 4 * width, 5)[0]
    return z * (1 + np.tanh(z / 2)) / 2 @ _weight(4 * width, width, 6) + _weight(1, width, 7)[0]


def _feed_homogeneous(h: np.ndarray) -> np.ndarray:
    width = h.shape[-1]
    return np.maximum(h @ _weight(width, 4 * width, 4), 0) @ _weight(4 * width, width, 6)

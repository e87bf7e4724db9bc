"""The calls that tell one wiring from another, and the relative error of every law they test: numpy, on the host."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

_SCALE = 16.0
"""Factor on x: a power of two, so that scaling is exact; large, so that a branch that reads x itself notices."""
_GAINS_K = _SCALE ** np.arange(-3, 8)
"""Factors on a branch, from far below to far above any stream; the same ratio, so that 16 g is on the ladder too."""
_ONE = 3
"""Place of the gain 1 on the ladder."""
_RMS = 0.5
_PROBES = 3 + 2 * (2 * len(_GAINS_K) + 1)


class View(NamedTuple):
    """One branch, with the other one at gain 0: E(g, x) is the block's output at gain g, G the largest gain."""

    constant: float
    """How far E(G, x) is from the same vector for every token."""
    linear: float
    """E(G, x) - E(0, x) against 16 times the same at G / 16."""
    bounded: float
    """E(G, x) against E(G / 16, x); 0 together with `linear`: the gain moves nothing."""
    flat_from_1: float
    """E(1, x) against E(G, x): 0 = the gain, once it is at all felt, changes nothing."""
    flat_from_16: float
    """E(16, x) against E(G, x)."""
    skipless: float
    """How far E(G, x) + E(-G, x) is from the same vector for every token: 0 = at large gain no skip is left."""
    update_scale: float
    """E(G, 16 x) - E(0, 16 x) against the same at x: 0 = the branch reads a normalized stream."""
    output_scale: float
    """E(g, 16 x) against E(g, x), at the gain g where branch and stream are comparable."""
    traded_scale: float
    """E(16 g, 16 x) against E(g, x): 0 = the sum is normalized and the branch reads a normalized stream."""


class BlockMeasures(NamedTuple):
    """Relative errors of laws, 0 = the law holds, and statistics of the output."""

    identity: float
    """Zero branches: x' - x against the same vector for every token."""
    shift: float
    """Zero branches: size of that vector against x; a bias of a norm behind a branch."""
    constant: float
    """Zero branches: x' against the same vector for every token."""
    normalized: float
    """Zero branches: x' of 16 x against x' of x."""
    odd: float
    """Zero branches: x' of x plus x' of -x against the same vector for every token; not 0 = a bias between norms."""
    parallel: float
    """What of the output with both branches lies outside the plane of the outputs with one of them."""
    output_mean: float
    """Largest mean over features of a token's output, both branches comparable to the stream."""
    output_rms: tuple[float, float]
    """Smallest and largest root mean square over features of a token's output, there."""
    attention: View
    feed_forward: View


class _Answers(NamedTuple):
    """What the block returned, with the branch of one view on and the other off."""

    plain_KBTD: np.ndarray
    scaled_KBTD: np.ndarray
    negative_BTD: np.ndarray


def measure_block(respond: Callable[..., np.ndarray], x_BTD: np.ndarray) -> BlockMeasures:
    """Probe a block and return how far each law is from holding.

    Args:
      respond: (x [N, B, T, D], attention gains [N], feed-forward gains [N]) -> [N, B, T, D] in float64.
      x_BTD: a random stream; it is scaled to a root mean square of 0.5.
    """
    x_BTD = x_BTD * (_RMS / np.sqrt(np.mean(x_BTD**2)))
    factors_N, gains_2N = _plan()
    answers_NBTD = respond(factors_N.reshape(-1, 1, 1, 1) * x_BTD, *gains_2N)
    zero, zero_scaled, zero_flipped = answers_NBTD[:3]
    count = len(_GAINS_K)
    halves = answers_NBTD[3:].reshape(2, 2 * count + 1, *x_BTD.shape)
    seen = [_Answers(half[:count], half[count : 2 * count], half[-1]) for half in halves]
    units = [_comparable_gain(answers.plain_KBTD, zero, x_BTD) for answers in seen]
    one, other = (answers.plain_KBTD[unit] for answers, unit in zip(seen, units, strict=True))
    both = respond(x_BTD[None], *(_GAINS_K[[unit]] for unit in units))[0]
    offset = (zero - x_BTD).mean(axis=(0, 1))
    last = _view(seen[1], zero, zero_scaled, x_BTD)
    centre = (seen[1].plain_KBTD[-1] + seen[1].negative_BTD) / 2
    closes = last.bounded < 1e-2 and last.skipless < 1e-2
    return BlockMeasures(
        identity=_ratio(_spread(zero - x_BTD), x_BTD),
        shift=_ratio(offset, x_BTD[0, 0]) if _ratio(_spread(zero - x_BTD), x_BTD) < 1e-2 else 0.0,
        constant=_ratio(_spread(zero), zero),
        normalized=_ratio(zero_scaled - zero, zero),
        odd=_ratio(_spread(zero + zero_flipped), zero),
        parallel=_outside(both, [zero, one, other], centre.mean(axis=(0, 1)) if closes else zero),
        output_mean=float(np.abs(both.mean(axis=-1)).max()),
        output_rms=_range(np.sqrt(np.mean(both**2, axis=-1))),
        attention=_view(seen[0], zero, zero_scaled, x_BTD),
        feed_forward=last,
    )


def _plan() -> tuple[np.ndarray, np.ndarray]:
    """Return the factor on x and the two gains, [2, N], of every call."""
    count = len(_GAINS_K)
    factors = [1.0, _SCALE, -1.0]
    gains_2N = np.zeros((2, _PROBES))
    for view in range(2):
        first = len(factors)
        factors += [1.0] * count + [_SCALE] * count + [1.0]
        gains_2N[view, first : len(factors)] = [*_GAINS_K, *_GAINS_K, -_GAINS_K[-1]]
    return np.array(factors), gains_2N


def _view(answers: _Answers, zero: np.ndarray, zero_scaled: np.ndarray, x_BTD: np.ndarray) -> View:
    plain, scaled, negative = answers
    update, before = plain[-1] - zero, plain[-2] - zero
    k = _comparable_gain(plain, zero, x_BTD)
    return View(
        constant=_ratio(_spread(plain[-1]), plain[-1]),
        linear=_ratio(update - _SCALE * before, update),
        bounded=_ratio(plain[-1] - plain[-2], update),
        flat_from_1=_ratio(plain[-1] - plain[_ONE], update),
        flat_from_16=_ratio(plain[-1] - plain[_ONE + 1], update),
        skipless=_ratio(_spread(plain[-1] + negative), _spread(plain[-1])),
        update_scale=_ratio(scaled[-1] - zero_scaled - update, update),
        output_scale=_ratio(scaled[k] - plain[k], plain[k] - zero),
        traded_scale=_ratio(scaled[k + 1] - plain[k], plain[k] - zero),
    )


def _comparable_gain(plain_KBTD: np.ndarray, zero: np.ndarray, x_BTD: np.ndarray) -> int:
    """Return the rung of the ladder, not the last, where the update is nearest to the stream or half its limit."""
    sizes_K = np.array([_size(plain - zero) for plain in plain_KBTD])
    target = min(sizes_K[-1] / 2, _size(x_BTD))
    if target == 0:
        return len(_GAINS_K) // 2
    return int(np.argmin(np.abs(np.log(np.maximum(sizes_K[:-1], 1e-30) / target))))


def _outside(both: np.ndarray, basis: list[np.ndarray], origin: np.ndarray) -> float:
    """Return how much of `both` - origin, token by token, no mixture of the basis - origin can make."""
    target = (both - origin).reshape(-1, both.shape[-1])
    vectors = np.stack([x - origin for x in basis], axis=-1).reshape(*target.shape, len(basis))
    # Columns of equal size: the cut-off for what counts as zero is relative.
    sizes = np.linalg.norm(vectors, axis=1, keepdims=True)
    vectors = vectors / np.where(sizes > 1e-6 * _size(both), sizes, np.inf)
    coefficients = np.linalg.pinv(vectors, rcond=1e-4) @ target[..., None]
    return _ratio(target - (vectors @ coefficients)[..., 0], both - basis[0])


def _spread(x_BTD: np.ndarray) -> np.ndarray:
    """Return what differs between tokens."""
    return x_BTD - x_BTD.mean(axis=(0, 1))


def _size(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(x**2)))


def _ratio(error: np.ndarray, reference: np.ndarray) -> float:
    """Return the size of one array against another's; 0 / 0 = 0."""
    top, bottom = _size(error), _size(reference)
    return 0.0 if top == 0 else top / bottom if bottom > 0 else np.inf


def _range(x: np.ndarray) -> tuple[float, float]:
    return float(x.min()), float(x.max())

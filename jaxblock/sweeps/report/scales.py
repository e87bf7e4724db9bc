"""Axes of a figure: where a value lies between 0 and 1, and which ticks to write."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

SCALES = ("linear", "log2", "log10")


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One axis: what is on it, and how far apart values are drawn."""

    label: str
    """Quantity and unit, and which depth, parameter count or FLOP convention."""
    scale: str = "linear"
    """A name of `SCALES`."""
    ticks: tuple[float, ...] = ()
    """Values to write, as the depths of a sweep; () = chosen from the limits."""
    floor: float | None = None
    """A value that the axis must contain, as 0 for a fraction."""
    ceiling: float | None = None


@dataclass(frozen=True)
class Limits:
    """An axis with its ends."""

    axis: Axis
    low: float
    high: float
    empty: bool = False
    """Nothing lies on it: its ends mean nothing and no tick is written."""

    def place(self, value: float) -> float:
        """Return where a value lies: 0 at the low end, 1 at the high end."""
        low, high, at = (_stretch(self.axis.scale, number) for number in (self.low, self.high, value))
        return (at - low) / (high - low)

    def ticks(self, most: int = 7) -> list[float]:
        """Return the values to write, at most `most` of them."""
        if self.empty:
            return []
        inside = [tick for tick in self.axis.ticks if -1e-9 <= self.place(tick) <= 1 + 1e-9]
        if inside:
            return inside[:: math.ceil(len(inside) / most)]
        if self.axis.scale == "linear":
            return _linear_ticks(self.low, self.high, most)
        base = 2 if self.axis.scale == "log2" else 10
        return _power_ticks(self.low, self.high, base, most)


def limits(axis: Axis, values: Sequence[float]) -> Limits:
    """Return an axis that contains all values that can be drawn on it, with a little room at the ends."""
    drawable = [value for value in values if math.isfinite(value) and (axis.scale == "linear" or value > 0)]
    drawable += [end for end in (axis.floor, axis.ceiling) if end is not None]
    empty = not drawable
    if empty:
        drawable = [0.0, 1.0] if axis.scale == "linear" else [1.0, 10.0]
    low, high = min(drawable), max(drawable)
    start, end = _stretch(axis.scale, low), _stretch(axis.scale, high)
    narrowest = 0.5 if axis.scale != "linear" else max(abs(start), abs(end), 1e-9) * 0.02
    room = max(0.07 * (end - start), (narrowest - (end - start)) / 2)
    start -= 0 if axis.floor is not None and axis.floor == low else room
    end += 0 if axis.ceiling is not None and axis.ceiling == high else room
    return Limits(axis, _shrink(axis.scale, start), _shrink(axis.scale, end), empty)


def number(value: float) -> str:
    """Return a number for a tick or a table: at most four digits, and 1e-4 rather than 0.0001."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    if 1e-3 <= abs(value) < 1e5:
        short = f"{value:.4g}"
        return short if "e" not in short else f"{value:.0f}"
    mantissa, exponent = f"{value:.3g}".split("e") if "e" in f"{value:.3g}" else f"{value:.2e}".split("e")
    mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
    return f"{mantissa}e{int(exponent)}"


def _stretch(scale: str, value: float) -> float:
    if scale == "linear":
        return value
    if value <= 0:
        return -math.inf
    return math.log2(value) if scale == "log2" else math.log10(value)


def _shrink(scale: str, value: float) -> float:
    if scale == "linear":
        return value
    return 2.0**value if scale == "log2" else 10.0**value


def _linear_ticks(low: float, high: float, most: int) -> list[float]:
    """Return round values, steps of 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(step for step in (power, 2 * power, 5 * power, 10 * power) if (high - low) / step <= most)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _power_ticks(low: float, high: float, base: int, most: int) -> list[float]:
    """Return powers of the base, with 2 and 5 times the powers of ten where there are few."""
    first, last = math.log(low, base), math.log(high, base)
    powers = range(math.floor(first) - 1, math.ceil(last) + 2)
    factors = (1, 2, 5) if base == 10 and last - first < 2 else (1,)
    ticks = [factor * float(base) ** power for power in powers for factor in factors]
    inside = [tick for tick in ticks if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]
    if len(inside) < 2:
        return _linear_ticks(low, high, most)
    return inside[:: math.ceil(len(inside) / most)]

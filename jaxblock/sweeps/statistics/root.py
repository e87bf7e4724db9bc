"""Zeros and minima of a function of one number on an interval."""

from collections.abc import Callable

HALVINGS = 45


def zero_between(function: Callable[[float], float], low: float, high: float) -> float:
    """Return x with function(x) = 0; ValueError where the two ends have one sign."""
    rising = function(high) > 0
    if (function(low) > 0) == rising:
        raise ValueError(f"the function has one sign at {low} and {high}: there is no zero to find")
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if (function(middle) > 0) == rising else (middle, high)
    return (low + high) / 2


def lowest_between(function: Callable[[float], float], low: float, high: float) -> float:
    """Return where a function with one minimum between low and high is lowest, by golden sections."""
    ratio = (5**0.5 - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = function(left), function(right)
    for _ in range(HALVINGS):
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = function(right)
    return (low + high) / 2

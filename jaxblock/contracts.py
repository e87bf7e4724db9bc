"""Checks at the door: sentences for users (ValueError), chex assertions for programmers, all before any compile.

A sentence names the field, the value that came, what is allowed and the nearest valid name.
"""

import difflib
import math
import os
import sys
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxblock.types import Array

SMALLEST = float(np.finfo(np.float32).tiny)
"""Below it programs of most devices have 0."""


def nearest(name: str, allowed: Iterable[str]) -> str:
    """Return " (did you mean 'x'?)" for the closest of `allowed`, or "" when none is close."""
    close = difflib.get_close_matches(name, list(allowed), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def check_choice(field: str, value: Any, allowed: Iterable[str]) -> None:
    """Raise ValueError unless `value` is one of `allowed`."""
    names = sorted(allowed)
    if value not in names:
        raise ValueError(
            f"{field} is {value!r}; it must be one of {', '.join(names)}{nearest(str(value), names)}"
        )


def check_file_name(field: str, value: str) -> None:
    """Raise ValueError unless `value` can be the path of a file: some text, without a NUL."""
    if not value or "\0" in value:
        raise ValueError(f"{field} is {value!r}; it must be the name of a file or a folder")
    try:
        os.fsencode(value)
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{field} is {value!r}, which this system cannot write as the name of a file"
        ) from error


def check_integer(field: str, value: Any, *, least: int, most: int = 2**31 - 1) -> None:
    """Raise ValueError unless `value` is an int (no bool, no float) from `least` to `most`, by default an int32."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{field} is {value!r}; it must be a whole number of at least {least}")
    if value > most:
        raise ValueError(f"{field} is {value!r}; it must be a whole number of at most {most}")


def check_number(
    field: str,
    value: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
) -> None:
    """Raise ValueError unless `value` is a real number in the range, as float32, too; NaN and infinities never are.

    `least` and `most` include the bound, `above` and `below` exclude it. What float32 would make infinite, or equal
    to a bound that is excluded, is refused: programs compute with that.
    """
    bounds = [
        (f"at least {least}", lambda v: least is None or v >= least, least),
        (f"above {above}", lambda v: above is None or v > above, above),
        (f"at most {most}", lambda v: most is None or v <= most, most),
        (f"below {below}", lambda v: below is None or v < below, below),
    ]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    finite = is_number and abs(value) <= sys.float_info.max  # a whole number may be too large for a float
    allowed = " and ".join(text for text, _, bound in bounds if bound is not None)
    wanted = f"{field} is {value!r}; it must be a finite number {allowed}".rstrip()
    if not finite or not all(holds(value) for _, holds, _ in bounds):
        raise ValueError(wanted)
    with np.errstate(over="ignore"):
        single = float(np.float32(value))
    single = 0.0 if abs(single) < SMALLEST else single
    strict = [holds for text, holds, _ in bounds if text.startswith(("above", "below"))]
    if not math.isfinite(single) or not all(holds(single) for holds in strict):
        raise ValueError(f"{wanted}, also in float32, where it is {single:g}")


def check_boolean(name: str, mask: Array) -> None:
    """Raise ValueError unless `mask` is boolean: a 0/1 mask could be taken for an additive bias."""
    if mask.dtype != jnp.bool_:
        raise ValueError(
            f"{name} has dtype {mask.dtype}; masks are boolean, True = may attend / is real: "
            f"pass {name}.astype(bool)"
        )

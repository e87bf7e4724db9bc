"""Positions of tokens: sinusoidal and learned tables, rotary angles, slopes of linear attention biases."""

import chex
import jax.numpy as jnp
import numpy as np

from jaxblock.contracts import check_choice, check_integer, check_number
from jaxblock.types import Array


def sinusoidal(length: int, width: int) -> Array:
    """Return [T, D] float32: sin(t / 10000^(2i/D)) in channel 2i, cos of the same in channel 2i + 1.

    Raises ValueError for a length below 1 and a width that is odd or below 2. Source: arXiv 1706.03762,
    section 3.5.
    """
    check_integer("length", length, least=1)
    check_even("width", width)
    angles = np.arange(length)[:, None] * _frequencies(width, 10000.0)[None, :]
    table = np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(length, width)
    return jnp.asarray(table, jnp.float32)


def learned(table_TD: Array, positions: Array) -> Array:
    """Return the rows of `table_TD` at `positions`, [..., T] integers -> [..., T, D].

    Raises ValueError, when traced, if `positions` is longer than the table. A position outside the table (a
    traced decoding step past its end) gives NaN, never another position's row. Source: arXiv 1705.03122,
    section 3.1.
    """
    chex.assert_rank(table_TD, 2)
    chex.assert_type(positions, int)
    rows, length = table_TD.shape[0], positions.shape[-1] if positions.ndim else 1
    if length > rows:
        raise ValueError(
            f"the sequence has {length} positions and the position table {rows} rows; it must fit"
        )
    return table_TD.at[positions].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)


def rotary_angles(positions: Array, head_dim: int, *, base: float = 10000.0) -> Array:
    """Return position * base^(-2i/K) for i < K/2: [..., T] integers -> [..., T, K/2] float32.

    Raises ValueError for an odd head_dim and a base that is not positive. Source: arXiv 2104.09864, eq. 15.
    """
    check_even("head_dim", head_dim)
    check_number("base", base, above=0.0)
    frequencies = jnp.asarray(_frequencies(head_dim, base), jnp.float32)
    angles = positions.astype(jnp.float32)[..., None]
    return angles * frequencies.reshape((1,) * positions.ndim + (-1,))


def apply_rotary(x_BTHK: Array, angles: Array, *, convention: str = "half") -> Array:
    """Rotate channel pairs (a, b) of every head by its angle: (a cos - b sin, a sin + b cos).

    x: [B, T, H, K]; angles: [T, K/2] or [B or 1, T, K/2]. Computed in float32 (float64 for float64 x), cast
    back to the dtype of x. convention: pairs are channels (i, i + K/2) for 'half' (GPT-NeoX, Llama in
    transformers) and (2i, 2i + 1) for 'interleaved' (arXiv 2104.09864, eq. 34; GPT-J). The two are one map up
    to the order of channels: half(x[..., p]) = interleaved(x)[..., p] with p = evens then odds.
    Raises ValueError for an odd head dim, angles that do not fit or an unknown convention.
    """
    check_choice("convention", convention, ("half", "interleaved"))
    chex.assert_rank(x_BTHK, 4)
    chex.assert_type(x_BTHK, float)
    batch, length, _, width = x_BTHK.shape
    check_even("head_dim", width)
    angles_BTK = angles[None] if angles.ndim == 2 else angles
    if angles_BTK.shape not in ((batch, length, width // 2), (1, length, width // 2)):
        raise ValueError(
            f"angles have shape {angles.shape}; for x of shape {x_BTHK.shape} they are "
            f"[{length}, {width // 2}] or [{batch} or 1, {length}, {width // 2}]"
        )
    wide = jnp.promote_types(x_BTHK.dtype, jnp.float32)
    cos, sin = (f(angles_BTK.astype(wide))[:, :, None, :] for f in (jnp.cos, jnp.sin))
    x = x_BTHK.astype(wide)
    a, b = (x[..., 0::2], x[..., 1::2]) if convention == "interleaved" else jnp.split(x, 2, axis=-1)
    pair = (a * cos - b * sin, a * sin + b * cos)
    if convention == "interleaved":
        return jnp.stack(pair, axis=-1).reshape(x.shape).astype(x_BTHK.dtype)
    return jnp.concatenate(pair, axis=-1).astype(x_BTHK.dtype)


def alibi_slopes(heads: int) -> Array:
    """Return [H] float32 slopes 2^(-8h/H), h = 1..H, for a power of two.

    Otherwise the slopes of the power of two below, then every other slope of the one above (the rule of the
    authors' code). Raises ValueError for heads below 1. Source: arXiv 2108.12409, section 3.
    """
    check_integer("heads", heads, least=1)
    lower = 2 ** (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (h + 1) / lower) for h in range(lower)]
    between = [2.0 ** (-8.0 * (h + 1) / (2 * lower)) for h in range(0, 2 * lower, 2)]
    return jnp.asarray((slopes + between)[:heads], jnp.float32)


def check_even(field: str, value: int) -> None:
    """Raise ValueError unless `value` is an even whole number above zero."""
    check_integer(field, value, least=2)
    if value % 2:
        raise ValueError(f"{field} is {value}; it must be even: channels are taken in pairs")


def _frequencies(width: int, base: float) -> np.ndarray:
    return base ** (-np.arange(0, width, 2, dtype=np.float64) / width)

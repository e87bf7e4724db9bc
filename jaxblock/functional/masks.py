"""Who may attend to whom: one record, and the boolean block it means for any slice of queries and keys.

True = may attend / is real. Query i of Q sits at position i + T - Q among the T keys: with fewer queries than
keys the causal mask is aligned to the end. A pattern hides a key when any of its parts does.
"""

import dataclasses
import functools
from typing import Any, TypeAlias

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxblock.contracts import check_boolean, check_integer
from jaxblock.types import Array

Window: TypeAlias = int | tuple[int | None, int | None] | Array | None
Limit: TypeAlias = int | Array | None

_UNLIMITED = np.iinfo(np.int32).max


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class AttentionPattern:
    """The parts of a mask, all optional; a pytree: causal and a Python window are static, arrays are leaves.

    causal: a query sees its own position and earlier ones.
    window: int W counts the token itself, |i - j| < W (W = 1 is the token alone; with `causal`, itself and
        W - 1 earlier tokens). Tuple (left, right): so many tokens to each side beyond itself, None =
        unlimited on that side; (2, 0) never looks into the future, causal flag or not. An integer scalar
        array means the same as an int and may be traced (a window per layer, scanned); there 0 = unlimited.
    key_valid_BT: [B or 1, T] boolean, False = padding.
    query_segments_BQ, key_segments_BT: [B or 1, Q] and [B or 1, T] integers, given together; a query sees
        keys of its own segment only (packed documents).
    mask: [B or 1, H or 1, Q or 1, T] boolean.
    query_positions_BQ, key_positions_BT: [B or 1, Q] and [B or 1, T] integers, given together: where queries and
        keys sit, for causal, window and linear bias, in place of the order of the axes (keys of a cache, which
        may lie in any order). Only implementation 'xla' takes them.
    Raises ValueError for a static window that is not positive (a side below 0), here; for arrays of a wrong
    shape or dtype when the pattern is used.
    """

    causal: bool = False
    window: Window = None
    key_valid_BT: Array | None = None
    query_segments_BQ: Array | None = None
    key_segments_BT: Array | None = None
    mask: Array | None = None
    query_positions_BQ: Array | None = None
    key_positions_BT: Array | None = None
    # Kept beside the window, so that a placeholder for it (None, an int, an object) stays a leaf.
    window_is_array: bool = dataclasses.field(init=False, repr=False, default=False)

    def __post_init__(self) -> None:
        if not isinstance(self.causal, bool):
            raise ValueError(f"causal is {self.causal!r}; it must be True or False")
        is_array = isinstance(self.window, jax.Array | np.ndarray | np.generic)
        object.__setattr__(self, "window_is_array", is_array)
        if self.window is None or is_array:
            return
        if not isinstance(self.window, tuple):
            check_integer("window", self.window, least=1)
        elif len(self.window) != 2:
            raise ValueError(f"window is {self.window!r}; a tuple is (left, right)")
        else:
            for name, side in zip(("left", "right"), self.window, strict=True):
                if side is not None:
                    check_integer(f"window ({name})", side, least=0)


EVERYONE = AttentionPattern()
"""The pattern that hides nothing."""

_PAIRS = (("query_segments_BQ", "key_segments_BT"), ("query_positions_BQ", "key_positions_BT"))
_LEAVES = ("key_valid_BT", "query_segments_BQ", "key_segments_BT", "mask", *_PAIRS[1])


def _flatten(pattern: AttentionPattern) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    window, is_array = pattern.window, pattern.window_is_array
    leaves = (window if is_array else None, *(getattr(pattern, name) for name in _LEAVES))
    return leaves, (pattern.causal, is_array, None if is_array else window)


def _unflatten(static: tuple[Any, ...], leaves: tuple[Any, ...]) -> AttentionPattern:
    # Not through __init__: tree transformations put things that are no arrays where the leaves were.
    pattern = object.__new__(AttentionPattern)
    causal, is_array, window = static
    values = (causal, is_array, leaves[0] if is_array else window, *leaves[1:])
    for name, value in zip(("causal", "window_is_array", "window", *_LEAVES), values, strict=True):
        object.__setattr__(pattern, name, value)
    return pattern


jax.tree_util.register_pytree_node(AttentionPattern, _flatten, _unflatten)


def reach(pattern: AttentionPattern) -> tuple[Limit, Limit]:
    """Return how far (left, right) a query sees beyond itself: int, traced scalar, or None = unlimited."""
    window = pattern.window
    left: Limit
    right: Limit
    if window is None or isinstance(window, tuple):
        left, right = window or (None, None)
    elif isinstance(window, int):
        left = right = window - 1
    else:
        window = jnp.asarray(window)
        if window.ndim or not jnp.issubdtype(window.dtype, jnp.integer):
            raise ValueError(
                f"window is an array of shape {window.shape} and dtype {window.dtype}; "
                "it must be an integer scalar"
            )
        window = window.astype(jnp.int32)  # narrower, "unlimited" would wrap; unsigned, so would -right
        left = right = jnp.where(window > 0, window - 1, _UNLIMITED)
    return left, 0 if pattern.causal else right


def visible(pattern: AttentionPattern, query_positions: Array, key_positions: Array) -> Array | None:
    """Return the boolean block [B or 1, H or 1, Q or 1, T] for these positions; None when nothing is hidden.

    query_positions: [Q] or [B, Q] integers; key_positions: [T] or [B, T]. The arrays in `pattern` must
    already belong to these positions (`cut` takes a slice of them). Positions enter through causal and window
    only, so a decoder with a key buffer gets its mask here too, from the traced position of the new token.
    Raises ValueError for a mask that is not boolean and for a window array that is not an integer scalar.
    """
    blocks = [*_visible_by_position(pattern, query_positions, key_positions), *_visible_by_array(pattern)]
    return functools.reduce(jnp.logical_and, blocks) if blocks else None


def visibility(pattern: AttentionPattern, queries: int, keys: int) -> Array | None:
    """Return the whole mask [B or 1, H or 1, Q or 1, T]; None when nothing is hidden.

    Query i sits at position i + keys - queries, or where the pattern says. Raises ValueError as `check_pattern`
    and `visible` do.
    """
    check_pattern(pattern, queries=queries, keys=keys)
    if pattern.query_positions_BQ is not None and pattern.key_positions_BT is not None:
        return visible(pattern, pattern.query_positions_BQ, pattern.key_positions_BT)
    return visible(pattern, jnp.arange(queries) + (keys - queries), jnp.arange(keys))


def distances(pattern: AttentionPattern, queries: int, keys: int) -> Array:
    """Return query position minus key position: [Q, T], or [B or 1, Q, T] where the pattern gives positions."""
    if pattern.query_positions_BQ is not None and pattern.key_positions_BT is not None:
        return pattern.query_positions_BQ[:, :, None] - pattern.key_positions_BT[:, None, :]
    return jnp.arange(queries)[:, None] + (keys - queries) - jnp.arange(keys)[None, :]


def check_no_positions(pattern: AttentionPattern, implementation: str) -> None:
    """Raise ValueError if the pattern gives positions, for an implementation that counts along the axes."""
    if pattern.query_positions_BQ is not None or pattern.key_positions_BT is not None:
        raise ValueError(
            f"implementation {implementation!r} counts positions along the axes and takes no query_positions_BQ or "
            "key_positions_BT; use implementation='xla'"
        )


def cut(
    pattern: AttentionPattern, *, query_start: Array | int, queries: int, key_start: Array | int, keys: int
) -> AttentionPattern:
    """Return the pattern, its arrays cut to `queries` and `keys` from the (traced) starts."""

    def take(x: Array | None, axis: int, start: Array | int, size: int) -> Array | None:
        if x is None or x.shape[axis] == 1:  # a broadcast axis stays one
            return x
        return jax.lax.dynamic_slice_in_dim(x, start, size, axis)

    return dataclasses.replace(
        pattern,
        key_valid_BT=take(pattern.key_valid_BT, 1, key_start, keys),
        query_segments_BQ=take(pattern.query_segments_BQ, 1, query_start, queries),
        key_segments_BT=take(pattern.key_segments_BT, 1, key_start, keys),
        mask=take(take(pattern.mask, 3, key_start, keys), 2, query_start, queries),
        query_positions_BQ=take(pattern.query_positions_BQ, 1, query_start, queries),
        key_positions_BT=take(pattern.key_positions_BT, 1, key_start, keys),
    )


def check_pattern(
    pattern: AttentionPattern, *, queries: int, keys: int, batch: int | None = None, heads: int | None = None
) -> None:
    """Raise ValueError unless every array has an allowed shape and dtype (batch, heads None: any)."""
    for of_queries, of_keys in _PAIRS:
        x_BQ, x_BT = getattr(pattern, of_queries), getattr(pattern, of_keys)
        if (x_BQ is None) != (x_BT is None):
            raise ValueError(f"{of_queries} and {of_keys} go together; one of them is None")
        _check_shape(of_queries, x_BQ, ((batch, 1), (queries,)))
        _check_shape(of_keys, x_BT, ((batch, 1), (keys,)))
    _check_shape("key_valid_BT", pattern.key_valid_BT, ((batch, 1), (keys,)))
    _check_shape("mask", pattern.mask, ((batch, 1), (heads, 1), (queries, 1), (keys,)))
    for name, mask in (("key_valid_BT", pattern.key_valid_BT), ("mask", pattern.mask)):
        if mask is not None:
            check_boolean(name, mask)
    for name in (*_PAIRS[0], *_PAIRS[1]):
        x = getattr(pattern, name)
        if x is not None and not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(f"{name} has dtype {x.dtype}; {name.split('_')[1]} are integers")


def _check_shape(name: str, x: Array | None, allowed: tuple[tuple[int | None, ...], ...]) -> None:
    if x is None:
        return
    fits = len(x.shape) == len(allowed) and all(
        size in sizes or None in sizes for size, sizes in zip(x.shape, allowed, strict=True)
    )
    if not fits:
        letters = "BHQT" if name == "mask" else name.rpartition("_")[2]
        axes = [
            " or ".join(letter if size is None else str(size) for size in dict.fromkeys(sizes))
            for letter, sizes in zip(letters, allowed, strict=True)
        ]
        shapes = "; that is [B,1,1,T], [B,1,Q,T], [B,H,Q,T] or the like" if name == "mask" else ""
        raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be [{', '.join(axes)}]{shapes}")


def _visible_by_position(pattern: AttentionPattern, queries: Array, keys: Array) -> list[Array]:
    chex.assert_rank([queries, keys], {1, 2})
    left, right = reach(pattern)
    if left is None and right is None:
        return []
    # [Q] -> [1, 1, Q, 1] and [B, Q] -> [B, 1, Q, 1]; distance > 0 is the past.
    rows = queries.reshape(-1, 1, queries.shape[-1], 1)
    columns = keys.reshape(-1, 1, 1, keys.shape[-1])
    distance = rows - columns
    blocks = [] if left is None else [distance <= left]
    return blocks if right is None else [*blocks, distance >= -right]


def _visible_by_array(pattern: AttentionPattern) -> list[Array]:
    blocks = []
    if pattern.key_valid_BT is not None:
        check_boolean("key_valid_BT", pattern.key_valid_BT)
        blocks.append(pattern.key_valid_BT[:, None, None, :])
    if pattern.query_segments_BQ is not None and pattern.key_segments_BT is not None:
        same = pattern.query_segments_BQ[:, :, None] == pattern.key_segments_BT[:, None, :]
        blocks.append(same[:, None])
    if pattern.mask is not None:
        check_boolean("mask", pattern.mask)
        blocks.append(pattern.mask)
    return blocks

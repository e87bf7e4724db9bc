"""How alike streams are: before and after a sublayer, n sublayers apart, and in models of other depths and widths.

    influence           1 - mean cos(x_s, x_{s+1})                              (ShortGPT, arXiv 2403.03853)
    angular distance    mean arccos(cos(x_l, x_{l+n})) / pi                     (arXiv 2403.17887)
    linear CKA          |Y^T X|_F^2 / (|X^T X|_F |Y^T Y|_F), columns centred     (arXiv 1905.00414)

A stack is measured where its stream is one array [B, T, D]; of several there is no x_s, and the answer is None.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxblock.contracts import check_integer
from jaxblock.probes.stack import Stack, scan_steps
from jaxblock.types import Array


def influences(stack: Stack, *, valid_BT: Array | None = None) -> Array | None:
    """Return 1 - mean cos(x before, x after) of every sublayer, float32 [S], over real tokens; None without one array.

    Taken as |a - b|^2 / 2 of unit vectors, which keeps its digits where a sublayer does little.
    """
    if not _is_one_array(stack):
        return None
    real_BT = jnp.ones(stack.stream.shape[:2], jnp.bool_) if valid_BT is None else valid_BT

    def visit(f, x, _):
        y = f(x)
        far_BT = jnp.sum(jnp.square(_unit(y) - _unit(x)), axis=-1) / 2
        return y, jnp.sum(jnp.where(real_BT, far_BT, 0.0)) / jnp.maximum(jnp.sum(real_BT), 1)

    return scan_steps(stack, visit, stack.stream)[1]


def sample_places(valid_BT: np.ndarray, count: int, *, seed: int) -> np.ndarray:
    """Return `count` different real tokens, numbered row by row through [B, T], ascending; on the host.

    Raises:
      ValueError: fewer real tokens than that.
    """
    real = np.flatnonzero(np.asarray(valid_BT))
    check_integer("count", count, least=1)
    if count > len(real):
        raise ValueError(f"count is {count}; there are {len(real)} real tokens to take")
    return np.sort(np.random.default_rng(seed).choice(real, count, replace=False))


def token_states(stack: Stack, places_K: Array | np.ndarray) -> Array | None:
    """Return the stream of some tokens before the first sublayer and after each, [S + 1, K, D]; None without one array.

    Args:
      stack: the stack.
      places_K: tokens, integer, numbered row by row through [B, T] (`sample_places`).
    """
    if not _is_one_array(stack):
        return None
    chex.assert_rank(places_K, 1)
    of = lambda x: x.reshape(-1, x.shape[-1])[places_K]  # noqa: E731

    def visit(f, x, _):
        y = f(x)
        return y, of(y)

    _, after_SKD = scan_steps(stack, visit, stack.stream)
    return jnp.concatenate([of(stack.stream)[None], after_SKD])


def angular_distances(states_NKD: Array) -> Array:
    """Return the mean angle over pi of every two places in depth, [N, N], from 0 (one direction) to 1 (opposite).

    Row l, column l + n is the distance n apart. The angle is 2 atan2(|a - b|, |a + b|), exact where it is small.
    """
    chex.assert_rank(states_NKD, 3)
    unit_NKD = _unit(states_NKD)

    def row(a_KD: Array) -> Array:
        apart, together = (
            jnp.sqrt(jnp.sum(jnp.square(unit_NKD + sign * a_KD[None]), axis=-1)) for sign in (-1.0, 1.0)
        )
        return jnp.mean(2.0 * jnp.arctan2(apart, together), axis=-1) / jnp.pi

    return jax.lax.map(row, unit_NKD)


def linear_cka(x_KD: Array, y_KE: Array) -> Array:
    """Return the linear CKA of two sets of states of the same K tokens, in [0, 1]; 0 where one does not vary.

    1 where one is the other rotated, scaled by one number and moved; not under other linear maps.
    """
    chex.assert_rank([x_KD, y_KE], 2)
    chex.assert_equal_shape_prefix([x_KD, y_KE], 1)
    x, y = (_wide(z) - _wide(z).mean(0, keepdims=True) for z in (x_KD, y_KE))
    x, y = (_ratio(z, jnp.max(jnp.abs(z))) for z in (x, y))  # a fourth power of large numbers is infinite
    cross, own_x, own_y = (_gram(a, b) for a, b in ((y, x), (x, x), (y, y)))
    return _ratio(jnp.square(cross), own_x * own_y)


def cka_matrix(x_NKD: Array, y_MKE: Array) -> Array:
    """Return the linear CKA of every place of one stack with every one of another, [N, M]; widths may differ."""
    chex.assert_rank([x_NKD, y_MKE], 3)
    return jax.lax.map(lambda x_KD: jax.lax.map(lambda y_KE: linear_cka(x_KD, y_KE), y_MKE), x_NKD)


def _is_one_array(stack: Stack) -> bool:
    """Whether the stream is one array, which must then be [B, T, D]."""
    if not isinstance(stack.stream, jax.Array | np.ndarray):
        return False
    if stack.stream.ndim != 3:
        raise ValueError(
            f"Stack.stream has shape {stack.stream.shape}; similarities are those of tokens, [B, T, D]: add axes of 1"
        )
    return True


def _gram(a_KD: Array, b_KE: Array) -> Array:
    """Return |A^T B|_F, of A and B at their own scale."""
    product = jnp.matmul(a_KD.T, b_KE, precision=jax.lax.Precision.HIGHEST)
    return jnp.sqrt(jnp.sum(jnp.square(product)))


def _unit(x: Array) -> Array:
    x = _wide(x)
    return _ratio(x, jnp.sqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True)))


def _wide(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _ratio(a: Array, b: Array) -> Array:
    """Return a / b, 0 where b is 0."""
    return jnp.where(b == 0, 0.0, a / jnp.where(b == 0, 1.0, b))

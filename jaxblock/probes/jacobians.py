"""Jacobians along depth: how much a sublayer, a block and all of a stack stretch a small change of the stream.

J is the Jacobian of a sublayer x -> x + u at the stream it is given, or of its update u alone; dim the entries of the
stream, of which a pytree is one vector. v has entries of +1 or -1, so that |v|^2 = dim and E v v^T = 1:

    gain            E |J v|^2 / |v|^2 = |J|_F^2 / dim                         (Hutchinson)
    growth          E |J_{l0 -> l} v|^2 / dim, all l in one pass              (arXiv 2111.12143, APJN)
    spectral norm   power iteration v <- J^T J v
    spectrum        log sigma of J_{0 -> S} on a random subspace: Q R = J Q at every sublayer

By block: give `whole_blocks(stack)`. Products in float32 or wider; a standard error is that of a mean over draws of v.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from jaxblock.contracts import check_integer
from jaxblock.probes.stack import Stack, inner_product, norm, one_by_one, scan_steps, update_of
from jaxblock.types import Array, Stream

LARGEST = 2048
"""Entries of a stream up to which a whole Jacobian, the square of it, is made."""


class Estimated(NamedTuple):
    """A mean and its standard error, of one shape."""

    value: Array
    error: Array


class Gains(NamedTuple):
    """E |J v|^2 / |v|^2 of every sublayer, [S]."""

    update: Estimated
    """Of u alone: what a branch, with its norm, adds to a change of the stream."""
    sublayer: Estimated
    """Of x + u."""


class TokenShares(NamedTuple):
    """|J|_F^2 / dim of every update, [S], by where a change is made and where it arrives."""

    local: Estimated
    """At the same token."""
    cross: Estimated
    """At another one."""
    share: Estimated
    """cross / (local + cross); 0 where the update does not depend on the stream."""


class SpectralNorms(NamedTuple):
    """Largest singular values of every sublayer, [S]; the error, |J^T J v - sigma^2 v| / sigma, is of the iteration."""

    update: Estimated
    sublayer: Estimated


class SingularValues(NamedTuple):
    """All singular values of every sublayer, [S, dim], largest first."""

    update: Array
    sublayer: Array


class Spectrum(NamedTuple):
    """The Jacobian of a whole stack on r directions, largest first, [r]; exact for that subspace."""

    log_singular: Array
    """log sigma of J restricted to it. In float32 what lies 16 below the largest is round-off."""
    exponents: Array
    """Lyapunov exponents, sum of log |R_ii| over S: growth by sublayer; in sum the same volume, without that limit."""


class Slope(NamedTuple):
    """A least-squares slope and its standard error."""

    value: float
    error: float


class Exponents(NamedTuple):
    """Rates by sublayer; 0 and 0 is the edge of chaos."""

    angle: Slope
    """Slope of the log of the typical angle of two tokens: below 0 tokens become one, above 0 they move apart."""
    gradient: Slope
    """Growth of log |d loss / d x_s| toward the input: above 0 it explodes, below 0 it vanishes."""


def draw_signs(stream: Stream, key: Array, *, samples: int) -> Any:
    """Return `samples` vectors of +1 and -1 of the form of the stream, every leaf [K, ...]."""
    leaves, structure = jax.tree.flatten(stream)
    keys = jax.random.split(key, len(leaves))
    return structure.unflatten(
        [
            jax.random.rademacher(k, (samples, *x.shape), dtype=x.dtype)
            for k, x in zip(keys, leaves, strict=True)
        ]
    )


def gains(stack: Stack, key: Array, *, samples: int = 8) -> Gains:
    """Return the gains of every sublayer and of its update, with the same `samples` (2 or more) vectors for all."""
    check_integer("samples", samples, least=2)
    v_K = draw_signs(stack.stream, key, samples=samples)

    def visit(f: Any, x: Stream, _: None) -> tuple[Stream, tuple[Array, Array]]:
        y, push = jax.linearize(f, x)
        w_K = jax.vmap(push)(v_K)
        u_K = update_of(v_K, w_K)
        return y, (inner_product(u_K, u_K, axes=1), inner_product(w_K, w_K, axes=1))

    _, squares_SK = scan_steps(stack, visit, stack.stream)
    return Gains(*(_mean(square_SK / stack.size) for square_SK in squares_SK))


def frobenius_norm(gain: Estimated, *, size: int = 1) -> Estimated:
    """Return |J|_F = sqrt(size * gain) with its standard error to first order, `size` being `stack.size`.

    With size 1, of a block's update: |J_block - 1|_F / sqrt(dim), how far a block is from doing nothing (arXiv
    2502.05795 calls near 0 in late blocks the curse of depth).
    """
    value = jnp.sqrt(size * gain.value)
    slope = jnp.where(value == 0, 0.0, size / (2 * jnp.where(value == 0, 1.0, value)))
    return Estimated(value, slope * gain.error)


def token_shares(stack: Stack, key: Array, *, samples: int = 8) -> TokenShares:
    """Return how much of every update's Jacobian stays at a token, from changes of one token in each row.

    Raises:
      ValueError: a stream whose leaves are not all [B, T, ...].
    """
    check_integer("samples", samples, least=2)
    shape = _rows(stack.stream)
    key_v, key_t = jax.random.split(key)
    here_KBT = jax.nn.one_hot(jax.random.randint(key_t, (samples, shape[0]), 0, shape[1]), shape[1])
    v_K = jax.tree.map(lambda v: v * _over(here_KBT, v), draw_signs(stack.stream, key_v, samples=samples))

    def visit(f: Any, x: Stream, _: None) -> tuple[Stream, tuple[Array, Array]]:
        y, push = jax.linearize(f, x)
        u_K = update_of(v_K, jax.vmap(push)(v_K))
        local_K = jax.tree.map(lambda u: u * _over(here_KBT, u), u_K)
        cross_K = update_of(local_K, u_K)
        return y, (inner_product(local_K, local_K, axes=1), inner_product(cross_K, cross_K, axes=1))

    _, (local_SK, cross_SK) = scan_steps(stack, visit, stack.stream)
    scale = stack.size / shape[1]  # |v|^2
    local, cross = _mean(local_SK / scale), _mean(cross_SK / scale)
    whole_S = local.value + cross.value
    safe_S = jnp.where(whole_S == 0, 1.0, whole_S)  # not > 0: NaN stays NaN
    share_S = cross.value / safe_S
    # A ratio of means: to first order its error is that of cross - share * whole.
    rest = _mean((cross_SK - share_S[:, None] * (local_SK + cross_SK)) / scale)
    return TokenShares(local, cross, Estimated(share_S, rest.error / safe_S))


def jacobian_growth(stack: Stack, key: Array, *, samples: int = 8, start: int = 0) -> Estimated:
    """Return E |J_{start -> l} v|^2 / dim for l = 0, ..., S, [S + 1]; 1 up to `start`, a number of a sublayer.

    Raises:
      ValueError: fewer than 2 samples, a start that is none of 0, ..., S - 1.
    """
    check_integer("samples", samples, least=2)
    check_integer("start", start, least=0, most=stack.sublayers - 1)
    v_K = draw_signs(stack.stream, key, samples=samples)

    def visit(f: Any, carry: tuple, given: Array) -> tuple[tuple, Array]:
        x, w_K = carry
        y, push = jax.linearize(f, x)
        w_K = jax.tree.map(lambda new, old: jnp.where(given, new, old), jax.vmap(push)(w_K), w_K)
        return (y, w_K), inner_product(w_K, w_K, axes=1)

    begun_S = jnp.arange(stack.sublayers) >= start
    _, squares_SK = scan_steps(stack, visit, (stack.stream, v_K), given=begun_S)
    first_1K = jnp.full((1, samples), float(stack.size), squares_SK.dtype)
    return _mean(jnp.concatenate([first_1K, squares_SK]) / stack.size)


def spectral_norms(stack: Stack, key: Array, *, iterations: int = 30) -> SpectralNorms:
    """Return the largest singular value of every sublayer and of its update: two passes of each an iteration.

    The value is |J v| of a unit vector and so never too large, up to round-off.
    """
    check_integer("iterations", iterations, least=1)
    start_2 = draw_signs(stack.stream, key, samples=2)
    # The update's map is v -> J v - v: both are iterated side by side.
    shift_2 = jnp.array([1.0, 0.0])

    def less(w_2: Any, v_2: Any) -> Any:
        return jax.tree.map(lambda w, v: w - v * _over(shift_2, v), w_2, v_2)

    def visit(f: Any, x: Stream, _: None) -> tuple[Stream, tuple[Array, Array]]:
        y, push = jax.linearize(f, x)
        pull = jax.linear_transpose(push, x)
        forth = lambda v_2: less(jax.vmap(push)(v_2), v_2)  # noqa: E731
        back = lambda w_2: less(one_by_one(pull, w_2), w_2)  # noqa: E731
        v_2 = jax.lax.fori_loop(0, iterations, lambda _, v_2: _unit(back(forth(v_2)), v_2), _unit(start_2))
        w_2 = forth(v_2)
        sigma_2 = norm(w_2, axes=1)
        rest_2 = jax.tree.map(lambda z, v: z - v * _over(sigma_2**2, v), back(w_2), v_2)
        return y, (sigma_2, norm(rest_2, axes=1) / jnp.where(sigma_2 == 0, 1.0, sigma_2))

    _, (sigma_S2, error_S2) = scan_steps(stack, visit, stack.stream)
    return SpectralNorms(*(Estimated(sigma_S2[:, i], error_S2[:, i]) for i in range(2)))


def singular_values(stack: Stack) -> SingularValues:
    """Return all singular values of every sublayer and of its update, from the whole Jacobian.

    Raises:
      ValueError: a stream of more than `LARGEST` entries.
    """
    if stack.size > LARGEST:
        raise ValueError(
            f"the stream has {stack.size} entries; a whole Jacobian is made of at most {LARGEST}: "
            "pass one row, or fewer tokens, or take spectral_norms"
        )
    flat, unflatten = ravel_pytree(stack.stream)

    def visit(f: Any, x: Array, _: None) -> tuple[Array, tuple[Array, Array]]:
        g = lambda x: ravel_pytree(f(unflatten(x)))[0]  # noqa: E731
        y, push = jax.linearize(g, x)
        j = jax.lax.map(push, jnp.eye(len(x), dtype=x.dtype)).T  # one by one: see `stack.one_by_one`
        j = j.astype(jnp.promote_types(j.dtype, jnp.float32))
        values = [jnp.linalg.svd(a, compute_uv=False) for a in (j - jnp.eye(len(x), dtype=j.dtype), j)]
        return y, (values[0], values[1])

    return SingularValues(*scan_steps(stack, visit, flat)[1])


def subspace_spectrum(stack: Stack, key: Array, *, directions: int = 8, token: int | None = None) -> Spectrum:
    """Return the spectrum of the Jacobian from the opened stream to the last, on random directions.

    Args:
      stack: the stack.
      key: draws the directions, from all (with `token`: from that token's) entries of the stream.
      directions: r. The directions are made orthogonal again after every sublayer, which costs r^2 dim.
      token: the position T to which the directions are confined; None = none.

    Raises:
      ValueError: more directions than there are entries to draw them from, no such token.
    """
    entries, mask = stack.size, None
    if token is not None:
        length = _rows(stack.stream)[1]
        check_integer("token", token, least=0, most=length - 1)
        entries //= length
        mask = ravel_pytree(jax.tree.map(lambda x: jnp.zeros_like(x).at[:, token].set(1), stack.stream))[0]
    check_integer("directions", directions, least=1, most=entries)
    flat, unflatten = ravel_pytree(stack.stream)
    wide = jnp.promote_types(flat.dtype, jnp.float32)
    start_XR = jax.random.normal(key, (flat.size, directions), wide)
    q_XR = jnp.linalg.qr(start_XR if mask is None else start_XR * mask.astype(wide)[:, None])[0]

    def visit(f: Any, carry: tuple, _: None) -> tuple[tuple, Array]:
        x, q_XR, product_RR, log_scale = carry
        y, push = jax.linearize(f, x)
        along = lambda q_X: ravel_pytree(push(unflatten(q_X.astype(flat.dtype))))[0].astype(wide)  # noqa: E731
        q_XR, r_RR = jnp.linalg.qr(jax.vmap(along, in_axes=1, out_axes=1)(q_XR))
        product_RR = jnp.matmul(r_RR, product_RR, precision=jax.lax.Precision.HIGHEST)
        scale = jnp.max(jnp.abs(product_RR))
        product_RR = product_RR / jnp.where(scale == 0, 1.0, scale)
        return (y, q_XR, product_RR, log_scale + jnp.log(scale)), jnp.log(jnp.abs(jnp.diagonal(r_RR)))

    carry = (stack.stream, q_XR, jnp.eye(directions, dtype=wide), jnp.zeros((), wide))
    (_, _, product_RR, log_scale), logs_SR = scan_steps(stack, visit, carry)
    log_singular = jnp.log(jnp.linalg.svd(product_RR, compute_uv=False)) + log_scale
    return Spectrum(log_singular, jnp.sort(logs_SR.mean(0), descending=True))


def two_exponents(similarity_S: np.ndarray, gradient_S: np.ndarray) -> Exponents:
    """Return the two rates of a stack from profiles along the sublayers, on the host in float64 (arXiv 2403.02579).

    The paper derives its exponents from a map of angles at initialization; these are least-squares slopes of what was
    measured, the angle being the arc cosine of the mean cosine.

    Args:
      similarity_S: mean cosine of two tokens (`stream.token_similarity`), below 1.
      gradient_S: |d loss / d x_s| (`gradient_profile`), above 0.

    Raises:
      ValueError: fewer than 3 places, a cosine that is not in (-1, 1), a norm that is not a finite number above 0.
    """
    similarity_S, gradient_S = (np.asarray(x, np.float64) for x in (similarity_S, gradient_S))
    if min(similarity_S.size, gradient_S.size) < 3 or similarity_S.ndim != 1 or gradient_S.ndim != 1:
        raise ValueError(
            f"profiles have shapes {similarity_S.shape} and {gradient_S.shape}; each must be [S], 3 places at least"
        )
    if not np.all(np.abs(similarity_S) < 1):
        raise ValueError("a cosine of tokens is not in (-1, 1): tokens that are one have no angle")
    if not np.all(np.isfinite(gradient_S) & (gradient_S > 0)):
        raise ValueError("a gradient's norm is not a finite number above 0: it has no logarithm")
    angle, growth = _slope(np.log(np.arccos(similarity_S))), _slope(np.log(gradient_S))
    return Exponents(angle, Slope(-growth.value, growth.error))


def _slope(y_S: np.ndarray) -> Slope:
    """Return the least-squares slope of y along its places and its standard error."""
    t_S = np.arange(len(y_S)) - (len(y_S) - 1) / 2
    slope = float(np.sum(t_S * y_S) / np.sum(t_S**2))
    rest_S = y_S - y_S.mean() - slope * t_S
    return Slope(slope, float(np.sqrt(np.sum(rest_S**2) / (len(y_S) - 2) / np.sum(t_S**2))))


def _mean(values_SK: Array) -> Estimated:
    """Return the mean over the last axis and its standard error."""
    error_S = jnp.std(values_SK, axis=-1, ddof=1) / np.sqrt(values_SK.shape[-1])
    return Estimated(jnp.mean(values_SK, axis=-1), error_S)


def _over(x: Array, like: Array) -> Array:
    """Return x in its own first axes, with axes of 1 behind up to the rank of `like`, in its dtype."""
    return x.reshape(*x.shape, *(1,) * (like.ndim - x.ndim)).astype(like.dtype)


def _unit(v_2: Any, otherwise: Any = None) -> Any:
    """Return v / |v|, leading axis by leading axis; `otherwise` where v is 0: a map that is 0 has no direction."""
    size_2 = norm(v_2, axes=1)
    unit = jax.tree.map(lambda v: v / _over(jnp.where(size_2 == 0, 1.0, size_2), v), v_2)
    if otherwise is None:
        return unit
    return jax.tree.map(lambda u, o: jnp.where(_over(size_2, u) == 0, o, u), unit, otherwise)


def _rows(stream: Stream) -> tuple[int, int]:
    """Return (B, T) of a stream of [B, T, ...] arrays."""
    shapes = {leaf.shape[:2] for leaf in jax.tree.leaves(stream)}
    if len(shapes) != 1 or len(min(shapes)) != 2:
        raise ValueError(
            f"the stream's leaves begin with {sorted(shapes)}; tokens can be told apart where all are [B, T, ...]"
        )
    return min(shapes)

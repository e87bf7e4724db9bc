"""A stack's Jacobian by the number of branches a path takes: exact, where ablation only samples (arXiv 1605.06431).

At the stream the data make, each sublayer's Jacobian is 1 + J_s, J_s that of its update; multiplied out, the stack's is
a sum over all 2^S ways to take or leave each branch. By how many are taken, k = 0, ..., S:

    forward     P_k <- P_k + J_s P_{k-1},     P_0 = a change of the opened stream;      sum_k P_k = the jvp
    backward    C_k <- C_k + J_s^T C_{k-1},   C_0 = d loss / d x_S;                     sum_k C_k = the vjp

    share_k = <P_k, sum P> / |sum P|^2        adds up to 1, may be below 0
    length  = sum_k k share_k                 S g / (1 + g) where every branch is g x
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxblock.probes.stack import Stack, inner_product, norm, one_by_one, scan_steps, update_of
from jaxblock.types import Array, Stream


class PathSpectrum(NamedTuple):
    """Reductions of the parts, float32; all shares are 0 where the parts cancel to nothing."""

    share: Array
    """[S + 1], signed."""
    norm: Array
    """|P_k|, [S + 1]."""
    length: Array
    """Mean number of branches on a path, weighted by share."""


def path_tangents(stack: Stack, tangent: Stream) -> Stream:
    """Return what a change of the opened stream becomes by path length, every leaf [S + 1, ...].

    S sublayers' Jacobians, each on S directions, and S + 1 streams in memory.
    """

    def visit(f: Any, carry: tuple, _: None) -> tuple[tuple, None]:
        x, parts = carry
        y, push = jax.linearize(f, x)
        return (y, _longer(parts, jax.vmap(push))), None

    (_, parts), _ = scan_steps(stack, visit, (stack.stream, _first(tangent, stack.sublayers)))
    return parts


def path_cotangents(stack: Stack, cotangent: Stream) -> Stream:
    """Return a gradient with respect to the opened stream by path length, every leaf [S + 1, ...].

    Args:
      stack: the stack.
      cotangent: d loss / d x_S, of the form of the stream; of a model's loss,
        `jax.grad(lambda x: loss(exit_of(model, params, tokens_BT)(x)))(run_stack(stack))`.
    """
    _, before_S = scan_steps(stack, lambda f, x, _: (f(x), x), stack.stream)

    def visit(f: Any, parts: Stream, x: Stream) -> tuple[Stream, None]:
        _, pull = jax.vjp(f, x)
        return _longer(parts, lambda c_K: one_by_one(pull, c_K)), None

    return scan_steps(stack, visit, _first(cotangent, stack.sublayers), given=before_S, reverse=True)[0]


def path_spectrum(parts: Stream) -> PathSpectrum:
    """Return how a tangent's or a cotangent's parts, [S + 1, ...], make up their sum."""
    lengths = jax.tree.leaves(parts)[0].shape[0]
    whole = jax.tree.map(lambda p: jnp.broadcast_to(p.sum(0, keepdims=True), p.shape), parts)
    along = inner_product(parts, whole, axes=1)
    total = along.sum()
    share = along / jnp.where(total == 0, 1.0, total)
    return PathSpectrum(share, norm(parts, axes=1), jnp.sum(jnp.arange(lengths) * share))


def _first(vector: Stream, sublayers: int) -> Stream:
    """Return the parts before any sublayer: all of it at length 0."""
    return jax.tree.map(lambda v: jnp.zeros((sublayers + 1, *v.shape), v.dtype).at[0].set(v), vector)


def _longer(parts: Stream, through: Any) -> Stream:
    """Return P_k + J P_{k-1}, where `through` is 1 + J on leaves [S, ...]; what has length S goes no further."""
    shorter = jax.tree.map(lambda p: p[:-1], parts)
    taken = update_of(shorter, through(shorter))
    return jax.tree.map(lambda p, j: p.at[1:].add(j), parts, taken)

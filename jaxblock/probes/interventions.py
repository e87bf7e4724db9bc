"""What happens to the rest when sublayers are skipped, and to the loss when blocks change places or come one by one.

skip          M[s, l] = |u_l(without s) - u_l| / |u_l|,  l > s        what later sublayers made of what s wrote
reorder       the loss with blocks in another order, or one of them twice
Shapley       mean over random orders of L(those before s) - L(those before s, and s)
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxblock.contracts import check_integer
from jaxblock.probes.stack import Stack, Step, norm, run_stack, scan_steps, update_of
from jaxblock.types import Array, Params, Stream


class Shapley(NamedTuple):
    """What each sublayer takes off the loss, averaged over the company it comes into."""

    value_S: Array
    """[S]; adds up to L(none) - L(all)."""
    error_S: Array
    """Standard errors of these means over orders, [S]."""
    marginals_RS: Array
    """Those of each order, [R, S], every row with that sum."""


def skip_effects(stack: Stack, *, at_once: int = 1) -> Array:
    """Return M[s, l], [S, S] float32: how much the update l differs when sublayer s is left out; 0 for l <= s.

    Leaving out is x -> x: in a post-norm stack it takes the norm along, where a lesion (`gate_branches`) leaves it.
    Rows near 0 say that nothing downstream reads what s wrote. S passes of the whole stack, reduced on the way; where
    an update is 0 (and then it is 0 on both sides or infinitely far off) it says 0 or infinity.

    Args:
      stack: the stack.
      at_once: how many s are run side by side in memory.
    """
    check_integer("at_once", at_once, least=1)
    places_S = jnp.arange(stack.sublayers)

    def without(s: Array) -> Array:
        def visit(f: Any, carry: tuple, place: Array) -> tuple[tuple, Array]:
            x, other = carry
            y, changed = f(x), f(other)
            u, v = update_of(x, y), update_of(other, changed)
            far, size = norm(update_of(u, v)), norm(u)
            effect = jnp.where(far == 0, 0.0, far / size)
            other = jax.tree.map(lambda a, b: jnp.where(place == s, a, b), other, changed)
            return (y, other), jnp.where(place > s, effect, 0.0)

        return scan_steps(stack, visit, (stack.stream, stack.stream), given=places_S)[1]

    return jax.lax.map(without, places_S, batch_size=at_once)


def swaps(depth: int) -> np.ndarray:
    """Return the orders in which blocks l and l + 1 have changed places, [L - 1, L]."""
    check_integer("depth", depth, least=2)
    orders = np.tile(np.arange(depth), (depth - 1, 1))
    for i in range(depth - 1):
        orders[i, [i, i + 1]] = orders[i, [i + 1, i]]
    return orders


def repeats(depth: int) -> np.ndarray:
    """Return the orders in which block l runs twice, [L, L + 1]."""
    check_integer("depth", depth, least=1)
    return np.stack([np.insert(np.arange(depth), i, i) for i in range(depth)])


def reordered(stack: Stack, order: Array | np.ndarray) -> Stack:
    """Return the stack of blocks order[0], order[1], ...: any number of them, each with all that made it differ."""
    return dataclasses.replace(stack, params=jax.tree.map(lambda x: jnp.asarray(x)[order], stack.params))


def order_losses(stack: Stack, loss: Callable[[Stream], Array], orders: Array | np.ndarray) -> Array:
    """Return the loss with blocks in each order, [R, ...].

    Args:
      stack: the stack.
      loss: of the stream after the last sublayer; of a model, a loss of `exit_of(model, params, tokens_BT)(stream)`.
      orders: numbers of blocks, integer [R, any length]: `swaps(stack.depth)`, `repeats(stack.depth)`.

    Raises:
      ValueError: orders of another rank or dtype, or a number that is no block's.
    """
    orders = np.asarray(orders)
    if orders.ndim != 2 or not np.issubdtype(orders.dtype, np.integer):
        raise ValueError(f"orders is {orders.dtype} {orders.shape}; it must be integer [orders, blocks]")
    if orders.size and (orders.min() < 0 or orders.max() >= stack.depth):
        raise ValueError(
            f"orders name blocks {orders.min()} to {orders.max()}; there are 0 to {stack.depth - 1}"
        )
    return jax.lax.map(lambda order: loss(run_stack(reordered(stack, order))), jnp.asarray(orders))


def gated(stack: Stack, gates_S: Array) -> Stack:
    """Return the stack whose sublayer s is x + g_s u.

    Raises:
      ValueError: gates that are not one per sublayer.
    """
    if gates_S.shape != (stack.sublayers,):
        raise ValueError(
            f"gates have shape {gates_S.shape}; they must be one per sublayer, ({stack.sublayers},)"
        )
    steps = tuple(functools.partial(_gated, step, i) for i, step in enumerate(stack.steps))
    return Stack(steps, (stack.params, gates_S.reshape(stack.depth, -1)), stack.stream)


def shapley_values(
    loss: Callable[[Array], Array], sublayers: int, key: Array, *, orders: int = 8, at_once: int = 1
) -> Shapley:
    """Return the Shapley values of S gates, from `orders` random orders in which sublayers are added to none.

    Args:
      loss: gates [S] -> a loss, averaged if it is an array. Of a model, lesions that leave norms in place:
        `lambda gates_S: loss(gate_branches(config, params, gates_S))`; of any stack,
        `lambda gates_S: loss(run_stack(gated(stack, gates_S)))`.
      sublayers: S.
      key: draws the orders.
      orders: R, 2 or more; R (S - 1) + 2 losses are taken.
      at_once: how many of them side by side in memory.
    """
    check_integer("sublayers", sublayers, least=1)
    check_integer("orders", orders, least=2)
    check_integer("at_once", at_once, least=1)
    ranks_RS = jax.vmap(lambda k: jax.random.permutation(k, sublayers))(jax.random.split(key, orders))
    # Row j of an order has the j sublayers of least rank; none and all are the same in every order.
    gates_RJS = (ranks_RS[:, None, :] < jnp.arange(1, sublayers)[None, :, None]).astype(jnp.float32)
    ends_2S = jnp.stack([jnp.zeros(sublayers), jnp.ones(sublayers)])
    rows_XS = jnp.concatenate([ends_2S, gates_RJS.reshape(-1, sublayers)])
    losses_X = jax.lax.map(lambda gates_S: jnp.mean(loss(gates_S)), rows_XS, batch_size=at_once)
    none_R1, all_R1 = (jnp.full((orders, 1), 1.0, losses_X.dtype) * losses_X[i] for i in range(2))
    losses_RJ = jnp.concatenate([none_R1, losses_X[2:].reshape(orders, -1), all_R1], axis=1)
    marginals_RS = jnp.take_along_axis(losses_RJ[:, :-1] - losses_RJ[:, 1:], ranks_RS, axis=1)
    error_S = jnp.std(marginals_RS, axis=0, ddof=1) / np.sqrt(orders)
    return Shapley(marginals_RS.mean(0), error_S, marginals_RS)


def _gated(step: Step, i: int, scanned: tuple[Params, Array], x: Stream) -> Stream:
    params, gates = scanned
    u = update_of(x, step(params, x))
    return jax.tree.map(lambda x, u: x + gates[i].astype(x.dtype) * u, x, u)

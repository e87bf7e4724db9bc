"""Cross-entropy without a [B, T, V] array: one scan over blocks of positions, which makes the gradient on its way.

The gradient of the summed objective does not wait for anything that comes after the loss but a number, so a block's
logits are made once, become the gradient of states and matrix, and are forgotten; the backward pass multiplies by
that number. Three products in all, as many as with whole logits. (Blocks of the vocabulary, or a derivative that
starts from log Z, make the logits twice.) Fused loss kernels work alike (arXiv 2410.10989).

Axes of this file: I index of a block, C positions of a block.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from jaxblock.contracts import check_boolean, check_integer
from jaxblock.functional.losses import CrossEntropy, LossOptions, cross_entropy, mean_over_targets
from jaxblock.functional.readout import Readout, read_out
from jaxblock.types import Array

PLAIN = LossOptions()
BLOCK_ELEMENTS = 2**24
"""Logits of a block, 64 MiB in float32. With a quarter of them the matrix's gradient is added up four times as often:
a quarter more time on CPU (V = 50257, D = 256)."""


def cross_entropy_blocked(
    x_BTD: Array,
    readout: Readout,
    targets_BT: Array,
    *,
    valid_BT: Array | None = None,
    options: LossOptions = PLAIN,
    block_elements: int = BLOCK_ELEMENTS,
) -> CrossEntropy:
    """Return `cross_entropy(read_out(x_BTD, readout), ...)`, values and gradients, without all of the logits at once.

    x_BTD is in the compute dtype; logits and loss are float32 (float64 for float64), the gradient of the matrix is
    summed in float32 and rounded once. Where valid_BT is False, states and target may hold anything, NaN and id -1
    included, without effect. Any B and T work; every block has all rows of the batch, so that a batch sharded over
    devices stays where it is.

    Memory: `block_positions` positions of logits, and a float32 copy of the matrix for its gradient, which is made
    in the forward pass wherever a derivative is asked for. `loss` and `total` cost three products; a derivative of
    `nats` or `z_loss`, or of what has lost track of which of them are unused, makes the gradient again. The custom
    derivative has no forward mode (jvp of a loss): use `cross_entropy` there. Its gradient is an ordinary function
    with every derivative of its own (hessian), which keep every block's logits.

    Raises as `cross_entropy` and `read_out` do, and ValueError for a `block_elements` below 1.
    """
    check_integer("block_elements", block_elements, least=1)
    chex.assert_rank([x_BTD, targets_BT], [3, 2])
    chex.assert_type([x_BTD, targets_BT], [float, int])
    chex.assert_equal_shape_prefix([x_BTD, targets_BT], 2)
    if valid_BT is None:
        valid_BT = jnp.ones(targets_BT.shape, bool)
    check_boolean("valid_BT", valid_BT)
    chex.assert_equal_shape([targets_BT, valid_BT])
    x_BTD = jnp.where(valid_BT[..., None], x_BTD, 0)  # a gradient of 0 times a NaN state would be NaN
    batch, length = targets_BT.shape
    rule = _Rule(options, block_positions(batch, length, readout.columns, block_elements=block_elements))
    sums: _Sums = _sums(rule, x_BTD, readout, targets_BT, valid_BT)
    weight = jnp.sum(valid_BT).astype(jnp.float32)
    return CrossEntropy(mean_over_targets(sums.total, weight), sums.total, weight, sums.nats, sums.z_loss)


def block_positions(batch: int, length: int, columns: int, *, block_elements: int = BLOCK_ELEMENTS) -> int:
    """Return C, positions per block: at most `block_elements` logits [B, C, V], or one position; blocks of one size.

    A few positions are added to the last block where C does not divide the length; they count for nothing.
    """
    most = max(1, block_elements // max(1, batch * columns))
    return max(1, -(-length // max(1, -(-length // most))))


_PRODUCTS = {"table": ("rv,vd->rd", "rv,rd->vd"), "kernel": ("rv,dv->rd", "rv,rd->dv")}
"""The gradient of states and of matrix from that of the logits, by layout."""


class _Sums(NamedTuple):
    """Of `CrossEntropy`: what depends on states and matrix, and is added up over blocks."""

    total: Array
    nats: Array
    z_loss: Array


class _Block(NamedTuple):
    x_BCD: Array
    targets_BC: Array
    valid_BC: Array


@dataclasses.dataclass(frozen=True)
class _Rule:
    options: LossOptions
    positions: int

    def sums(self, logits_BCV: Array, block: _Block) -> _Sums:
        found = cross_entropy(logits_BCV, block.targets_BC, valid_BT=block.valid_BC, options=self.options)
        return _Sums(found.total, found.nats, found.z_loss)

    def blocks(self, x_BTD: Array, targets_BT: Array, valid_BT: Array) -> _Block:
        """Return the positions in blocks, every leaf [I, B, C, ...]."""
        return _Block(*(_split(x, self.positions) for x in (x_BTD, targets_BT, valid_BT)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sums(rule: _Rule, x_BTD: Array, readout: Readout, targets_BT: Array, valid_BT: Array) -> _Sums:
    def step(sums: _Sums, block: _Block) -> tuple[_Sums, None]:
        return _add(sums, rule.sums(read_out(block.x_BCD, readout), block)), None

    start = _Sums(*[_zero(x_BTD)] * 3)
    return jax.lax.scan(step, start, rule.blocks(x_BTD, targets_BT, valid_BT))[0]


def _sums_and_gradient(
    rule: _Rule,
    objective: Callable[[_Sums], Array],
    x_BTD: Array,
    readout: Readout,
    targets_BT: Array,
    valid_BT: Array,
) -> tuple[_Sums, Array, Array]:
    """Return the sums and the gradient of `objective` of them by states and matrix, in float32.

    The objective is linear: its gradient adds up over the blocks.
    """
    wide = _wide(x_BTD)
    matrix = readout.matrix.astype(x_BTD.dtype)
    to_states, to_matrix = _PRODUCTS[readout.layout]

    def step(carry: tuple[_Sums, Array], block: _Block) -> tuple[tuple[_Sums, Array], Array]:
        so_far, dmatrix = carry

        def of_logits(logits_BCV: Array) -> tuple[Array, _Sums]:
            sums = rule.sums(logits_BCV, block)
            return objective(sums), sums

        dlogits_BCV, sums = jax.grad(of_logits, has_aux=True)(read_out(block.x_BCD, readout))
        if readout.factor != 1.0:
            dlogits_BCV = readout.factor * dlogits_BCV
        # As two-dimensional products, like all of `dense`.
        dlogits_RV = dlogits_BCV.reshape(-1, dlogits_BCV.shape[-1])
        x_RD = block.x_BCD.reshape(-1, block.x_BCD.shape[-1])
        dx_RD = jnp.einsum(to_states, dlogits_RV, matrix, preferred_element_type=wide)
        dmatrix = dmatrix + jnp.einsum(to_matrix, dlogits_RV, x_RD, preferred_element_type=wide)
        return (_add(so_far, sums), dmatrix), dx_RD.reshape(block.x_BCD.shape)

    zero = _zero(x_BTD)
    start = (_Sums(zero, zero, zero), jnp.broadcast_to(zero, matrix.shape))
    (sums, dmatrix), dx_IBCD = jax.lax.scan(step, start, rule.blocks(x_BTD, targets_BT, valid_BT))
    return sums, _join(dx_IBCD, x_BTD.shape[1]), dmatrix


def _forward(
    rule: _Rule, x_BTD: Any, readout: Any, targets_BT: Any, valid_BT: Any
) -> tuple[_Sums, tuple[Any, ...]]:
    given = jax.tree.map(
        lambda primal: primal.value,
        (x_BTD, readout, targets_BT, valid_BT),
        is_leaf=lambda node: isinstance(node, CustomVJPPrimal),
    )
    sums, dx_BTD, dmatrix = _sums_and_gradient(rule, lambda sums: sums.total, *given)
    return sums, (given, dx_BTD, dmatrix)


def _backward(rule: _Rule, kept: tuple[Any, ...], slopes: Any) -> tuple[Array, Readout, None, None]:
    given, dx_BTD, dmatrix = kept
    x_BTD, readout = given[:2]
    if all(isinstance(slope, SymbolicZero) for slope in (slopes.nats, slopes.z_loss)):
        dx_BTD, dmatrix = slopes.total * dx_BTD, slopes.total * dmatrix
    else:
        slopes_3 = jnp.stack([_zero(x_BTD) if isinstance(slope, SymbolicZero) else slope for slope in slopes])
        _, dx_BTD, dmatrix = _sums_and_gradient(
            rule, lambda sums: jnp.sum(jnp.stack(sums) * slopes_3), *given
        )
    dreadout = dataclasses.replace(readout, matrix=dmatrix.astype(readout.matrix.dtype))
    return dx_BTD.astype(x_BTD.dtype), dreadout, None, None


_sums.defvjp(_forward, _backward, symbolic_zeros=True)


def _wide(x: Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


def _zero(x_BTD: Array) -> Array:
    # Of x: under shard_map a scan's carry must vary over the same mesh axes from its first step on.
    return jnp.zeros_like(jnp.sum(x_BTD), dtype=_wide(x_BTD))


def _add(a: _Sums, b: _Sums) -> _Sums:
    return jax.tree.map(jnp.add, a, b)


def _split(x: Array, positions: int) -> Array:
    """[B, T, ...] -> [I, B, C, ...], zeros (False) in the padding."""
    more = -x.shape[1] % positions
    if more:
        x = jnp.pad(x, [(0, more if axis == 1 else 0) for axis in range(x.ndim)])
    # Sizes spelled out: -1 is not defined where there are no rows or no positions.
    x = x.reshape(x.shape[0], x.shape[1] // positions, positions, *x.shape[2:])
    return jnp.moveaxis(x, 1, 0)


def _join(x_IBCD: Array, length: int) -> Array:
    """Undo `_split`."""
    x_BICD = jnp.moveaxis(x_IBCD, 0, 1)
    batch, blocks, positions, width = x_BICD.shape
    return x_BICD.reshape(batch, blocks * positions, width)[:, :length]

"""An identity whose backward pass measures what flows through it: gradients over depth in [S] numbers."""

import chex
import jax
import jax.numpy as jnp

from jaxblock.types import Array


@jax.custom_vjp
def gradient_tap(x: Array, tap: Array) -> Array:
    """Return x; the "gradient" with respect to `tap` is sum(cotangent^2), the squared norm of d loss / d x.

    What a whole stack writes for its taps costs a number each, where a perturbation added to x would cost an array
    each. First order only: a derivative of the measured norm is not the derivative of anything.

    Args:
      x: any floating array.
      tap: a float32 scalar, whose value is not read.

    Raises:
      AssertionError: a tap that is no float32 scalar, an x that is not floating.
    """
    chex.assert_shape(tap, ())
    chex.assert_type([x, tap], [float, jnp.float32])
    return x


def _forward(x: Array, tap: Array) -> tuple[Array, None]:
    return gradient_tap(x, tap), None


def _backward(_: None, cotangent: Array) -> tuple[Array, Array]:
    return cotangent, jnp.sum(jnp.square(cotangent.astype(jnp.float32)))


gradient_tap.defvjp(_forward, _backward)

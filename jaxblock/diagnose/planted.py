"""Connections with one mistake each, and a model of them small enough to be made in a second: the controls."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxblock.config import ModelConfig
from jaxblock.models import Decoder
from jaxblock.modules import Norm
from jaxblock.residual import Topology
from jaxblock.types import Array, Branch, Params


class PreNorm(nn.Module):
    """x + f(norm(x)), right."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: Array, f: Branch) -> Array:
        """Return x + f(norm(x))."""
        return x + f(Norm(self.config, name="norm")(x))


class Skipless(nn.Module):
    """The control of wiring: y = f(norm(x)) for the feed-forward, whose skip is missing."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: Array, f: Branch) -> Array:
        """Return x + f(norm(x)) of attention, f(norm(x)) of anything else."""
        y = f(Norm(self.config, name="norm")(x))
        return x + y if str(self.name).startswith("attention") else y


class Widened(nn.Module):
    """The control of shapes: a connection that broadcasts."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: Array, f: Branch) -> Array:
        """Return an array with one row too many."""
        y = f(Norm(self.config, name="norm")(x))
        return jnp.concatenate([x + y, x[:1]])


class Doubled(nn.Module):
    """The control of branches at 0: 2 x + f(norm(x))."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: Array, f: Branch) -> Array:
        """Return 2 x + f(norm(x))."""
        return 2 * x + f(Norm(self.config, name="norm")(x))


class Flipped(nn.Module):
    """The control of the sign: -x + f(norm(x))."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: Array, f: Branch) -> Array:
        """Return f(norm(x)) less x."""
        return f(Norm(self.config, name="norm")(x)) - x


class Stopped(nn.Module):
    """The control of the gradient: x + f(norm(x)), and no gradient through x."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: Array, f: Branch) -> Array:
        """Return the sum with a skip that has no gradient."""
        return jax.lax.stop_gradient(x) + f(Norm(self.config, name="norm")(x))


class Rolled(nn.Module):
    """The control of rows: x + f(norm(the row before))."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: Array, f: Branch) -> Array:
        """Return the sum with a branch of the row before."""
        return x + f(jnp.roll(Norm(self.config, name="norm")(x), 1, axis=0))


class Faded(nn.Module):
    """The control of gradients along depth: f(x) / 20, neither skip nor norm."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: Array, f: Branch) -> Array:
        """Return a twentieth of the branch."""
        return f(x) / 20


def small_model(connection: Any, *, final_norm: bool = True) -> Decoder:
    """Return four blocks of a connection, float32."""
    config = ModelConfig(vocab_size=16, context=16, depth=4, width=16, heads=2, positions="none")
    return Decoder(config, topology=Topology(connection, "control", "control", final_norm=final_norm))


def drawn(model: Decoder) -> Params:
    """Return parameters, numpy's: compiling initial values takes longer than a check."""
    draw = np.random.default_rng(0)
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]

    def leaf(path: tuple, x: jax.ShapeDtypeStruct) -> Array:
        size = 0.35 if path[-1].key in ("kernel", "table") else 0.1
        return jnp.asarray(draw.normal(scale=size, size=x.shape) + (path[-1].key == "scale"), x.dtype)

    return jax.tree_util.tree_map_with_path(leaf, shapes)

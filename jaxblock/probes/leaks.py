"""Two forward passes compared at every sublayer: does padding leak into real tokens, and how does round-off grow.

    x_s, s = 0, ..., S: the stream before sublayer s, and the closed stream

Of a stream that is not one array there is no x_s: what the branch of sublayer s reads stands in for it. Both passes'
streams are kept, S + 1 arrays [B, T, D] each (the leak's four times): meant for one small batch.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxblock.contracts import check_boolean
from jaxblock.models.observation import OBSERVED, Sublayer
from jaxblock.models.trunk import Trunk
from jaxblock.modules.intermediates import BRANCHES
from jaxblock.modules.intermediates import COLLECTION as INTERMEDIATES
from jaxblock.types import Array, Params


class PaddingLeaks(NamedTuple):
    """Largest |x_s - x_s'| of an entry of a real token, the two streams differing at padded places only; [S + 1]."""

    error_S: Array
    """Exactly 0, or padding leaks from the first s that has more on."""
    unmasked_S: Array
    """Control: the same with every token declared real. All 0 where no real token could have seen a padded one
    (padding to the right of a causal model's tokens), and then the check has shown nothing."""


def keep_stream(seen: Sublayer) -> dict[str, Array]:
    """An observer that keeps the stream before the sublayer, or what the branch read, [N, B, T, D], N = 1 or 3."""
    kept = seen.before if isinstance(seen.before, jax.Array) else seen.read
    return {"stream_NBTD": jnp.stack(jax.tree.leaves(kept))}


def padding_leak_profile(
    model: Trunk, params: Params, tokens_BT: Array, valid_BT: Array, *, key: Array
) -> PaddingLeaks:
    """Return what noise in the padded places of the embedded stream does to real tokens, sublayer by sublayer.

    The models here read id 0 in the place of padding, so two fillings with ids would be one; the noise, of the
    stream's own size, comes after. Four passes of one compiled program, so that no bit differs without a cause.

    Args:
      model: a decoder, an encoder or a classifier.
      params: its parameters.
      tokens_BT: ids read.
      valid_BT: boolean [B, T], True = real.
      key: of the noise.

    Raises:
      ValueError: a mask that is not boolean.
    """
    chex.assert_equal_shape([tokens_BT, valid_BT])
    check_boolean("valid_BT", valid_BT)
    topology, shape = model.connections, (*tokens_BT.shape, model.config.width)
    noise_BTD = jax.random.normal(key, shape)
    everything_BT = jnp.ones_like(valid_BT)

    def run(case: tuple[Array, Array]) -> tuple[dict[str, Array], Array]:
        declared_BT, amount = case

        def open_filled(config: Any, x_BTD: Array) -> Any:
            if x_BTD.shape == shape:  # `init` opens one token, to look at shapes
                x = x_BTD.astype(jnp.float32)
                filled = x + amount * jnp.sqrt(jnp.mean(jnp.square(x))) * noise_BTD
                x_BTD = jnp.where(valid_BT[..., None], x_BTD, filled.astype(x_BTD.dtype))
            return topology.open(config, x_BTD)

        filled = model.clone(topology=dataclasses.replace(topology, open=open_filled))
        return _streams(filled, params, tokens_BT, declared_BT)

    cases = (jnp.stack([valid_BT, valid_BT, everything_BT, everything_BT]), jnp.array([0.0, 1.0, 0.0, 1.0]))
    blocks, closed = jax.lax.map(run, cases)

    def distance(x: Array, y: Array) -> Array:
        difference = jnp.abs(x.astype(jnp.float32) - y.astype(jnp.float32))
        return jnp.max(jnp.where(valid_BT[None, ..., None], difference, 0.0))

    runs = [({name: x[i] for name, x in blocks.items()}, closed[i]) for i in range(4)]
    return PaddingLeaks(_profile(distance, *runs[:2]), _profile(distance, *runs[2:]))


def numerical_error_profile(
    model: Trunk, params: Params, tokens_BT: Array, *, other: Trunk, valid_BT: Array | None = None
) -> Array:
    """Return sqrt(sum |y_s - x_s|^2 / sum |x_s|^2) over real tokens, float32 [S + 1]: its slope is error per sublayer.

    Args:
      model: the reference, whose streams are x_s.
      params: parameters, given to both as they are.
      tokens_BT: ids read.
      other: the same model in other dtypes, or run another way; its streams are y_s.
      valid_BT: boolean [B, T], which tokens are real; None = all.

    Raises:
      ValueError: models that differ in depth, width, wiring, token mixer or residual connection.
    """
    fields = ("depth", "width", "wiring", "token_mixer", "residual")
    for name in fields:
        mine, theirs = getattr(model.config, name), getattr(other.config, name)
        if mine != theirs:
            raise ValueError(
                f"other.config.{name} is {theirs!r} and model.config.{name} {mine!r}; the two must be one model, in "
                "other dtypes or run another way"
            )
    real_BT = jnp.ones(tokens_BT.shape, jnp.bool_) if valid_BT is None else valid_BT

    def error(x: Array, y: Array) -> Array:
        x, y = (jnp.where(real_BT[None, ..., None], z.astype(jnp.float32), 0.0) for z in (x, y))
        size = jnp.sum(jnp.square(x))
        return jnp.sqrt(jnp.sum(jnp.square(y - x)) / jnp.where(size > 0, size, 1.0))

    return _profile(error, *(_streams(each, params, tokens_BT, valid_BT) for each in (model, other)))


def _streams(
    model: Trunk, params: Params, tokens_BT: Array, valid_BT: Array | None
) -> tuple[dict[str, Array], Array]:
    """Return what was kept of every sublayer, by branch, [L, N, B, T, D], and the closed stream, [1, B, T, D]."""
    collections = [OBSERVED, INTERMEDIATES]
    seen = model.clone(observe=keep_stream)
    made: Any = seen.apply({"params": params}, tokens_BT, valid_BT=valid_BT, mutable=collections)
    blocks = made[1][OBSERVED]["blocks"]
    kept = {name: found["stream_NBTD"] for name, found in blocks.items()}
    return kept, made[1][INTERMEDIATES]["resid_final"][None]


def _profile(measure: Callable[[Array, Array], Array], one: tuple[Any, Any], two: tuple[Any, Any]) -> Array:
    """Return measure(x, y) of every sublayer's pair and of the closed one, [S + 1]."""
    (mine, closed), (theirs, other_closed) = one, two
    branches = next(names for names in BRANCHES if all(name in mine for name in names))
    found_LN = jnp.stack([jax.vmap(measure)(mine[name], theirs[name]) for name in branches], axis=1)
    return jnp.append(found_LN.reshape(-1), measure(closed, other_closed))

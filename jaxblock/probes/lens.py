"""What a stream already says in the vocabulary, sublayer by sublayer: two readings, which must not be mixed up.

    logit lens            logits_s = head(final_norm(x_s)), the norm's statistics those of x_s itself
    direct attribution    <u_s / sigma, W_y>, sigma and mean those of the closed stream: parts that sum to the logit

Both need a stream that is one array; of any other there is no x_s to read, and it is said. Reductions are made inside
the stack: nothing of size [S, B, T, V] exists.
Sources: the lens as introduced by nostalgebraist (2020); the attribution as in arXiv 2310.15916 and what it cites.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxblock.functional.dense import logits
from jaxblock.functional.norms import layer_norm, rms_norm
from jaxblock.models import Decoder
from jaxblock.models.observation import GIVEN, Sublayer
from jaxblock.modules import scaling
from jaxblock.modules.intermediates import BRANCHES
from jaxblock.types import Array, Params


class LensProfile(NamedTuple):
    """The logit lens after every sublayer, float32 [S], means over real tokens, in nats."""

    cross_entropy: Array
    """Of the targets."""
    divergence: Array
    """KL(p_S || p_s), from the model's own prediction; 0 after the last sublayer."""
    entropy: Array
    agreement: Array
    """Share of tokens whose most probable id is already the model's."""


class Attribution(NamedTuple):
    """What each part of the stream adds to the logit of the target, float32, means over real tokens."""

    parts_S: Array
    """[S]: of each sublayer's update."""
    embedding: Array
    """Of the embedding; with a layer norm's bias in it."""
    logit: Array
    """The model's logit of the target."""
    error: Array
    """Largest |sum of the parts - logit| of a real token: 0 up to round-off, or the parts are not the whole."""


@dataclasses.dataclass(frozen=True)
class LensObserver:
    """Reads the stream after each sublayer through the final norm and the head."""

    norm: str
    epsilon: float
    factor: float

    def __call__(self, seen: Sublayer) -> dict[str, Array]:
        """Return the four means of `LensProfile`, for the stream after this sublayer."""
        if not isinstance(seen.after, jax.Array):
            return {}
        given = seen.given
        states = apply_final_norm(seen.after.astype(jnp.float32), given["norm"], self.norm, self.epsilon)
        logits_BTV = self.factor * logits(states, given["head_DV"].astype(jnp.float32))
        logits_BTV = logits_BTV[..., : given["logits_BTV"].shape[-1]]
        log_p, log_q = (jax.nn.log_softmax(x.astype(jnp.float32)) for x in (given["logits_BTV"], logits_BTV))
        valid_BT = given["valid_BT"]
        target = jnp.take_along_axis(log_q, given["targets_BT"][..., None], axis=-1)[..., 0]
        return {
            "cross_entropy": -_mean(target, valid_BT),
            "divergence": _mean(jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1), valid_BT),
            "entropy": -_mean(jnp.sum(jnp.exp(log_q) * log_q, axis=-1), valid_BT),
            "agreement": _mean((log_p.argmax(-1) == log_q.argmax(-1)).astype(jnp.float32), valid_BT),
        }


def logit_lens(
    model: Decoder, params: Params, tokens_BT: Array, targets_BT: Array, *, valid_BT: Array | None = None
) -> LensProfile | None:
    """Return the logit lens of every sublayer, from two forward passes; None where the stream is not one array.

    Args:
      model: a decoder; its own observer is put aside.
      params: its parameters.
      tokens_BT: ids read.
      targets_BT: ids the cross entropy is taken of, each of them a token of the vocabulary.
      valid_BT: which tokens are real; None = all.
    """
    config = model.config
    plain = model.clone(observe=None)
    logits_BTV: Any = plain.apply({"params": params}, tokens_BT, valid_BT=valid_BT)
    given = {
        "norm": params.get("final_norm") if model.connections.final_norm else None,
        "head_DV": head_kernel(params),
        "logits_BTV": logits_BTV[..., : config.vocab_size],
        "targets_BT": targets_BT,
        "valid_BT": jnp.ones(tokens_BT.shape, jnp.bool_) if valid_BT is None else valid_BT,
    }
    norm = config.norm if model.connections.final_norm else "none"
    observer = LensObserver(norm, config.norm_epsilon, scaling(config).logits)
    variables: dict[str, Any] = {"params": params, GIVEN: {"observer": given}}
    blocks = _observed(model.clone(observe=observer), variables, tokens_BT, valid_BT)
    for branches in BRANCHES:
        if all(blocks.get(name) for name in branches):
            stacked = {
                key: jnp.stack([blocks[name][key] for name in branches], axis=1).reshape(-1)
                for key in LensProfile._fields
            }
            return LensProfile(**stacked)
    return None


@dataclasses.dataclass(frozen=True)
class AttributionObserver:
    """Projects the stream before each sublayer, and its update, on each token's direction; [B, T] numbers."""

    norm: str
    """layer_norm, whose centring is part of the linear map, or another."""

    def __call__(self, seen: Sublayer) -> dict[str, Array]:
        """Return the projections of x and of u = (stream after) - x."""
        if not isinstance(seen.after, jax.Array):
            return {}
        x, after = seen.before.astype(jnp.float32), seen.after.astype(jnp.float32)
        direction_BTD = seen.given["direction_BTD"]
        return {
            name: jnp.sum(_centred(y, self.norm) * direction_BTD, axis=-1)
            for name, y in {"before": x, "update": after - x}.items()
        }


def direct_attribution(
    model: Decoder, params: Params, tokens_BT: Array, targets_BT: Array, *, valid_BT: Array | None = None
) -> Attribution | None:
    """Return what every sublayer adds to its target's logit; None where the stream is not one array.

    The closed stream's norm is taken as it is, a linear map: its statistics are frozen. Arguments as of `logit_lens`.
    """
    config, has_norm = model.config, model.connections.final_norm
    plain, factor = model.clone(observe=None), scaling(model.config).logits
    made: Any = plain.apply({"params": params}, tokens_BT, valid_BT=valid_BT, mutable=["intermediates"])
    logits_BTV, collected = made
    closed_BTD = collected["intermediates"]["resid_final"].astype(jnp.float32)
    kind, norm = (config.norm, params.get("final_norm", {})) if has_norm else ("none", {})
    direction_BTD = jnp.take(head_kernel(params).astype(jnp.float32), targets_BT, axis=1).transpose(1, 2, 0)
    weights = {name: value.astype(jnp.float32).reshape(1, 1, -1) for name, value in norm.items()}
    offset_BT = jnp.sum(direction_BTD * weights["bias"], -1) if "bias" in norm else jnp.zeros(tokens_BT.shape)
    direction_BTD = direction_BTD * weights["scale"] if "scale" in norm else direction_BTD
    if has_norm:
        spread_BT1 = jnp.square(_centred(closed_BTD, kind)).mean(-1, keepdims=True)
        direction_BTD = direction_BTD * jax.lax.rsqrt(spread_BT1 + config.norm_epsilon)
    given = {"direction_BTD": factor * direction_BTD}
    variables: dict[str, Any] = {"params": params, GIVEN: {"observer": given}}
    blocks = _observed(model.clone(observe=AttributionObserver(kind)), variables, tokens_BT, valid_BT)
    branches = next((names for names in BRANCHES if all(blocks.get(name) for name in names)), None)
    if branches is None:
        return None
    parts_SBT = jnp.stack([blocks[name]["update"] for name in branches], axis=1).reshape(-1, *tokens_BT.shape)
    embedding_BT = blocks[branches[0]]["before"][0] + factor * offset_BT
    logit_BT = jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1)[..., 0]
    # What happens after the last sublayer (a stack's close, another block's end) is a part, too, and would show here.
    rest_BT = logit_BT - embedding_BT - parts_SBT.sum(0)
    valid_BT = jnp.ones(tokens_BT.shape, jnp.bool_) if valid_BT is None else valid_BT
    error = jnp.max(jnp.where(valid_BT, jnp.abs(rest_BT), 0.0))
    parts_S, embedding, logit = (_mean(x, valid_BT) for x in (parts_SBT, embedding_BT, logit_BT))
    return Attribution(parts_S, embedding, logit, error)


def _observed(
    model: Decoder, variables: dict[str, Any], tokens_BT: Array, valid_BT: Array | None
) -> dict[str, Any]:
    """Return what an observer of each sublayer returned, by branch."""
    made: Any = model.apply(variables, tokens_BT, valid_BT=valid_BT, mutable=["observed"])
    return made[1].get("observed", {}).get("blocks", {})


def _centred(x_BTD: Array, norm: str) -> Array:
    """Return x less its mean over the width where the norm takes it away, else x."""
    return x_BTD - x_BTD.mean(-1, keepdims=True) if norm == "layer_norm" else x_BTD


def _mean(x: Array, valid_BT: Array) -> Array:
    """Return the mean over real tokens, [..., B, T] -> [...]."""
    valid = valid_BT.reshape((1,) * (x.ndim - 2) + valid_BT.shape)
    return jnp.sum(jnp.where(valid, x, 0.0), axis=(-2, -1)) / jnp.maximum(jnp.sum(valid_BT), 1)


def apply_final_norm(x: Array, scale: Params | None, norm: str, epsilon: float) -> Array:
    """Return norm(x) with the final norm's parameters; x itself for "none"."""
    if norm == "none":
        return x
    weights = {} if scale is None else {name: value.astype(x.dtype) for name, value in scale.items()}
    return (rms_norm if norm == "rms_norm" else layer_norm)(x, epsilon=epsilon, **weights)


def head_kernel(params: Params) -> Array:
    """Return what the last states are multiplied with, [D, V]: the head's kernel, or the embedding table transposed."""
    return params["head"]["kernel"] if "head" in params else params["embedding"]["table"].T

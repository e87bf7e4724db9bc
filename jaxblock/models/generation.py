"""Continue a prompt: one compiled loop that runs the model on the last `context` tokens and draws the next."""

import functools

import chex
import jax
import jax.numpy as jnp

from jaxblock.functional.sampling import SamplingRule, sample
from jaxblock.models.decoder import Decoder
from jaxblock.types import Array, Params


@functools.partial(jax.jit, static_argnames=("model", "length", "rule"))
def generate(
    model: Decoder, params: Params, prompt_BT: Array, key: Array, *, length: int, rule: SamplingRule
) -> Array:
    """Draw `length` tokens after each prompt.

    The model reads at most its `context` last tokens, so a continuation may be longer than the context.

    Args:
      model: the decoder.
      params: its parameters.
      prompt_BT: token ids [B, T], T >= 1, every row a prompt of the same length.
      key: randomness; one key per token is split from it.
      length: number of new tokens.
      rule: temperature, top-k, top-p; temperature 0 is greedy.

    Returns:
      The new tokens, int32 [B, length]; ids that pad the vocabulary are never among them.
    """
    chex.assert_rank(prompt_BT, 2)
    chex.assert_axis_dimension_gt(prompt_BT, 1, 0)
    context = model.config.context
    prompt_BT = prompt_BT[:, -context:].astype(jnp.int32)
    count = prompt_BT.shape[1]
    buffer_BT = jnp.pad(prompt_BT, ((0, 0), (0, context - count)))

    def step(carry: tuple[Array, Array], key: Array) -> tuple[tuple[Array, Array], Array]:
        # Tokens lie left-aligned; what follows the last one is not read, since attention is causal.
        buffer_BT, count = carry
        logits_BTV = model.apply({"params": params}, buffer_BT)
        logits_BV = jax.lax.dynamic_index_in_dim(logits_BTV, count - 1, axis=1, keepdims=False)
        token_B = sample(logits_BV[:, : model.config.vocab_size], key, rule)
        full = count == context
        buffer_BT = jnp.where(full, jnp.roll(buffer_BT, -1, axis=1), buffer_BT)
        count = jnp.minimum(count + 1, context)
        return (buffer_BT.at[:, count - 1].set(token_B), count), token_B

    start = (buffer_BT, jnp.asarray(count, jnp.int32))
    _, tokens_TB = jax.lax.scan(step, start, jax.random.split(key, length))
    return tokens_TB.T

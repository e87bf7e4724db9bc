"""flax.linen's own modules: a model written with its LayerNorm, MultiHeadDotProductAttention and Dense as they are.

The option "loop" is "unrolled", a Python loop over blocks, or "scan", `nn.scan` over stacked ones.
"""

import functools
from collections.abc import Mapping
from typing import Any

from experiments.benchmarks.contest import Job, need, timed
from experiments.benchmarks.peers.device import check_platform, peak_bytes, random_tokens
from experiments.benchmarks.sizes import Sizes, sizes_of


def prepare(options: Mapping[str, Any]) -> Job:
    """Return the step of the sizes in `options`."""
    jax, optax = need("jax"), need("optax")
    check_platform(options["platform"])
    sizes = sizes_of(options)
    model = _model(sizes, scanned=options["loop"] == "scan")
    inputs_BT, targets_BT = random_tokens(sizes)
    optimizer = optax.adamw(3e-4)
    params = jax.jit(model.init)(jax.random.key(0), inputs_BT)
    moments = jax.jit(optimizer.init)(params)

    def loss(params: Any) -> Any:
        logits_BTV = model.apply(params, inputs_BT).astype("float32")
        return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, targets_BT).mean()

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(params: Any, moments: Any) -> tuple[Any, Any, Any]:
        value, gradients = jax.value_and_grad(loss)(params)
        changes, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, changes), moments, value

    def step() -> float:
        nonlocal params, moments
        params, moments, value = update(params, moments)
        return float(value)

    return Job(timed(step), {"platform": jax.default_backend()}, peak_bytes)


def _model(sizes: Sizes, *, scanned: bool) -> Any:
    import flax.linen as nn
    import jax.numpy as jnp

    dtype = jnp.dtype(sizes.dtype)
    attention = functools.partial(nn.MultiHeadDotProductAttention, num_heads=sizes.heads, dtype=dtype)

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x_BTD, mask):
            x_BTD = x_BTD + attention()(nn.LayerNorm(dtype=dtype)(x_BTD), mask=mask)
            h_BTF = nn.gelu(nn.Dense(4 * sizes.width, dtype=dtype)(nn.LayerNorm(dtype=dtype)(x_BTD)))
            return x_BTD + nn.Dense(sizes.width, dtype=dtype)(h_BTF), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens_BT):
            mask = nn.make_causal_mask(tokens_BT[:1])
            places = nn.Embed(sizes.seq, sizes.width, dtype=dtype)(jnp.arange(sizes.seq))
            x_BTD = nn.Embed(sizes.vocab, sizes.width, dtype=dtype)(tokens_BT) + places
            if scanned:
                whole: Any = nn.broadcast
                axes: Any = {"params": 0}
                keys: Any = {"params": True}
                stack = nn.scan(Block, variable_axes=axes, split_rngs=keys, in_axes=whole, length=sizes.depth)
                x_BTD, _ = stack()(x_BTD, mask)
            else:
                for _ in range(sizes.depth):
                    x_BTD, _ = Block()(x_BTD, mask)
            return nn.Dense(sizes.vocab, use_bias=False, dtype=dtype)(nn.LayerNorm(dtype=dtype)(x_BTD))

    return Model()

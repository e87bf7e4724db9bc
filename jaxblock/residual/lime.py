"""LIMe in its representation form: attention's key and value read a learned sum over the inputs of all blocks so far.

x + f(norm_q(x), norm_k(sum_{j <= i} k_j X_j), norm_v(sum_{j <= i} v_j X_j)),  X_j the input of block j

in block i, x = X_i; the feed-forward is pre-norm's, the residual additive. static: k and v start one-hot at X_i (a
constant, plus a delta that is learned from 0): pre-norm. dynamic: k, v = softmax_j(w_j . rms(x) + b_j), as in
x-transformers' DynamicLIMe, w and b from 0: the mean over X_0 .. X_i, which is not pre-norm; `bias` more on the score
of X_i brings the start nearer to it. Blocks are counted, not sublayers.                        (arXiv 2502.09245)

Against the paper, which mixes every layer's keys and values, head by head over all heads of all layers, with one
weight for a head's key and value: representations are mixed here, before this block's own norm and kernels, with one
weight per block for the key and one for the value, and none over heads. The paper draws the weights of earlier layers
at random. DynamicLIMe mixes the query, too.

Where no sublayer reads views (wiring = "parallel", or another token mixer than attention) the one branch there is
reads the value's sum, x + f(norm_v(sum_j v_j X_j)): a rule of ours.
"""

import functools
from typing import NamedTuple

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from jaxblock.config import ModelConfig
from jaxblock.contracts import check_choice, check_number
from jaxblock.functional.depth_views import LinearScores, mix_views, newest_weights, softmax_weights
from jaxblock.functional.residual import pre_norm
from jaxblock.modules import Norm
from jaxblock.residual.contract import NoGradient, Topology
from jaxblock.residual.declarations import additive_mixing, norm_parameters
from jaxblock.residual.depth_views import count_norms, norm_views, reads_views
from jaxblock.residual.history import History, open_history, read_once
from jaxblock.residual.place import place
from jaxblock.types import Array, Branch, Views

WEIGHTS = ("static", "dynamic")


class LimeStream(NamedTuple):
    """The residual stream, and the inputs of the blocks so far, this one's last."""

    x_BTD: Array
    inputs: History


class LimeConnection(nn.Module):
    """x + f(norm_q(x), norm_k(key), norm_v(value)) around attention, key and value sums over blocks' inputs."""

    config: ModelConfig
    weights: str
    bias: float

    @nn.compact
    def __call__(self, stream: LimeStream, f: Branch) -> LimeStream:
        """Return the stream after the sublayer; the history is not touched."""
        x = stream.x_BTD
        if self.name == "feed_forward_connection":
            norm = Norm(self.config, name="norm")
            return stream._replace(x_BTD=pre_norm(x, f, norm))
        if reads_views(self.config):
            key, value = self._sums(stream)
            views = norm_views(self.config, Views(x, key, value))
            return stream._replace(x_BTD=x + f(views))
        (value,) = self._sums(stream)
        norm = Norm(self.config, name="norm")
        return stream._replace(x_BTD=x + f(norm(value)))

    def _sums(self, stream: LimeStream) -> Array:
        """Return the sum of each view that is mixed, [C, B, T, D]."""
        config, names = self.config, mixed_views(self.config)
        dtype, zeros, places = jnp.dtype(config.param_dtype), nn.initializers.zeros, config.depth
        weights = [self.param(f"{name}_weight", zeros, (places,), dtype) for name in names]
        kernels = []
        if self.weights == "dynamic":
            kernels = [self.param(f"{name}_kernel", zeros, (places, config.width), dtype) for name in names]

        def read(x: Array, inputs: History, weights: list, kernels: list) -> Array:
            sources = inputs.sources()
            if not kernels:
                return mix_views(sources, newest_weights(sources, jnp.stack(weights)))
            scores, epsilon = LinearScores(jnp.stack(kernels), jnp.stack(weights)), config.norm_epsilon
            return mix_views(sources, softmax_weights(sources, x, scores, newest=self.bias, epsilon=epsilon))

        return read_once(read, stream.x_BTD, stream.inputs, weights, kernels)


class FileInput(nn.Module):
    """The next block's input joins the history."""

    config: ModelConfig

    @nn.compact
    def __call__(self, stream: LimeStream) -> LimeStream:
        """Return the stream with its state filed, unless no block follows."""
        follows = place(self).block < self.config.depth - 1
        return stream._replace(inputs=stream.inputs.push(stream.x_BTD, when=follows))


class WithoutInputs(nn.Module):
    """x, without its history."""

    config: ModelConfig

    @nn.compact
    def __call__(self, stream: LimeStream, shared: None) -> Array:
        """Return what the final norm reads."""
        return stream.x_BTD


def mixed_views(config: ModelConfig) -> tuple[str, ...]:
    """Return the names of the views that are sums over depth."""
    return ("key", "value") if reads_views(config) else ("value",)


def lime(weights: str = "static", bias: float = 0.0) -> Topology:
    """Return LIMe.

    Args:
      weights: static, learned numbers that start at pre-norm; or dynamic, a softmax made of each token's x.
      bias: dynamic only: how much the score of the block's own input starts above the others'.
    """
    check_choice("model.residual: weights", weights, WEIGHTS)
    check_number("model.residual: bias", bias)
    if weights == "static" and bias:
        raise ValueError(
            f"model.residual: bias is {bias!r} and weights is 'static'; only dynamic weights have one"
        )
    dynamic = weights == "dynamic"

    def mixing(config: ModelConfig) -> np.ndarray:
        table, per_block = additive_mixing(config), config.sublayers // config.depth
        for block in range(config.depth if dynamic else 0):
            shares = np.exp(np.append(np.zeros(block), bias) - max(bias, 0.0))
            # State j is the sum of all sources up to number j * per_block, whose row of the plain table it is.
            table[block * per_block] = (
                shares / shares.sum() @ np.tri(config.sublayers + 1)[: block * per_block + 1 : per_block]
            )
        return table

    def parameters(config: ModelConfig) -> int:
        per_block = len(mixed_views(config)) * config.depth * (1 + config.width * dynamic)
        return norm_parameters(config, count_norms(config)) + config.depth * per_block

    def flops(config: ModelConfig) -> int:
        """The sums; with dynamic weights as much again for the scores."""
        products = len(mixed_views(config)) * sum(range(1, config.depth + 1)) * config.width
        return 2 * products * (1 + dynamic)

    def traffic(config: ModelConfig) -> int:
        """Pre-norm's; each block's input written, all earlier ones read, and two more views given to attention."""
        rows = config.depth - 1 + sum(range(config.depth))
        views = 2 * config.depth if reads_views(config) else 0
        return config.width * (4 * config.sublayers + rows + views)

    first = NoGradient(
        "blocks/(attention_)?connection/(key|value)_(kernel|weight)",
        0,
        "the first block has one input to read, whose weight is 1",
    )
    return Topology(
        functools.partial(LimeConnection, weights=weights, bias=float(bias)),
        "x + f(norm(x), norm(sum_j k_j X_j), norm(sum_j v_j X_j)), X_j the inputs of the blocks so far",
        "arXiv 2502.09245",
        open=lambda config, x: LimeStream(x, open_history(x, config.depth)),
        after_block=FileInput,
        close=WithoutInputs,
        parameters=parameters,
        reduces_to=None if dynamic else "pre_norm",
        mixing=mixing,
        no_gradient=(first,) if dynamic else (),
        sums_width=dynamic,
        flops=flops,
        traffic=traffic,
        advice="pre-norm's learning rate; dynamic weights start as the mean over blocks, a bias of 3 to 5 starts them "
        "near pre-norm",
    )

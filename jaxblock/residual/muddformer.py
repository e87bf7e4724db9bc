"""MUDDFormer: each of attention's query, key and value, and the stream, reads its own dynamic sum over all blocks.

X_0 = embedding,  X_i = Block_i(X^Q, X^K, X^V; X^R),  X^c = sum_{j <= i} a_c[j] X_j,  c in {Q, K, V, R}
a_c = W2_c gelu(W1 rms(X_i)) + s_c                                                          (arXiv 2502.12170)

after block i. Block i + 1's residual stream is X^R; its attention reads norm_q(X^Q), norm_k(X^K), norm_v(X^V). s
starts one-hot at the newest state (a constant, plus a delta that is learned from 0) and W2 at 0: pre-norm. Blocks are
counted, not sublayers. The last block's q, k and v are read by nobody.

Against the paper: W1 has C (L + 2) columns in every block, its width in the last one, as all blocks' parameters are
stacked (the paper: C (i + 1) after block i, four times that after the last one); places that do not exist yet have
columns in W2 and s that are never read; the first block's attention has three norms, not one; the feed-forward's
width does not grow with depth. There is no Pre+Post-norm variant.

Where no sublayer reads views (wiring = "parallel", or another token mixer than attention) only X^R is made, C = 1.
"""

import functools
from typing import NamedTuple

import flax.linen as nn
import jax.numpy as jnp

from jaxblock.config import ModelConfig
from jaxblock.contracts import check_choice
from jaxblock.functional.depth_views import HiddenWeights, dynamic_weights, mix_views, newest_weights
from jaxblock.functional.residual import pre_norm
from jaxblock.modules import Norm
from jaxblock.residual.contract import NoGradient, Topology
from jaxblock.residual.declarations import additive_mixing, norm_parameters
from jaxblock.residual.depth_views import count_norms, norm_views, reads_views
from jaxblock.residual.history import History, open_history, read_once
from jaxblock.types import Array, Branch, Views

WEIGHTS = ("dynamic", "static")


class MuddStream(NamedTuple):
    """X^R, what the next attention reads, and the states after each block."""

    x_BTD: Array
    views: Views | None
    """None where no sublayer reads views."""
    states: History


class MuddConnection(nn.Module):
    """x + f(norm_q(X^Q), norm_k(X^K), norm_v(X^V)) around attention, x + f(norm(x)) around all else."""

    config: ModelConfig

    @nn.compact
    def __call__(self, stream: MuddStream, f: Branch) -> MuddStream:
        """Return the stream after the sublayer; views and history are not touched."""
        if stream.views is None or self.name == "feed_forward_connection":
            norm = Norm(self.config, name="norm")
            return stream._replace(x_BTD=pre_norm(stream.x_BTD, f, norm))
        views = norm_views(self.config, stream.views)
        return stream._replace(x_BTD=stream.x_BTD + f(views))


class DepthViews(nn.Module):
    """X^c = sum_j a_c[j] X_j."""

    config: ModelConfig
    weights: str

    @nn.compact
    def __call__(self, stream: MuddStream) -> MuddStream:
        """Return the stream that the next block reads."""
        config, names = self.config, view_names(self.config)
        dtype, zeros, places = jnp.dtype(config.param_dtype), nn.initializers.zeros, config.depth + 1
        static = [self.param(f"{name}_weight", zeros, (places,), dtype) for name in names]
        hidden, outputs = None, []
        if self.weights == "dynamic":
            width = hidden_width(config)
            hidden = self.param("hidden_kernel", nn.initializers.lecun_normal(), (config.width, width), dtype)
            outputs = [self.param(f"{name}_kernel", zeros, (places, width), dtype) for name in names]

        def read(x: Array, states: History, static: list, hidden: Array | None, outputs: list) -> Array:
            sources = states.sources()
            weights = newest_weights(sources, jnp.stack(static))
            if hidden is not None:
                layers = HiddenWeights(hidden, jnp.stack(outputs))
                dynamic = dynamic_weights(sources, x, layers, epsilon=config.norm_epsilon)
                weights = weights[..., None, None] + dynamic
            return mix_views(sources, weights)

        x, states = stream.x_BTD, stream.states.push(stream.x_BTD)
        *views, x = read_once(read, x, states, static, hidden, outputs)
        return MuddStream(x, Views(*views) if views else None, states)


class ResidualView(nn.Module):
    """X^R alone."""

    config: ModelConfig

    @nn.compact
    def __call__(self, stream: MuddStream, shared: None) -> Array:
        """Return what the final norm reads."""
        return stream.x_BTD


def view_names(config: ModelConfig) -> tuple[str, ...]:
    """Return the names of the C sums, the residual stream's last."""
    return (*Views._fields, "residual") if reads_views(config) else ("residual",)


def hidden_width(config: ModelConfig) -> int:
    """Return the columns of W1, C (L + 2)."""
    return len(view_names(config)) * (config.depth + 2)


def muddformer(weights: str = "dynamic") -> Topology:
    """Return MUDDFormer.

    Args:
      weights: dynamic, made of the newest state of each token; or static, the learned s alone.
    """
    check_choice("model.residual: weights", weights, WEIGHTS)

    def open_stream(config: ModelConfig, x: Array) -> MuddStream:
        views = Views(x, x, x) if reads_views(config) else None
        return MuddStream(x, views, open_history(x, config.depth + 1))

    def parameters(config: ModelConfig) -> int:
        per_place = len(view_names(config)) * (config.depth + 1)
        block = per_place
        if weights == "dynamic":
            block += hidden_width(config) * (config.width + per_place)
        return norm_parameters(config, count_norms(config)) + config.depth * block

    def flops(config: ModelConfig) -> int:
        """W1, then per view and source a score from the hidden layer, then the sums; the last block's, too."""
        views, hidden = len(view_names(config)), hidden_width(config)
        sources = sum(range(2, config.depth + 2))
        sums = 2 * views * sources * config.width
        return sums + (weights == "dynamic") * 2 * hidden * (config.depth * config.width + views * sources)

    def traffic(config: ModelConfig) -> int:
        """Pre-norm's; per block one row written, all earlier ones read, and two more views given to attention."""
        rows = config.depth + sum(range(1, config.depth + 1))
        views = 2 * config.depth if reads_views(config) else 0
        return config.width * (4 * config.sublayers + rows + views)

    unread = NoGradient(
        "blocks/after_block/(query|key|value)_(kernel|weight)", -1, "after the last block only X^R is read"
    )
    return Topology(
        MuddConnection,
        "x + f(norm(X^Q), norm(X^K), norm(X^V)); after block i: X^c = sum_j a_cj(X_i) X_j, x = X^R",
        "arXiv 2502.12170",
        open=open_stream,
        after_block=functools.partial(DepthViews, weights=weights),
        close=ResidualView,
        parameters=parameters,
        reduces_to="pre_norm",
        mixing=additive_mixing,
        no_gradient=(unread,),
        sums_width=weights == "dynamic",
        flops=flops,
        traffic=traffic,
        advice="pre-norm's learning rate; one public comparison diverged with it at 24 blocks: watch the gradient's "
        "norm, or take weights = 'static'",
    )

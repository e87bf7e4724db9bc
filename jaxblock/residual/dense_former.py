"""DenseFormer: after each block, a learned weighted average of the states of all blocks so far.

X_0 = embedding,  X_i = Block_i(Y_{i-1}),  Y_i = sum_{j <= i} alpha_ij X_j,  Y_0 = X_0       (arXiv 2402.02622)

alpha starts at the identity, which is the plain pre-norm stack. Blocks are counted, not sublayers. What is learned
is alpha - identity, from zero: one parameter per term that exists, L (L + 3) / 2 of them for dilation 1, period 1.
(The authors' code decays alpha itself; nothing is decayed here.)
"""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxblock.config import ModelConfig
from jaxblock.contracts import check_integer
from jaxblock.functional.depth_mixing import Sources, dense_table, dense_terms, kept_states, mix_sources
from jaxblock.functional.residual import pre_norm
from jaxblock.modules import Norm
from jaxblock.residual.contract import Topology
from jaxblock.residual.declarations import additive_mixing, norm_parameters
from jaxblock.residual.history import History, open_history, read_once
from jaxblock.residual.place import place
from jaxblock.types import Array, Branch


class DenseStream(NamedTuple):
    """The state between sublayers, and a history of states."""

    x_BTD: Array
    states: History
    """The states that a later block's average reads (`kept_states`); with dilation and period, not all."""


class DenseConnection(nn.Module):
    """x + f(norm(x))."""

    config: ModelConfig

    @nn.compact
    def __call__(self, stream: DenseStream, f: Branch) -> DenseStream:
        """Return the stream after the sublayer; the history is not touched."""
        norm = Norm(self.config, name="norm")
        return stream._replace(x_BTD=pre_norm(stream.x_BTD, f, norm))


class DenseWeights(nn.Module):
    """alpha, made once for the whole stack."""

    config: ModelConfig
    dilation: int
    period: int

    @nn.compact
    def __call__(self) -> Array:
        """Return alpha, float32 [L + 1, kept states + 1]; row i is what block i + 1 reads, state i itself last."""
        terms = dense_terms(self.config.depth, dilation=self.dilation, period=self.period)
        alpha = jnp.eye(len(terms), dtype=jnp.float32)
        if terms.any():  # else the period is longer than the stack: nothing is averaged, nothing is learned
            dtype = jnp.dtype(self.config.param_dtype)
            weight = self.param("weight", nn.initializers.zeros, (int(terms.sum()),), dtype)
            alpha = alpha + dense_table(weight, terms)
        return jnp.concatenate([alpha[:, kept_states(terms)], jnp.diagonal(alpha)[:, None]], axis=1)


class DepthAverage(nn.Module):
    """y = sum_j alpha_ij x_j after every `period`-th block; x itself after the others."""

    config: ModelConfig
    dilation: int
    period: int

    @nn.compact
    def __call__(self, stream: DenseStream) -> DenseStream:
        """Return the stream that the next block reads."""
        here = place(self)
        terms = dense_terms(self.config.depth, dilation=self.dilation, period=self.period)
        is_kept = np.isin(np.arange(len(terms)), kept_states(terms))
        weights = jax.lax.dynamic_index_in_dim(here.shared, here.block + 1, keepdims=False)

        def average(x: Array, states: History, weights: Array) -> Array:
            earlier, newest = states.sources(), len(weights) - 1
            sources = Sources(
                (*earlier.chunks, x[None]),
                jnp.append(earlier.present, True),
                jnp.append(earlier.index, newest),
            )
            return mix_sources(sources, weights[sources.index])

        def skip(x: Array, states: History, weights: Array) -> Array:
            return x

        def read(x: Array, states: History, weights: Array) -> Array:
            if self.period == 1:
                return average(x, states, weights)
            return jax.lax.cond((here.block + 1) % self.period == 0, average, skip, x, states, weights)

        # What no later block reads is not filed: every row costs a pass over memory at every block, forward and back.
        states = stream.states.push(stream.x_BTD, when=jnp.asarray(is_kept)[here.block + 1])
        return DenseStream(read_once(read, stream.x_BTD, stream.states, weights), states)


class LastState(nn.Module):
    """x, without its history."""

    config: ModelConfig

    @nn.compact
    def __call__(self, stream: DenseStream, shared: Array) -> Array:
        """Return what the final norm reads."""
        return stream.x_BTD


def dense_former(dilation: int = 1, period: int = 1) -> Topology:
    """Return DenseFormer; the paper's "4x5" is dilation 4, period 5.

    Args:
      dilation: only states j = i modulo `dilation` are averaged after block i.
      period: only after every `period`-th block. With period = dilation whole residue classes are never read;
        the authors use dilation + 1.
    """
    check_integer("model.residual: dilation", dilation, least=1)
    check_integer("model.residual: period", period, least=1)

    def weights(config: ModelConfig, *, name: str) -> nn.Module:
        return DenseWeights(config, dilation, period, name=name)

    def average(config: ModelConfig, *, name: str) -> nn.Module:
        return DepthAverage(config, dilation, period, name=name)

    def kept(config: ModelConfig) -> int:
        return len(kept_states(dense_terms(config.depth, dilation=dilation, period=period)))

    def count(config: ModelConfig) -> int:
        return norm_parameters(config, config.sublayers + 1) + read_terms(config)

    def read_terms(config: ModelConfig) -> int:
        return int(dense_terms(config.depth, dilation=dilation, period=period).sum())

    def traffic(config: ModelConfig) -> int:
        """Pre-norm's, a row written for every state kept, and every term read but the newest, which is at hand."""
        averages = config.depth // period
        return config.width * (4 * config.sublayers + kept(config) + read_terms(config) - averages)

    return Topology(
        DenseConnection,
        "x + f(norm(x)); after block i: x = sum_j alpha_ij x_j",
        "arXiv 2402.02622",
        open=lambda config, x: DenseStream(x, open_history(x, kept(config))),
        shared=weights,
        after_block=average,
        close=LastState,
        parameters=count,
        reduces_to="pre_norm",
        mixing=additive_mixing,
        flops=lambda config: 2 * config.width * read_terms(config),
        traffic=traffic,
        advice="pre-norm's learning rate; period = dilation + 1, else whole residue classes are never read",
    )

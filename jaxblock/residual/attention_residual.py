"""Attention residuals: each sublayer reads a softmax over depth of all sublayer outputs before it.

v_0 = embedding,  v_l = f_l(norm_l(h_l)),  h_l = sum_{i < l} a_li v_i,  a_l = softmax_i(w_l . rms_norm_l(v_i))

w_l starts at 0: the mean of the history, which a scale-invariant norm cannot tell from pre-norm's sum. One more
reader, with a query of its own, closes the stack. Sublayers are counted, not blocks. (arXiv 2603.15031)
"""

import functools

import flax.linen as nn
import numpy as np

from jaxblock.config import ModelConfig
from jaxblock.modules import Norm
from jaxblock.residual.contract import Topology
from jaxblock.residual.depth_reader import DepthReader, ReaderOptions, has_keys, reader_topology, seen_sources
from jaxblock.residual.history import History, open_history
from jaxblock.residual.place import place
from jaxblock.types import Array, Branch


class AttentionResidual(nn.Module):
    """v = f(norm(read(history))); the history grows by v."""

    config: ModelConfig
    options: ReaderOptions

    @nn.compact
    def __call__(self, history: History, f: Branch) -> History:
        """Return the history with the branch's output added."""
        norm = Norm(self.config, name="norm")
        read = DepthReader(self.config, self.options, self.config.sublayers + 1, name="reader")
        keys = place(self).shared if has_keys(self.options) else None
        return history.push(f(norm(read(history.sources(), history.newest(), keys))))


class HistoryReader(nn.Module):
    """The read that closes the stack."""

    config: ModelConfig
    options: ReaderOptions

    @nn.compact
    def __call__(self, history: History, shared: Array | None) -> Array:
        """Return what the final norm reads."""
        read = DepthReader(self.config, self.options, self.config.sublayers + 1, name="reader")
        return read(history.sources(), history.newest(), shared)


def attention_residual(
    score: str = "softmax",
    query: str = "static",
    key: str = "content",
    key_norm: str = "rms_norm",
    window: int = 0,
    heads: int = 1,
) -> Topology:
    """Return full attention residuals; the options are `ReaderOptions`."""
    options = ReaderOptions(score=score, query=query, key=key, key_norm=key_norm, window=window, heads=heads)

    def mixing(config: ModelConfig) -> np.ndarray:
        reads = np.tri(config.sublayers + 1)
        if window:
            reads *= 1 - np.tri(config.sublayers + 1, k=-window)
            reads[:, 0] = 1.0
        return reads / reads.sum(1, keepdims=True) if score == "softmax" else reads / 2

    def sources(config: ModelConfig) -> list[int]:
        return [1 + outputs for outputs in range(config.sublayers + 1)]

    def traffic(config: ModelConfig) -> int:
        """Each reader's sources, then the branch's output read, filed and, read again, given on."""
        return config.width * (sum(seen_sources(options, sources(config))) + 3 * config.sublayers)

    return reader_topology(
        functools.partial(AttentionResidual, options=options),
        "v = f(norm(sum_i softmax_i(w . rms_norm(v_i)) v_i))",
        options,
        places=lambda config: config.sublayers + 1,
        mixing=mixing,
        sources=sources,
        traffic=traffic,
        open=lambda config, x: open_history(x, config.sublayers + 1),
        close=functools.partial(HistoryReader, options=options),
    )

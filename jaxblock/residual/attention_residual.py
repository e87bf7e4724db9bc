"""Attention residuals: each sublayer reads a softmax over depth of all sublayer outputs before it.

v_0 = embedding,  v_l = f_l(norm_l(h_l)),  h_l = sum_{i < l} a_li v_i,  a_l = softmax_i(w_l . rms_norm_l(v_i))

w_l starts at 0: the mean of the history, which a scale-invariant norm cannot tell from pre-norm's sum. One more
reader, with a query of its own, closes the stack. Sublayers are counted, not blocks. (arXiv 2603.15031)

The block form sums every n sublayers into one source b_k; inside a block the running sum is a source too, and it
starts from nothing at each boundary. Where the last block is ragged its sum is read as it is.
"""

import dataclasses
import functools
from typing import NamedTuple

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from jaxblock.config import ModelConfig
from jaxblock.contracts import check_choice, check_integer
from jaxblock.functional.depth_mixing import (
    DEPTH_SCORES,
    Sources,
    content_scores,
    depth_weights,
    depth_window,
    keyed_scores,
    mix_sources,
)
from jaxblock.functional.norms import rms_norm
from jaxblock.modules import Norm
from jaxblock.modules.intermediates import record
from jaxblock.residual.declarations import norm_parameters
from jaxblock.residual.history import History, open_history, read_once
from jaxblock.residual.place import place
from jaxblock.residual.topology import NoGradient, Topology
from jaxblock.types import Array, Branch


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReaderOptions:
    """How a reader weighs its sources; the defaults are the paper's method, the rest its ablations.

    Raises:
      ValueError: an option out of range.
    """

    score: str = "softmax"
    """softmax over depth, or the sigmoid of each score."""
    query: str = "static"
    """static: a learned vector per reader; dynamic: W rms_norm(newest source), W [D, D] per reader, from 0."""
    key: str = "content"
    """content: the normalized sources; layer: one learned key per source's place, whatever it holds.
    static with layer is one learned scalar per source; dynamic with layer is the cell no paper has filled."""
    key_norm: str = "rms_norm"
    """rms_norm or none, for content keys."""
    window: int = 0
    """Only the newest so many sources, and the embedding; 0 = all."""
    heads: int = 1
    """Groups of channels with a softmax each (arXiv 2607.27230); divides the width."""

    def __post_init__(self) -> None:
        check_choice("residual: score", self.score, DEPTH_SCORES)
        check_choice("residual: query", self.query, ("static", "dynamic"))
        check_choice("residual: key", self.key, ("content", "layer"))
        check_choice("residual: key_norm", self.key_norm, ("rms_norm", "none"))
        check_integer("residual: window", self.window, least=0)
        check_integer("residual: heads", self.heads, least=1)
        if self.key == "layer" and self.key_norm != "rms_norm":
            raise ValueError(
                f"residual: key_norm is {self.key_norm!r} and key is 'layer'; only content keys have a norm"
            )

    def check_width(self, config: ModelConfig) -> None:
        """Raise ValueError unless the heads divide the width."""
        if config.width % self.heads:
            raise ValueError(
                f"residual: heads is {self.heads} and model.width is {config.width}; heads must divide width"
            )


class DepthReader(nn.Module):
    """h = sum_i a_i v_i over the sources, with a query of its own."""

    config: ModelConfig
    options: ReaderOptions
    places: int
    """Number of sources there will ever be: length of a row of scalar logits."""

    @nn.compact
    def __call__(self, sources: Sources, newest_BTD: Array, keys_ND: Array | None) -> Array:
        """Return what the sublayer reads, [B, T, D] in the stream's dtype.

        Args:
          sources: what can be read.
          newest_BTD: the newest source, which a dynamic query is made of.
          keys_ND: the shared keys of places; None where keys are contents.
        """
        config, options = self.config, self.options
        options.check_width(config)
        width, epsilon, dtype = config.width, config.norm_epsilon, jnp.dtype(config.param_dtype)
        zeros, ones = nn.initializers.zeros, nn.initializers.ones
        weights = {}
        if options.query == "dynamic":
            weights["kernel"] = self.param("query_kernel", zeros, (width, width), dtype)
        elif options.key == "content":
            weights["query"] = self.param("query", zeros, (width,), dtype)
        else:
            weights["logits"] = self.param("logits", zeros, (self.places, options.heads), dtype)
        if options.key == "content" and options.key_norm == "rms_norm":
            weights["key_scale"] = self.param("key_scale", ones, (width,), dtype)

        def scores(sources: Sources, newest_BTD: Array, weights: dict, keys_ND: Array | None) -> Array:
            if "logits" in weights:
                return weights["logits"].astype(jnp.float32)[sources.index][:, None, None, :]
            query = weights.get("query")
            if query is None:
                current_BTD = rms_norm(newest_BTD.astype(jnp.float32), epsilon=epsilon)
                query = jnp.einsum("btd,de->bte", current_BTD, weights["kernel"].astype(jnp.float32))
            if keys_ND is not None:
                return keyed_scores(keys_ND[sources.index], query, heads=options.heads)
            scale = weights.get("key_scale")
            return content_scores(sources, query, scale, heads=options.heads, epsilon=epsilon)

        def read(sources: Sources, *rest: object) -> tuple[Array, Array]:
            seen = depth_window(sources, options.window)
            weights_NBTH = depth_weights(scores(sources, *rest), seen, options.score)
            return mix_sources(sources, weights_NBTH), weights_NBTH

        h, weights_NBTH = read_once(read, sources, newest_BTD, weights, keys_ND)
        record(self, "depth_weights", weights_NBTH)
        return h


class PlaceKeys(nn.Module):
    """One key per place in depth, [N, D], of the size that normalized contents have."""

    config: ModelConfig
    places: int

    @nn.compact
    def __call__(self) -> Array:
        """Return the keys."""
        shape = (self.places, self.config.width)
        return self.param("keys", nn.initializers.normal(1.0), shape, jnp.dtype(self.config.param_dtype))


def reader_parameters(config: ModelConfig, options: ReaderOptions, places: int) -> int:
    """Return the number of parameters of one reader, the shared keys not among them."""
    width = config.width
    key_scale = width if options.key == "content" and options.key_norm == "rms_norm" else 0
    if options.query == "dynamic":
        return width * width + key_scale
    return key_scale + (width if options.key == "content" else places * options.heads)


# ---------------------------------------------------------------------------- every sublayer output is a source


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

    return _topology(
        functools.partial(AttentionResidual, options=options),
        "v = f(norm(sum_i softmax_i(w . rms_norm(v_i)) v_i))",
        options,
        places=lambda config: config.sublayers + 1,
        mixing=mixing,
        open=lambda config, x: open_history(x, config.sublayers + 1),
        close=functools.partial(HistoryReader, options=options),
    )


# ---------------------------------------------------------------------------- sums of n sublayers are sources


class BlockStream(NamedTuple):
    """Finished sums, and the one that is being made."""

    sums: History
    """b_0 = embedding, b_k = sum of the k-th n sublayer outputs."""
    partial_BTD: Array
    """Sum of the current block's outputs so far."""
    filled: Array
    """How many outputs it holds, int32 scalar; 0 = it is no source yet."""


def block_sources(stream: BlockStream) -> tuple[Sources, Array]:
    """Return what a reader of the block form can read, and the newest of it."""
    finished = stream.sums.sources()
    present = stream.filled > 0
    sources = Sources(
        (*finished.chunks, stream.partial_BTD[None]),
        jnp.append(finished.present, present),
        jnp.append(finished.index, finished.newest + 1),
    )
    return sources, jnp.where(present, stream.partial_BTD, stream.sums.newest())


class BlockAttentionResidual(nn.Module):
    """partial = partial + f(norm(read(sums, partial))); every n-th sublayer it becomes a sum of its own."""

    config: ModelConfig
    options: ReaderOptions
    sublayers: int

    @nn.compact
    def __call__(self, stream: BlockStream, f: Branch) -> BlockStream:
        """Return the stream with the branch's output added to the running sum."""
        norm = Norm(self.config, name="norm")
        read = DepthReader(
            self.config, self.options, block_places(self.config, self.sublayers), name="reader"
        )
        keys = place(self).shared if has_keys(self.options) else None
        partial = stream.partial_BTD + f(norm(read(*block_sources(stream), keys)))
        full = stream.filled + 1 == self.sublayers
        return BlockStream(
            stream.sums.push(partial, when=full),
            jnp.where(full, jnp.zeros_like(partial), partial),
            jnp.where(full, 0, stream.filled + 1),
        )


class BlockReader(nn.Module):
    """The read that closes the stack: all sums, and the last one even if it is not full."""

    config: ModelConfig
    options: ReaderOptions
    sublayers: int

    @nn.compact
    def __call__(self, stream: BlockStream, shared: Array | None) -> Array:
        """Return what the final norm reads."""
        read = DepthReader(
            self.config, self.options, block_places(self.config, self.sublayers), name="reader"
        )
        return read(*block_sources(stream), shared)


def block_places(config: ModelConfig, sublayers: int) -> int:
    """Return how many sources there are in the end: the embedding and ceil(S / n) sums."""
    return 1 + -(-config.sublayers // sublayers)


def block_attention_residual(
    sublayers: int = 8,
    score: str = "softmax",
    query: str = "static",
    key: str = "content",
    key_norm: str = "rms_norm",
    window: int = 0,
    heads: int = 1,
) -> Topology:
    """Return block attention residuals; `sublayers` are summed into one source, the rest are `ReaderOptions`."""
    check_integer("residual: sublayers", sublayers, least=1)
    options = ReaderOptions(score=score, query=query, key=key, key_norm=key_norm, window=window, heads=heads)

    def open_block(config: ModelConfig, x: Array) -> BlockStream:
        sums = open_history(x, 1 + config.sublayers // sublayers)
        return BlockStream(sums, jnp.zeros_like(x), jnp.zeros((), jnp.int32))

    def mixing(config: ModelConfig) -> np.ndarray:
        reads = np.zeros((config.sublayers + 1,) * 2)
        for read in range(
            config.sublayers + 1
        ):  # the sources of reader l = read + 1: block_of[i] is that of v_i
            block_of = [0, *(1 + i // sublayers for i in range(read))]
            newest = block_of[-1]
            seen = [b for b in set(block_of) if not window or b == 0 or b > newest - window]
            weight = 1 / len(seen) if score == "softmax" else 0.5
            reads[read, : read + 1] = [weight * (b in seen) for b in block_of]
        return reads

    return _topology(
        functools.partial(BlockAttentionResidual, options=options, sublayers=sublayers),
        "partial = partial + f(norm(sum_k softmax_k(w . rms_norm(b_k)) b_k)), b = sums of n outputs",
        options,
        places=lambda config: block_places(config, sublayers),
        mixing=mixing,
        open=open_block,
        close=functools.partial(BlockReader, options=options, sublayers=sublayers),
    )


def has_keys(options: ReaderOptions) -> bool:
    """Return whether keys belong to places and are shared by all readers."""
    return options.key == "layer" and options.query == "dynamic"


def _topology(connection, equation: str, options: ReaderOptions, *, places, mixing, open, close) -> Topology:
    """Return the record of either form."""

    def shared(config: ModelConfig, *, name: str) -> nn.Module:
        return PlaceKeys(config, places(config), name=name)

    def parameters(config: ModelConfig) -> int:
        readers = (config.sublayers + 1) * reader_parameters(config, options, places(config))
        keys = places(config) * config.width if has_keys(options) else 0
        return readers + keys + norm_parameters(config, config.sublayers + 1)

    def zero_branch(config: ModelConfig, x: Array) -> Array:
        return x * mixing(config)[-1, 0]

    first = NoGradient(
        "blocks/(attention_)?connection/reader/.*", 0, "the first reader has one source, whose weight is 1"
    )
    return Topology(
        connection,
        equation,
        "arXiv 2603.15031",
        open=open,
        shared=shared if has_keys(options) else None,
        close=close,
        parameters=parameters,
        reduces_to=None if options.window else "pre_norm",
        mixing=mixing,
        zero_branch=zero_branch,
        no_gradient=(first,) if options.score == "softmax" else (),
    )

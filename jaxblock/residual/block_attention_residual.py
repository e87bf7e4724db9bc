"""Block attention residuals: what is read over depth are sums of n sublayer outputs.

b_0 = embedding,  b_k = sum of the k-th n outputs;  inside a block the running sum is a source too, and starts from
nothing at each boundary. Where the last block is ragged its sum is read as it is.               (arXiv 2603.15031)

Where sums end with blocks, the finished ones are constants of an inner scan over the blocks of a group, and all
its readers read them at once (phase 1); the running sum joins each reader's softmax later (phase 2), exactly.
"""

import functools
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxblock.config import ModelConfig
from jaxblock.contracts import check_integer
from jaxblock.functional.depth_mixing import FinishedPart, Sources, read_finished
from jaxblock.modules import Norm
from jaxblock.residual.contract import Groups, Topology
from jaxblock.residual.depth_reader import DepthReader, ReaderOptions, has_keys, reader_topology, seen_sources
from jaxblock.residual.history import History, open_history, read_once
from jaxblock.residual.place import place, told_ahead
from jaxblock.types import Array, Branch, Params


class BlockStream(NamedTuple):
    """Finished sums, and the one that is being made."""

    sums: History
    """b_0 = embedding, b_k = sum of the k-th n sublayer outputs."""
    partial_BTD: Array
    """Sum of the current block's outputs so far."""
    filled: Array
    """How many outputs it holds, int32 scalar; 0 = it is no source yet."""


def partial_source(stream: BlockStream) -> Sources:
    """Return the running sum as a source."""
    present = (stream.filled > 0).reshape(1)
    index = stream.sums.sources().newest + 1
    return Sources((stream.partial_BTD[None],), present, index.reshape(1))


def block_sources(stream: BlockStream) -> Sources:
    """Return all that a reader of the block form can read."""
    finished, partial = stream.sums.sources(), partial_source(stream)
    return Sources(
        finished.chunks + partial.chunks,
        jnp.concatenate([finished.present, partial.present]),
        jnp.concatenate([finished.index, partial.index]),
    )


def newest_source(stream: BlockStream) -> Array:
    """Return the running sum, or the last finished one where it is empty."""
    return jnp.where(stream.filled > 0, stream.partial_BTD, stream.sums.newest())


def finish_sum(stream: BlockStream, sublayers: int) -> BlockStream:
    """Return the stream with the running sum made a source of its own, and empty again, where it is full."""
    full = stream.filled == sublayers
    return BlockStream(
        stream.sums.push(stream.partial_BTD, when=full),
        jnp.where(full, jnp.zeros_like(stream.partial_BTD), stream.partial_BTD),
        jnp.where(full, 0, stream.filled),
    )


class BlockAttentionResidual(nn.Module):
    """partial = partial + f(norm(read(sums, partial))); every n-th sublayer it becomes a sum of its own."""

    config: ModelConfig
    options: ReaderOptions
    sublayers: int

    @nn.compact
    def __call__(self, stream: BlockStream, f: Branch) -> BlockStream:
        """Return the stream with the branch's output added to the running sum."""
        norm = Norm(self.config, name="norm")
        places = block_places(self.config, self.sublayers)
        read = DepthReader(self.config, self.options, places, name="reader")
        keys = place(self).shared if has_keys(self.options) else None
        finished = told_ahead(self)
        sources = block_sources(stream) if finished is None else partial_source(stream)
        partial = stream.partial_BTD + f(norm(read(sources, newest_source(stream), keys, finished)))
        stream = BlockStream(stream.sums, partial, stream.filled + 1)
        return stream if grouped(self.config, self.sublayers) else finish_sum(stream, self.sublayers)


def grouped(config: ModelConfig, sublayers: int) -> bool:
    """Return whether sums end where blocks end."""
    return sublayers % (config.sublayers // config.depth) == 0


def read_ahead(options: ReaderOptions) -> bool:
    """Return whether finished sums can be read for all readers of a group at once: queries known, no window."""
    static = options.query == "static" and options.key == "content"
    return static and options.score == "softmax" and not options.window


def sum_groups(config: ModelConfig, options: ReaderOptions, sublayers: int) -> Groups | None:
    """Return the groups of blocks that make one sum each, read in two phases where the queries are static."""
    if not grouped(config, sublayers):
        return None

    def before(stream: BlockStream, params: Params) -> dict[str, FinishedPart] | None:
        if not read_ahead(options):
            return None
        names = [name for name in params if name.endswith("connection")]
        readers = [params[name]["reader"] for name in names]
        weights = jax.tree.map(lambda *x: jnp.concatenate(x), *readers)

        def read(sources: Sources, weights: dict) -> FinishedPart:
            queries, scales = weights["query"], weights.get("key_scale")
            return read_finished(sources, queries, scales, heads=options.heads, epsilon=config.norm_epsilon)

        parts = read_once(read, stream.sums.sources(), weights)
        blocks = len(readers[0]["query"])
        return {
            name: jax.tree.map(lambda x, i=i: x[i * blocks : (i + 1) * blocks], parts)
            for i, name in enumerate(names)
        }

    blocks = sublayers // (config.sublayers // config.depth)
    return Groups(blocks, before, lambda stream: finish_sum(stream, sublayers))


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
        return read(block_sources(stream), newest_source(stream), shared)


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
    check_integer("model.residual: sublayers", sublayers, least=1)
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

    def sources(config: ModelConfig) -> list[int]:
        return [1 + -(-outputs // sublayers) for outputs in range(config.sublayers + 1)]

    def traffic(config: ModelConfig) -> int:
        """Two phases: finished sums once per group, each reader's part written; then 5 arrays per sublayer.

        Where a reader has to read all its sources itself: those, and 4 arrays per sublayer.
        """
        if not read_ahead(options) or not grouped(config, sublayers):
            return config.width * (sum(seen_sources(options, sources(config))) + 4 * config.sublayers)
        groups = -(-config.sublayers // sublayers)
        finished = groups * (groups + 1) // 2
        return config.width * (finished + groups + 6 * config.sublayers + sources(config)[-1])

    return reader_topology(
        functools.partial(BlockAttentionResidual, options=options, sublayers=sublayers),
        "partial = partial + f(norm(sum_k softmax_k(w . rms_norm(b_k)) b_k)), b = sums of n outputs",
        options,
        places=lambda config: block_places(config, sublayers),
        mixing=mixing,
        open=open_block,
        close=functools.partial(BlockReader, options=options, sublayers=sublayers),
        sources=sources,
        traffic=traffic,
        groups=functools.partial(sum_groups, options=options, sublayers=sublayers),
    )

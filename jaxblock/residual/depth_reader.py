"""The reader of attention residuals: a softmax over depth with a query of its own, in every form of the papers.

h = sum_i a_i v_i,  a = softmax_i(q . rms_norm(v_i)),  q a learned vector that starts at 0           (arXiv 2603.15031)
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from jaxblock.config import ModelConfig
from jaxblock.contracts import check_choice, check_integer
from jaxblock.functional.depth_mixing import (
    DEPTH_SCORES,
    FinishedPart,
    Sources,
    content_scores,
    depth_weights,
    depth_window,
    keyed_scores,
    mix_sources,
    read_partial,
)
from jaxblock.functional.norms import rms_norm
from jaxblock.modules.intermediates import record
from jaxblock.residual.contract import NoGradient, Topology
from jaxblock.residual.declarations import norm_parameters
from jaxblock.residual.history import read_once
from jaxblock.types import Array


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
        check_choice("model.residual: score", self.score, DEPTH_SCORES)
        check_choice("model.residual: query", self.query, ("static", "dynamic"))
        check_choice("model.residual: key", self.key, ("content", "layer"))
        check_choice("model.residual: key_norm", self.key_norm, ("rms_norm", "none"))
        check_integer("model.residual: window", self.window, least=0)
        check_integer("model.residual: heads", self.heads, least=1)
        if self.key == "layer" and self.key_norm != "rms_norm":
            raise ValueError(
                f"model.residual: key_norm is {self.key_norm!r} and key is 'layer'; only content keys have a norm"
            )

    def check_width(self, config: ModelConfig) -> None:
        """Raise ValueError unless the heads divide the width."""
        if config.width % self.heads:
            raise ValueError(
                f"model.residual: heads is {self.heads} and model.width is {config.width}; heads must divide width"
            )


class DepthReader(nn.Module):
    """h = sum_i a_i v_i over the sources, with a query of its own."""

    config: ModelConfig
    options: ReaderOptions
    places: int
    """Number of sources there will ever be: length of a row of scalar logits."""

    @nn.compact
    def __call__(
        self,
        sources: Sources,
        newest_BTD: Array,
        keys_ND: Array | None,
        finished: FinishedPart | None = None,
    ) -> Array:
        """Return what the sublayer reads, [B, T, D] in the stream's dtype.

        Args:
          sources: what can be read; with `finished`, the one source beside it.
          newest_BTD: the newest source, which a dynamic query is made of.
          keys_ND: the shared keys of places; None where keys are contents.
          finished: what was read ahead of all other sources.
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

        def read(sources: Sources, *rest: Any) -> tuple[Array, Array]:
            seen = depth_window(sources, options.window)
            weights_NBTH = depth_weights(scores(sources, *rest), seen, options.score)
            return mix_sources(sources, weights_NBTH), weights_NBTH

        def read_rest(finished: FinishedPart, sources: Sources, *rest: Any) -> Array:
            score_BTH = scores(sources, *rest)[0]
            return read_partial(finished, sources.chunks[0][0], score_BTH, sources.present[0])

        if finished is not None:
            return read_once(read_rest, finished, sources, newest_BTD, weights, keys_ND)
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


def has_keys(options: ReaderOptions) -> bool:
    """Return whether keys belong to places and are shared by all readers."""
    return options.key == "layer" and options.query == "dynamic"


def reader_flops(config: ModelConfig, options: ReaderOptions, sources: list[int]) -> int:
    """Return the forward FLOPs per token of readers with so many sources each, the last one included.

    A weighted sum of n sources is 2 n D, n scores q . v are 2 n D more, a query W v is 2 D^2.
    """
    dynamic = options.query == "dynamic"
    queries = 2 * config.width**2 * len(sources) if dynamic else 0
    scored = dynamic or options.key == "content"  # else a score is a parameter, not a product
    return queries + sum(seen_sources(options, sources)) * config.width * (4 if scored else 2)


def seen_sources(options: ReaderOptions, sources: list[int]) -> list[int]:
    """Return how many of so many sources each reader sees: with a window the newest, and the embedding."""
    return [min(n, options.window + 1) for n in sources] if options.window else sources


def reader_topology(
    connection,
    equation: str,
    options: ReaderOptions,
    *,
    places,
    mixing,
    open,
    close,
    sources,
    traffic,
    groups=None,
) -> Topology:
    """Return the record of either form; `sources(config)` lists how many each reader has, the last one included."""

    def shared(config: ModelConfig, *, name: str) -> nn.Module:
        return PlaceKeys(config, places(config), name=name)

    def parameters(config: ModelConfig) -> int:
        options.check_width(config)
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
        groups=groups,
        shared=shared if has_keys(options) else None,
        close=close,
        parameters=parameters,
        reduces_to=None if options.window else "pre_norm",
        mixing=mixing,
        zero_branch=zero_branch,
        no_gradient=(first,) if options.score == "softmax" else (),
        sums_width=options.key == "content" or options.query == "dynamic",
        flops=lambda config: reader_flops(config, options, sources(config)),
        traffic=traffic,
        advice="pre-norm's learning rate; queries must start at 0, and the norms need a small epsilon, as what is read "
        "shrinks with depth",
    )

"""FLOPs of reading over depth, per token: what a topology of `jaxblock.residual` multiplies beside its branches.

A weighted sum of n sources is 2 n D FLOPs, n scores q . v are 2 n D more, a query W v is 2 D^2. Counted are sources
that exist; rows of a history that are not written yet, which the compiled program reads as zeros, are not.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from jaxblock.config import ModelConfig, parse_choice
from jaxblock.functional.depth_mixing import dense_terms
from jaxblock.residual import REGISTRY

Options = Mapping[str, Any]


def depth_mixing_flops(config: ModelConfig) -> int | None:
    """Return the forward FLOPs per token of all reads over depth; None for a topology that has no row in `RULES`."""
    choice = parse_choice("model.residual", config.residual)
    if choice.name not in RULES:
        return None
    defaults = inspect.signature(REGISTRY[choice.name]).parameters.values()
    return RULES[choice.name](config, {option.name: option.default for option in defaults} | choice.options)


def _one_source(config: ModelConfig, options: Options) -> int:
    """A sublayer reads the stream as it is."""
    return 0


def _dense_former(config: ModelConfig, options: Options) -> int:
    terms = dense_terms(config.depth, dilation=options["dilation"], period=options["period"])
    return 2 * config.width * int(terms.sum())


def _attention_residual(config: ModelConfig, options: Options) -> int:
    """Before sublayer l there are the embedding and l - 1 outputs; one more reader closes the stack."""
    return _readers(config, options, [1 + outputs for outputs in range(config.sublayers + 1)])


def _block_attention_residual(config: ModelConfig, options: Options) -> int:
    """The embedding, the finished sums, and the running one where it holds anything."""
    size = options["sublayers"]
    return _readers(config, options, [1 + -(-outputs // size) for outputs in range(config.sublayers + 1)])


def _readers(config: ModelConfig, options: Options, sources: list[int]) -> int:
    if options["window"]:  # the newest so many, and the embedding
        sources = [min(n, options["window"] + 1) for n in sources]
    dynamic = options["query"] == "dynamic"
    queries = 2 * config.width**2 * len(sources) if dynamic else 0
    scored = dynamic or options["key"] == "content"  # else a score is a parameter, not a product
    return queries + sum(sources) * config.width * (4 if scored else 2)


RULES: Mapping[str, Callable[[ModelConfig, Options], int]] = {
    "none": _one_source,
    "pre_norm": _one_source,
    "post_norm": _one_source,
    "peri_norm": _one_source,
    "branch_norm": _one_source,
    "dense_former": _dense_former,
    "attention_residual": _attention_residual,
    "block_attention_residual": _block_attention_residual,
}
"""One row for every name of `jaxblock.residual.REGISTRY`."""

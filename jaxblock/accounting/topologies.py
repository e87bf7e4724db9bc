"""What every residual topology is and costs, at one size of model: the table of `jaxblock topologies`."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxblock.accounting.flops import training_flops_per_token
from jaxblock.choices import parse_choice
from jaxblock.config import ModelConfig
from jaxblock.residual import REGISTRY, Topology, initializations, topology


class TopologyFacts(NamedTuple):
    """One topology in numbers, None where it declares no formula."""

    name: str
    """Its name in the registry."""
    options: dict[str, Any]
    """All options, those left out at their defaults."""
    equation: str
    source: str
    parameters: int | None
    """Of all connections, norms and the final norm included."""
    parameters_extra: int | None
    """Beyond pre-norm's: negative where it has fewer norms."""
    flops: int | None
    """Forward FLOPs per token of all connections."""
    flops_overhead: float | None
    """Those FLOPs over all that a pre-norm model of this size multiplies (causal convention)."""
    stream_bytes: int
    """Per token, of what goes from block to block, histories included."""
    traffic_bytes: int | None
    """Per token, moved by all connections of a forward pass, each pass between two branches done at once."""
    traffic_ratio: float | None
    """The same over pre-norm's."""
    final_norm: bool
    reduces_to: str | None
    """What it equals at its start."""
    scale_free: bool
    depth_scaled: bool
    initializations: tuple[str, ...]
    """Those that go with it."""
    sums_width: bool
    labels: tuple[dict[str, Any], ...]
    """What the optimizer does differently with some of its parameters."""
    projects: bool
    """Whether parameters are projected after each optimizer step."""
    advice: str


def topology_facts(
    text: str, config: ModelConfig, *, registry: Mapping[str, Callable[..., Topology]] = REGISTRY
) -> TopologyFacts:
    """Return the facts of a registered topology in a model of this size.

    Args:
      text: "name" or "name(option=1)", as a config spells it.
      config: the model; its own `residual` is not read.
      registry: where names are looked up.

    Raises:
      ValueError: an unknown name or option, with the nearest valid one.
    """
    found, plain = topology(text, registry), REGISTRY["pre_norm"]()
    choice = parse_choice("topology", text)
    defaults = inspect.signature(registry[choice.name]).parameters.values()
    pre_norm = dataclasses.replace(config, residual="pre_norm")
    parameters, flops, traffic = (
        None if formula is None else formula(config)
        for formula in (found.parameters, found.flops, found.traffic)
    )
    least_parameters, least_traffic = _declared(plain.parameters, config), _declared(plain.traffic, config)
    itemsize = jnp.dtype(config.stream_dtype).itemsize
    return TopologyFacts(
        name=choice.name,
        options={option.name: option.default for option in defaults} | choice.options,
        equation=found.equation,
        source=found.source,
        parameters=parameters,
        parameters_extra=None if parameters is None else parameters - least_parameters,
        flops=flops,
        flops_overhead=None if flops is None else 3 * flops / training_flops_per_token(pre_norm),
        stream_bytes=_stream_bytes(found, config),
        traffic_bytes=None if traffic is None else traffic * itemsize,
        traffic_ratio=None if traffic is None else traffic / least_traffic,
        final_norm=found.final_norm,
        reduces_to=found.reduces_to,
        scale_free=found.scale_free,
        depth_scaled=found.depth_scaled,
        initializations=initializations(config, found),
        sums_width=found.sums_width,
        labels=tuple(label._asdict() for label in found.labels),
        projects=found.project is not None,
        advice=found.advice,
    )


def _declared(formula: Callable[[ModelConfig], int] | None, config: ModelConfig) -> int:
    assert formula is not None, "pre_norm declares every formula"
    return formula(config)


def _stream_bytes(topology: Topology, config: ModelConfig) -> int:
    """Return the bytes per token of the floating arrays of a stream; scalars that count are not data."""
    x_BTD = jax.ShapeDtypeStruct((1, 1, config.width), jnp.dtype(config.stream_dtype))
    stream = jax.eval_shape(lambda x: topology.open(config, x), x_BTD)
    arrays = [leaf for leaf in jax.tree.leaves(stream) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return sum(leaf.size * leaf.dtype.itemsize for leaf in arrays)

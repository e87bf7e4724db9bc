"""`jaxblock topologies`: every residual topology, its rule, its source and what it costs."""

import dataclasses
import json
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import tyro

from jaxblock.cli.arguments import Action, Flag, Integer, check_arguments, refuse_flag

if TYPE_CHECKING:
    from jaxblock.accounting import TopologyFacts

PAGE = 110
"""Columns."""
DECAYS = {None: "weight decay as their role says", True: "weight decay", False: "no weight decay"}


@dataclasses.dataclass(frozen=True)
class TopologiesCommand:
    """List the residual topologies: rule, source, and cost in a model of a given size."""

    name: Annotated[str | None, tyro.conf.Positional] = None
    """One of them, with its options and advice. Left out: all."""
    depth: Integer = "24"
    """Blocks of the model."""
    width: Integer = "1024"
    """Width of its stream."""
    json: Flag = False
    """Print one line of JSON."""


def topologies(arguments: Sequence[str]) -> Action:
    """List the residual topologies, what they are and cost: jaxblock topologies [NAME] [--json]."""
    from jaxblock.accounting import topology_facts
    from jaxblock.config import ModelConfig
    from jaxblock.residual import REGISTRY

    known = ("depth", "width")
    check_arguments(
        arguments, known, positionals=1, refuse=lambda name: refuse_flag(name, (*known, "json", "help"))
    )
    command = tyro.cli(
        TopologiesCommand, prog="jaxblock topologies", description=topologies.__doc__, args=list(arguments)
    )
    depth, width = _whole_number("depth", command.depth), _whole_number("width", command.width)
    sizes = {"depth": depth, "width": width}
    config = ModelConfig(
        vocab_size=32768,
        context=1024,
        depth=depth,
        width=width,
        heads=1,
        norm="rms_norm",
        bias=False,
        positions="none",
    )
    facts, refused = [], {}
    for name in REGISTRY if command.name is None else [command.name]:
        try:
            facts.append(topology_facts(name, config))
        except ValueError as error:  # a width that one of them cannot have
            if command.name is not None:
                raise
            refused[name] = str(error)

    def act() -> int:
        if command.json:
            print(json.dumps({**sizes, "topologies": [row._asdict() for row in facts], "refused": refused}))
        elif command.name is None:
            print(_table(facts, refused, command))
        else:
            print(_page(facts[0], command))
        return 0

    return act


def _whole_number(name: str, text: str | None) -> int:
    """Return the number a flag gives.

    Raises:
      ValueError: it is no whole number above 0.
    """
    if text is None or not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ValueError(f"--{name} is {text!r}; it must be a whole number, at least 1")
    return int(text)


def _table(facts: "Sequence[TopologyFacts]", refused: Mapping[str, str], command: TopologiesCommand) -> str:
    """Return one line of figures and one of words per topology, and what refuses this size."""
    longest = max(len(row.name) for row in facts)
    lines = [
        f"in a model of {command.depth} blocks of width {command.width}; jaxblock topologies NAME tells more",
        "",
        f"{'':{longest}}  {'parameters':>13} {'FLOPs':>8} {'stream':>10} {'traffic':>8}  starts as",
    ]
    for row in facts:
        numbers = f"{_extra(row):>13} {_percent(row.flops_overhead):>8} {row.stream_bytes:>10,}"
        lines.append(
            f"{row.name:{longest}}  {numbers} {_times(row.traffic_ratio):>8}  {row.reduces_to or '-'}"
        )
        lines.append(f"{'':{longest}}  {row.equation}  ({row.source})")
    lines += [f"{name:{longest}}  not of this size: {reason}" for name, reason in refused.items()]
    return "\n".join(
        [
            *lines,
            "",
            "parameters: more than pre_norm's; FLOPs: beside a pre_norm model's; stream: bytes per token that go from "
            "block to",
            "block, histories included; traffic: bytes that the connections move, over pre_norm's. In the rules: x the "
            "stream,",
            "f the branch (attention or feed-forward), u its output, L blocks, S sublayers. starts as: the topology",
            "that it equals at its own initial values, where there is one.",
        ]
    )


def _page(row: "TopologyFacts", command: TopologiesCommand) -> str:
    """Return all that is declared of one topology."""
    options = ", ".join(f"{name}={value!r}" for name, value in row.options.items())
    labels = "; ".join(
        (f"learning rate times {label['learning_rate']:g}, " if label["learning_rate"] != 1 else "")
        + f"{DECAYS[label['decay']]} on the parameters that match {label['pattern']}"
        for label in row.labels
    )
    flags = [
        *(["a factor on the branch changes nothing"] if row.scale_free else []),
        *(["its factors depend on the number of blocks"] if row.depth_scaled else []),
        *(["parameters are projected after every optimizer step"] if row.projects else []),
        *(["own parameters are summed over the width, and do not scale with it"] if row.sums_width else []),
        "a final norm follows" if row.final_norm else "no final norm",
    ]
    rows = {
        "rule": row.equation,
        "source": row.source,
        "config": f'residual = "{row.name}({options})"' if options else f'residual = "{row.name}"',
        "starts as": row.reduces_to or "itself: no other topology is equal to it there",
        "start with": "initialization " + " or ".join(f'"{name}"' for name in row.initializations),
        "parameters": _told(
            row.parameters,
            f"{_extra(row)} beside pre_norm's, {command.depth} blocks of width {command.width}",
        ),
        "FLOPs": _told(
            row.flops,
            f"{_number(row.flops)} per token forward, {_percent(row.flops_overhead)} of a pre_norm model's",
        ),
        "stream": f"{row.stream_bytes:,} bytes per token from block to block, histories included",
        "traffic": _told(
            row.traffic_bytes,
            f"{_number(row.traffic_bytes)} bytes per token, {_times(row.traffic_ratio)} pre_norm's",
        ),
        "properties": "; ".join(flags),
        "optimizer": labels or "as the roles of its parameters say: no weight decay on its own",
        "advice": row.advice or "none published",
    }
    indent = " " * 14
    return "\n".join(
        textwrap.fill(f"{name:12}  {text}", PAGE, subsequent_indent=indent) for name, text in rows.items()
    )


def _told(value: int | float | None, text: str) -> str:
    return "not declared" if value is None else text


def _extra(row: "TopologyFacts") -> str:
    return "-" if row.parameters_extra is None else f"{row.parameters_extra:+,}"


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f} %"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"

"""All checks in the order of the debugging path, and what they found.

Steps 1 to 8 are those of a person who debugs a block; the checks without a number are the mistakes of structure that
have the right shapes.
"""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from jaxblock.diagnose import gradients, learning, official, structure, tokens
from jaxblock.diagnose.finding import FAIL, PASS, SKIP, WARN, Finding, settle
from jaxblock.diagnose.subject import Subject


class Measured:
    """What several checks look at, measured once."""

    def __init__(self, subject: Subject):
        self.subject = subject

    @functools.cached_property
    def curves(self) -> learning.Curves:
        """The few rows learnt at several rates."""
        return learning.learn(self.subject)

    @functools.cached_property
    def measure(self) -> Callable:
        """The compiled measurement along depth."""
        return gradients.measurer(self.subject)

    @functools.cached_property
    def params(self) -> dict:
        """The parameters that are measured along depth."""
        return gradients.warmed(self.subject)

    @functools.cached_property
    def depth(self) -> gradients.Depth:
        """What is measured along depth."""
        return self.measure(self.params)

    @functools.cached_property
    def silenced(self) -> gradients.Depth:
        """The same with block 0's feed-forward at 0."""
        return self.measure(gradients.planted(self.subject, self.params, factor=0.0))

    @functools.cached_property
    def relative_update(self) -> Finding:
        """Step 5 with block 0's feed-forward 1000 times as large, or NaN where a norm takes the size away."""
        for factor, words in ((1000.0, "1000 times as large"), (float("nan"), "NaN")):
            wild = self.measure(gradients.planted(self.subject, self.params, factor=factor))
            name = f"block 0's feed-forward kernels {words}"
            found = gradients.relative_update(self.depth, wild, planted=name)
            if found.control is not None and found.control.caught:
                break
        return found


class Check(NamedTuple):
    """One line."""

    step: int | None
    """Its step on the debugging path; None = a mistake of structure."""
    ask: Callable[[Measured], Finding]


CHECKS: Mapping[str, Check] = {
    "overfit": Check(1, lambda m: learning.overfits(m.curves)),
    "learning_rate": Check(None, lambda m: learning.learning_rate(m.curves)),
    "shapes": Check(2, lambda m: structure.shapes(m.subject)),
    "padding": Check(3, lambda m: tokens.padding(m.subject)),
    "causality": Check(None, lambda m: tokens.causality(m.subject)),
    "reach": Check(None, lambda m: tokens.reach(m.subject)),
    "rows": Check(None, lambda m: tokens.rows(m.subject)),
    "targets": Check(None, lambda m: tokens.targets(m.subject)),
    "zero_branches": Check(4, lambda m: structure.zero_branches(m.subject)),
    "wiring": Check(None, lambda m: structure.wiring(m.subject)),
    "norms_apart": Check(None, lambda m: structure.norms_apart(m.subject)),
    "final_norm": Check(None, lambda m: structure.exit_norm(m.subject)),
    "relative_update": Check(5, lambda m: m.relative_update),
    "stream_gradient": Check(6, lambda m: gradients.stream_gradient(m.depth)),
    "dead_layers": Check(None, lambda m: gradients.dead_layers(m.depth, m.silenced)),
    "idle_parameters": Check(None, lambda m: gradients.idle_leaves(m.depth, m.silenced, m.subject)),
    "evaluation": Check(7, lambda m: tokens.evaluation(m.subject)),
    "official_layers": Check(8, lambda m: official.official_layers(m.subject)),
    "weight_decay": Check(None, lambda m: gradients.decay(m.subject)),
}


class Row(NamedTuple):
    """A check and what it found."""

    name: str
    step: int | None
    finding: Finding
    seconds: float


def run_checks(
    measured: Measured, names: Sequence[str] = tuple(CHECKS), say: Callable[[str], None] = lambda name: None
) -> list[Row]:
    """Run checks in order; `say` is told the name of each before it starts."""
    rows = []
    for name in dict.fromkeys(names):
        say(name)
        begun = time.perf_counter()
        found = settle(CHECKS[name].ask(measured))
        rows.append(Row(name, CHECKS[name].step, found, time.perf_counter() - begun))
    return rows


def verdict(rows: Sequence[Row]) -> str:
    """Return the worst verdict of all."""
    found = {row.finding.verdict for row in rows}
    return FAIL if FAIL in found else WARN if WARN in found else PASS


def page(rows: Sequence[Row], *, heading: str = "", seconds: float | None = None) -> str:
    """Return rows as a table to read: what was found, the bound, the control; what to look at where it did not pass."""
    lines = [heading, ""] if heading else []
    for row in rows:
        found = row.finding
        step = f"{row.step}." if row.step else ""
        lines.append(f"{found.verdict:4}  {step:2} {row.name.replace('_', ' '):16} {found.found}")
        if found.bound:
            lines.append(f"{'':26}bound: {found.bound}")
        if found.control is not None:
            number = "" if found.control.number is None else f": {found.control.number:.3g}"
            caught = "" if found.control.caught else ", NOT caught"
            lines.append(f"{'':26}control: {found.control.planted}{number}{caught}")
        if found.verdict in (WARN, FAIL):
            lines.append(f"{'':26}look at: {found.look}")
    counts = {word: sum(row.finding.verdict == word for row in rows) for word in (PASS, WARN, FAIL, SKIP)}
    took = "" if seconds is None else f"; {seconds:g} s"
    return "\n".join([*lines, "", ", ".join(f"{n} {word}" for word, n in counts.items()) + took])

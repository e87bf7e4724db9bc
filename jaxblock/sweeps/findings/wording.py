"""How verdicts are written: a number with its interval in words and in fields, and the verdict of a refusal."""

from dataclasses import dataclass

from jaxblock.sweeps.findings.records import Verdict
from jaxblock.sweeps.statistics.estimate import Estimate, Refusal


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What a verdict is about, before anything is found: the fields of `Verdict` of the same names."""

    id: str
    headline: int
    what: str
    """Begins the sentence, as "pre_norm: how the optimum moves with depth"."""
    quantity: str = ""
    unit: str = ""
    series: str = ""
    reference: str = ""
    depth: int | None = None

    def verdict(
        self, status: str, sentence: str, numbers: dict[str, float], *, estimate: Estimate | None = None
    ) -> Verdict:
        """Return the verdict with what was found."""
        return Verdict(
            id=self.id,
            status=status,
            sentence=sentence,
            numbers=numbers,
            headline=self.headline,
            series=self.series,
            reference=self.reference,
            depth=self.depth,
            quantity=self.quantity,
            unit=self.unit,
            estimate=estimate,
        )

    def refused(self, refusal: Refusal) -> Verdict:
        """Return the verdict that a rule forbids; it has no numbers."""
        return Verdict(
            id=self.id,
            status="refused",
            sentence=f"{self.what} is refused: {refusal.sentence}",
            numbers={},
            rule=refusal.rule,
            headline=self.headline,
            series=self.series,
            reference=self.reference,
            depth=self.depth,
            quantity=self.quantity,
            unit=self.unit,
            refusal=refusal,
        )


def numbers_of(name: str, estimate: Estimate) -> dict[str, float]:
    """Return value and interval under a name."""
    return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}


def words_of(estimate: Estimate, unit: str = "") -> str:
    """Write value, interval and unit."""
    bounds = f"{estimate.value:.3g} [{estimate.low:.3g}, {estimate.high:.3g}]"
    return f"{bounds}{' ' if unit else ''}{unit} ({estimate.interval}, n = {estimate.n})"


def listed(values: list[int]) -> str:
    """Write numbers with commas."""
    return ", ".join(map(str, values))


def is_refused(statistic: object, rule: str) -> bool:
    """Whether a statistic is refused by this rule."""
    return isinstance(statistic, Refusal) and statistic.rule == rule

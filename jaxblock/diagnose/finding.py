"""What one check of `jaxblock diagnose` found: a number against its bound, and the control that proved it can fail."""

from typing import NamedTuple

PASS, WARN, FAIL, SKIP = "pass", "warn", "fail", "skip"


class Control(NamedTuple):
    """A mistake planted into the same model, or into one of the same parts, on which the measurement must say so."""

    planted: str
    """What was planted."""
    number: float | None
    """What the check's number was then."""
    caught: bool
    """Whether the check failed on it, as it must."""


class Finding(NamedTuple):
    """One line of the table."""

    verdict: str
    """pass, warn (look at it), fail (it is broken), or skip (it has no meaning for this model)."""
    found: str
    """What was measured, in words with its number; of a skipped check, why."""
    number: float | None = None
    """The number the verdict rests on; None where there is none."""
    bound: str = ""
    """What the number is held against."""
    control: Control | None = None
    """None where the check was skipped."""
    look: str = ""
    """What to look at next, unless it passed."""

    @property
    def as_dict(self) -> dict:
        """Plain values, by field."""
        control = None if self.control is None else self.control._asdict()
        return {**self._asdict(), "control": control}


def settle(finding: Finding) -> Finding:
    """Return the finding, a pass only where its control was caught: what cannot fail has proved nothing."""
    control = finding.control
    if finding.verdict != PASS:
        return finding
    if control is None or control.caught:
        return finding._replace(look="")
    look = f"the control was not caught ({control.planted}): here this check could not have failed"
    return finding._replace(verdict=WARN, look=look)


def skipped(why: str) -> Finding:
    """Return the finding of a check that has no meaning here."""
    return Finding(SKIP, why)

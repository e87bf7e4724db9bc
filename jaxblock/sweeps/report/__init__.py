"""The report of a sweep: one page that says what was found, how sure it is and what is refused, and its files."""

from jaxblock.sweeps.report.files import write_report

__all__ = ["write_report"]

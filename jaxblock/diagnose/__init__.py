"""`jaxblock diagnose`: is this model what it says, and does it learn? Checks that can fail, each with the control that
proved it."""

from jaxblock.diagnose.finding import FAIL, PASS, SKIP, WARN, Control, Finding
from jaxblock.diagnose.subject import Subject, subject_of_config, subject_of_run
from jaxblock.diagnose.table import CHECKS, Measured, Row, page, run_checks, verdict

__all__ = [
    "CHECKS",
    "FAIL",
    "PASS",
    "SKIP",
    "WARN",
    "Control",
    "Finding",
    "Measured",
    "Row",
    "Subject",
    "page",
    "run_checks",
    "subject_of_config",
    "subject_of_run",
    "verdict",
]

"""Colors of the report: eight series that stay apart in every common color blindness, on white and on black.

The light ones are those of Okabe and Ito (2008), the yellow darkened until it can be read on white; the dark ones are
lighter by the same hue. A series also has a sign of its own, so that no figure rests on color.
"""

from collections.abc import Mapping

SERIES_LIGHT = ("#0072b2", "#c14e00", "#008060", "#b0568c", "#2f8fc4", "#8f7400", "#6b4fa0", "#3f3f3f")
SERIES_DARK = ("#5cb3ea", "#f0914c", "#3fc39b", "#e29ac6", "#9ad4f5", "#e0c33c", "#b9a2ea", "#d0d0d0")
SIGNS = 8


def sign_of(color: int) -> int:
    """Return which of the `SIGNS` a series has: after the eighth, a color comes with the next sign."""
    return (color + color // len(SERIES_LIGHT)) % SIGNS


PAPER: Mapping[str, str] = {
    "background": "#ffffff",
    "raised": "#f6f6f4",
    "ink": "#1b1b1a",
    "quiet": "#5c5c58",
    "faint": "#8c8c86",
    "grid": "#e4e4e0",
    "alarm": "#b3261e",
    "good": "#0b6b42",
    "link": "#0b57a4",
}
NIGHT: Mapping[str, str] = {
    "background": "#141413",
    "raised": "#1f1f1d",
    "ink": "#ecece8",
    "quiet": "#b0b0a8",
    "faint": "#85857d",
    "grid": "#31312e",
    "alarm": "#ff8a80",
    "good": "#6fd3a3",
    "link": "#8ab8f5",
}

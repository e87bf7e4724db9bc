"""`write_report`: everything is made in memory first, then each file is replaced in one move, the page last."""

import datetime
import json
import os
from pathlib import Path

from jaxblock.sweeps.analysis import analyse
from jaxblock.sweeps.report.answer import verdict_record
from jaxblock.sweeps.report.columns import column_table
from jaxblock.sweeps.report.figures import all_figures
from jaxblock.sweeps.report.fit_tables import diagnosis_sheet, law_sheet
from jaxblock.sweeps.report.material import Material
from jaxblock.sweeps.report.page import page
from jaxblock.sweeps.report.png import draw_png
from jaxblock.sweeps.report.sheets import Sheet
from jaxblock.sweeps.report.tables import (
    arm_sheet,
    contrast_sheet,
    event_sheet,
    failure_sheet,
    failure_table,
    mapping_sheet,
    run_table,
    series_sheet,
    size_sheet,
    to_csv,
)
from jaxblock.sweeps.results import Sweep

PAGE = "report.html"


def write_report(sweep: Sweep, folder: Path) -> Path:
    """Write report.html, results.csv, columns.csv, verdicts.json, tables/*.csv and figures/*.png; return the page.

    The files are the same ones whatever the sweep holds, so that a later report replaces every file of an earlier one.

    Args:
      sweep: finished or not.
      folder: where the files go; made where it is not there.
    """
    written = report_files(sweep, datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))
    for name, content in written.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.partial")
        try:
            temporary.write_bytes(content)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    return folder / PAGE


def report_files(sweep: Sweep, time: str) -> dict[str, bytes]:
    """Return file name -> content, the page last: who reads it finds all that it links to.

    Args:
      sweep: finished or not.
      time: when the report is made, UTC, ISO 8601.
    """
    material = Material(sweep, analyse(sweep))
    figures, sheets = all_figures(material), page_sheets(material)
    written = {"results.csv": run_table(material)}
    written |= {f"tables/{figure.name}.csv": figure.table for figure in figures}
    written |= {f"tables/{name}.csv": sheet.file() for name, sheet in sheets.items()}
    written["tables/failures.csv"] = failure_table(material)  # the page shows them in groups
    written["columns.csv"] = column_table(written)
    files = {f"figures/{figure.name}.png": draw_png(figure) for figure in figures}
    files |= {name: to_csv(table).encode() for name, table in written.items()}
    record = verdict_record(material, time)
    files["verdicts.json"] = (json.dumps(record, indent=2, default=str) + "\n").encode()
    files[PAGE] = page(material, figures, tuple(sheets.values())).encode()
    return files


def page_sheets(material: Material) -> dict[str, Sheet]:
    """Return file name -> table, of those below the figures."""
    sweep = material.sweep
    return {
        "plan": mapping_sheet("The plan", sweep.plan),
        "fixed": mapping_sheet("What was held fixed", sweep.fixed),
        "series": series_sheet(material),
        "arms": arm_sheet(material),
        "sizes": size_sheet(material),
        "diagnosis": diagnosis_sheet(material),
        "laws": law_sheet(material),
        "contrasts": contrast_sheet(material),
        "failures": failure_sheet(material),
        "events": event_sheet(material),
        "environment": mapping_sheet("Environment", sweep.environment),
        "conventions": mapping_sheet("Conventions", material.findings.conventions),
    }

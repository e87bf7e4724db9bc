"""`write_report`: everything is made in memory first, then each file is replaced in one move, the page last."""

import json
import os
from pathlib import Path

from jaxblock.sweeps.analysis import analyse
from jaxblock.sweeps.report.answer import verdict_values
from jaxblock.sweeps.report.figures import all_figures
from jaxblock.sweeps.report.fit_tables import diagnosis_table, law_table
from jaxblock.sweeps.report.marks import Table
from jaxblock.sweeps.report.material import Material
from jaxblock.sweeps.report.page import page
from jaxblock.sweeps.report.png import draw_png
from jaxblock.sweeps.report.tables import (
    arm_table,
    contrast_table,
    event_table,
    failure_table,
    grouped_failures,
    mapping_table,
    run_table,
    series_table,
    size_table,
    to_csv,
)
from jaxblock.sweeps.results import Sweep

PAGE = "report.html"


def write_report(sweep: Sweep, folder: Path) -> Path:
    """Write report.html, results.csv, verdicts.json, tables/*.csv and figures/*.png; return the page's path.

    The files are the same ones whatever the sweep holds, so that a later report replaces every file of an earlier one.

    Args:
      sweep: finished or not.
      folder: where the files go; made where it is not there.
    """
    written = report_files(sweep)
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


def report_files(sweep: Sweep) -> dict[str, bytes]:
    """Return file name -> content, the page last: who reads it finds all that it links to."""
    material = Material(sweep, analyse(sweep))
    figures, tables = all_figures(material), page_tables(material)
    files = {f"figures/{figure.name}.png": draw_png(figure) for figure in figures}
    written = {figure.name: figure.table for figure in figures}
    written |= {name: table for name, (_, table) in tables.items()} | {"failures": failure_table(material)}
    files |= {f"tables/{name}.csv": to_csv(table).encode() for name, table in written.items()}
    files["results.csv"] = to_csv(run_table(material)).encode()
    files["verdicts.json"] = (json.dumps(verdict_values(material.findings), indent=2) + "\n").encode()
    files[PAGE] = page(material, figures, dict(tables.values())).encode()
    return files


def page_tables(material: Material) -> dict[str, tuple[str, Table]]:
    """Return file name -> (heading, table) of the tables below the figures."""
    sweep, setting = material.sweep, ("setting", "value")
    return {
        "plan": ("The plan", mapping_table(sweep.plan, setting)),
        "fixed": ("What was held fixed", mapping_table(sweep.fixed, setting)),
        "series": ("Series", series_table(material)),
        "arms": ("Arms: outcomes and best rates", arm_table(material)),
        "sizes": ("Arms: parameters N, training FLOPs per token, time and memory", size_table(material)),
        "diagnosis": ("Arms: sharpness, stability, horizon", diagnosis_table(material)),
        "laws": ("Laws in depth", law_table(material)),
        "contrasts": ("Contrasts against the reference, paired by seed", contrast_table(material)),
        "failures": ("Runs that failed or are not there", grouped_failures(material)),
        "events": ("What happened on the way", event_table(material)),
        "environment": ("Environment", mapping_table(sweep.environment, setting)),
        "conventions": ("Conventions on every axis", mapping_table(material.findings.conventions, setting)),
    }

"""report.html: one file that needs nothing else, from the records of the analysis."""

from collections.abc import Sequence

from jaxblock.sweeps.report.answer import (
    answer,
    change_box,
    status_legend,
    unfinished,
    verdict_list,
)
from jaxblock.sweeps.report.marks import Figure, Table
from jaxblock.sweeps.report.markup import Child, Markup, identifier, tag
from jaxblock.sweeps.report.material import Material
from jaxblock.sweeps.report.scales import number
from jaxblock.sweeps.report.sheets import Sheet
from jaxblock.sweeps.report.style import style_sheet
from jaxblock.sweeps.report.svg import draw_legend, draw_panels

MOST_ROWS = 400
"""Rows of a figure's data shown on the page; the CSV file has all."""
LONG = 24
"""Longest word that a column is made wide enough for."""
OPEN = 3
"""Most refusals of a figure before their list is folded."""


def page(material: Material, figures: Sequence[Figure], sheets: Sequence[Sheet]) -> Markup:
    """Return the whole page.

    Args:
      material: the sweep and its analysis.
      figures: in order.
      sheets: the tables at the end of the page, in order; their files are named in `files`.
    """
    name = material.sweep.name
    titles = [figure.title for figure in figures] + [sheet.heading for sheet in sheets]
    head = tag(
        "head",
        [
            tag("meta", (), {"charset": "utf-8"}),
            tag("meta", (), {"name": "viewport", "content": "width=device-width, initial-scale=1"}),
            tag("meta", (), {"name": "color-scheme", "content": "light dark"}),
            tag("title", f"{name}: depth sweep"),
            tag("style", style_sheet()),
        ],
    )
    body = tag(
        "body",
        [
            tag("a", "Skip to the figures", {"class": "skip", "href": "#figures"}),
            _header(material),
            tag(
                "main",
                [
                    change_box(material.findings),
                    _contents(titles),
                    _facts(material),
                    tag("div", [_figure(i, one) for i, one in enumerate(figures, 1)], {"id": "figures"}),
                    *(_section(sheet) for sheet in sheets),
                ],
            ),
            tag("footer", _footer(material)),
        ],
    )
    return Markup("<!doctype html>\n" + tag("html", [head, body], {"lang": "en"}) + "\n")


def _header(material: Material) -> Markup:
    sweep = material.sweep
    steps = max((run.planned_steps for run in sweep.results), default=0)
    finished = sum(run.outcome != "missing" for run in sweep.results)
    facts = (
        f"{len(material.labels)} series, depths {', '.join(map(str, material.depths)) or 'none'} blocks, "
        f"{len(material.rates)} learning rates; {finished:,} of {len(sweep.results):,} runs done, at "
        f"{steps:,} steps = {steps * sweep.tokens_per_step:,} tokens. A uniform guess has {sweep.uniform_loss:.3f} nats"
    )
    if sweep.baseline_loss is not None:
        facts += f"; the baseline ({sweep.baseline or 'of the task'}) {sweep.baseline_loss:.3f}"
    return tag(
        "header",
        [
            tag("h1", sweep.name),
            tag("p", f"{facts}.", {"class": "facts"}),
            unfinished(material),
            *answer(material.findings),
            status_legend(material.findings),
            verdict_list(material.findings),
        ],
    )


def _facts(material: Material) -> Markup:
    """Return the box of what is the same in every figure, so that no caption has to repeat it."""
    items = [tag("li", sentence) for sentence in material.facts]
    return tag(
        "section",
        [tag("h2", "On every axis", {"id": "on-every-axis"}), tag("ul", items)],
        {"class": "box", "aria-labelledby": "on-every-axis"},
    )


def _contents(titles: Sequence[str]) -> Markup:
    items = [tag("li", tag("a", title, {"href": f"#{identifier(title)}"})) for title in titles]
    return tag("nav", tag("ol", items), {"aria-label": "Contents"})


def _figure(place: int, figure: Figure) -> Markup:
    heading = tag("h2", figure.title, {"id": identifier(figure.title)})
    said = tag("p", figure.answer, {"class": "short-answer"}) if figure.answer else None
    panels = draw_panels(figure)
    size = {1: "one", 2: "two"}[len(panels)] if len(panels) in (1, 2) else "many"
    drawing = (
        tag("div", panels, {"class": f"panels {size}", "role": "group", "aria-label": figure.summary})
        if panels
        else tag("p", f"Nothing to draw yet. {figure.summary}", {"class": "empty"})
    )
    caption = tag(
        "figcaption",
        [
            tag("p", [tag("strong", f"Figure {place}. "), figure.caption]),
            _refusals(figure.refusals),
        ],
    )
    data = _data(figure.title, f"tables/{figure.name}.csv", figure.table)
    body = [draw_legend(figure) if panels else None, drawing, caption]
    return tag(
        "section",
        [heading, said, tag("figure", body, {"class": "alone" if len(panels) == 1 else None}), data],
        {"aria-labelledby": identifier(figure.title), "class": "figure"},
    )


def _refusals(sentences: Sequence[str]) -> Markup | None:
    """Return what the figure does not show; a long list is folded."""
    if not sentences:
        return None
    heading, items = f"Refused, and why ({len(sentences)})", tag("ul", [tag("li", one) for one in sentences])
    return tag("details", [tag("summary", heading), items], {"open": len(sentences) <= OPEN})


def _data(title: str, file: str, table: Table) -> Markup:
    """Return the folded data of a figure, with a link to its file."""
    shown = Table(columns=table.columns, rows=table.rows[:MOST_ROWS])
    cut = f", the first {MOST_ROWS} shown" if len(table.rows) > MOST_ROWS else ""
    link = tag("p", [f"{len(table.rows):,} rows{cut}: ", tag("a", file, {"href": file})])
    summary = tag("summary", f"Data of this figure ({len(table.rows):,} rows)")
    return tag("details", [summary, link, html_table(shown, title)], {"class": "data"})


def _section(sheet: Sheet) -> Markup:
    notes = [tag("li", [tag("strong", f"{term}: "), sentence]) for term, sentence in sheet.notes]
    body: Child = (
        html_table(sheet.page(), sheet.heading) if sheet.rows else tag("p", "None.", {"class": "empty"})
    )
    name = identifier(sheet.heading)
    return tag(
        "section",
        [
            tag("h2", sheet.heading, {"id": name}),
            tag("ul", notes, {"class": "notes"}) if notes and sheet.rows else None,
            body,
        ],
        {"aria-labelledby": name},
    )


def html_table(table: Table, caption: str) -> Markup:
    """Return a table; columns of numbers are set to the right, and a wide one scrolls on its own."""
    kinds = [_kind([row[i] for row in table.rows]) for i in range(len(table.columns))]
    head = [
        tag("th", column.replace("_", " "), {"scope": "col", "class": kind})
        for column, kind in zip(table.columns, kinds, strict=True)
    ]
    rows = [
        tag("tr", [tag("td", _cell(cell), {"class": kind}) for cell, kind in zip(row, kinds, strict=True)])
        for row in table.rows
    ]
    whole = tag("table", [tag("thead", tag("tr", head)), tag("tbody", rows)], {"aria-label": caption})
    return tag("div", whole, {"class": "scroll", "tabindex": "0", "role": "region", "aria-label": caption})


def _kind(column: Sequence[object]) -> str | None:
    """Return the class of a column: n for numbers, long for words that must be cut, or None."""
    words = [cell for cell in column if isinstance(cell, str)]
    if not words and any(isinstance(cell, int | float) for cell in column):
        return "n"
    longest = max((len(word) for cell in words for word in cell.split()), default=0)
    return "long" if longest > LONG else None


def _cell(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return number(value) if isinstance(value, float) else str(value)


def _footer(material: Material) -> list[Child]:
    links = [tag("a", name, {"href": name}) for name in ("results.csv", "verdicts.json", "columns.csv")]
    runs = ["Written by jaxblock report. Every run: ", links[0], ", one row per run, failures too. "]
    machines = ["Verdicts for machines: ", links[1], ". Unit and meaning of every column of every CSV file: "]
    return [tag("p", [*runs, *machines, links[2], "."])]

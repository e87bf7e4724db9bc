"""The report of a sweep: it names every failure, prints no refused number, needs nothing outside itself."""

import csv
import dataclasses
import datetime
import functools
import io
import json
import re
import struct
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from jaxblock.sweeps.analysis import analyse
from jaxblock.sweeps.findings.records import STATUSES
from jaxblock.sweeps.report import files as files_module
from jaxblock.sweeps.report import write_report
from jaxblock.sweeps.report.columns import describe
from jaxblock.sweeps.report.figures.losses import loss_figure
from jaxblock.sweeps.report.marks import Line, Points
from jaxblock.sweeps.report.material import Material
from jaxblock.sweeps.results import Result, Sweep
from jaxblock.sweeps.statistics.estimate import RULES, Refusal
from tests.sweeps.test_report_sweep import RATES, SCRIPT, synthetic_sweep

LEADS = ("Which series is better", "Does the learning rate transfer over depth", "Loss against depth")
WORDS = (
    *("series", "against", "reason", "sentence", "note", "refused", "refusal", "interval", "phrase"),
    *("law", "law_start", "law_end", "parameter", "run", "time_utc", "statistic"),
)
"""Columns of tables that hold words, which may have digits in them."""
SETTINGS = ("plan", "fixed", "environment", "conventions")
"""Tables of settings: their values are of any kind."""
EMPTY_ELEMENTS = ("meta", "br", "col", "img")


class Page(HTMLParser):
    """What a browser would see of a page: elements in order, and the text of each kind of element."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[tuple[str, str]] = []
        """(innermost element that matters, text)."""
        self.errors: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in EMPTY_ELEMENTS:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.errors.append(f"</{tag}> closes what is not open")

    def handle_data(self, data: str) -> None:
        self.text.append((" ".join(self.open), data))

    def words(self, *, within: str = "body") -> str:
        """Return the text inside some element, style left out."""
        return "".join(
            data for path, data in self.text if within in path.split() and "style" not in path.split()
        )

    def attributes(self, tag: str) -> list[dict[str, str | None]]:
        return [found for name, found in self.elements if name == tag]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a report on the whole synthetic sweep."""
    target = tmp_path_factory.mktemp("report")
    assert write_report(synthetic_sweep(), target) == target / "report.html"
    return target


@pytest.fixture(scope="module")
def source(folder: Path) -> str:
    return (folder / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(source: str) -> Page:
    return Page(source)


@functools.cache
def unfinished_sweep() -> Sweep:
    """Return a plan of which nothing is done."""
    sweep = synthetic_sweep(depths=(2, 4))
    keep = {field.name for field in dataclasses.fields(Result) if field.default is dataclasses.MISSING}
    keep -= {"parameters", "flops_per_token"}
    results = tuple(Result(**{name: getattr(run, name) for name in keep}) for run in sweep.results)
    return dataclasses.replace(sweep, results=results, events=())


def rows_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"))))


def header_of(path: Path) -> list[str]:
    return next(csv.reader(io.StringIO(path.read_text(encoding="utf-8"))))


def test_the_page_names_the_diverging_rate_the_arm_without_memory_and_the_killed_worker(page: Page) -> None:
    words = page.words()
    assert "the loss ended at 8.0000, and a uniform guess has 5.5452" in words
    assert "one run alone needs 9.1 GiB and 8.0 GiB are allowed" in words
    assert "worker 1 died with signal 9 twice" in words
    assert re.search(
        r"6 diverged, 15 non_finite; left out as no evidence: 21 out_of_memory, 1 killed, 1 missing", words
    )


def test_the_top_says_what_was_found_what_is_refused_and_what_would_change_it(page: Page) -> None:
    top, findings = page.words(within="header"), analyse(synthetic_sweep())
    assert all(verdict.sentence in top for verdict in findings.verdicts)
    assert all(f"{meaning}" in top for meaning in STATUSES.values())
    assert "1 of 210 runs are not done yet" in top
    box = page.words(within="main")
    assert all(question.sentence in box for question in findings.open_questions)
    assert "What would change this conclusion" in box


def test_a_refused_optimum_has_no_value_in_any_table_and_an_accepted_one_has(folder: Path) -> None:
    rows = rows_of(folder / "tables" / "optimum_against_depth.csv")
    optima = [row for row in rows if row["quantity"] == "optimal_learning_rate"]
    refused = [row for row in optima if row["refused"]]
    assert {(row["series"], row["depth_blocks"]) for row in refused} >= {(optima[-1]["series"], "32")}
    for path in (folder / "tables").glob("*.csv"):
        for row in rows_of(path):
            for column in (name for name in row if name.endswith("refused") and row[name]):
                assert row[column] in RULES, (path.name, column)
                assert row[column.removesuffix("refused") + "refusal"]
                base = column.removesuffix("refused").rstrip("_")
                parts = ("", "_low", "_high", "_n") if base else ()
                emptied = [base + part for part in parts] + (
                    [] if base else ["value", "low", "high", "n", "optimum"]
                )
                assert not any(row.get(name) for name in emptied), (path.name, column)
    assert all(row["value"] for row in optima if not row["refused"])
    assert len(refused) < len(optima)


def refused_numbers() -> Iterator[float]:
    """Yield what fits without rules would have found where the analysis refuses: optima, and their law in depth."""
    for series in analyse(synthetic_sweep()).series:
        optima = {}
        for arm in series.arms:
            means = [(np.log2(row.rate), np.mean(row.losses)) for row in arm.rates if row.losses]
            if len(means) > 2:
                u, loss = np.asarray(means).T
                bend, slope, _ = np.polyfit(u, loss, 2)
                optima[arm.depth] = 2 ** (-slope / (2 * bend))
                if isinstance(arm.basin, Refusal):
                    yield optima[arm.depth]
        if isinstance(series.transfer, Refusal) and len(optima) > 1:
            yield np.polyfit(np.log2(list(optima)), np.log2(list(optima.values())), 1)[0]


def test_a_refused_number_is_nowhere(folder: Path, page: Page) -> None:
    texts = [page.words(), (folder / "verdicts.json").read_text(encoding="utf-8")]
    texts += [path.read_text(encoding="utf-8") for path in (folder / "tables").glob("*.csv")]
    numbers = list(refused_numbers())
    assert len(numbers) >= 2
    for number in numbers:
        for words in (f"{number:.3g}", f"{number:.4g}"):
            assert not any(re.search(rf"(?<![\d.]){re.escape(words)}", text) for text in texts), words


def test_an_accepted_number_is_on_the_page(page: Page) -> None:
    """The control of the tests above: they look where numbers are."""
    arm = analyse(synthetic_sweep()).series[0].arms[0]
    assert not isinstance(arm.basin, Refusal)
    assert f"{arm.basin.optimum.value:.4g}" in page.words()


def test_every_figure_has_a_caption_with_its_numbers_and_its_data(folder: Path, page: Page) -> None:
    captions = "".join(data if "figcaption" in path else "\f" for path, data in page.text).split("Figure ")[
        1:
    ]
    assert (
        len(captions) == len(page.attributes("figure")) == len(list((folder / "figures").glob("*.png"))) == 10
    )
    for caption in captions:
        for pattern in (
            r"n = \d",
            r"interval",
            r"Of 210 runs, failed",
        ):
            assert re.search(pattern, caption), (pattern, caption)
    links = [found["href"] for found in page.attributes("a")]
    assert all(f"tables/{path.stem}.csv" in links for path in (folder / "figures").glob("*.png"))


def test_every_drawing_can_be_read_aloud(page: Page) -> None:
    drawings = [found for found in page.attributes("svg") if found.get("role") == "img"]
    assert len(drawings) > 20
    assert all(found["aria-label"] for found in drawings)
    assert all(
        found.get("aria-hidden") == "true" for found in page.attributes("svg") if found not in drawings
    )
    groups = [found for found in page.attributes("div") if found.get("role") == "group"]
    assert len(groups) == 10
    assert all(found["aria-label"] for found in groups)


def test_the_page_needs_nothing_outside_itself(folder: Path, page: Page, source: str) -> None:
    assert not {name for name, _ in page.elements} & {
        "script",
        "link",
        "img",
        "iframe",
        "object",
        "embed",
        "base",
    }
    for _, attributes in page.elements:
        assert not {"src", "srcset", "style", "background"} & set(attributes)
        assert not any(name.startswith("on") for name in attributes)
        target = attributes.get("href")
        assert target is None or target.startswith("#") or (folder / target).is_file(), target
    assert not re.search(r"@import|@font-face|https?:", source)
    assert all(found.startswith("#clip-") for found in re.findall(r"url\(([^)]*)\)", source))


def test_what_a_plan_says_is_text_and_never_markup(page: Page, source: str) -> None:
    assert "<script" not in source.lower()
    assert page.words().count(SCRIPT) > 5
    assert page.words(within="title").startswith(f"depth & width {SCRIPT}")


def test_the_page_is_well_formed(page: Page) -> None:
    assert not page.errors
    assert not page.open
    names = [found["id"] for _, found in page.elements if "id" in found]
    assert len(names) == len(set(names))
    targets = {found["href"] for found in page.attributes("a")}
    assert {target[1:] for target in targets if target and target.startswith("#")} <= set(names)
    headings = [name for name, _ in page.elements if re.fullmatch(r"h[1-6]", name)]
    assert headings[0] == "h1"
    assert headings.count("h1") == 1


def test_results_csv_has_a_row_for_every_run_and_a_column_for_every_scalar(folder: Path) -> None:
    sweep, rows = synthetic_sweep(), rows_of(folder / "results.csv")
    assert [row["id"] for row in rows] == [run.id for run in sweep.results]
    assert [row["outcome"] for row in rows] == [run.outcome for run in sweep.results]
    structured = {"axes", "parameters", "flops_per_token", "val_losses", "losses", "start", "end", "probe"}
    assert {field.name for field in dataclasses.fields(Result)} - structured <= set(rows[0])
    assert {"axes.model.residual", "parameters.total", "flops_per_token.causal"} <= set(rows[0])
    for row, run in zip(rows, sweep.results, strict=True):
        assert row["val_loss"] == ("" if run.val_loss is None else str(run.val_loss))
        assert float(row["learning_rate"]) in RATES


def test_verdicts_json_holds_the_verdicts(folder: Path) -> None:
    record = json.loads((folder / "verdicts.json").read_text(encoding="utf-8"))
    assert list(record) == ["sweep", "plan", "finished", "runs", "time", "verdicts"]
    assert record["sweep"] == synthetic_sweep().name
    assert record["plan"]["data"] == {"batch": 16, "note": SCRIPT}
    assert (record["finished"], record["runs"]) == (False, {"planned": 210, "done": 209})
    assert datetime.datetime.fromisoformat(record["time"]).utcoffset() == datetime.timedelta(0)
    found, verdicts = record["verdicts"], analyse(synthetic_sweep()).verdicts
    assert [one["id"] for one in found] == [one.id for one in verdicts]
    assert all(not one["numbers"] and one["rule"] for one in found if one["status"] == "refused")
    assert {one["status"] for one in found} <= set(STATUSES)


def test_the_page_calls_a_verdict_what_verdicts_json_calls_it(page: Page, folder: Path) -> None:
    record = json.loads((folder / "verdicts.json").read_text(encoding="utf-8"))
    classes = [found.get("class") or "" for found in page.attributes("span")]
    words = [found for found in classes if found.startswith("word ")]
    legend, listed = words[: len(STATUSES)], words[len(STATUSES) :]
    assert legend == [f"word {status}" for status in STATUSES]
    assert Counter(listed) == Counter(f"word {one['status']}" for one in record["verdicts"])
    spoken = [data for path, data in page.text if path.endswith("li span") and data in STATUSES]
    assert spoken == [word.removeprefix("word ") for word in words]


def test_every_column_of_every_csv_file_has_its_unit_and_meaning(folder: Path) -> None:
    described = {(row["file"], row["column"]): row for row in rows_of(folder / "columns.csv")}
    written = {
        (path.relative_to(folder).as_posix(), column)
        for path in folder.rglob("*.csv")
        if path.name != "columns.csv"
        for column in header_of(path)
    }
    assert written == set(described)
    assert all(row["meaning"] for row in described.values())
    for column in ("step_s", "program_bytes"):
        assert "whole" in described["results.csv", column]["meaning"]
        assert "divide by lanes" in described["results.csv", column]["meaning"]
    with pytest.raises(KeyError):
        describe("a_column_nobody_described")


def test_a_cell_of_a_table_is_one_number_or_words_under_a_plain_name(folder: Path) -> None:
    """A number with its interval, or a list of numbers, would not parse."""
    tables = [path for path in (folder / "tables").glob("*.csv") if path.stem not in SETTINGS]
    for path in tables:
        assert all(re.fullmatch(r"[a-z][a-z0-9_]*", column) for column in header_of(path)), path.name
        for row in rows_of(path):
            for name, cell in row.items():
                if not name.endswith(WORDS) and re.search(r"\d", cell):
                    assert re.fullmatch(r"-?\d+(\.\d+)?(e[+-]?\d+)?", cell), (path.name, name, cell)
    assert len(tables) > 10


def test_the_page_opens_with_ranking_then_transfer_then_loss_and_not_with_counts(page: Page) -> None:
    top, findings = page.words(within="header"), analyse(synthetic_sweep())
    places = [top.index(words) for words in LEADS]
    assert places == sorted(places)
    opening = top[: top.index("What is refused")]
    headline = next(one for one in findings.verdicts if one.headline == 0)
    assert headline.sentence.lower() in opening.lower()
    for count in ("divergence/", "time/", "bytes/", "runs"):
        for one in findings.verdicts:
            assert not (one.id.startswith(count) and one.sentence in opening), one.id


def test_what_every_axis_shares_is_said_once(source: str) -> None:
    for words in (
        "Horizon: 300 steps = 614,400 tokens.",
        "non-embedding, 98,368 to 1,572,928",
        "convention causal:",
        "On every axis",
    ):
        assert source.count(words) == 1, words
    assert source.index("On every axis") < source.index("<figure")


def test_the_small_signs_of_the_first_figure_are_measured_losses(folder: Path) -> None:
    sweep = synthetic_sweep()
    material = Material(sweep, analyse(sweep))
    (panel,) = loss_figure(material).panels
    drawn = {loss for mark in panel.marks if isinstance(mark, Points) for _, loss in mark.at}
    assert drawn == {loss for _, _, arm in material.arms for loss in arm.best_losses.values()}
    assert drawn <= {run.val_loss for run in sweep.results}
    fixed = [mark for mark in panel.marks if isinstance(mark, Line) and mark.faint]
    places = {place for mark in panel.marks if isinstance(mark, Points) for place, _ in mark.at}
    assert fixed
    assert {mark.style for mark in fixed} == {"dotted"}
    assert {place for line in fixed for place, _ in line.at} <= places


def test_figures_are_png_files_of_a_readable_size(folder: Path) -> None:
    for path in (folder / "figures").iterdir():
        data = path.read_bytes()
        width, height = struct.unpack(">II", data[16:24])
        assert data.startswith(b"\x89PNG\r\n\x1a\n")
        assert 400 < width < 3000
        assert 300 < height < 3000


def test_a_sweep_without_a_finished_run_has_a_report_with_the_same_files(folder: Path) -> None:
    files = files_module.report_files(unfinished_sweep(), "2026-01-02T03:04:05+00:00")
    page = Page(files["report.html"].decode())
    assert set(files) == {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert not page.errors
    assert "84 of 84 runs are not done yet" in page.words()
    assert len(rows := list(csv.DictReader(io.StringIO(files["results.csv"].decode())))) == 84
    assert {row["outcome"] for row in rows} == {"missing"}


def test_a_report_that_fails_leaves_the_old_one_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def written(text: bytes) -> None:
        content = {"tables/a.csv": text, "report.html": text}
        monkeypatch.setattr(files_module, "report_files", lambda sweep, time: content)
        write_report(unfinished_sweep(), tmp_path)

    written(b"old")
    replace = Path.replace

    def fail(path: Path, target: Path) -> Path:
        if target.name == "report.html":
            raise OSError("no space left on device")
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        written(b"new")
    assert (tmp_path / "report.html").read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["a.csv", "report.html"]

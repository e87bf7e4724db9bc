"""Parts of the report: axes that hold what is drawn, signs that differ, text that is never markup."""

import itertools
import math
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxblock.sweeps.report.figures.curves import running_mean, window_of
from jaxblock.sweeps.report.layout import LABEL_HEIGHT, line_labels, panel_limits, pieces
from jaxblock.sweeps.report.marks import (
    Crosses,
    Figure,
    Gap,
    Intervals,
    Line,
    Mark,
    Note,
    Panel,
    Points,
    Table,
)
from jaxblock.sweeps.report.markup import Markup, identifier, tag
from jaxblock.sweeps.report.material import refusals
from jaxblock.sweeps.report.palette import NIGHT, PAPER, SERIES_DARK, SERIES_LIGHT, SIGNS
from jaxblock.sweeps.report.scales import SCALES, Axis, limits, number
from jaxblock.sweeps.report.sheets import Sheet, statistic, value
from jaxblock.sweeps.report.svg import LABEL, draw_legend, draw_panels, sign
from jaxblock.sweeps.report.tables import flatten, to_csv
from jaxblock.sweeps.statistics.estimate import Estimate, Refusal

positive = st.floats(1e-9, 1e9)


def figure_of(*panels: Panel, shared: str = "", series: tuple[str, ...] = ("a", "b")) -> Figure:
    return Figure(
        name="name",
        title="Title",
        summary="what it shows",
        caption="n = 3",
        panels=panels,
        series=series,
        table=Table(columns=("x",), rows=()),
        shared=shared,
    )


def panel_of(*marks: Mark, scale: str = "linear") -> Panel:
    return Panel(title="panel", x=Axis(label="x", scale=scale), y=Axis(label="y", scale=scale), marks=marks)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(SCALES), st.lists(positive, min_size=1, max_size=6))
def test_an_axis_holds_its_values_in_order_and_its_ticks_lie_on_it(scale: str, values: list[float]) -> None:
    ends = limits(Axis(label="x", scale=scale), values)
    places = [ends.place(value) for value in sorted(values)]
    assert all(-1e-6 <= place <= 1 + 1e-6 for place in places)
    assert places == sorted(places)
    ticks = ends.ticks(7)
    assert 1 <= len(ticks) <= 7
    assert all(-1e-6 <= ends.place(tick) <= 1 + 1e-6 for tick in ticks)


def test_a_logarithmic_axis_leaves_out_what_it_cannot_draw_and_an_empty_one_has_no_ticks() -> None:
    ends = limits(Axis(label="x", scale="log2"), [0.0, -1.0, math.nan, 2.0, 8.0])
    assert 1 < ends.low < 2
    assert ends.place(0.0) == -math.inf
    assert limits(Axis(label="x"), []).ticks() == []
    assert limits(Axis(label="x", ticks=(1.0, 2.0)), [math.nan]).ticks() == []
    assert limits(Axis(label="x"), [0.0, 1.0]).ticks() != []


def test_given_ticks_are_kept_and_thinned() -> None:
    depths = tuple(2.0**i for i in range(12))
    ends = limits(Axis(label="L", scale="log2", ticks=depths), depths)
    assert ends.ticks(12) == list(depths)
    assert ends.ticks(6) == list(depths[::2])


@settings(deadline=None, max_examples=60)
@given(st.floats(-1e12, 1e12))
def test_a_written_number_is_the_number_to_three_digits(value: float) -> None:
    assert float(number(value)) == pytest.approx(value, rel=6e-3)


def test_numbers_are_written_as_a_person_would() -> None:
    assert [number(value) for value in (0.0, 0.001, 0.0005, 2e-5, 16.0, 123456.0)] == [
        *("0", "0.001", "5e-4", "2e-5", "16", "1.23e5"),
    ]


def test_shared_axes_are_equal_and_others_are_not() -> None:
    panels = [panel_of(Points(at=((0.0, low), (1.0, low + 1)), color=0)) for low in (0.0, 5.0)]
    (_, one), (_, other) = panel_limits(figure_of(*panels, shared="y"))
    assert (one.low, one.high) == (other.low, other.high)
    (_, one), (_, other) = panel_limits(figure_of(*panels))
    assert one.high < other.low


def test_an_interval_lies_inside_the_panel_whole() -> None:
    mark = Intervals(at=((1.0, 1.0),), ends=((-3.0, 9.0),), color=0)
    ((_, y),) = panel_limits(figure_of(panel_of(mark)))
    assert y.low < -3.0 < 9.0 < y.high
    along_x = Intervals(at=((1.0, 1.0),), ends=((-3.0, 9.0),), color=0, along="x")
    ((x, y),) = panel_limits(figure_of(panel_of(along_x)))
    assert x.low < -3.0 < 9.0 < x.high
    assert y.high < 9.0


def test_a_line_is_cut_where_a_value_cannot_be_drawn() -> None:
    at = ((1.0, 1.0), (2.0, 2.0), (4.0, 0.0), (8.0, 4.0))
    x, y = limits(Axis(label="x", scale="log2"), [1, 8]), limits(Axis(label="y", scale="log2"), [1, 4])
    assert [len(piece) for piece in pieces(at, x, y)] == [2, 1]
    assert [len(piece) for piece in pieces(at[:2], x, y)] == [2]


def test_series_are_told_apart_by_color_and_sign_and_the_first_ones_by_either() -> None:
    assert len({sign(color, 0.0, 0.0, 1.0) for color in range(SIGNS)}) == SIGNS
    assert len(SERIES_LIGHT) == len(SERIES_DARK) == SIGNS
    assert len(set(SERIES_LIGHT)) == len(set(SERIES_DARK)) == SIGNS
    assert len({(color % SIGNS, sign(color, 0.0, 0.0, 1.0)) for color in range(SIGNS**2)}) == SIGNS**2


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colors (WCAG 2.1)."""

    def luminance(color: str) -> float:
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize(("theme", "series"), [(PAPER, SERIES_LIGHT), (NIGHT, SERIES_DARK)])
def test_text_and_signs_stand_out_in_light_and_dark(theme: dict[str, str], series: tuple[str, ...]) -> None:
    for name in ("ink", "quiet", "alarm", "good", "link"):
        assert contrast(theme[name], theme["background"]) >= 4.5, name
        assert contrast(theme[name], theme["raised"]) >= 4.5, name
    assert all(contrast(color, theme["background"]) >= 3.0 for color in series)
    assert contrast(theme["grid"], theme["background"]) < 3.0


def test_refusals_are_words_and_failures_are_crosses_in_the_drawing() -> None:
    marks = (
        Line(at=((1.0, 1.0), (2.0, 2.0)), color=0),
        Gap(at=1.5, depth=16, color=1, word="refused: <edge>", title="why & how"),
        Gap(at=1.9, depth=32, color=1, word="refused: <edge>", title="why & how"),
        Crosses(at=(1.0, 2.0), color=1, titles=("seed 0", "seed 1")),
        Note(sentence="b: refused", color=1),
    )
    (drawn,) = draw_panels(figure_of(panel_of(*marks)))
    assert drawn.count('class="cross"') == 2
    assert drawn.count('class="void"') == 2
    assert "L = 16, 32 refused: &lt;edge&gt;" in drawn
    assert "why &amp; how" in drawn
    assert "b: refused" in drawn
    notes = [int(down) for down in re.findall(r'y="(\d+)" class="note"', drawn)]
    axis = int(re.findall(r'y="(\d+)" class="axis-label"', drawn)[0])
    assert len(notes) == 2
    assert max(notes) < axis, "words above the panel, never among its points"
    (without,) = draw_panels(figure_of(panel_of(marks[0])))
    assert 'class="cross"' not in without


def test_the_legend_has_the_series_that_are_drawn_and_no_other() -> None:
    legend = draw_legend(figure_of(panel_of(Points(at=((1.0, 1.0),), color=1)), series=("left", "right")))
    assert legend is not None
    assert "right" in legend
    assert "left" not in legend
    assert draw_legend(figure_of(panel_of(Points(at=(), color=1)))) is None


def test_labels_of_lines_do_not_overlap_and_have_room_on_the_right() -> None:
    lines = [Line(at=((0.0, 0.0), (1.0, 1.0 + 1e-3 * i)), color=0, label=f"L={i}") for i in range(3)]
    panel = panel_of(*lines, Points(at=((0.0, 0.0), (1.0, 3.0)), color=0))
    ((x, y),) = panel_limits(figure_of(panel))
    heights = [up for _, up, _ in line_labels(panel, x, y)]
    assert len(heights) == 3
    assert all(high - low >= LABEL_HEIGHT - 1e-9 for low, high in itertools.pairwise(heights))
    (drawn,) = draw_panels(figure_of(panel))
    right = max(float(end) for end in re.findall(r'L([\d.]+) [\d.]+" class="grid"', drawn))
    width = float(re.findall(r'viewBox="0 0 (\d+)', drawn)[0])
    assert width - right == LABEL


@settings(deadline=None, max_examples=40)
@given(st.lists(st.floats(0.0, 10.0), min_size=1, max_size=60))
def test_a_running_mean_keeps_a_constant_and_a_straight_line(losses: list[float]) -> None:
    found = running_mean(list(enumerate(losses)))
    assert [(step, loss) for step, loss, _ in found] == list(enumerate(losses))
    assert all(min(losses) - 1e-9 <= mean <= max(losses) + 1e-9 for _, _, mean in found)
    straight = [(i, 3.0 + 0.5 * i) for i in range(len(losses))]
    half = window_of(len(losses)) // 2
    assert all(
        mean == pytest.approx(loss) for _, loss, mean in running_mean(straight)[half : len(losses) - half]
    )
    level = [(i, 3.0) for i in range(len(losses))]
    assert all(mean == pytest.approx(3.0) for _, _, mean in running_mean(level))
    assert window_of(len(losses)) % 2 == 1


def test_a_running_mean_takes_noise_away() -> None:
    noisy = [(i, float(i % 2)) for i in range(200)]
    middle = [mean for _, _, mean in running_mean(noisy)]
    assert max(middle) - min(middle) < 0.1


def test_a_cell_has_one_face_for_the_page_and_one_for_the_file() -> None:
    fine = Estimate(value=1.0, low=0.5, high=2.0, n=3, interval="95 % t")
    few = Refusal(rule="few_seeds", sentence="run more seeds")
    columns = (value("series", "series"), statistic("loss", "the loss"))
    sheet = Sheet(heading="h", columns=columns, rows=(("a", fine), ("b", few)))
    assert sheet.page().rows == (("a", "1 [0.5, 2]"), ("b", "refused: too few seeds"))
    names = ("loss", "loss_low", "loss_high", "loss_n", "loss_interval", "loss_refused", "loss_refusal")
    assert sheet.file().columns == ("series", *names)
    empty = (None,) * 5
    assert sheet.file().rows == (
        ("a", 1.0, 0.5, 2.0, 3, "95 % t", None, None),
        ("b", *empty, "few_seeds", "run more seeds"),
    )


class Reader(HTMLParser):
    """The text, the title attribute and the elements of a piece."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.words, self.title, self.names = "", "", []
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.title = dict(attrs).get("title") or ""

    def handle_data(self, data: str) -> None:
        self.words += data


texts = st.text(
    st.characters(codec="utf-8", exclude_characters="\r\0", exclude_categories=("Cs", "Cc")), max_size=20
)


@settings(deadline=None, max_examples=60)
@given(texts, texts)
def test_any_text_comes_out_of_html_as_it_went_in(words: str, title: str) -> None:
    found = Reader(tag("p", words, {"title": title, "hidden": None}))
    assert (found.words, found.title, found.names) == (words, title, ["p"])


def test_only_markup_is_not_escaped() -> None:
    assert tag("p", Markup("<b>x</b>")) == "<p><b>x</b></p>"
    assert tag("p", "<b>x</b>") == "<p>&lt;b&gt;x&lt;/b&gt;</p>"
    assert (
        tag("details", ["a", None, tag("br")], {"open": True, "class": False})
        == "<details open>a<br></details>"
    )
    assert identifier("Does the <rate> transfer?") == "does-the-rate-transfer"


def test_refusals_with_one_reason_share_a_sentence() -> None:
    few = Refusal(rule="few_seeds", sentence="run more seeds")
    fine = Estimate(value=1.0, low=0.0, high=2.0, n=3, interval="95 % t")
    named = [
        ("a, L = 2", few),
        ("a, L = 4", few),
        ("a, L = 8", fine),
        ("b, slope", few),
        ("b, L = 2, end", few),
    ]
    assert refusals(named) == ("a, L = 2, 4; b, slope; b, L = 2, end: run more seeds",)
    assert refusals([("a", fine)]) == ()


def test_tables_keep_commas_quotes_and_empty_cells() -> None:
    table = Table(columns=("a", "b"), rows=(('x, "y"', None), (1.5, 0)))
    assert to_csv(table) == 'a,b\n"x, ""y""",\n1.5,0\n'
    assert flatten({"a": {"b": 1, "c": {"d": [2]}}, "e": 3}) == {"a.b": 1, "a.c.d": [2], "e": 3}

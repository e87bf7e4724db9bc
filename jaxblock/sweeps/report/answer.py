"""The top of the page: what was found, how sure it is, what is refused, and what would change it."""

from collections.abc import Sequence

from jaxblock.sweeps.findings.records import STATUSES, Findings, Verdict
from jaxblock.sweeps.report.markup import Child, Markup, join, tag
from jaxblock.sweeps.report.material import Material
from jaxblock.sweeps.statistics.estimate import RULES

WORDS = {"pass": "shown", "warn": "open", "fail": "fails", "refused": "refused"}
"""Status -> what the page calls it."""
TOPICS = 3
"""Most topics of the paragraph; the rest is in the list below it."""
SHOWN = 12
"""Most verdicts before the rest is folded."""


def answer(findings: Findings) -> list[Markup]:
    """Return the paragraphs that answer the sweep's question, in the verdicts' own sentences."""
    found: dict[str, list[Verdict]] = {}
    for verdict in findings.verdicts:
        if verdict.status in ("pass", "fail"):
            found.setdefault(_topic(verdict), []).append(verdict)
    counts = {status: sum(one.status == status for one in findings.verdicts) for status in STATUSES}
    words = {"pass": "shown", "fail": "shown to fail", "warn": "open", "refused": "refused"}
    counted = ", ".join(f"{counts[status]} {word}" for status, word in words.items())
    sentences = [_of_topic(verdicts) for verdicts in found.values()]
    paragraphs = [
        tag(
            "p",
            " ".join(sentences[:TOPICS]) or "Nothing is resolved by the runs so far.",
            {"class": "answer"},
        ),
        tag("p", f"How sure, in statements: {counted}. Intervals are 95 %."),
    ]
    refused = [one for one in findings.verdicts if one.status == "refused"]
    if refused:
        rules = dict.fromkeys(one.rule for one in refused)
        why = "; ".join(f"{RULES[rule]} ({sum(one.rule == rule for one in refused)})" for rule in rules)
        paragraphs.append(
            tag("p", [tag("strong", "What is refused, and why: "), f"{why}."], {"class": "refused-answer"})
        )
    return paragraphs


def unfinished(material: Material) -> Markup | None:
    """Return the sentence about runs that are not there yet."""
    counts = material.findings.failures.counts
    if "missing" not in counts:
        return None
    missing, total = counts["missing"], len(material.sweep.results)
    words = f"{missing:,} of {total:,} runs are not done yet. Every number below is of the runs so far and may change."
    return tag("p", [tag("strong", "This sweep is not finished: "), words], {"class": "refused-answer"})


def verdict_list(findings: Findings) -> Markup | None:
    """Return every verdict with its status: what is resolved first, what is refused last."""
    if not findings.verdicts:
        return None
    order = {"pass": 0, "fail": 0, "warn": 1, "refused": 2}
    items = [_item(verdict) for verdict in sorted(findings.verdicts, key=lambda one: order[one.status])]
    shown = tag("ul", items[:SHOWN], {"class": "verdicts"})
    if len(items) <= SHOWN:
        return shown
    rest = tag("ul", items[SHOWN:], {"class": "verdicts"})
    return join([shown, tag("details", [tag("summary", f"{len(items) - SHOWN} more verdicts"), rest])])


def change_box(findings: Findings) -> Markup:
    """Return the box of what would change the conclusion: the first of every topic, the others folded."""
    topics: dict[str, list[Child]] = {}
    for question in findings.open_questions:
        topics.setdefault(question.topic, []).append(tag("li", question.sentence))
    rest = [item for items in topics.values() for item in items[1:]]
    body: list[Child] = [tag("ul", [items[0] for items in topics.values()])]
    if rest:
        body.append(tag("details", [tag("summary", f"{len(rest)} more"), tag("ul", rest)]))
    if not topics:
        body = [tag("p", "The analysis names nothing.")]
    return tag(
        "section",
        [tag("h2", "What would change this conclusion", {"id": "what-would-change"}), *body],
        {"class": "box", "aria-labelledby": "what-would-change"},
    )


def verdict_values(findings: Findings) -> Sequence[dict[str, object]]:
    """Return the verdicts as plain values, for machines."""
    return [
        {
            "id": one.id,
            "status": one.status,
            "sentence": one.sentence,
            "numbers": dict(one.numbers),
            "rule": one.rule,
        }
        for one in findings.verdicts
    ]


def _item(verdict: Verdict) -> Markup:
    word = tag(
        "span", WORDS[verdict.status], {"class": f"word {verdict.status}", "title": STATUSES[verdict.status]}
    )
    return tag("li", [word, tag("span", [tag("strong", f"{_topic(verdict)}. "), verdict.sentence])])


def _topic(verdict: Verdict) -> str:
    """Return what a verdict is about: "stream_growth_start/residual=pre_norm" -> "Stream growth start"."""
    return verdict.id.partition("/")[0].replace("_", " ").capitalize()


def _of_topic(verdicts: Sequence[Verdict]) -> str:
    """Return the first sentence of a topic, and how many are like it."""
    words = verdicts[0].sentence
    first = words.split(" ", 1)[0]
    start = words[:1].upper() if first.isalpha() else words[:1]  # a series' label stays as it is
    more = f" ({len(verdicts) - 1} more of this kind below)" if len(verdicts) > 1 else ""
    return f"{start}{words[1:].removesuffix('.')}{more}."

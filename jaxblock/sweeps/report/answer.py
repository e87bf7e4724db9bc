"""The top of the page: what was found, how sure it is, what is refused, and what would change it."""

from collections.abc import Sequence

from jaxblock.sweeps.findings.records import STATUSES, Findings, Verdict
from jaxblock.sweeps.report.markup import Child, Markup, join, tag
from jaxblock.sweeps.report.material import Material, listed, short
from jaxblock.sweeps.statistics.estimate import RULES, Refusal

SHOWN = 12
"""Most verdicts before the rest is folded."""
MOST = 3
"""Most sentences, and most series, in a paragraph of the answer."""


def answer(findings: Findings) -> list[Markup]:
    """Return the answer to the sweep's question: ranking, transfer of the rate, loss against depth, in this order."""
    said = (
        ("Which series is better", ranking_answer(findings)),
        ("Does the learning rate transfer over depth", transfer_answer(findings)),
        ("Loss against depth", loss_answer(findings)),
    )
    paragraphs = [tag("p", [tag("strong", lead), " ", words], {"class": "answer"}) for lead, words in said]
    refused = [one for one in findings.verdicts if one.status == "refused"]
    if refused:
        rules = dict.fromkeys(one.rule for one in refused)
        why = "; ".join(f"{RULES[rule]} ({sum(one.rule == rule for one in refused)})" for rule in rules)
        paragraphs.append(
            tag("p", [tag("strong", "What is refused, and why: "), f"{why}."], {"class": "refused-answer"})
        )
    return paragraphs


def ranking_answer(findings: Findings) -> str:
    """Return which series are shown to differ, or that none is and which difference is nearest to it."""
    if len(findings.series) < 2:
        return "The sweep has one series, so there is nothing to rank."
    found = [_sentence(one) for one in findings.verdicts if one.headline == 0]
    return " ".join(found) or "No series shares a depth with the reference, so none is ranked."


def transfer_answer(findings: Findings) -> str:
    """Return whether the optimum moves with depth, and what keeping one rate costs."""
    words = [moved(findings)]
    costs = [one for one in _topic(findings, "regret") if one.status != "refused"]
    dear = [one for one in costs if one.status == "fail"]
    if dear:
        words.append(_first(dear))
    elif costs:
        most = max(costs, key=lambda one: one.numbers.get("regret_high", 0.0))
        words.append(f"No cost of keeping one rate is resolved; the largest it may be: {_sentence(most)}")
    return " ".join(words)


def moved(findings: Findings) -> str:
    """Return whether the optimum moves with depth, without what that costs."""
    return _judged(findings, "learning_rate_transfer")


def loss_answer(findings: Findings) -> str:
    """Return the law of the loss in depth, and the tuned losses at the ends of the depths."""
    ends = []
    for series in findings.series:
        tuned = [(arm.depth, arm.basin.loss) for arm in series.arms if not isinstance(arm.basin, Refusal)]
        if tuned:
            kept = tuned[:: max(1, len(tuned) - 1)]
            ends.append(
                f"{series.label} " + ", ".join(f"{short(loss)} at depth {depth}" for depth, loss in kept)
            )
    at_ends = f"At each arm's own optimum, nats: {listed(ends, MOST)}." if ends else "No arm has an optimum."
    return f"{at_ends} {_judged(findings, 'loss_law')}"


def status_legend(findings: Findings) -> Markup:
    """Return the words of the statuses, the same as in verdicts.json, with their meaning and count."""
    counts = {status: sum(one.status == status for one in findings.verdicts) for status in STATUSES}
    items = [
        tag("li", [_word(status), tag("span", f"{counts[status]}: {meaning}")])
        for status, meaning in STATUSES.items()
    ]
    return tag("ul", items, {"class": "statuses", "aria-label": "What the words of the verdicts mean"})


def unfinished(material: Material) -> Markup | None:
    """Return the sentence about runs that are not there yet."""
    counts = material.findings.failures.counts
    if "missing" not in counts:
        return None
    missing, total = counts["missing"], len(material.sweep.results)
    words = f"{missing:,} of {total:,} runs are not done yet. Every number below is of the runs so far and may change."
    return tag("p", [tag("strong", "This sweep is not finished: "), words], {"class": "refused-answer"})


def verdict_list(findings: Findings) -> Markup | None:
    """Return every verdict with its status, in the analysis' order of importance."""
    if not findings.verdicts:
        return None
    items = [_item(verdict) for verdict in sorted(findings.verdicts, key=lambda one: one.headline)]
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


def verdict_record(material: Material, time: str) -> dict[str, object]:
    """Return verdicts.json: which sweep, how far it is, and its verdicts.

    Args:
      material: the sweep and its analysis.
      time: when the report is made, UTC, ISO 8601.
    """
    results = material.sweep.results
    done = sum(run.outcome != "missing" for run in results)
    return {
        "sweep": material.sweep.name,
        "plan": material.sweep.plan,
        "finished": done == len(results),
        "runs": {"planned": len(results), "done": done},
        "time": time,
        "verdicts": [one.as_dict() | {"rule": one.rule} for one in material.findings.verdicts],
    }


def _topic(findings: Findings, topic: str) -> list[Verdict]:
    return [one for one in findings.verdicts if one.id.partition("/")[0] == topic]


def _judged(findings: Findings, topic: str) -> str:
    """Return what is shown, then what is not resolved, then what is refused with each reason once."""
    found = _topic(findings, topic)
    words = [_first([one for one in found if one.status in ("pass", "note", "fail")])]
    words.append(_first([one for one in found if one.status == "warn"]))
    refused = [one for one in found if one.status == "refused"]
    if refused:
        reasons: dict[str, list[str]] = {}
        for one in refused:
            why = one.refusal.sentence if one.refusal else RULES[one.rule]
            reasons.setdefault(why, []).append(one.series)
        about = [f"{_about(labels)}: {why}" for why, labels in reasons.items()]
        names = {
            "learning_rate_transfer": "How the optimum moves with depth",
            "loss_law": "The law of the loss",
        }
        words.append(f"{names[topic]} is refused for {listed(about, MOST)}.")
    return " ".join(word for word in words if word)


def _about(labels: Sequence[str]) -> str:
    return f"{len(labels)} series" if len(labels) > MOST else " and ".join(labels)


def _first(verdicts: Sequence[Verdict]) -> str:
    """Return the first sentences, and how many more there are."""
    more = f" ({len(verdicts) - MOST} more of this kind below.)" if len(verdicts) > MOST else ""
    return " ".join(_sentence(one) for one in verdicts[:MOST]) + more


def _sentence(verdict: Verdict) -> str:
    """Return a verdict's sentence with a full stop; a series' label keeps its small letter."""
    words = verdict.sentence
    start = words[:1].upper() if words.split(" ", 1)[0].isalpha() else words[:1]
    return f"{start}{words[1:].removesuffix('.')}."


def _word(status: str) -> Markup:
    return tag("span", status, {"class": f"word {status}", "title": STATUSES[status]})


def _item(verdict: Verdict) -> Markup:
    """Return a verdict with its topic: "stream_growth_start/residual=pre_norm" -> "Stream growth start"."""
    topic = verdict.id.partition("/")[0].replace("_", " ").capitalize()
    return tag("li", [_word(verdict.status), tag("span", [tag("strong", f"{topic}. "), verdict.sentence])])

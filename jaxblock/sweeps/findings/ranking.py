"""Which series is better: the answer to the sweep's question first, then every contrast behind it."""

from collections.abc import Iterator, Sequence

from jaxblock.sweeps.findings.records import Contrast, Series, Verdict
from jaxblock.sweeps.findings.wording import Subject, is_refused, listed, numbers_of, words_of
from jaxblock.sweeps.statistics.estimate import Estimate, Refusal

ANSWER, CONTRAST = 0, 1
QUANTITY, UNIT = "difference in loss", "nats"


def rankings(series: Sequence[Series], contrasts: Sequence[Contrast]) -> Iterator[Verdict]:
    """Yield the answer and one verdict per contrast; a refusal where some series never tuned its learning rate."""
    untuned = [one.label for one in series if any(is_refused(arm.basin, "not_tuned") for arm in one.arms)]
    if len(series) > 1 and untuned:
        sentence = (
            "the same learning rate for all is not a comparison, and the learning rate was not tuned for "
            f"{'; '.join(untuned)}"
        )
        subject = Subject(
            id="ranking", headline=ANSWER, what="a ranking of the series, which are not ranked,"
        )
        yield subject.refused(Refusal(rule="not_tuned", sentence=sentence))
    elif contrasts:
        yield answer(contrasts)
    for one in contrasts:
        if not is_refused(one.difference, "not_tuned"):
            yield ranking(one)


def answer(contrasts: Sequence[Contrast]) -> Verdict:
    """Return which series are shown to be better or worse than the reference; else the nearest to it."""
    tested = [one for one in contrasts if isinstance(one.difference, Estimate)]
    if not tested:
        refusal = contrasts[0].difference
        assert isinstance(refusal, Refusal)
        what = f"the ranking of the series, {len(contrasts)} contrasts,"
        return Subject(id="comparison", headline=ANSWER, what=what, quantity=QUANTITY, unit=UNIT).refused(
            refusal
        )
    resolved = [one for one in tested if one.status == "resolved"]
    if not resolved:
        nearest = min(tested, key=lambda one: (one.p_holm, one.p))
        refused = len(contrasts) - len(tested)
        more = f"; {refused} of {len(contrasts)} contrasts are refused" if refused else ""
        return stated(nearest, "warn", f"no ranking is resolved; nearest: {difference_words(nearest)}{more}")
    labels = dict.fromkeys(one.series for one in contrasts)
    sentences = [of_series([one for one in contrasts if one.series == label]) for label in labels]
    return stated(largest(resolved), "pass", "; ".join(sentences))


def stated(leading: Contrast, status: str, sentence: str) -> Verdict:
    """Return the answer with the fields of the contrast that it names first."""
    return subject_of(leading, id="comparison", headline=ANSWER).verdict(
        status, sentence, numbers_of_contrast(leading), estimate=estimate_of(leading)
    )


def of_series(contrasts: Sequence[Contrast]) -> str:
    """Write at which depths one series is better, worse, not told apart and not compared."""
    label, reference = contrasts[0].series, contrasts[0].reference
    parts = []
    for phrase in ("better", "worse"):
        found = [one for one in contrasts if one.status == "resolved" and one.phrase == phrase]
        if found:
            top = largest(found)
            many = f"; largest at depth {top.depth}" if len(found) > 1 else ""
            size = f"{words_of(estimate_of(top), UNIT)}, Holm p = {top.p_holm:.2g}"
            parts.append(f"{phrase} at depth {listed([one.depth for one in found])}{many}: {size}")
    for status in ("not resolvable", "refused"):
        depths = [one.depth for one in contrasts if one.status == status]
        if depths:
            parts.append(f"{status} at depth {listed(depths)}")
    return f"{label} against {reference} is {'; '.join(parts)}"


def largest(contrasts: Sequence[Contrast]) -> Contrast:
    """Return the contrast with the largest difference."""
    return max(contrasts, key=lambda one: abs(estimate_of(one).value))


def estimate_of(one: Contrast) -> Estimate:
    """Return the difference of a contrast that is not refused."""
    assert isinstance(one.difference, Estimate)
    return one.difference


def subject_of(one: Contrast, *, id: str, headline: int) -> Subject:
    """Return what a contrast is about."""
    return Subject(
        id=id,
        headline=headline,
        what=f"{one.series} against {one.reference} at depth {one.depth}",
        quantity=QUANTITY,
        unit=UNIT,
        series=one.series,
        reference=one.reference,
        depth=one.depth,
    )


def numbers_of_contrast(one: Contrast) -> dict[str, float]:
    """Return the numbers of a contrast that is not refused."""
    assert isinstance(one.detectable, float)
    assert one.p_holm is not None
    assert one.misfit is not None
    numbers = numbers_of("difference", estimate_of(one)) | {
        "detectable": one.detectable,
        "p_holm": one.p_holm,
    }
    return numbers | {"misfit": one.misfit, "pairs": float(one.pairs)}


def difference_words(one: Contrast) -> str:
    """Write a contrast as "X is worse than Y by d [low, high] nats at depth N, Holm p = p"."""
    found = estimate_of(one)
    word = "better" if found.value < 0 else "worse"
    low, high = (found.low, found.high) if found.value >= 0 else (-found.high, -found.low)
    size = f"{abs(found.value):.3g} [{low:.3g}, {high:.3g}] {UNIT} ({found.interval}, n = {found.n})"
    return f"{one.series} is {word} than {one.reference} by {size} at depth {one.depth}, Holm p = {one.p_holm:.2g}"


def ranking(one: Contrast) -> Verdict:
    """Return the verdict of one contrast."""
    subject = subject_of(one, id=f"ranking/{one.series}/depth={one.depth}", headline=CONTRAST)
    if isinstance(one.difference, Refusal):
        return subject.refused(one.difference)
    if one.status == "resolved":
        status, sentence = "pass", difference_words(one)
    else:
        assert isinstance(one.detectable, float)
        status = "warn"
        sentence = (
            f"{subject.what}: {one.phrase}; the difference is {words_of(one.difference, UNIT)}, "
            f"Holm p = {one.p_holm:.2g}, and {one.detectable:.3g} could be detected"
        )
    return subject.verdict(status, sentence, numbers_of_contrast(one), estimate=one.difference)

"""Conclusions with a status, for a machine and a reader; each claim is written so that `pass` means it was shown."""

from collections.abc import Iterator, Sequence

from jaxblock.sweeps.findings.open_questions import arms_of, still_falling
from jaxblock.sweeps.findings.records import Contrast, Failures, Series, Verdict
from jaxblock.sweeps.statistics.estimate import Estimate, Refusal
from jaxblock.sweeps.statistics.fits import Power
from jaxblock.sweeps.statistics.transfer import MARGIN, StableRate


def verdicts_of(
    series: Sequence[Series], contrasts: Sequence[Contrast], failures: Failures
) -> tuple[Verdict, ...]:
    """Return every verdict, the comparisons first."""
    found = [*rankings(series, contrasts)]
    for one in series:
        found += [
            transfer(one),
            *regrets(one),
            loss_with_depth(one),
            *growths(one),
            stability(one),
            *costs(one),
        ]
    return (*found, horizon(series), completeness(failures))


def numbers_of(name: str, estimate: Estimate) -> dict[str, float]:
    """Return value and interval under a name."""
    return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}


def words_of(estimate: Estimate) -> str:
    """Write value and interval."""
    return f"{estimate.value:.3g} [{estimate.low:.3g}, {estimate.high:.3g}] ({estimate.interval}, n = {estimate.n})"


def refused(name: str, what: str, refusal: Refusal) -> Verdict:
    """Return the verdict that a rule forbids; it has no numbers."""
    sentence = f"{what} is refused: {refusal.sentence}"
    return Verdict(id=name, status="refused", sentence=sentence, numbers={}, rule=refusal.rule)


def rankings(series: Sequence[Series], contrasts: Sequence[Contrast]) -> Iterator[Verdict]:
    """One verdict per contrast; a single refusal where some series never tuned its learning rate."""
    untuned = [one.label for one in series if any(is_refused(arm.basin, "not_tuned") for arm in one.arms)]
    if len(series) > 1 and untuned:
        yield Verdict(
            id="ranking",
            status="refused",
            sentence="the series are not ranked: the same learning rate for all is not a comparison, and the "
            f"learning rate was not tuned for {'; '.join(untuned)}",
            numbers={},
            rule="not_tuned",
        )
    for one in contrasts:
        if not is_refused(one.difference, "not_tuned"):
            yield ranking(one)


def is_refused(statistic: object, rule: str) -> bool:
    """Whether a statistic is refused by this rule."""
    return isinstance(statistic, Refusal) and statistic.rule == rule


def ranking(one: Contrast) -> Verdict:
    """Return the verdict of one contrast."""
    name = f"ranking/{one.series}/depth={one.depth}"
    what = f"{one.series} against {one.reference} at depth {one.depth}"
    if isinstance(one.difference, Refusal) or isinstance(one.detectable, Refusal) or one.p_holm is None:
        refusal = one.difference if isinstance(one.difference, Refusal) else one.detectable
        assert isinstance(refusal, Refusal)
        return refused(name, what, refusal)
    better = "lower" if one.difference.value < 0 else "higher"
    found = f"differs by {words_of(one.difference)} nats (Holm p = {one.p_holm:.2g})"
    sentence = {
        "resolved": f"{what}: the loss is {better}; it {found}",
        "not resolvable": f"{what}: not resolvable; it {found}, and {one.detectable:.3g} could be detected",
        "not significant": f"{what}: not significant after adjustment; it {found}",
    }[one.status]
    numbers = numbers_of("difference", one.difference)
    numbers |= {"detectable": one.detectable, "p_holm": one.p_holm, "pairs": float(one.pairs)}
    return Verdict(
        id=name, status="pass" if one.status == "resolved" else "warn", sentence=sentence, numbers=numbers
    )


def transfer(one: Series) -> Verdict:
    """Claim: the learning-rate optimum does not move with depth."""
    name = f"learning_rate_transfer/{one.label}"
    if isinstance(one.transfer, Refusal):
        return refused(name, f"{one.label}: how the learning-rate optimum moves with depth", one.transfer)
    slope = one.transfer.slope
    status = "pass" if one.transfer.equivalence.equivalent else "fail" if slope.excludes(0.0) else "warn"
    words = {
        "pass": f"the learning-rate optimum stays (|slope| < {MARGIN:g} is shown)",
        "fail": "the learning-rate optimum moves with depth",
        "warn": "whether the learning-rate optimum moves with depth is not resolved",
    }[status]
    sentence = f"{one.label}: {words}: slope {words_of(slope)} octaves per doubling of the depth in blocks"
    numbers = numbers_of("slope", slope) | {"p": one.transfer.p, "p_equivalence": one.transfer.equivalence.p}
    return Verdict(id=name, status=status, sentence=sentence, numbers=numbers)


def regrets(one: Series) -> Iterator[Verdict]:
    """Claim: the learning rate tuned at the shallowest depth costs nothing at the deepest one it can be read at."""
    if not one.regrets:
        return
    name = f"regret/{one.label}"
    found = [regret for regret in one.regrets if isinstance(regret.regret, Estimate)]
    last = (found or one.regrets)[-1]
    what = f"{one.label}: keeping the learning rate of depth {one.regret_depth} at depth {last.depth}"
    if isinstance(last.regret, Refusal):
        yield refused(name, what, last.regret)
        return
    costs = last.regret.low > 0
    failing = [str(regret.depth) for regret in one.regrets if is_refused(regret.regret, "failed_there")]
    more = "" if costs else ": a cost is not resolved"
    more += f"; runs fail near that rate at depth {', '.join(failing)}" if failing else ""
    yield Verdict(
        id=name,
        status="fail" if costs or failing else "warn",
        sentence=f"{what} costs {words_of(last.regret)} nats{more}",
        numbers=numbers_of("regret", last.regret),
    )


def loss_with_depth(one: Series) -> Verdict:
    """Claim: the loss falls with depth as E + A N^-p."""
    name = f"loss_law/{one.label}"
    if isinstance(one.loss_law, Refusal):
        return refused(name, f"{one.label}: the law of the loss in depth", one.loss_law)
    law = one.loss_law
    return Verdict(
        id=name,
        status="pass",
        sentence=f"{one.label}: the loss falls with depth as E + A N^-p, p = {words_of(law.exponent)}, "
        f"E = {words_of(law.floor)} nats, over {len(law.depths)} depths",
        numbers=numbers_of("exponent", law.exponent) | numbers_of("floor", law.floor) | {"r2": law.r2},
    )


def growths(one: Series) -> Iterator[Verdict]:
    """Claims: size of the stream and of the gradient do not depend on depth, at the start and after training."""
    for name, what, power in (
        ("stream_growth_start", "the stream's growth at initialisation", one.growth_start),
        ("stream_growth_end", "the stream's growth after training", one.growth_end),
        ("gradient_start", "the gradient norm at initialisation", one.gradient_start),
        ("gradient_end", "the gradient norm after training", one.gradient_end),
    ):
        yield growth(f"{name}/{one.label}", f"{one.label}: {what}", power)


def growth(name: str, what: str, power: Power | Refusal) -> Verdict:
    """Judge an exponent against the margin."""
    if isinstance(power, Refusal):
        return refused(name, f"{what} against depth", power)
    low, high = power.exponent.low, power.exponent.high
    if low >= -MARGIN and high <= MARGIN:
        status, words = "pass", "does not depend on depth"
    elif high < -MARGIN or low > MARGIN:
        status, words = "fail", "depends on depth"
    else:
        status, words = "warn", f"may or may not depend on depth (margin {MARGIN:g})"
    sentence = f"{what} {words}: depth^q with q = {words_of(power.exponent)}, r^2 = {power.r2:.2g}"
    return Verdict(
        id=name,
        status=status,
        sentence=sentence,
        numbers=numbers_of("exponent", power.exponent) | {"r2": power.r2},
    )


def stability(one: Series) -> Verdict:
    """Claim: no run of the series failed."""
    failed = sum(row.failed for arm in one.arms for row in arm.rates)
    total = sum(row.evidence for arm in one.arms for row in arm.rates)
    rates = [
        f"{arm.stable_rate.rate:.3g} at depth {arm.depth}"
        for arm in one.arms
        if isinstance(arm.stable_rate, StableRate)
    ]
    stable = f"; largest stable learning rate {', '.join(rates)}" if rates else ""
    return Verdict(
        id=f"divergence/{one.label}",
        status="warn" if failed or not total else "pass",
        sentence=f"{one.label}: {failed} of {total} runs diverged{stable}",
        numbers={"failed": float(failed), "runs": float(total)},
    )


def costs(one: Series) -> Iterator[Verdict]:
    """State time and memory per block, where a line could be fitted."""
    for name, what, line in (("time", "seconds per step", one.time), ("bytes", "bytes", one.bytes)):
        if isinstance(line, Refusal):
            yield refused(f"{name}/{one.label}", f"{one.label}: {what} against depth", line)
        else:
            resolved = line.slope.excludes(0.0)
            yield Verdict(
                id=f"{name}/{one.label}",
                status="pass" if resolved else "warn",
                sentence=f"{one.label}: one run's share is {line.intercept.value:.3g} + {words_of(line.slope)} "
                f"{what} per block" + ("" if resolved else ": a growth is not resolved"),
                numbers=numbers_of("slope", line.slope) | numbers_of("intercept", line.intercept),
            )


def horizon(series: Sequence[Series]) -> Verdict:
    """Claim: the training loss had stopped falling."""
    falling = [name for name, arm in arms_of(series) if still_falling(arm)]
    known = [name for name, arm in arms_of(series) if isinstance(arm.still_falling, Estimate)]
    if not known:
        what = "whether the training losses had stopped falling"
        return refused(
            "horizon", what, Refusal(rule="no_values", sentence="no arm has two slopes at its end")
        )
    words = f"still falling at the end in {len(falling)} of {len(known)} arms"
    return Verdict(
        id="horizon",
        status="warn" if falling else "pass",
        sentence=f"the training loss is {words}" + (f": {'; '.join(falling)}" if falling else ""),
        numbers={"falling": float(len(falling)), "arms": float(len(known))},
    )


def completeness(failures: Failures) -> Verdict:
    """Claim: every run of the plan trained to the end."""
    total, ok = sum(failures.counts.values()), failures.counts.get("ok", 0)
    others = {outcome: count for outcome, count in failures.counts.items() if outcome != "ok"}
    words = ", ".join(f"{count} {outcome}" for outcome, count in others.items())
    return Verdict(
        id="runs",
        status="warn" if others else "pass",
        sentence=f"{ok} of {total} runs are ok"
        + (f"; {words}: each is listed with its reason" if words else ""),
        numbers={
            "runs": float(total),
            **{outcome: float(count) for outcome, count in failures.counts.items()},
        },
    )

"""Verdicts about depth: whether the optimum moves, the law of the loss, the regret, growth of stream and gradient."""

from collections.abc import Iterator

from jaxblock.sweeps.findings.records import Series, Verdict
from jaxblock.sweeps.findings.wording import Subject, is_refused, listed, numbers_of, words_of
from jaxblock.sweeps.statistics.basin import MISFIT_SHARE, Basin
from jaxblock.sweeps.statistics.decay import Decay
from jaxblock.sweeps.statistics.estimate import Estimate, Refusal
from jaxblock.sweeps.statistics.fits import Power
from jaxblock.sweeps.statistics.transfer import MARGIN

TRANSFER, LOSS_LAW, REGRET, GROWTH, GRADIENT = 2, 3, 4, 5, 6


def transfer(one: Series) -> Verdict:
    """Claim: the learning-rate optimum does not move with depth."""
    subject = Subject(
        id=f"learning_rate_transfer/{one.label}",
        headline=TRANSFER,
        what=f"{one.label}: how the learning-rate optimum moves with depth",
        quantity="slope of the optimal learning rate",
        unit="octaves per doubling of the depth in blocks",
        series=one.label,
    )
    if isinstance(one.transfer, Refusal):
        return subject.refused(one.transfer)
    slope = one.transfer.slope
    status = "pass" if one.transfer.equivalence.equivalent else "fail" if slope.excludes(0.0) else "warn"
    words = {
        "pass": f"the learning-rate optimum stays (|slope| < {MARGIN:g} is shown)",
        "fail": "the learning-rate optimum moves with depth",
        "warn": "whether the learning-rate optimum moves with depth is not resolved",
    }[status]
    sentence = f"{one.label}: {words}: slope {words_of(slope, subject.unit)}"
    numbers = numbers_of("slope", slope) | {"p": one.transfer.p, "p_equivalence": one.transfer.equivalence.p}
    return subject.verdict(status, sentence, numbers, estimate=slope)


def loss_with_depth(one: Series) -> Verdict:
    """Claim: the loss falls with depth as E + A N^-p; open where parabolas miss by a tenth of what it falls."""
    subject = Subject(
        id=f"loss_law/{one.label}",
        headline=LOSS_LAW,
        what=f"{one.label}: the law of the loss in depth",
        quantity="exponent p of the loss E + A N^-p",
        series=one.label,
    )
    if isinstance(one.loss_law, Refusal):
        return subject.refused(one.loss_law)
    law, misfit = one.loss_law, largest_misfit(one)
    doubtful = misfit > MISFIT_SHARE * fall(law)
    more = (
        f"; open, since the losses are read from parabolas that miss by up to {misfit:.2g} nats and the law falls by "
        f"{fall(law):.2g}"
        if doubtful
        else ""
    )
    return subject.verdict(
        "warn" if doubtful else "pass",
        f"{one.label}: the loss falls with depth as E + A N^-p, p = {words_of(law.exponent)}, "
        f"E = {words_of(law.floor, 'nats')}, over {len(law.depths)} depths{more}",
        numbers_of("exponent", law.exponent)
        | numbers_of("floor", law.floor)
        | {"r2": law.r2, "misfit": misfit},
        estimate=law.exponent,
    )


def largest_misfit(one: Series) -> float:
    """Return the largest misfit of the series' basins."""
    return max((arm.basin.misfit for arm in one.arms if isinstance(arm.basin, Basin)), default=0.0)


def fall(law: Decay) -> float:
    """Return by how much the law falls from the shallowest to the deepest depth it was fitted to."""
    first, last = (depth**-law.exponent.value for depth in (law.depths[0], law.depths[-1]))
    return law.amplitude.value * (first - last)


def regrets(one: Series) -> Iterator[Verdict]:
    """Claim: the learning rate tuned at the shallowest depth costs nothing at the deepest one it can be read at."""
    if not one.regrets:
        return
    found = [regret for regret in one.regrets if isinstance(regret.regret, Estimate)]
    last = (found or one.regrets)[-1]
    subject = Subject(
        id=f"regret/{one.label}",
        headline=REGRET,
        what=f"{one.label}: keeping the learning rate of depth {one.regret_depth} at depth {last.depth}",
        quantity="regret",
        unit="nats",
        series=one.label,
        depth=last.depth,
    )
    if isinstance(last.regret, Refusal):
        yield subject.refused(last.regret)
        return
    costs = last.regret.low > 0
    failing = [regret.depth for regret in one.regrets if is_refused(regret.regret, "failed_there")]
    more = "" if costs else ": a cost is not resolved"
    more += f"; runs fail near that rate at depth {listed(failing)}" if failing else ""
    yield subject.verdict(
        "fail" if costs or failing else "warn",
        f"{subject.what} costs {words_of(last.regret, 'nats')}{more}",
        numbers_of("regret", last.regret),
        estimate=last.regret,
    )


def growths(one: Series) -> Iterator[Verdict]:
    """Claims: size of the stream and of the gradient do not depend on depth, at the start and after training."""
    for name, what, power in (
        ("stream_growth_start", "the stream's growth at initialisation", one.growth_start),
        ("stream_growth_end", "the stream's growth after training", one.growth_end),
        ("gradient_start", "the gradient norm at initialisation", one.gradient_start),
        ("gradient_end", "the gradient norm after training", one.gradient_end),
    ):
        subject = Subject(
            id=f"{name}/{one.label}",
            headline=GRADIENT if name.startswith("gradient") else GROWTH,
            what=f"{one.label}: {what} against depth",
            quantity=f"exponent of {what} in depth",
            series=one.label,
        )
        yield growth(subject, f"{one.label}: {what}", power)


def growth(subject: Subject, what: str, power: Power | Refusal) -> Verdict:
    """Judge an exponent against the margin."""
    if isinstance(power, Refusal):
        return subject.refused(power)
    low, high = power.exponent.low, power.exponent.high
    if low >= -MARGIN and high <= MARGIN:
        status, words = "pass", "does not depend on depth"
    elif high < -MARGIN or low > MARGIN:
        status, words = "fail", "depends on depth"
    else:
        status, words = "warn", f"may or may not depend on depth (margin {MARGIN:g})"
    sentence = f"{what} {words}: depth^q with q = {words_of(power.exponent)}, r^2 = {power.r2:.2g}"
    numbers = numbers_of("exponent", power.exponent) | {"r2": power.r2}
    return subject.verdict(status, sentence, numbers, estimate=power.exponent)

"""What would change the conclusions: made from the data, one sentence per cause."""

from collections.abc import Iterator, Sequence

from jaxblock.sweeps.findings.records import Arm, Contrast, Question, Series
from jaxblock.sweeps.results import Sweep
from jaxblock.sweeps.statistics.basin import Basin
from jaxblock.sweeps.statistics.estimate import Estimate, Refusal

NOT_TUNED = ("optimizer.", "loss.", "data.batch", "data.accumulation", "run.steps")
"""Config paths (or their beginnings) of what a result hangs on besides the model."""
MODEL_CHOICES = (
    "model.initialization",
    "model.parametrization",
    "model.norm",
    "model.residual",
    "model.width",
)
ENOUGH_SEEDS = 5
SIDES = {
    "left": "a lower learning rate",
    "right": "a higher learning rate",
    "between": "a learning rate between the last that holds and the first that fails",
    "finer": "learning rates between those around the minimum",
}


def questions_of(
    sweep: Sweep, series: Sequence[Series], contrasts: Sequence[Contrast]
) -> tuple[Question, ...]:
    """Return the questions by topic: fixed, horizon, seeds, rates, misfit, evaluation, refused, runs, start."""
    return (
        *fixed(sweep),
        *horizon(sweep, series),
        *seeds(series),
        *rates(series),
        *misfits(series),
        *evaluation(series, contrasts),
        *refused(series),
        *missing_runs(sweep),
        *starts(series),
    )


def arms_of(series: Sequence[Series]) -> Iterator[tuple[str, Arm]]:
    """Yield each arm with its name."""
    for one in series:
        for arm in one.arms:
            yield f"{one.label} at depth {arm.depth}", arm


def fixed(sweep: Sweep) -> Iterator[Question]:
    """Name the hyperparameters that were fixed and not tuned."""
    for words, paths in (
        ("fixed and not tuned", NOT_TUNED),
        ("every run shares these choices of the model", MODEL_CHOICES),
    ):
        values = [f"{path} = {value}" for path, value in sweep.fixed.items() if path.startswith(paths)]
        if values:
            yield Question(topic="fixed", sentence=f"{words}: {', '.join(values)}")


def horizon(sweep: Sweep, series: Sequence[Series]) -> Iterator[Question]:
    """Say at how many steps this holds, and whose loss was still falling."""
    steps = sorted({run.planned_steps for run in sweep.results})
    words = " to ".join(f"{one:,}" for one in dict.fromkeys((steps[0], steps[-1])))
    tokens = " to ".join(f"{one * sweep.tokens_per_step:,}" for one in dict.fromkeys((steps[0], steps[-1])))
    yield Question(
        topic="horizon",
        sentence=f"everything is said at {words} steps ({tokens} tokens), and the best learning rate moves with that",
    )
    falling = [name for name, arm in arms_of(series) if still_falling(arm)]
    if falling:
        yield Question(topic="horizon", sentence=f"the training loss was still falling: {'; '.join(falling)}")


def still_falling(arm: Arm) -> bool:
    """Whether the slope of the training loss at the end is below zero with its whole interval."""
    return isinstance(arm.still_falling, Estimate) and arm.still_falling.high < 0


def seeds(series: Sequence[Series]) -> Iterator[Question]:
    """Count the arms with fewer than 5 seeds."""
    counts = [len(arm.best_losses) for _, arm in arms_of(series)]
    few = [count for count in counts if count < ENOUGH_SEEDS]
    if few:
        yield Question(
            topic="seeds",
            sentence=f"{len(few)} of {len(counts)} arms have fewer than {ENOUGH_SEEDS} seeds at their best learning "
            f"rate (the fewest: {min(few)})",
        )


def rates(series: Sequence[Series]) -> Iterator[Question]:
    """Name the arms without an optimum and say what to run."""
    for name, arm in arms_of(series):
        if isinstance(arm.basin, Refusal):
            more = f" ({SIDES[arm.basin.side]} is missing)" if arm.basin.side else ""
            yield Question(
                topic="rates", sentence=f"no learning-rate optimum, {name}: {arm.basin.sentence}{more}"
            )


def misfits(series: Sequence[Series]) -> Iterator[Question]:
    """Name the largest misfit: by so much the losses between the measured rates are unknown."""
    found = [(arm.basin.misfit, name) for name, arm in arms_of(series) if isinstance(arm.basin, Basin)]
    largest, where = max(found, default=(0.0, ""))
    if largest > 0:
        yield Question(
            topic="misfit",
            sentence=f"a finer grid of rates: the fitted parabolas miss the measured means by up to {largest:.2g} nats "
            f"({where}), and every loss at an optimum is uncertain by its misfit",
        )


def evaluation(series: Sequence[Series], contrasts: Sequence[Contrast]) -> Iterator[Question]:
    """Name the evaluation's own error where it is more than half of the largest difference."""
    differences = [abs(one.difference.value) for one in contrasts if isinstance(one.difference, Estimate)]
    errors = [
        (arm.evaluation_error, name) for name, arm in arms_of(series) if arm.evaluation_error is not None
    ]
    error, where = max(errors, default=(0.0, ""))
    if differences and error > max(differences) / 2:
        yield Question(
            topic="evaluation",
            sentence=f"more validation batches: the standard error of one run's validation loss is up to {error:.2g} "
            f"nats ({where}), and the largest difference is {max(differences):.2g}; runs read the same "
            "batches, so it cancels partly in a difference, by how much is not measured",
        )


def refused(series: Sequence[Series]) -> Iterator[Question]:
    """Name the fits over depth that are refused, those with one reason together."""
    reasons: dict[str, list[str]] = {}
    for one in series:
        fits = (
            ("how the optimum moves with depth", one.transfer),
            ("loss against depth", one.loss_law),
            ("stream against depth at the start", one.growth_start),
            ("stream against depth after training", one.growth_end),
            ("time against depth", one.time),
            ("memory against depth", one.bytes),
        )
        for what, fit in fits:
            if isinstance(fit, Refusal):
                reasons.setdefault(f"{what}: {fit.sentence}", []).append(one.label)
    for reason, labels in reasons.items():
        yield Question(topic="refused", sentence=f"refused, {reason} ({'; '.join(labels)})")


def missing_runs(sweep: Sweep) -> Iterator[Question]:
    """Count the runs that say nothing, by outcome."""
    for outcome in ("out_of_memory", "killed", "error", "missing"):
        depths = sorted({run.depth for run in sweep.results if run.outcome == outcome})
        if depths:
            count = sum(run.outcome == outcome for run in sweep.results)
            where = ", ".join(map(str, depths))
            yield Question(
                topic="runs", sentence=f"runs that are {outcome} and say nothing: {count} (depth {where})"
            )


def starts(series: Sequence[Series]) -> Iterator[Question]:
    """List initialisation and warm-up beside every comparison: a norm's place is not the only thing that differs."""
    if len(series) > 1:
        words = "; ".join(
            f"{one.label}: initialization {one.initialization}, parametrization {one.parametrization}, "
            f"warm-up {one.warmup:g} of the steps"
            for one in series
        )
        yield Question(topic="start", sentence=f"each series with its own start: {words}")

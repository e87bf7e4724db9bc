"""columns.csv: unit and meaning of every column of every CSV file of the report."""

from collections.abc import Mapping

from jaxblock.sweeps.report.marks import Table
from jaxblock.sweeps.results import OUTCOMES

NATS, RATE, BLOCKS, SECONDS = "nats per target", "1", "blocks L", "s"
ENDS: Mapping[str, tuple[str | None, str]] = {
    "_low": (None, "lower end of the interval of"),
    "_high": (None, "upper end of the interval of"),
    "_n": ("values", "values (mostly seeds) behind"),
    "_interval": ("", "kind of the interval of"),
    "_refused": ("", "rule that forbids the number, which is then empty:"),
    "_refusal": ("", "that rule in words, for this case:"),
}
"""End of a name -> (unit, None for that of the number itself; what stands before the number's meaning)."""
GROUPS: Mapping[str, tuple[str, str]] = {
    "axes.": ("", "value of this axis of the plan (config path)"),
    "parameters.": ("parameters", "parameter count by convention"),
    "flops_per_token.": ("FLOPs per token", "training FLOPs per token by convention"),
    "parameters_": ("parameters", "parameter count by convention"),
    "flops_": ("FLOPs per token", "training FLOPs per token by convention"),
}
MEANINGS: Mapping[str, tuple[str, str]] = {
    "id": ("", "hash of config, code and data: the same run has the same one on every machine"),
    "run": ("", "id of the run, as in results.csv"),
    "depth": (BLOCKS, "depth of the model"),
    "depth_blocks": (BLOCKS, "depth of the model"),
    "depths": ("arms", "how many depths the series has"),
    "depth_least": (BLOCKS, "shallowest depth of the series"),
    "depth_most": (BLOCKS, "deepest depth of the series"),
    "sublayers": ("sublayers S", "depth counted in sublayers"),
    "width": ("features D", "width of the residual stream"),
    "residual": ("", "residual topology"),
    "initialization": ("", "initialization"),
    "parametrization": ("", "parametrization"),
    "learning_rate": (RATE, "peak learning rate"),
    "warmup": ("fraction of the steps", "warm-up"),
    "seed": ("", "seed of parameters and data order"),
    "planned_steps": ("optimizer steps", "steps of the plan"),
    "outcome": (
        "",
        "how the run ended: " + "; ".join(f"{name}: {words}" for name, words in OUTCOMES.items()),
    ),
    "reason": ("", "one sentence where the outcome is not ok"),
    "steps": ("optimizer steps", "steps made"),
    "val_loss": (NATS, "validation loss after the last step"),
    "val_error": (
        NATS,
        "standard error of val_loss over the validation batches: noise of the evaluation, not of the training",
    ),
    "first_loss": (NATS, "training loss of the first batch, before any update"),
    "last_loss": (NATS, "mean training loss over the last tenth of the steps"),
    "still_falling": (
        "nats per 1,000 steps",
        "slope of the training loss over the last tenth of the steps, below 0 where it still falls; empty with "
        "under 10 steps there",
    ),
    "first_gradient_norm": ("1", "global gradient norm at the first step, before clipping"),
    "last_gradient_norm": ("1", "median global gradient norm over the last tenth of the steps"),
    "lanes": ("runs", "runs trained at once by the program of this run"),
    "lanes_least": ("runs", "fewest runs trained at once by a program of the arm"),
    "lanes_most": ("runs", "most runs trained at once by a program of the arm"),
    "compile_s": (SECONDS, "compiling the program; shared by all its lanes"),
    "step_s": (
        SECONDS,
        "one step of the whole program, median over its chunks; divide by lanes for one run's share",
    ),
    "program_bytes": (
        "bytes",
        "arguments, results and temporaries of the whole compiled program; divide by lanes for one run's share",
    ),
    "series": ("", "label of the series: the axes that tell it apart"),
    "against": ("", "label of the reference series"),
    "reference": ("", "whether comparisons are made against this series"),
    "runs": ("runs", "runs of the plan"),
    "planned": ("runs", "runs of the plan at this rate"),
    "failed": ("runs", "runs that diverged or were not finite"),
    "evidence": ("runs", "runs that say anything about the rate: failed or trained to the end"),
    "optimal_rate": (RATE, "fitted learning-rate optimum"),
    "optimum": (RATE, "fitted learning-rate optimum of the arm"),
    "tuned_loss": (NATS, "validation loss at the fitted optimum, mean over seeds"),
    "fit_misfit": (
        NATS,
        "how far the measured means lie from the fitted curve, already inside the intervals",
    ),
    "best_measured_rate": (RATE, "rate of the grid with the lowest mean loss"),
    "best_measured_loss": (NATS, "mean loss measured there"),
    "note": ("", "reservation about the number before it"),
    "step_s_per_run": (SECONDS, "one optimizer step of one run's share: program / lanes"),
    "bytes_per_run": ("bytes", "one run's share of the compiled program: program / lanes"),
    "curvature": ("nats per octave^2", "second derivative of the loss in log2 rate at the optimum"),
    "sensitivity": (NATS, "mean loss over the common rates, capped by the first loss, less the lowest"),
    "stable_rate": (RATE, "largest rate up to which fewer than half of the runs fail"),
    "first_unstable_rate": (RATE, "next rate, where at least half of the runs fail"),
    "failed_fraction": ("fraction", "failed runs over runs with evidence, all rates"),
    "capped_loss": (NATS, "mean loss at the best measured rate, a failed run counted with the cap"),
    "law_start": ("", "law of the stream's size along the blocks, at initialization"),
    "law_end": ("", "law of the stream's size along the blocks, after training"),
    "law_start_ahead_aicc": ("AICc", "how far that law is ahead of the second best"),
    "law_end_ahead_aicc": ("AICc", "how far that law is ahead of the second best"),
    "evaluation_error": (NATS, "standard error of one run's loss from the finite validation set"),
    "law": ("", "law in depth that is fitted"),
    "parameter": ("", "fitted number of the law"),
    "status": ("", "resolved, not resolvable or refused"),
    "phrase": (
        "",
        "what the status means for the series: better, worse, not resolvable, or why it is refused",
    ),
    "comparisons": ("comparisons", "how many comparisons interval, detectable and p_holm are adjusted for"),
    "misfit": (NATS, "misfits of both arms' fitted curves together, inside the interval"),
    "detectable": (NATS, "smallest difference found with 80 % power at level .05"),
    "difference": (NATS, "loss of the series less loss of the reference, paired by seed"),
    "p": ("1", "p value, two-sided paired t test"),
    "p_holm": ("1", "the same, adjusted over all comparisons (Holm)"),
    "pairs": ("seeds", "seeds compared"),
    "excluded": ("seeds", "seeds left out because a run of either side failed or is not there"),
    "time_utc": ("UTC", "when it happened"),
    "event": ("", "kind of event"),
    "sentence": ("", "what happened"),
    "runs_concerned": ("runs", "how many runs it concerns"),
    "setting": ("", "name of the value"),
    "value": ("", "the number; its unit is that of the quantity or file, a list is written as JSON"),
    "low": ("", "lower end of the interval of value"),
    "high": ("", "upper end of the interval of value"),
    "n": ("values", "values (mostly seeds) behind value"),
    "interval": ("", "kind of the interval"),
    "refused": ("", "rule that forbids the number, which is then empty"),
    "refusal": ("", "that rule in words, for this case"),
    "quantity": ("", "what value is"),
    "moment": ("", "start: at initialization; end: after training"),
    "non_embedding_parameters": ("parameters", "parameters without embeddings"),
    "training_flops_causal": ("FLOPs", "training FLOPs of one run, causal convention"),
    "seconds_per_run": (SECONDS, "training one run's share, no compiling"),
    "which": ("", "best or worst seed of the arm at its best measured rate"),
    "step": ("optimizer steps", "step of the training loss"),
    "loss": (NATS, "training loss of that single batch"),
    "statistic": ("", "what was measured of every sublayer (jaxblock.probes), after the last step"),
    "relative_depth": ("fraction of the sublayers S", "place s / S, 1 after the last sublayer"),
    "median": ("", "median of the statistic over seeds, in its own unit"),
    "seeds": ("seeds", "seeds with a finite value there"),
    "running_mean": (NATS, "centred running mean of loss over recorded steps"),
}


def describe(name: str) -> tuple[str, str]:
    """Return unit and meaning of a column.

    Raises:
      KeyError: a column nobody described, an error of this package.
    """
    if name in MEANINGS:
        return MEANINGS[name]
    for end, (unit, words) in ENDS.items():
        base = name.removesuffix(end)
        if base != name and base in MEANINGS:
            own, meaning = MEANINGS[base]
            return own if unit is None else unit, f"{words} {base} ({meaning})"
    for start, (unit, words) in GROUPS.items():
        if name.startswith(start):
            return unit, f"{words}: {name.removeprefix(start)}"
    outcome = name.removeprefix("runs_")
    return "runs", f"runs of the arm with outcome {outcome}: {OUTCOMES[outcome]}"


def column_table(files: Mapping[str, Table]) -> Table:
    """Return one row per file and column.

    Args:
      files: name of each CSV file -> what is written into it.
    """
    rows = tuple(
        (file, column, *(words or None for words in describe(column)))
        for file, table in files.items()
        for column in table.columns
    )
    return Table(columns=("file", "column", "unit", "meaning"), rows=rows)

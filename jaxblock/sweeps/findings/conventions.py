"""Which depth, loss, count and interval is meant: the words that belong on every axis and below every table."""

from jaxblock.sweeps.findings.arms import Losses
from jaxblock.sweeps.results import Sweep


def conventions_of(sweep: Sweep, losses: Losses) -> dict[str, str]:
    """Return the conventions in words."""
    steps = " to ".join(
        dict.fromkeys(f"{one:,}" for one in _ends([run.planned_steps for run in sweep.results]))
    )
    kind = (
        "validation loss after the last step"
        if losses.validation
        else "training loss, mean of the last tenth"
    )
    names = list(dict.fromkeys(name for run in sweep.results for name in run.flops_per_token))
    return {
        "depth": "N is depth in blocks; S counts residual sublayers (2 per block, 1 in parallel wiring)",
        "loss": f"{kind}, nats per target",
        "parameters": "blocks only; non-embedding; total: each table says which",
        "flops": f"training FLOPs per token, by convention: {', '.join(names) or 'not recorded'}",
        "cap": f"a failed run counts as a uniform guess, {losses.cap:.4g} nats, where a mean is called capped",
        "horizon": f"{steps} steps of {sweep.tokens_per_step:,} tokens",
        "growth": "rms of the stream after the last block over rms before the first",
        "time": "step of the whole program over the runs it trains at once; compilation apart",
        "seeds": "runs of one seed share data order and initial keys in every arm: differences are paired",
        "failed": "diverged and non_finite count as failed; out_of_memory, killed, error, missing count for nothing",
        "intervals": "95 %: t over seeds (under 5 values: small n), Clopper-Pearson for fractions, Fieller for the "
        "learning-rate optimum, profile for L = E + A N^-p",
        "misfit": "largest distance in nats of the fitted parabola from a measured mean over seeds; intervals of "
        "losses read from a parabola are longer by it on both sides, those of differences by both sides' misfits",
        "tests": "two-sided paired t of a difference beyond the misfits, Holm over every contrast; their intervals "
        "hold for all of them at once (Bonferroni); detectable: 80 % power at that level, plus the misfits",
        "exponents": "power laws by one slope per seed, t over seeds",
    }


def _ends(values: list[int]) -> tuple[int, ...]:
    return (min(values), max(values)) if values else ()

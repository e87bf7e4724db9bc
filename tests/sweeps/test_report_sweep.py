"""A made-up sweep for the tests of the report: basins with a known optimum, failures of every kind, hostile names."""

import hashlib
import math

import numpy as np

from jaxblock.sweeps.results import OUTCOMES, Event, Profile, Result, Sweep

SCRIPT = "<script>alert('x')</script>"
"""What a plan or a reason may hold, and no page may run."""
DEPTHS, SEEDS = (2, 4, 8, 16, 32), (0, 1, 2)
RATES = tuple(0.0005 * 2.0**i for i in range(7))
STEPS = 300
SLOPES = {"pre_norm": -0.25, "post_norm": -1.6}
"""Law of the optimum, log2 rate against log2 depth: that of post_norm leaves the grid at 16 blocks."""


def synthetic_sweep(
    *, residuals: tuple[str, ...] = ("pre_norm", "post_norm"), depths: tuple[int, ...] = DEPTHS
) -> Sweep:
    """Return a sweep with a diverging rate, an arm out of memory, killed runs and a sentence full of HTML."""
    results = tuple(
        synthetic_run(residual, depth, rate, seed)
        for residual in residuals
        for depth in depths
        for rate in RATES
        for seed in SEEDS
    )
    killed = tuple(run.id for run in results if run.outcome == "killed")
    axes = {
        "model.residual": residuals,
        "model.depth": depths,
        "optimizer.learning_rate": RATES,
        "run.seed": SEEDS,
    }
    return Sweep(
        name=f"depth & width {SCRIPT}",
        plan={"sweep": {"name": "depth", "chunk": 50}, "axes": axes, "data": {"batch": 16, "note": SCRIPT}},
        axes=axes,
        fixed={
            "model.width": 64,
            "optimizer.weight_decay": 0.1,
            "optimizer.name": "adamw",
            "data.note": SCRIPT,
        },
        results=results,
        events=(
            Event(
                time="2026-01-02T03:04:05Z",
                kind="worker_killed",
                sentence=f"worker 1 died with signal 9 twice while it trained pre_norm at 8 blocks {SCRIPT}",
                runs=killed,
            ),
            Event(time="2026-01-02T03:09:00Z", kind="halved_lanes", sentence="21 lanes did not fit; 10 did"),
        ),
        environment={
            "jax": "0.10.2",
            "device": "cpu",
            "cores": 2,
            "load_average_at_start": 0.5,
            "code": "abc",
        },
        tokens_per_step=2048,
        uniform_loss=math.log(256),
        baseline_loss=2.61,
        baseline="bigram",
    )


def synthetic_run(residual: str, depth: int, rate: float, seed: int) -> Result:
    """Return one run."""
    axes = {
        "model.residual": residual,
        "model.depth": depth,
        "optimizer.learning_rate": rate,
        "run.seed": seed,
    }
    outcome, reason = _outcome(residual, depth, rate, seed)
    noise = np.random.default_rng([depth, seed, round(rate * 1e6), len(residual)])
    optimum = 0.012 * (depth / 2) ** SLOPES[residual]
    floor = 1.6 + 0.9 * depth**-0.6 + (0.04 if residual == "post_norm" else 0.0)
    loss = floor + 0.05 * math.log2(rate / optimum) ** 2 + 0.01 * seed + 0.004 * float(noise.normal())
    params = 12 * depth * 64 * 64
    common = Result(
        id=hashlib.sha256(repr(axes).encode()).hexdigest()[:16],
        axes=axes,
        depth=depth,
        sublayers=2 * depth,
        width=64,
        residual=residual,
        initialization="scaled",
        parametrization="standard",
        learning_rate=rate,
        warmup=0.1,
        seed=seed,
        planned_steps=STEPS,
        outcome=outcome,
        reason=reason,
        parameters={"blocks": params, "non_embedding": params + 64, "total": params + 64 + 256 * 64},
        flops_per_token={
            "full": 7.0 * params,
            "causal": 6.5 * params,
            "6N_total": 6.4 * params,
            "6N_blocks": 6.0 * params,
        },
    )
    if outcome in ("out_of_memory", "killed", "error", "missing"):
        return common
    return _trained(common, loss if outcome == "ok" else 7.0 + seed)


def _trained(run: Result, loss: float) -> Result:
    """Return a run with what training measures."""
    finite, start = run.outcome != "non_finite", 5.6 + 0.01 * run.seed
    steps = STEPS if finite else 12
    growth = 0.15 if run.residual == "pre_norm" else 0.0
    fields = dict(vars(run)) | {
        "steps": steps,
        "val_loss": loss if finite else None,
        "val_error": 0.004 if finite else None,
        "val_losses": (loss - 0.01, loss + 0.01) if finite else (),
        "losses": tuple((i, loss + (start - loss) * math.exp(-i / 40)) for i in range(0, steps, 12)),
        "first_loss": start,
        "last_loss": loss if finite else None,
        "still_falling": -0.4 if finite else None,
        "first_gradient_norm": 1.5 * run.depth**-0.1 * (1 + 0.02 * run.seed),
        "last_gradient_norm": 0.5 * run.depth**0.2 * (1 + 0.02 * run.seed) if finite else None,
        "start": _profile(run, growth),
        "end": _profile(run, 3 * growth) if finite else None,
        "probe": _probe(run, 3 * growth),
        "lanes": 21,
        "compile_s": 3.0 + 0.1 * run.depth,
        "step_s": 0.01 * run.depth + 0.02,
        "program_bytes": 21 * (2_000_000 + 700_000 * run.depth),
    }
    return Result(**fields)


def _profile(run: Result, growth: float) -> Profile:
    stream = tuple((1 + growth * block) ** 0.5 * (1 + 0.01 * run.seed) for block in range(run.depth + 1))
    return Profile(stream=stream, branches=(0.3,) * run.sublayers, logits=1.0)


def _probe(run: Result, growth: float) -> dict[str, tuple[float | None, ...]]:
    sizes = [(1 + growth * s / 2) ** 0.5 * (1 + 0.01 * run.seed) for s in range(run.sublayers + 1)]
    updates = [0.3 / size for size in sizes[:-1]]
    return {"stream_rms": tuple(sizes[1:]), "relative_update": (None, *updates[1:])}


def _outcome(residual: str, depth: int, rate: float, seed: int) -> tuple[str, str]:
    if residual == "post_norm" and depth == 32:
        return "out_of_memory", "one run alone needs 9.1 GiB and 8.0 GiB are allowed"
    if rate == RATES[-1] and depth >= 8:
        return "non_finite", f"the loss was not finite at step 12 {SCRIPT}"
    if rate == RATES[-2] and depth >= 8 and residual == "post_norm":
        return "diverged", "the loss ended at 8.0000, and a uniform guess has 5.5452"
    if residual == "pre_norm" and depth == 8 and rate == RATES[0] and seed == 2:
        return "killed", "its worker process died twice"
    if residual == "pre_norm" and depth == 4 and rate == RATES[0] and seed == 2:
        return "missing", ""
    return "ok", ""


def test_the_synthetic_sweep_has_every_outcome_that_the_report_must_name() -> None:
    outcomes = {run.outcome for run in synthetic_sweep().results}
    assert {"ok", "diverged", "non_finite", "out_of_memory", "killed", "missing"} <= outcomes <= set(OUTCOMES)

"""From a plan to a full store: programs, worker processes, what is done when one dies, wider learning-rate grids.

Killed at any moment, the same call goes on; what has a result is not run again.
"""

import contextlib
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w

from jaxblock.sweeps.crew import Crew, LocalCrew, SweepError
from jaxblock.sweeps.environment import describe_environment
from jaxblock.sweeps.extension import widened_again, wider_runs
from jaxblock.sweeps.findings.plan_warnings import warnings_of
from jaxblock.sweeps.identity import code_fingerprint, hash_of, program_key, run_id
from jaxblock.sweeps.plan import Plan, Run, read_plan
from jaxblock.sweeps.progress import SweepProgress
from jaxblock.sweeps.reading import read_sweep
from jaxblock.sweeps.schema import PlannedRun
from jaxblock.sweeps.store import Store
from jaxblock.sweeps.surveys import Survey, survey
from jaxblock.training.config_file import build_config
from jaxblock.training.files import held, replace_text
from jaxblock.training.interrupts import Interrupts

POLL_SECONDS = 0.2
RETRIED = ("error", "killed", "out_of_memory")


class Prepared(NamedTuple):
    """A plan that nothing can refuse any more."""

    plan: Plan
    runs: tuple[Run, ...]
    surveys: dict[str, Survey]
    """What is known of each program before it is run, by its key."""

    def id_of(self, run: Run) -> str:
        """Return a run's id."""
        return run_id(run.config, data=self.survey_of(run).data)

    def survey_of(self, run: Run) -> Survey:
        """Return what is known of a run's program."""
        return self.surveys[program_key(run.config)]


def prepare_sweep(plan: Plan) -> Prepared:
    """Load the data and trace every model, so that whatever is wrong is said before anything is written.

    Raises:
      ValueError: the data do not fit a config, or a model cannot be built.
    """
    runs, surveys = plan.runs(), {}
    for run in runs:
        key = program_key(run.config)
        if key not in surveys:
            surveys[key] = survey(run.config)
    return Prepared(plan, runs, surveys)


MakeCrew = Callable[..., Crew]
"""(store, sweep's config, say=...) -> who works."""


def run_sweep(
    prepared: Prepared, folder: Path, *, retry: bool = False, make_crew: MakeCrew = LocalCrew
) -> int:
    """Run what has no result yet; return the exit code: 0 done, 130 or 143 interrupted.

    The workers compute. On a GPU or TPU, a process that has taken the device for itself leaves them none: call this
    from one whose JAX_PLATFORMS was "cpu" when it imported jax, as `jaxblock sweep` does.

    Args:
      prepared: from `prepare_sweep`.
      folder: the sweep's, new or not.
      retry: whether runs that failed (`RETRIED`) are made again.
      make_crew: who works: processes of this machine, or `crew` of a `jaxblock.sweeps.ray_crew.Cluster`.

    Raises:
      SweepError: another process is running the sweep, or its folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (
            held(folder, taken=SweepError(f"the sweep in {str(folder)!r} is being run by another process")),
            contextlib.closing(Store.create(folder)) as store,
            Interrupts() as interrupts,
            SweepProgress(store) as progress,
        ):
            return _run(prepared, store, progress, interrupts, retry=retry, make_crew=make_crew)
    except (sqlite3.Error, OSError) as error:  # a full disk, a folder that went away
        raise SweepError(f"{error}; what is saved stays, and the same command goes on from it") from error


def _run(
    prepared: Prepared,
    store: Store,
    progress: SweepProgress,
    interrupts: Interrupts,
    *,
    retry: bool,
    make_crew: MakeCrew,
) -> int:
    """Run a sweep that this process holds."""
    plan = _save(prepared, store)
    _write_plan(prepared.plan, store.folder / "plan.toml")
    _drop_foreign(store, plan)
    if retry:
        store.forget(RETRIED)
    _tell_beginning(store, plan, prepared.plan.axes, progress)
    while interrupts.signal is None:
        store.add_programs(_groups(prepared, store, plan))
        _work(prepared, store, progress, interrupts, make_crew)
        if interrupts.signal is None and not _extend(prepared, store, plan, progress):
            return 0
    store.add_event("interrupted", "the sweep was interrupted")
    return interrupts.exit_code


def _write_plan(plan: Plan, path: Path) -> None:
    """Keep the plan beside its results; a file that says the same, in a user's own words, stays as it is."""
    with contextlib.suppress(ValueError):
        if read_plan(path) == plan:
            return
    replace_text(path, tomli_w.dumps(plan.values()))


def _tell_beginning(
    store: Store, plan: int, axes: Mapping[str, Sequence[Any]], progress: SweepProgress
) -> None:
    """Take up what a killed sweep left, and say what there is to do."""
    continued = store.reopen()
    runs = [run for program in continued for run in program.runs]
    if runs:
        sentence = f"the sweep had ended early; {len(runs)} runs in training go on from their last save"
        store.add_event("resumed", sentence, runs)
        progress.say(sentence)
    planned, results = store.planned(plan), store.results()
    done = sum(run[0] in results for run in planned)
    progress.say(f"{len(planned)} runs, {done} of them done; results in {store.folder}")
    for sentence in warnings_of(axes):
        progress.say(f"note: {sentence}")


def _drop_foreign(store: Store, plan: int) -> None:
    """End what was in training for another plan, another code or other data."""
    dropped = store.drop_foreign(plan)
    if dropped:
        sentence = f"plan, code or data have changed: {len(dropped)} runs that were in training are no longer asked for"
        store.add_event("interrupted", sentence, dropped)


def _save(prepared: Prepared, store: Store) -> int:
    """Keep the plan and its runs; return the plan's number."""
    first = prepared.survey_of(prepared.runs[0])
    facts = {
        "environment": describe_environment(code=code_fingerprint(), data=first.data),
        "tokens_per_step": first.tokens_per_step,
        "uniform_loss": first.uniform_loss,
    }
    runs = [_stored(prepared, run) for run in prepared.runs]
    identity = hash_of([run[0] for run in runs])
    plan = store.save_plan(prepared.plan.values(), facts, identity=identity)
    store.add_runs(plan, runs)
    again = widened_again(prepared.plan, store.widened_axes())
    store.add_runs(plan, [_stored(prepared, run) for run in again], widened=True)
    return plan


def _stored(prepared: Prepared, run: Run) -> PlannedRun:
    config, model = run.config, run.config.model
    known = prepared.survey_of(run)
    about = {
        "depth": model.depth,
        "sublayers": model.sublayers,
        "width": model.width,
        "residual": model.residual,
        "initialization": model.initialization,
        "parametrization": model.parametrization,
        "learning_rate": config.optimizer.learning_rate,
        "warmup": config.optimizer.warmup,
        "seed": config.run.seed,
        "planned_steps": config.run.steps,
        "parameters": known.parameters,
        "flops_per_token": known.flops_per_token,
    }
    return prepared.id_of(run), run.axes, config.as_dict(), about


def _groups(prepared: Prepared, store: Store, plan: int) -> list[list[str]]:
    """Return the runs that wait, as programs: equal but for their lanes, at most `sweep.lanes` each."""
    pending = set(store.pending(plan))
    groups: dict[str, list[str]] = {}
    for run, _, config, _ in store.planned(plan):
        if run in pending:
            key = program_key(build_config(config))
            groups.setdefault(key, []).append(run)
    most = prepared.plan.sweep.lanes
    return [runs[start : start + most] for runs in groups.values() for start in range(0, len(runs), most)]


def _extend(prepared: Prepared, store: Store, plan: int, progress: SweepProgress) -> bool:
    """Add runs where an arm's best learning rate lies at the edge of its grid; return whether there are any."""
    added = wider_runs(prepared.plan, read_sweep(store.folder).results)
    for arm in added:
        stored = [_stored(prepared, run) for run in arm.runs]
        store.add_runs(plan, stored, widened=True)
        store.add_event("grid_extended", arm.sentence, [run[0] for run in stored])
        progress.say(f"{arm.sentence} (sweep.extend = {prepared.plan.sweep.extend})")
    return bool(added)


def _work(
    prepared: Prepared, store: Store, progress: SweepProgress, interrupts: Interrupts, make_crew: MakeCrew
) -> None:
    """Keep workers at work until no program waits, or a signal comes."""
    if not store.programs():
        return
    with make_crew(store, prepared.plan.sweep, say=progress.say) as crew:
        while crew.is_at_work() and interrupts.signal is None:
            time.sleep(POLL_SECONDS)
            progress.update()

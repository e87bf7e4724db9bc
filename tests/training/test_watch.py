"""What shows a run while it trains: refused early if it cannot be shown, and never able to stop the run."""

import struct
import sys
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxblock.cli import main
from jaxblock.training.config import RunConfig, TrainConfig, WatchConfig
from jaxblock.training.plots import Curves
from jaxblock.training.run_folder import RunFolder
from jaxblock.training.watch import Watch
from tests.test_imports import PACKAGE, importers

ROWS = [
    {"step": 1, "loss": 2.5, "gradient_norm": None, "tokens": 12},
    {"step": 2, "loss": 2.25, "gradient_norm": 0.5, "tokens": 12},
    {"step": 2, "val_loss": 2.0},
]
BAD = {"step": 3, "event": "spike", "loss": 9.0, "sentence": "a spike"}


def config_of(**watch: Any) -> TrainConfig:
    return TrainConfig(run=RunConfig(steps=10), watch=WatchConfig(**watch))


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    found = RunFolder(tmp_path / "deeper")
    found.plots.mkdir(parents=True)
    return found


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Said(list):
    def __call__(self, line: str) -> None:
        self.append(line)


@pytest.mark.parametrize(
    ("flags", "field", "package"),
    [
        (["--watch.tensorboard", "true"], "tensorboard", "tensorboardX"),
        (["--watch.wandb", "depth"], "wandb", "wandb"),
    ],
)
def test_b113_a_logger_asked_for_and_missing_is_refused_before_anything_is_written(
    flags, field, package, tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["train", "--run.dir", str(tmp_path / "run"), *flags]) == 2
    said = capsys.readouterr().err
    assert f"watch.{field} is asked for, but {package} cannot be imported" in said
    assert f'pip install "jaxblock[{field}]"' in said
    assert list(tmp_path.iterdir()) == []


def test_b113_a_run_that_asks_for_no_logger_needs_none(folder, monkeypatch):
    for package in ("tensorboardX", "wandb"):
        monkeypatch.setitem(sys.modules, package, None)
        assert importers(PACKAGE, package) == set()  # no import statement, at the top or deferred
    Watch.check(config_of())
    with Watch(config_of(), folder, baseline=None) as watch:
        watch.rows(ROWS)
    assert watch.notes == []
    assert {path.name for path in folder.path.iterdir()} == {"plots"}


def test_a_profile_of_no_step_is_refused():
    Watch.check(config_of(profile_start=10))
    with pytest.raises(ValueError, match=r"watch\.profile_start is 11, but run\.steps is 10"):
        Watch.check(config_of(profile_start=11))


def events_of(path: Path) -> list:
    """Return the events of a file: records of length, its checksum, bytes, their checksum."""
    from tensorboardX.proto.event_pb2 import Event

    data, events = path.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        events.append(Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    return events


def test_tensorboard_gets_every_number_at_its_step(folder):
    with Watch(config_of(tensorboard=True), folder, baseline=None) as watch:
        watch.rows(ROWS[:2])
        watch.rows([ROWS[2], BAD])
    (file,) = (folder.path / "tensorboard").iterdir()
    version, start, *events = events_of(file)
    assert version.file_version == "brain.Event:2"
    assert (start.step, start.session_log.status) == (1, start.session_log.START)
    found = [(event.step, {v.tag: v.simple_value for v in event.summary.value}) for event in events]
    assert found == [
        (1, {"loss": 2.5, "tokens": 12}),
        (2, {"loss": 2.25, "gradient_norm": 0.5, "tokens": 12}),
        (2, {"val_loss": 2.0}),
        (3, {"loss": 9.0, "event/spike": 1.0}),
    ]


def test_tensorboard_of_a_resume_hides_what_is_made_again(folder, monkeypatch):
    monkeypatch.setattr("time.time", lambda: 1.7e9)  # file names hold whole seconds
    for first in (1, 2):
        with Watch(config_of(tensorboard=True), folder, baseline=None) as watch:
            watch.rows(ROWS[first - 1 :])
    files = list((folder.path / "tensorboard").iterdir())
    assert len(files) == 2
    assert sorted(events_of(file)[1].step for file in files) == [1, 2]


def test_b113_a_full_disk_is_said_once_and_counted_and_stops_nothing(folder, monkeypatch):
    said = Said()
    with Watch(config_of(tensorboard=True), folder, baseline=None, say=said) as watch:
        watch.rows(ROWS[:1])

        def full(*_):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("tensorboardX.event_file_writer.EventsWriter.flush", full)
            for row in ROWS[1:]:
                watch.rows([row])
        watch.rows([BAD])
    assert len(said) == 1
    assert "tensorboard failed with OSError: [Errno 28] No space left on device; the run goes on" in said[0]
    assert watch.notes == [
        "watch: tensorboard failed 2 times, first with OSError: [Errno 28] No space left on device"
    ]
    (file,) = (folder.path / "tensorboard").iterdir()
    assert [event.step for event in events_of(file)[2:]] == [1, 2, 2, 3]  # there again: nothing is lost


def test_an_interrupt_is_no_failure_of_a_watcher(folder, monkeypatch):
    with Watch(config_of(tensorboard=True), folder, baseline=None) as watch:

        def interrupted(*_):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr("tensorboardX.event_file_writer.EventsWriter.flush", interrupted)
            with pytest.raises(KeyboardInterrupt):
                watch.rows(ROWS)
    assert watch.notes == []


class FakeWandb(types.ModuleType):
    """The four calls that are made of it, kept."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.inits, self.logged, self.metrics, self.finished = [], [], [], []

    def init(self, **settings: Any) -> Any:
        self.inits.append(settings)
        return types.SimpleNamespace(
            log=self.logged.append,
            define_metric=lambda name, step_metric=None: self.metrics.append((name, step_metric)),
            finish=lambda exit_code: self.finished.append(exit_code),
        )


@pytest.fixture
def wandb(monkeypatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_wandb_gets_the_rows_and_a_resume_continues_its_run(folder, wandb):
    config = config_of(wandb="depth")
    Watch.check(config)
    with Watch(config, folder, baseline=None) as watch:
        watch.rows([*ROWS, BAD])
    assert wandb.logged == [
        {"step": 1, "loss": 2.5, "tokens": 12},
        {"step": 2, "loss": 2.25, "gradient_norm": 0.5, "tokens": 12},
        {"step": 2, "val_loss": 2.0},
        {"step": 3, "loss": 9.0, "event/spike": 1.0},
    ]
    assert wandb.metrics == [("step", None), ("*", "step")]
    first = wandb.inits[0]
    assert {name: first[name] for name in ("project", "name", "resume", "dir")} == {
        "project": "depth",
        "name": "deeper",
        "resume": "allow",
        "dir": str(folder.path),
    }
    assert first["config"] == config.values()

    def fails() -> None:
        with Watch(config, folder, baseline=None):
            raise RuntimeError("the run broke")

    with pytest.raises(RuntimeError, match="the run broke"):
        fails()
    assert wandb.inits[1]["id"] == first["id"]
    assert wandb.finished == [0, 1]
    other = RunFolder(folder.path.with_name("other"))
    other.plots.mkdir(parents=True)
    with Watch(config, other, baseline=None):
        pass
    assert wandb.inits[2]["id"] != first["id"]


@pytest.mark.parametrize("call", ["init", "log", "finish"])
def test_b113_a_network_that_is_down_stops_nothing(call, folder, wandb, monkeypatch):
    def down(*_, **__):
        raise ConnectionError("network is unreachable")

    healthy = wandb.init
    if call == "init":
        monkeypatch.setattr(wandb, "init", down)
    else:
        monkeypatch.setattr(
            wandb, "init", lambda **s: types.SimpleNamespace(**{**vars(healthy(**s)), call: down})
        )
    said = Said()
    with Watch(config_of(wandb="depth"), folder, baseline=None, say=said) as watch:
        watch.rows(ROWS)
    assert said == [
        "watch: wandb failed with ConnectionError: network is unreachable; the run goes on, "
        "its folder has everything"
    ]
    assert watch.notes == ["watch: wandb failed 1 time, first with ConnectionError: network is unreachable"]


@pytest.fixture
def drawn(monkeypatch) -> list[Curves]:
    """The curves of each figure that was drawn, without drawing."""
    seen: list[Curves] = []
    monkeypatch.setattr("jaxblock.training.watch.draw_run", lambda curves, *_, **__: seen.append(curves))
    return seen


def test_the_figure_is_redrawn_when_its_time_has_come(folder, drawn):
    clock = Clock()
    with Watch(config_of(figure_seconds=60.0), folder, baseline=None, clock=clock) as watch:
        for now, figures in ((1059.0, 0), (1060.0, 1), (1119.0, 1), (1120.0, 2), (9999.0, 3)):
            clock.now = now
            watch.figure()
            assert len(drawn) == figures


def test_a_slow_figure_takes_a_hundredth_of_the_time(folder, monkeypatch):
    """Drawing takes 2 s: the next one comes 200 s later, not 60."""
    clock, starts = Clock(), []

    def draw(*_, **__):
        starts.append(clock.now)
        clock.now += 2.0

    monkeypatch.setattr("jaxblock.training.watch.draw_run", draw)
    with Watch(config_of(figure_seconds=60.0), folder, baseline=None, clock=clock) as watch:
        for _ in range(600):
            clock.now += 1.0
            watch.figure()
    assert starts == [1060.0, 1262.0, 1464.0]


def test_no_figure_is_drawn_where_none_is_wanted(folder, drawn):
    clock = Clock()
    with Watch(config_of(figure_seconds=0.0), folder, baseline=None, clock=clock) as watch:
        clock.now += 1e6
        watch.figure()
    assert drawn == []


def test_a_resume_draws_the_steps_before_it_and_reads_them_once(folder, drawn, monkeypatch):
    clock = Clock()
    folder.append_metrics(ROWS)
    with Watch(config_of(), folder, baseline=None, clock=clock) as watch:
        monkeypatch.setattr(folder, "read_metrics", None)
        for step in (3, 4):
            watch.rows([{"step": step, "loss": 2.0}])
            clock.now += 1000.0
            watch.figure()
    assert [point.first for point in drawn[-1].loss.points] == [1, 2, 3, 4]


def test_b113_a_figure_that_cannot_be_written_stops_nothing(tmp_path):
    """The folder for figures is gone; drawing itself is real here."""
    gone, clock, said = RunFolder(tmp_path / "run"), Clock(), Said()
    with Watch(config_of(), gone, baseline=1.0, say=said, clock=clock) as watch:
        for figures in (0, 1):
            clock.now += 1000.0
            watch.figure()
            gone.plots.mkdir(parents=True, exist_ok=True)
            assert len(list(gone.plots.iterdir())) == figures
    assert len(said) == len(watch.notes) == 1
    assert "figure failed 1 time, first with FileNotFoundError" in watch.notes[0]


def profiled(watch: Watch, steps: range) -> None:
    state = jnp.zeros(3)
    for step in steps:
        watch.before_step(step)
        state = state + 1.0
        watch.after_step(step, state)


@pytest.fixture
def traces(monkeypatch) -> list[str]:
    """The profiler's calls, without a trace."""
    calls: list[str] = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda path: calls.append(f"start {Path(path).name}"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
    return calls


def test_a_trace_appears_as_soon_as_its_steps_are_done(folder):
    def traced() -> bool:
        return any(path.suffix == ".pb" for path in (folder.path / "profile").rglob("*"))

    with Watch(config_of(profile_start=2, profile_steps=2), folder, baseline=None) as watch:
        profiled(watch, range(1, 3))
        assert not traced()
        profiled(watch, range(3, 4))
        assert traced()
    assert watch.notes == []


@pytest.mark.parametrize(
    ("start", "steps", "calls"),
    [
        (None, range(1, 9), []),
        (3, range(1, 9), ["start profile", "stop"]),
        (3, range(1, 4), ["start profile", "stop"]),  # the run ends early: the context ends the trace
        (3, range(4, 9), ["start profile", "stop"]),  # a resume among its steps
        (3, range(5, 9), []),  # a resume after them
        (3, [1, 2, 3, 4, 2, 3, 4, 5], ["start profile", "stop"]),  # a rewind does not trace again
    ],
)
def test_a_trace_is_made_once_and_always_ended(start, steps, calls, folder, traces):
    with Watch(config_of(profile_start=start, profile_steps=2), folder, baseline=None) as watch:
        profiled(watch, steps)
    assert traces == calls


def test_the_step_is_waited_for_only_at_the_end_of_a_trace(folder, traces, monkeypatch):
    monkeypatch.setattr(jax, "block_until_ready", lambda state: traces.append("wait"))
    with Watch(config_of(profile_start=3, profile_steps=2), folder, baseline=None) as watch:
        profiled(watch, range(1, 9))
    assert traces == ["start profile", "wait", "stop"]


def test_b113_a_profiler_that_is_busy_stops_nothing(folder, monkeypatch):
    def busy(path: str) -> None:
        raise RuntimeError("only one profile may run at a time")

    monkeypatch.setattr(jax.profiler, "start_trace", busy)
    with Watch(config_of(profile_start=1), folder, baseline=None, say=Said()) as watch:
        profiled(watch, range(1, 5))
    assert watch.notes == [
        "watch: profile failed 1 time, first with RuntimeError: only one profile may run at a time"
    ]

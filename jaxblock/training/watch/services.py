"""Where the rows of metrics.jsonl can also go: TensorBoard and Weights & Biases, each imported when it is asked for."""

import importlib
import time
import uuid
from pathlib import Path
from typing import Any, Protocol

from jaxblock.training.config import TrainConfig
from jaxblock.training.files import replace_text


class Service(Protocol):
    """A receiver of rows; whatever it raises is shielded from the run by `Watch`."""

    def write(self, rows: list[dict[str, Any]]) -> None:
        """Take rows of metrics.jsonl, in order."""
        ...

    def close(self, *, failed: bool) -> None:
        """Write what is left; `failed`: the run ended by an exception."""
        ...


def numbers(row: dict[str, Any]) -> dict[str, float]:
    """Return a row's numbers by name, without its step; an event becomes the number 1 under "event/NAME"."""
    found = {
        name: float(value)
        for name, value in row.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name != "step"
    }
    return found | ({f"event/{row['event']}": 1.0} if "event" in row else {})


class TensorBoard:
    """Event files in RUN/tensorboard.

    They are written by tensorboardX's file writer itself, not by its SummaryWriter: that one writes in a thread which
    a full disk ends, and the run then waits for ever on a full queue.
    """

    def __init__(self, folder: Path):
        self._folder = folder / "tensorboard"
        self._files = importlib.import_module("tensorboardX.event_file_writer")
        self._events = importlib.import_module("tensorboardX.proto.event_pb2")
        self._summaries = importlib.import_module("tensorboardX.proto.summary_pb2")
        self._writer: Any = None

    def write(self, rows: list[dict[str, Any]]) -> None:
        """Append the rows and flush them."""
        for row in rows:
            if self._writer is None:
                self._writer = self._open(row["step"])
            values = [
                self._summaries.Summary.Value(tag=name, simple_value=value)
                for name, value in numbers(row).items()
            ]
            self._write(row["step"], summary=self._summaries.Summary(value=values))
        if self._writer is not None:
            self._writer.flush()

    def close(self, *, failed: bool) -> None:
        """Flush and close the file."""
        if self._writer is not None:
            self._writer.close()

    def _open(self, step: int) -> Any:
        """Start a file; of the files before it, TensorBoard then hides what came from `step` on: it is made again."""
        self._folder.mkdir(exist_ok=True)
        # The name holds whole seconds: a resume within one would overwrite the file.
        self._writer = self._files.EventsWriter(str(self._folder / "events"), f".{uuid.uuid4().hex[:8]}")
        start = self._events.SessionLog(status=self._events.SessionLog.START)
        self._write(step, session_log=start)
        return self._writer

    def _write(self, step: int, *, summary: Any = None, session_log: Any = None) -> None:
        event = self._events.Event(wall_time=time.time(), step=step, summary=summary, session_log=session_log)
        self._writer.write_event(event)


class WeightsAndBiases:
    """A run of a Weights & Biases project, named after the run's folder; a resume continues it.

    Its id is kept in RUN/wandb_id.txt. The x axis is "step", so that what a rewind makes again is accepted.
    """

    def __init__(self, config: TrainConfig, folder: Path):
        path = folder / "wandb_id.txt"
        if not path.exists():
            replace_text(path, uuid.uuid4().hex[:8] + "\n")
        self._run = importlib.import_module("wandb").init(
            project=config.watch.wandb,
            name=folder.absolute().name,
            id=path.read_text(encoding="utf-8").strip(),
            resume="allow",
            config=config.values(),
            allow_val_change=True,  # a resume may change fields that do not change a step
            dir=str(folder),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, rows: list[dict[str, Any]]) -> None:
        """Log the rows."""
        for row in rows:
            self._run.log({"step": row["step"], **numbers(row)})

    def close(self, *, failed: bool) -> None:
        """Finish the run; it is marked as failed where an exception ended it."""
        self._run.finish(exit_code=1 if failed else 0)

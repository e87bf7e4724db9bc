"""`jaxblock tokenize`: text to token shards."""

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import rich.console
import rich.progress
import tyro

from jaxblock.cli.arguments import (
    INTERRUPTED,
    Action,
    Flag,
    Integer,
    Text,
    asks_for_help,
    check_arguments,
    refuse,
    refuse_flag,
)

TOKENIZE_FIELDS = ("out", "tokenizer", "shard_tokens", "validation")
_SECONDS_BETWEEN_LINES = 30.0


@dataclasses.dataclass(frozen=True)
class TokenizeCommand:
    """Turn text into token shards that `--data.path` reads."""

    input: Annotated[str | None, tyro.conf.Positional] = None
    """A text or JSONL file, or a folder of them. Left out: the standard library's source."""
    out: Text = None
    """The folder to write, which must not exist; if it is an unfinished job of the same command, that goes on."""
    tokenizer: Annotated[str, tyro.conf.arg(metavar="STRING")] = "bytes"
    """bytes, bytes(end_of_text=True), PATH/tokenizer.json, or "bpe(vocab_size=4096)", trained on INPUT itself."""
    shard_tokens: Integer = None
    """Tokens in each .bin file. Left out: 100000000."""
    validation: Annotated[str, tyro.conf.arg(metavar="NUMBER")] = "0.005"
    """For the validation split: a share of the text (0.005), or about how many tokens (1000000)."""
    json: Flag = False
    """Print tokens.json as one line."""


def tokenize(arguments: Sequence[str]) -> Action:
    """Turn text into token shards: jaxblock tokenize [INPUT] --out DIR."""
    from jaxblock.training.config_file import parse_literal
    from jaxblock.training.tokenize import TokenizeSettings, plan_job

    known = TOKENIZE_FIELDS
    check_arguments(arguments, known, positionals=1, refuse=lambda name: refuse_flag(name, known))
    command = tyro.cli(
        TokenizeCommand, prog="jaxblock tokenize", description=tokenize.__doc__, args=list(arguments)
    )
    if command.out is None and not asks_for_help(arguments):
        raise ValueError(
            "--out is missing; it must name the folder to write: jaxblock tokenize INPUT --out DIR"
        )
    given = {"validation": parse_literal(command.validation)}
    if command.shard_tokens is not None:
        given["shard_tokens"] = parse_literal(command.shard_tokens)
    source = None if command.input is None else Path(command.input)
    settings = TokenizeSettings(source, Path(str(command.out)), command.tokenizer, **given)
    with Speed() as speed:
        job = plan_job(settings, speed.report)

    def act() -> int:
        with Speed(total=job.size) as speed:
            for note in (*job.notes, *(["continues an unfinished job"] if job.resumes else [])):
                speed.say(note)
            try:
                result = job.run(speed.report)
            except ValueError as error:
                return refuse(error)
            except KeyboardInterrupt:
                speed.say("interrupted; the same command again goes on from here")
                return INTERRUPTED
        print(
            json.dumps({"out": str(settings.out), **result}) if command.json else _words(settings.out, result)
        )
        return 0

    return act


def _words(out: Path, result: Mapping[str, Any]) -> str:
    """Return what a person wants to know at the end."""
    lines = []
    for name, split in result["splits"].items():
        lines.append(
            f"{name:6}{split['tokens']:>16,} tokens {split['documents']:>12,} documents "
            f"{len(split['shards']):>6,} shards   {split['bytes_per_token']:.3f} bytes per token"
        )
    flags = f"--data.path {out} --model.vocab_size {result['tokenizer']['vocab_size']}"
    return "\n".join([*lines, f"train with  jaxblock train {flags}"])


class Speed:
    """Say on stderr how far a job is: a bar in a terminal, a line now and then elsewhere."""

    def __init__(self, *, total: int | None = None):
        self._console = rich.console.Console(stderr=True, highlight=False)
        self._total, self._start, self._said = total, time.perf_counter(), time.perf_counter()
        self._stage = ""
        self._first = (0, 0)  # bytes and tokens when the stage began: a continued job did them before
        self._bar: rich.progress.Progress | None = None
        self._task = rich.progress.TaskID(0)

    def __enter__(self) -> "Speed":
        if self._console.is_terminal:
            columns = ("{task.description}", rich.progress.BarColumn(), rich.progress.DownloadColumn())
            bar = rich.progress.Progress(
                *columns, rich.progress.TimeRemainingColumn(), console=self._console, transient=True
            )
            bar.start()
            self._task = bar.add_task("scan", total=self._total)
            self._bar = bar
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, markup=False, soft_wrap=True)

    def report(self, stage: str, done: int, tokens: int) -> None:
        """Report that `done` bytes are done, and `tokens` written."""
        now = time.perf_counter()
        if stage != self._stage:
            self._stage, self._start, self._said, self._first = stage, now, now, (done, tokens)
        seconds = max(now - self._start, 1e-9)
        rate, speed = (tokens - self._first[1]) / seconds, (done - self._first[0]) / seconds
        words = f"{stage}  {rate:,.0f} tokens/s" if rate else stage
        if self._bar is not None:
            self._bar.update(self._task, completed=done, description=words)
        elif now - self._said >= _SECONDS_BETWEEN_LINES:
            self._said = now
            left = ""
            if self._total is not None and speed > 0:
                seconds = round((self._total - done) / speed)
                left = f"  {100 * done / self._total:.0f} %  {seconds // 60}:{seconds % 60:02d} left"
            self.say(f"{words}  {done / 2**20:,.0f} MiB{left}")

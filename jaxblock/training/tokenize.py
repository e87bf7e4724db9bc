"""A corpus of text to token shards: `jaxblock tokenize`, streaming, and safe to kill at any moment.

The text is read twice and never held. The scan checks every document and chooses the validation split; then each
document is encoded, followed by the end of text where the tokenizer has one, into the shards of its split. Inside a
split, documents stand in the order of their files' names.

The job's folder holds `progress.json`, the moment that the shards can be taken back to, until `tokens.json`, written
last, says that they are whole. All that is written is decided by the text and the settings, so a job that was killed
and continued leaves the same bytes as an unbroken one.
"""

import dataclasses
import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxblock.contracts import check_integer, check_number
from jaxblock.training.document_split import (
    Part,
    Report,
    Scan,
    Split,
    choose_split,
    first_texts,
    group_parts,
    hash_place,
    iterate_parts,
    scan_documents,
)
from jaxblock.training.documents import BEGINNING, Place
from jaxblock.training.safe_files import read_utf8_file
from jaxblock.training.shards import (
    MOST_SHARD_TOKENS,
    PROGRESS_FILE,
    SPLITS,
    TOKENS_FILE,
    ShardWriter,
    form_for,
    locked,
    write_whole,
)
from jaxblock.training.token_files import TextFiles, find_texts, no_text, note_skipped, readable
from jaxblock.training.tokenizers import (
    TOKENIZER_FILE,
    BytePairTraining,
    FileTokenizer,
    Tokenizer,
    choose_tokenizer,
    tokenizer_record,
)

_LEAST_BYTES = 8
_MOST_BYTES_PER_TOKEN = 8  # no tokenizer for text has longer tokens on average
_MEASURED_BYTES = 2**22
_CHECKPOINT_TOKENS = 2**24


@dataclasses.dataclass(frozen=True)
class TokenizeSettings:
    """What is tokenized, how, and where to.

    `validation` is a share of the bytes (0.005) or about how many tokens (1000000).
    """

    source: Path | None
    out: Path
    tokenizer: str = "bytes"
    shard_tokens: int = 100_000_000
    validation: float | int = 0.005

    def __post_init__(self) -> None:
        check_integer("shard_tokens", self.shard_tokens, least=1, most=MOST_SHARD_TOKENS)
        if isinstance(self.validation, float):
            check_number("validation", self.validation, above=0.0, below=1.0)
        elif isinstance(self.validation, int):
            check_integer("validation", self.validation, least=1, most=2**63 - 1)
        else:
            raise ValueError(
                f"validation is {self.validation!r}; it must be a share such as 0.005, or a number of tokens"
            )


class TokenizeJob:
    """A job that nothing about its input can refuse any more. `notes` are sentences about what is left out."""

    def __init__(
        self,
        settings: TokenizeSettings,
        choice: Tokenizer | BytePairTraining,
        texts: TextFiles,
        scan: Scan,
    ):
        self.settings, self.notes = settings, texts.notes
        self._choice, self._texts, self._scan = choice, texts, scan
        self._progress: dict[str, Any] | None = None
        self._look_again()

    @property
    def size(self) -> int:
        """Bytes of text."""
        return self._scan.size

    @property
    def resumes(self) -> bool:
        """Whether an earlier start of the same job is continued."""
        return self._progress is not None

    def run(self, report: Report) -> dict[str, Any]:
        """Do the work; return what tokens.json says.

        Raises:
          ValueError: the disk is full or refuses a file, the source changes, another process has the folder,
            a text contains the end of text, the corpus is too small for the tokenizer that it shall train.
        """
        out = self.settings.out
        tokenizer = self._tokenizer(report)
        split = choose_split(self._scan, self._wanted_bytes(tokenizer))
        try:
            out.mkdir(parents=True, exist_ok=True)
            with locked(out):
                self._look_again()
                return self._encode(tokenizer, split, report)
        except OSError as error:
            raise ValueError(f"{out} cannot be written: {error.strerror or error}") from error

    def _look_again(self) -> None:
        """Find out, now that the folder is this process's own, how far the job is."""
        check_out(self.settings.out, self.settings.source)
        self._progress = _read_progress(self.settings.out)
        if self._progress is not None:
            self._check_same(self._progress["settings"])

    def _tokenizer(self, report: Report) -> Tokenizer:
        """Return the tokenizer; one that is yet to be trained is trained on train documents."""
        path = self.settings.out / TOKENIZER_FILE
        if not isinstance(self._choice, BytePairTraining):
            return self._choice
        if self.resumes and path.exists():
            return FileTokenizer(read_utf8_file(path), self._choice.name, end_of_text=0)
        split = choose_split(self._scan, self._most_wanted)
        taken = self._choice.most_bytes / self._scan.size
        return self._choice.train(_training_texts(self._texts.files, split, taken, report))

    @property
    def _most_wanted(self) -> int:
        return most_wanted(self.settings, self._scan.size)

    def _wanted_bytes(self, tokenizer: Tokenizer) -> int:
        """Return how many bytes of text go to validation; tokens are counted in its first documents."""
        wanted, read, made = self.settings.validation, 0, 0
        if isinstance(wanted, float):
            return self._most_wanted
        for text, ends in first_texts(self._texts.files, self._scan.lowest):
            made += len(tokenizer.encode(text)) + (ends and tokenizer.end_of_text is not None)
            read += len(text)
            if made >= wanted or read >= _MEASURED_BYTES:
                break
        return min(math.ceil(wanted * read / max(made, 1)), self._most_wanted)

    def _encode(self, tokenizer: Tokenizer, split: Split, report: Report) -> dict[str, Any]:
        settings, out, form = self.settings, self.settings.out, form_for(tokenizer.vocab_size)
        writers = {name: ShardWriter(out, name, form, shard_tokens=settings.shard_tokens) for name in SPLITS}
        state = _State(out, self._own_settings(), writers, self._progress)
        try:
            state.save()
            text = tokenizer.file_text()
            if text is not None:
                write_whole(out / TOKENIZER_FILE, text.encode())
            for batch in group_parts(iterate_parts(self._texts.files, split, state.place)):
                ids = tokenizer.encode_batch([part.text for part in batch])
                _check_ends(batch, ids, tokenizer)
                state.add(batch, ids, tokenizer.end_of_text)
                report("encode", state.bytes, state.tokens)
            if state.bytes != self._scan.size:
                raise ValueError(f"{self._texts.words} was changed while it was read")
            return state.finish(self._record(tokenizer, form.dtype.name))
        finally:
            for writer in writers.values():
                writer.close()

    def _record(self, tokenizer: Tokenizer, dtype: str) -> dict[str, Any]:
        """Return what tokens.json says besides the splits."""
        return {
            "tokenizer": tokenizer_record(tokenizer),
            "dtype": dtype,
            "source": self._texts.words,
            "source_fingerprint": self._scan.fingerprint,
            "shard_tokens": self.settings.shard_tokens,
            "validation": self.settings.validation,
        }

    def _own_settings(self) -> dict[str, Any]:
        """Return what decides the result."""
        choice = self._choice
        return {
            "source fingerprint": self._scan.fingerprint,
            "tokenizer": choice.name,
            "tokenizer fingerprint": None if isinstance(choice, BytePairTraining) else choice.fingerprint,
            "shard_tokens": self.settings.shard_tokens,
            "validation": self.settings.validation,
        }

    def _check_same(self, there: dict[str, Any]) -> None:
        own = self._own_settings()
        differences = [f"{name}: {own[name]}, {there[name]}" for name in own if own[name] != there.get(name)]
        if differences:
            raise ValueError(
                f"out {self.settings.out} is an unfinished job with other settings; asked for, and there: "
                + "; ".join(differences)
            )


class _State:
    """What is written and counted, and the record of it that a continued job starts from."""

    def __init__(
        self,
        out: Path,
        settings: dict[str, Any],
        writers: dict[str, ShardWriter],
        progress: dict[str, Any] | None,
    ):
        self._out, self._settings, self._writers = out, settings, writers
        self.place, self._unsaved = BEGINNING, 0
        self._counts = {name: Counter(tokens=0, documents=0, bytes=0) for name in SPLITS}
        if progress is not None:
            self.place = Place(*progress["place"])
            self._counts = {name: Counter(progress["splits"][name]["counts"]) for name in SPLITS}
        for name, writer in writers.items():
            shards = {"whole": 0, "held": 0} if progress is None else progress["splits"][name]
            writer.rewind(shards["whole"], shards["held"])

    @property
    def bytes(self) -> int:
        """Bytes of text that are encoded."""
        return sum(counts["bytes"] for counts in self._counts.values())

    @property
    def tokens(self) -> int:
        """Tokens that are written."""
        return sum(counts["tokens"] for counts in self._counts.values())

    def add(self, batch: Sequence[Part], ids: Sequence[np.ndarray], end_of_text: int | None) -> None:
        """Write a batch; save when much was written."""
        for name, writer in self._writers.items():
            own = [(part, tokens) for part, tokens in zip(batch, ids, strict=True) if part.split == name]
            arrays: list[np.ndarray] = []
            for part, tokens in own:
                ends = part.ends and end_of_text is not None
                arrays += [tokens, np.array([end_of_text] if ends else [], np.int32)]
                self._counts[name].update(
                    documents=part.ends, bytes=len(part.text), tokens=len(tokens) + ends
                )
            if arrays:
                writer.write(np.concatenate(arrays))
                self._unsaved += sum(map(len, arrays))
        self.place = batch[-1].after
        if self._unsaved >= _CHECKPOINT_TOKENS:
            self.save()

    def save(self) -> None:
        """Make this the moment that a continued job starts from."""
        for writer in self._writers.values():
            writer.flush()
        splits = {
            name: {"whole": writer.whole, "held": writer.held, "counts": self._counts[name]}
            for name, writer in self._writers.items()
        }
        record = {"settings": self._settings, "place": self.place, "splits": splits}
        write_whole(self._out / PROGRESS_FILE, _as_json(record))
        self._unsaved = 0

    def finish(self, record: dict[str, Any]) -> dict[str, Any]:
        """Move the last shards, write tokens.json, and end being a job."""
        self.save()
        for writer in self._writers.values():
            writer.finish()
        record["splits"] = {
            name: {
                **self._counts[name],
                "bytes_per_token": self._counts[name]["bytes"] / max(self._counts[name]["tokens"], 1),
                "shards": [{"name": shard, "tokens": count} for shard, count in writer.shards],
            }
            for name, writer in self._writers.items()
        }
        write_whole(self._out / TOKENS_FILE, _as_json(record))
        os.unlink(self._out / PROGRESS_FILE)
        return record


def plan_job(settings: TokenizeSettings, report: Report) -> TokenizeJob:
    """Check everything, scan the source, and return the job; nothing is written.

    Raises:
      ValueError: the source, the tokenizer or the folder will not do, or its unfinished job is another one.
    """
    choice = choose_tokenizer(settings.tokenizer)
    check_out(settings.out, settings.source)
    texts = find_texts(settings.source, field="INPUT")
    with readable(Path(texts.words)):
        files = [(name, path, path.stat().st_size) for name, path in texts.files]
    empty = note_skipped(Counter({"empty files": sum(size == 0 for _, _, size in files)}))
    texts = dataclasses.replace(texts, notes=empty + texts.notes)
    wanted = most_wanted(settings, sum(size for _, _, size in files))
    scan = scan_documents(texts, reads_utf8=choice.reads_utf8, wanted=wanted, report=report)
    if not scan.size:
        raise ValueError(no_text(f"INPUT {texts.words}", texts.notes))
    if scan.size < _LEAST_BYTES:
        raise ValueError(
            f"INPUT {texts.words} holds {scan.size} bytes of text; {_LEAST_BYTES} are needed for two splits"
        )
    return TokenizeJob(settings, choice, texts, scan)


def most_wanted(settings: TokenizeSettings, size: int) -> int:
    """Return the most bytes of `size` that validation can be given."""
    if isinstance(settings.validation, float):
        return math.ceil(settings.validation * size)
    return min(settings.validation * _MOST_BYTES_PER_TOKEN, size // 2)


def check_out(out: Path, source: Path | None) -> None:
    """Raise ValueError unless `out` is new, or an unfinished job: nothing is overwritten."""
    with readable(out):
        if source is not None and source.is_dir() and out.resolve().is_relative_to(source.resolve()):
            raise ValueError(f"out {out} lies in INPUT {source}, and would be a part of it: choose another")
        parent = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            raise ValueError(
                f"out is {str(out)!r}, but {str(parent)!r} is not a folder that can be written to"
            )
        names = {path.name for path in out.iterdir()} if out.exists() else set()
    if PROGRESS_FILE not in names and names - {PROGRESS_FILE + ".partial"}:
        what = "is finished" if TOKENS_FILE in names else "exists and is no unfinished `jaxblock tokenize`"
        raise ValueError(f"out {out} {what}; nothing is overwritten, choose another")


def _read_progress(out: Path) -> dict[str, Any] | None:
    path = out / PROGRESS_FILE
    if not path.exists():
        return None
    try:
        progress = json.loads(read_utf8_file(path))
        if set(progress["splits"]) == set(SPLITS) and len(progress["place"]) == len(BEGINNING):
            return progress
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is not what `jaxblock tokenize` writes: {error}") from error
    raise ValueError(f"{path} is not what `jaxblock tokenize` writes")


def _training_texts(
    files: Sequence[tuple[str, Path]], split: Split, taken: float, report: Report
) -> Iterator[bytes]:
    """Yield pieces of train documents, a share `taken` of them, chosen by a hash of their places."""
    done = 0
    for part in iterate_parts(files, split, BEGINNING):
        done += len(part.text)
        report("train", done, 0)
        if part.split == "train" and hash_place(b"", done) < taken * 2**64:
            yield part.text


def _check_ends(batch: Sequence[Part], ids: Sequence[np.ndarray], tokenizer: Tokenizer) -> None:
    """Raise ValueError if a text has the end of text as a token, which would end its document before its end."""
    for part, tokens in zip(batch, ids, strict=True):
        if tokenizer.end_of_text is not None and np.any(tokens == tokenizer.end_of_text):
            raise ValueError(
                f"{part.words} has the end of text, id {tokenizer.end_of_text}, inside its text: "
                f"{tokenizer.name} reads it as an ordinary word"
            )


def _as_json(record: dict[str, Any]) -> bytes:
    return (json.dumps(record, indent=2) + "\n").encode()

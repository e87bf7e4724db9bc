"""The data of a classifier: texts with a label, their split, and padded batches of them; bytes are the tokens.

Texts come from a `.jsonl` file, one object {"text": "...", "label": "..."} a line, or from
`training.function_corpus`; images, a byte a pixel, from `training.digit_corpus`. A row of a batch is the first
`context` bytes of a text, padded on the right with 0.
"""

import hashlib
import json
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

import grain
import numpy as np

from jaxblock.contracts import check_integer, check_number
from jaxblock.training.rows import checked_rows
from jaxblock.training.safe_files import check_regular
from jaxblock.training.token_files import readable

VALIDATION_PART = 0.15
"""The part of each class's examples that is held out, at most, unless a class is too small for it."""


class LabelledBatch(NamedTuple):
    """Texts as arrays. A row that is not real has no real token; its label is 0 and does not count."""

    inputs_BT: np.ndarray
    """int32 bytes, 0 behind the end."""
    valid_BT: np.ndarray
    """Boolean, True = a byte of the text."""
    labels_B: np.ndarray
    """int32."""
    real_B: np.ndarray
    """Boolean, True = an example; False = a row that fills up the last validation batch."""


@dataclass(frozen=True, eq=False)
class LabelledExamples:
    """E texts with labels; the texts lie end to end in one array."""

    bytes_N: np.ndarray
    """uint8."""
    ends_E: np.ndarray
    """int64: where each text ends in `bytes_N`."""
    labels_E: np.ndarray
    """int32: the number of each text's class."""
    names: tuple[str, ...]
    """The classes, C of them."""

    @classmethod
    def of(cls, texts: Sequence[bytes], labels: Sequence[int], names: tuple[str, ...]) -> "LabelledExamples":
        """Join texts; raises ValueError unless there is a label from 0 to C - 1 for each."""
        labels_E = np.asarray(labels, np.int32)
        if len(texts) != len(labels):
            raise ValueError(
                f"there are {len(texts)} texts and {len(labels)} labels; each text has one label"
            )
        if len(labels_E) and not 0 <= labels_E.min() <= labels_E.max() < len(names):
            found, allowed = f"{labels_E.min()} to {labels_E.max()}", f"0 to {len(names) - 1}"
            raise ValueError(f"labels are {found}; with {len(names)} names they are {allowed}")
        ends_E = np.cumsum([len(text) for text in texts], dtype=np.int64)
        return cls(np.frombuffer(b"".join(texts), np.uint8), ends_E, labels_E, names)

    def __len__(self) -> int:
        return len(self.labels_E)

    def text(self, index: int) -> np.ndarray:
        """Return text `index`, uint8 [its length]."""
        return self.bytes_N[int(self.ends_E[index - 1]) if index else 0 : int(self.ends_E[index])]

    def count_longer(self, context: int) -> int:
        """Return how many texts are longer than `context` bytes: a model of that context reads their beginning."""
        return int(np.sum(np.diff(self.ends_E, prepend=0) > context))

    def take(self, chosen: Sequence[int]) -> "LabelledExamples":
        """Return some of the examples, in the order asked for."""
        texts = [self.text(index).tobytes() for index in chosen]
        return LabelledExamples.of(texts, [int(self.labels_E[index]) for index in chosen], self.names)


def decode_text(bytes_N: np.ndarray) -> str:
    """Return a text as a person reads it."""
    return bytes_N.tobytes().decode("utf-8", errors="replace")


@dataclass(frozen=True, eq=False)
class LabelledCorpus:
    """Train and validation examples, and what a run records about them.

    `fingerprint` names the data, their split and their classes: 16 hex digits of a sha256. `source` is a sentence
    for people, `notes` are sentences about what was left out or cut. `show` is how a person reads an example.
    """

    train: LabelledExamples
    validation: LabelledExamples
    fingerprint: str
    source: str
    notes: tuple[str, ...]
    show: Callable[[np.ndarray], str] = decode_text

    @property
    def names(self) -> tuple[str, ...]:
        """The classes, by label."""
        return self.train.names


class LabelledBatches:
    """The endless training batches: `batches[step]` is the same on every machine, in any order of asking.

    An epoch is every example once, in an order of its own; a batch may hold the end of one epoch and the start of
    the next.
    """

    def __init__(self, examples: LabelledExamples, *, context: int, batch: int, seed: int):
        _check_settings(examples, context=context, batch=batch)
        check_integer("seed", seed, least=0, most=2**32 - 1)
        self._examples, self.context, self.batch = examples, context, batch
        order = grain.MapDataset.range(len(examples)).seed(seed).shuffle().repeat()
        self._order = cast(Sequence[int], order)

    def __getitem__(self, step: int) -> LabelledBatch:
        return self.rows(step, range(self.batch))

    def rows(self, step: int, rows: Sequence[int]) -> LabelledBatch:
        """Return some rows of the global batch of `step`: what one process reads."""
        step = operator.index(step)
        if step < 0:
            raise ValueError(f"step is {step}; it must be at least 0")
        places = [step * self.batch + row for row in checked_rows(rows, self.batch)]
        return pad_examples(self._examples, [self._order[place] for place in places], context=self.context)


class LabelledValidation:
    """Batches in which each example stands exactly once, in order; the last one is filled up with rows not real."""

    def __init__(self, examples: LabelledExamples, *, context: int, batch: int):
        _check_settings(examples, context=context, batch=batch)
        self._examples, self.context, self.batch = examples, context, batch

    def __len__(self) -> int:
        return -(-len(self._examples) // self.batch)

    def __iter__(self) -> Iterator[LabelledBatch]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, number: int) -> LabelledBatch:
        return self.rows(number, range(self.batch))

    def rows(self, number: int, rows: Sequence[int]) -> LabelledBatch:
        """Return some rows of the global batch `number`: what one process reads."""
        if not 0 <= number < len(self):
            raise IndexError(f"batch {number} of {len(self)} validation batches")
        places = [number * self.batch + row for row in checked_rows(rows, self.batch)]
        held = len(self._examples)
        chosen = [place if place < held else None for place in places]
        return pad_examples(self._examples, chosen, context=self.context)


def pad_examples(examples: LabelledExamples, chosen: Sequence[int | None], *, context: int) -> LabelledBatch:
    """Return examples as rows of `context` places, cut or padded on the right; None makes a row that is not real."""
    rows = len(chosen)
    inputs_BT, lengths_B1 = np.zeros((rows, context), np.int32), np.zeros((rows, 1), np.int64)
    labels_B, real_B = np.zeros(rows, np.int32), np.array([index is not None for index in chosen], bool)
    for row, index in enumerate(chosen):
        if index is not None:
            text = examples.text(index)[:context]
            inputs_BT[row, : len(text)] = text
            lengths_B1[row], labels_B[row] = len(text), examples.labels_E[index]
    return LabelledBatch(inputs_BT, np.arange(context)[None] < lengths_B1, labels_B, real_B)


def split_groups(
    groups: Sequence[str], labels: Sequence[int], *, part: float = VALIDATION_PART
) -> np.ndarray:
    """Return boolean [E], True = validation, with whole groups (files) on one side.

    Within a class, groups in the order of sha256(name) go to validation as long as they fit into `part` of the
    class's examples; where none fits, the smallest does. A class of one group stays in train. Other classes, and the
    order in which examples are listed, have no say.
    """
    check_number("part", part, above=0.0, below=1.0)
    sizes: dict[int, dict[str, int]] = {}
    for group, label in zip(groups, labels, strict=True):
        own = sizes.setdefault(label, {})
        own[group] = own.get(group, 0) + 1
    held_out: set[str] = set()
    for own in sizes.values():
        room, fits = part * sum(own.values()), []
        ordered = sorted(
            own, key=lambda group: hashlib.sha256(group.encode("utf-8", "surrogateescape")).digest()
        )
        for group in ordered:
            if own[group] <= room:
                fits.append(group)
                room -= own[group]
        if len(own) > 1:
            held_out.update(fits or [min(ordered, key=own.__getitem__)])
    return np.array([group in held_out for group in groups], bool)


def make_corpus(
    examples: LabelledExamples,
    groups: Sequence[str],
    *,
    context: int,
    source: str,
    notes: Sequence[str],
    part: float = VALIDATION_PART,
) -> LabelledCorpus:
    """Split examples by group, `part` of each class held out, count what the context cuts, and name the result.

    Raises:
      ValueError: nothing to hold out, or fewer than two classes.
    """
    check_integer("context", context, least=1)
    classes = len(set(examples.labels_E.tolist()))
    if classes < 2:
        raise ValueError(f"{source} has {classes} classes with examples; a classifier needs at least 2")
    is_held_out = split_groups(groups, examples.labels_E.tolist(), part=part)
    train, validation = (examples.take(np.flatnonzero(side).tolist()) for side in (~is_held_out, is_held_out))
    if not len(validation):
        raise ValueError(f"{source} has one example a class, and none can be held out for validation")
    cut = examples.count_longer(context)
    cut_note = [f"Cut {cut:,} of {len(examples):,} texts to their first {context} bytes."] if cut else []
    digest = hashlib.sha256("\0".join(examples.names).encode())
    for side in (train, validation):
        for array in (side.labels_E, side.ends_E, side.bytes_N):
            digest.update(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes())
    words = f"{source}: {len(examples):,} texts of {len(examples.names)} classes"
    return LabelledCorpus(train, validation, digest.hexdigest()[:16], words, (*notes, *cut_note))


def load_labelled(path: Path, *, context: int) -> LabelledCorpus:
    """Load a `.jsonl` file with a "text" and a "label" (a string or a whole number) on each line.

    Blank lines, empty texts and texts that occurred before are left out; a text is in train or in validation by
    its hash, class by class. Classes are sorted, numbers by value.

    Raises:
      ValueError: naming file and line, for a line that is not such an object; for no data, one class, or labels of
        two kinds.
    """
    seen: dict[bytes, str | int] = {}
    skipped = {"empty texts": 0, "texts that occur again": 0}
    check_regular(path)
    with readable(path), open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if line.strip():
                text, label = _parse_line(line, f"{path}, line {number},")
                skipped["empty texts"] += not text
                skipped["texts that occur again"] += text in seen
                if text:
                    seen.setdefault(text, label)
    kinds = {type(label) for label in seen.values()}
    if len(kinds) > 1:
        raise ValueError(f"{path} has labels that are strings and labels that are numbers; choose one")
    values = sorted(set(seen.values()), key=lambda label: (isinstance(label, str), label))
    number_of = {value: number for number, value in enumerate(values)}
    labels = [number_of[label] for label in seen.values()]
    examples = LabelledExamples.of(list(seen), labels, tuple(map(str, values)))
    groups = [hashlib.sha256(text).hexdigest() for text in seen]
    notes = [f"Skipped {count:,} {what}." for what, count in skipped.items() if count]
    return make_corpus(examples, groups, context=context, source=str(path), notes=notes)


def _parse_line(line: bytes, where: str) -> tuple[bytes, str | int]:
    wanted = f'{where} must be a JSON object with a string "text" and a "label", a string or a whole number'
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{wanted}; it is not JSON in UTF-8: {error}") from error
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        raise ValueError(wanted)
    label = record.get("label")
    if not isinstance(label, str | int) or isinstance(label, bool) or label == "":
        raise ValueError(wanted)
    try:
        str(label).encode("utf-8")
        return record["text"].encode("utf-8"), label
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where} has a lone surrogate at character {error.start} of its text or label"
        ) from error


def _check_settings(examples: LabelledExamples, *, context: int, batch: int) -> None:
    check_integer("context", context, least=1)
    check_integer("batch", batch, least=1)
    if not len(examples):
        raise ValueError("there are no examples; at least one is needed")

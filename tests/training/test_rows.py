"""The rows of a process: together the global batch for any number of processes, also where it changes."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxblock.training.batches import TrainBatches, ValidationBatches
from jaxblock.training.corpus import TokenStream
from jaxblock.training.labelled import LabelledBatches, LabelledExamples, LabelledValidation
from jaxblock.training.mixed_batches import MixedBatches, MixedValidation
from jaxblock.training.rows import process_rows

FEW = settings(deadline=None, max_examples=8)
BATCH = 8
SHARES = [Fraction(1, 2), Fraction(3, 10), Fraction(1, 5)]
SHAPE = {"context": 4, "batch": BATCH}
EXAMPLES = LabelledExamples.of(
    [bytes([i + 1] * (i % 7)) for i in range(29)], [i % 3 for i in range(29)], ("a", "b", "c")
)


def streams() -> list[TokenStream]:
    """Three sources of 90, 41 and 18 tokens; a token is 1000 * source + its offset + 1."""
    return [
        TokenStream([1000 * source + np.arange(1, size + 1, dtype=np.uint16)])
        for source, size in enumerate([90, 41, 18])
    ]


KINDS = {
    "train": lambda: TrainBatches(streams()[0], **SHAPE, seed=3, seams="separate"),
    "validation": lambda: ValidationBatches(streams()[0], **SHAPE, seams="separate"),
    "mixed train": lambda: MixedBatches(streams(), SHARES, **SHAPE, seed=3, seams="separate"),
    "mixed validation": lambda: MixedValidation(streams(), **SHAPE, seams="separate"),
    "labelled train": lambda: LabelledBatches(EXAMPLES, **SHAPE, seed=3),
    "labelled validation": lambda: LabelledValidation(EXAMPLES, **SHAPE),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_rows_of_all_processes_are_the_global_batch(kind):
    whole = KINDS[kind]()
    for number in range(3):
        for processes in (1, 2, 4):
            # Each process has objects of its own, as it has in a run.
            parts = [KINDS[kind]().rows(number, process_rows(BATCH, processes, i)) for i in range(processes)]
            for field, expected in zip(zip(*parts, strict=True), whole[number], strict=True):
                np.testing.assert_array_equal(np.concatenate(field), expected)
    moved = [KINDS[kind]().rows(0, [row - 1 for row in range(BATCH)][1:])]  # the control: a row too early
    assert not np.array_equal(moved[0][0], whole[0][0][1:])


@given(st.integers(1, 64), st.integers(1, 64))
def test_rows_are_contiguous_or_the_processes_are_refused(batch, processes):
    if batch % processes:
        with pytest.raises(ValueError, match=f"data.batch is {batch} and there are {processes} processes"):
            process_rows(batch, processes, 0)
        return
    rows = [process_rows(batch, processes, index) for index in range(processes)]
    assert list(itertools.chain(*rows)) == list(range(batch))
    assert {len(own) for own in rows} == {batch // processes}


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ((8, 2, 2), "index is 2; .* at most 1"),
        ((8, 2, -1), "index is -1"),
        ((8, 0, 0), "processes is 0"),
        ((0, 1, 0), "batch is 0"),
        ((8.0, 1, 0), r"batch is 8\.0"),
    ],
)
def test_what_is_no_process_is_refused(given, reason):
    with pytest.raises(ValueError, match=reason):
        process_rows(*given)


@FEW
@given(st.lists(st.sampled_from([1, 2, 4, 8]), min_size=2, max_size=4), st.data(), st.booleans())
def test_b80_a_run_may_change_its_processes_and_loses_and_repeats_nothing(counts, data, mixed):
    """Restarts with any numbers of processes read, step by step, what the unbroken run of one process reads."""
    kind = KINDS["mixed train" if mixed else "train"]
    step, read = 0, []
    for processes in counts:
        hosts = [kind() for _ in range(processes)]
        stop = step + data.draw(st.integers(0, 4))
        for number, index in itertools.product(range(step, stop), range(processes)):
            read += hosts[index].rows(number, process_rows(BATCH, processes, index)).targets_BT.tolist()
        step = stop
    unbroken = [row for number in range(step) for row in kind()[number].targets_BT.tolist()]
    assert read == unbroken
    for source in range(3 if mixed else 1):
        own = [tuple(row) for row in read if row[0] // 1000 == source]
        windows = (len(streams()[source]) - 1) // SHAPE["context"]
        epochs = [own[first : first + windows] for first in range(0, len(own), windows)]
        assert all(len(set(epoch)) == len(epoch) for epoch in epochs)  # within an epoch, each window once

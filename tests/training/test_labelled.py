"""A classifier's data: rows are texts cut or padded, every example once an epoch, files and texts on one side."""

import hashlib
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxblock.training.labelled import (
    LabelledBatches,
    LabelledExamples,
    LabelledValidation,
    load_labelled,
    pad_examples,
    split_groups,
)

FEW = settings(deadline=None, max_examples=25)


def numbered(count: int) -> LabelledExamples:
    """Example i is one byte, i + 1: a row tells its example, and 0 is padding alone."""
    return LabelledExamples.of(
        [bytes([i + 1]) for i in range(count)], [i % 3 for i in range(count)], ("a", "b", "c")
    )


def train(count: int = 40, *, context: int = 2, batch: int = 3, seed: int = 0) -> LabelledBatches:
    return LabelledBatches(numbered(count), context=context, batch=batch, seed=seed)


def order_of(batches: LabelledBatches, epoch: int, count: int = 40) -> list[int]:
    """The examples of an epoch in the order in which training meets them."""
    places = range(epoch * count, (epoch + 1) * count)
    read = {step: batches[step].inputs_BT for step in {place // batches.batch for place in places}}
    return [int(read[p // batches.batch][p % batches.batch, 0]) for p in places]


def assert_equal(left, right) -> None:
    for a, b in zip(left, right, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_row_is_the_beginning_of_a_text_padded_on_the_right():
    examples = LabelledExamples.of([b"abc", b"", b"defgh"], [1, 0, 1], ("no", "yes"))
    batch = pad_examples(examples, [2, 0, None, 1], context=4)
    assert bytes(batch.inputs_BT[0].tolist()) == b"defg"
    assert batch.inputs_BT[1].tolist() == [*b"abc", 0]
    np.testing.assert_array_equal(batch.valid_BT.sum(1), [4, 3, 0, 0])
    np.testing.assert_array_equal(batch.valid_BT[1], [True, True, True, False])
    np.testing.assert_array_equal(batch.labels_B, [1, 1, 0, 0])
    np.testing.assert_array_equal(batch.real_B, [True, True, False, True])
    assert [x.dtype for x in batch] == [np.int32, np.bool_, np.int32, np.bool_]
    assert examples.count_longer(4) == 1
    assert examples.count_longer(5) == 0
    assert [examples.text(i).tobytes() for i in range(3)] == [b"abc", b"", b"defgh"]


def test_labels_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="2 texts and 1 labels"):
        LabelledExamples.of([b"a", b"b"], [0], ("x",))
    with pytest.raises(ValueError, match="labels are 0 to 2; with 2 names they are 0 to 1"):
        LabelledExamples.of([b"a", b"b"], [0, 2], ("x", "y"))


# Training batches ----------------------------------------------------------------------------------------------------


@FEW
@given(st.integers(1, 30), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_an_epoch_holds_every_example_once(count, batch, seed):
    batches = train(count, batch=batch, seed=seed)
    for epoch in range(2):
        assert sorted(order_of(batches, epoch, count)) == list(range(1, count + 1))


def test_epochs_and_seeds_have_orders_of_their_own_and_a_resume_has_the_same():
    orders = [order_of(train(seed=seed), epoch) for seed in range(3) for epoch in range(3)]
    assert len({tuple(order) for order in orders}) == 9
    assert orders[0] != sorted(orders[0])
    assert order_of(train(seed=0), 2) == orders[2]


def test_a_batch_depends_on_seed_and_step_alone():
    forwards, backwards = train(), train()
    kept = [forwards[step] for step in range(30)]
    for step in reversed(range(30)):
        assert_equal(backwards[step], kept[step])
    assert_equal(train()[np.int64(29)], kept[29])
    assert not np.array_equal(train(seed=1)[0].inputs_BT, kept[0].inputs_BT)
    with pytest.raises(ValueError, match="step is -1"):
        train()[-1]


@pytest.mark.parametrize("kind", [LabelledBatches, LabelledValidation])
def test_a_process_reads_its_rows_of_the_global_batch(kind):
    seed = {"seed": 5} if kind is LabelledBatches else {}
    batches = kind(numbered(16), context=2, batch=6, **seed)
    whole = batches[2]
    for rows in (range(0, 3), range(3, 6), [1, 4]):
        for a, b in zip(batches.rows(2, rows), whole, strict=True):
            np.testing.assert_array_equal(a, b[list(rows)])
    with pytest.raises(ValueError, match=r"rows are \[5, 6\]; .* below the batch size 6"):
        batches.rows(0, range(5, 7))


def test_no_example_and_no_place_are_refused():
    nothing = LabelledExamples.of([], [], ("a",))
    with pytest.raises(ValueError, match="no examples"):
        LabelledValidation(nothing, context=2, batch=2)
    with pytest.raises(ValueError, match="batch is 0"):
        LabelledBatches(numbered(3), context=2, batch=0, seed=0)


# Validation ----------------------------------------------------------------------------------------------------------


@FEW
@given(st.integers(1, 20), st.integers(1, 9))
def test_b68_validation_holds_every_example_once_in_batches_of_one_shape(count, batch):
    """Also where there are fewer examples than rows."""
    batches = list(LabelledValidation(numbered(count), context=2, batch=batch))
    assert {b.inputs_BT.shape for b in batches} == {(batch, 2)}
    seen = np.concatenate([b.inputs_BT[b.real_B, 0] for b in batches])
    np.testing.assert_array_equal(seen, np.arange(1, count + 1))
    filled = np.concatenate([b.real_B for b in batches])
    np.testing.assert_array_equal(filled, np.arange(len(filled)) < count)
    assert not any(b.valid_BT[~b.real_B].any() for b in batches)


def test_b68_three_examples_in_batches_of_eight():
    batches = LabelledValidation(numbered(3), context=2, batch=8)
    assert len(batches) == 1
    np.testing.assert_array_equal(batches[0].real_B, [True] * 3 + [False] * 5)
    with pytest.raises(IndexError):
        batches[1]


# The split -----------------------------------------------------------------------------------------------------------


GROUPS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5)), min_size=1, max_size=60)


@FEW
@given(GROUPS, st.randoms(use_true_random=False))
def test_a_group_is_on_one_side_and_a_class_of_two_groups_on_both(drawn, random):
    groups, labels = [f"{label}/{file}" for label, file in drawn], [label for label, _ in drawn]
    is_held_out = split_groups(groups, labels)
    inside = {group for group, held in zip(groups, is_held_out, strict=True) if held}
    assert inside.isdisjoint(group for group, held in zip(groups, is_held_out, strict=True) if not held)
    for label in set(labels):
        own = {group for group, of in zip(groups, labels, strict=True) if of == label}
        assert (0 < len(own & inside) < len(own)) or (len(own) == 1 and not own & inside)
    order = random.sample(range(len(groups)), len(groups))
    again = split_groups([groups[i] for i in order], [labels[i] for i in order])
    np.testing.assert_array_equal(again, is_held_out[order])


def test_the_part_held_out_is_kept_to_class_by_class():
    groups = [f"{label}/{i // 2}" for label in "ab" for i in range(40)]  # files of two
    is_held_out = split_groups(groups, [0] * 40 + [1] * 40, part=0.2)
    assert is_held_out[:40].sum() == is_held_out[40:].sum() == 8
    large = ["x"] * 30 + ["y"] * 10  # no file fits into a tenth: the smallest goes
    np.testing.assert_array_equal(split_groups(large, [0] * 40, part=0.1), [False] * 30 + [True] * 10)


# JSONL ---------------------------------------------------------------------------------------------------------------


def write(path, rows, *, start=b""):
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(start + b"\n".join(lines) + b"\n")
    return path


def both(corpus):
    return [
        (part.text(i).tobytes(), corpus.names[part.labels_E[i]])
        for part in (corpus.train, corpus.validation)
        for i in range(len(part))
    ]


def test_a_jsonl_file_is_its_texts_and_labels(tmp_path):
    rows = [{"text": f"é {i}", "label": "odd" if i % 2 else "even", "more": None} for i in range(40)]
    corpus = load_labelled(write(tmp_path / "a.jsonl", rows, start=b"\xef\xbb\xbf"), context=4)
    assert sorted(both(corpus)) == sorted((row["text"].encode(), row["label"]) for row in rows)
    assert corpus.names == ("even", "odd")
    assert len(corpus.validation) == 6
    assert set(corpus.validation.labels_E.tolist()) == {0, 1}
    assert corpus.notes == ("Cut 30 of 40 texts to their first 4 bytes.",)
    assert corpus.source.endswith("a.jsonl: 40 texts of 2 classes")


def test_the_fingerprint_and_the_split_are_of_the_content_alone(tmp_path):
    rows = [{"text": f"text {i}", "label": i % 2} for i in range(40)]
    (tmp_path / "deep").mkdir()
    first, moved = (
        load_labelled(write(tmp_path / name, rows), context=9) for name in ("a.jsonl", "deep/b.jsonl")
    )
    assert first.fingerprint == moved.fingerprint
    assert both(first) == both(moved)
    backwards = load_labelled(write(tmp_path / "a.jsonl", rows[::-1]), context=9)
    held_out = [
        {part.text(i).tobytes() for i in range(6)} for part in (first.validation, backwards.validation)
    ]
    assert held_out[0] == held_out[1]
    rows[7]["label"] = 0
    assert load_labelled(write(tmp_path / "a.jsonl", rows), context=9).fingerprint != first.fingerprint


def test_empty_and_repeated_texts_are_left_out_and_told(tmp_path):
    rows = [{"text": "", "label": 1}, b"", *[{"text": f"{i % 9}", "label": i % 9 % 2 + 9} for i in range(12)]]
    corpus = load_labelled(write(tmp_path / "a.jsonl", rows), context=9)
    assert len(both(corpus)) == 9
    assert corpus.names == ("9", "10")  # numbers by value
    assert corpus.notes == ("Skipped 1 empty texts.", "Skipped 3 texts that occur again.")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (b"{", r"line 2, must be a JSON object .* not JSON in UTF-8"),
        (b"\xff", r"line 2, must be a JSON object .* not JSON in UTF-8"),
        ({"text": 3, "label": "x"}, r'line 2, must be a JSON object with a string "text"'),
        ({"text": "a"}, r'line 2, must be a JSON object .* "label", a string or a whole number'),
        ({"text": "a", "label": True}, "line 2, must be"),
        ({"text": "a", "label": 1.0}, "line 2, must be"),
        ({"text": "a", "label": ""}, "line 2, must be"),
        ({"text": "\ud800", "label": "x"}, "line 2, has a lone surrogate at character 0"),
        ({"text": "b", "label": 3}, "labels that are strings and labels that are numbers"),
        ({"text": "b", "label": "x"}, "has 1 classes with examples; a classifier needs at least 2"),
        ({"text": "b", "label": "y"}, "has one example a class, and none can be held out"),
    ],
)
def test_a_line_that_is_no_labelled_text_is_refused(tmp_path, row, message):
    path = write(tmp_path / "a.jsonl", [{"text": "a", "label": "x"}, row])
    with pytest.raises(ValueError, match=message):
        load_labelled(path, context=4)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"missing.jsonl cannot be read: No such file"):
        load_labelled(tmp_path / "missing.jsonl", context=4)


def test_a_text_is_held_out_by_its_hash(tmp_path):
    """What was held out stays so when other texts come: with twice the room, the same ones and others."""
    rows = [{"text": f"text {i}", "label": i % 2} for i in range(80)]
    order = sorted((row["text"] for row in rows if not row["label"]), key=_hash)
    corpus = load_labelled(write(tmp_path / "a.jsonl", rows), context=9)
    held_out = {
        corpus.validation.text(i).tobytes().decode() for i in np.flatnonzero(corpus.validation.labels_E == 0)
    }
    assert held_out == set(order[:6])


def _hash(text: str) -> bytes:
    return hashlib.sha256(hashlib.sha256(text.encode()).hexdigest().encode()).digest()

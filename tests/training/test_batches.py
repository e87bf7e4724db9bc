"""Batches: a pure function of (seed, step); every window once an epoch; every validation target once."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxblock.training.batches import SEAMS, Batch, TrainBatches, ValidationBatches
from jaxblock.training.corpus import TokenStream

FEW = settings(deadline=None, max_examples=25)


def stream_of(*sizes: int) -> TokenStream:
    """Tokens 1, 2, 3, ..., so that a token is its offset + 1 and 0 is padding alone; one document a size."""
    ends = np.cumsum([0, *sizes])
    return TokenStream([np.arange(a + 1, b + 1, dtype=np.uint16) for a, b in itertools.pairwise(ends)])


def train(stream: TokenStream, *, context: int = 4, batch: int = 3, seed: int = 0, seams: str = "joined"):
    return TrainBatches(stream, context=context, batch=batch, seed=seed, seams=seams)


def first_inputs(batches: TrainBatches, epoch: int) -> list[int]:
    """The first token of each window of an epoch, in the order in which training meets them."""
    places = range(epoch * batches.windows, (epoch + 1) * batches.windows)
    read = {step: batches[step] for step in {place // batches.batch for place in places}}
    return [int(read[p // batches.batch].inputs_BT[p % batches.batch, 0]) for p in places]


def order_of(batches: TrainBatches, epoch: int) -> list[int]:
    """The windows of an epoch by number, whatever the place of the first."""
    firsts = first_inputs(batches, epoch)
    return [(first - min(firsts)) // batches.context for first in firsts]


def assert_equal(left: Batch, right: Batch) -> None:
    for a, b in zip(left, right, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("seams", SEAMS)
def test_shapes_and_types(seams):
    batch = train(stream_of(50, 50), seams=seams)[0]
    assert batch.inputs_BT.shape == batch.targets_BT.shape == batch.valid_BT.shape == (3, 4)
    assert batch.inputs_BT.dtype == batch.targets_BT.dtype == np.int32
    assert batch.valid_BT.dtype == np.bool_
    assert (batch.segments_BT is None) == (seams == "joined")
    if batch.segments_BT is not None:
        assert batch.segments_BT.dtype == np.int32


@FEW
@given(st.integers(2, 40), st.integers(1, 6), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_an_epoch_holds_every_window_once(tokens, context, batch, seed):
    if tokens < context + 1:
        return
    batches = train(stream_of(tokens), context=context, batch=batch, seed=seed)
    rows = np.concatenate([batches[step].targets_BT for step in range(2 * batches.windows // batch + 1)])
    for epoch in range(2):
        targets = rows[epoch * batches.windows : (epoch + 1) * batches.windows].ravel()
        assert len(targets) == len(set(targets.tolist())) == (tokens - 1) // context * context
        assert int(targets.max() - targets.min()) == len(targets) - 1
    for step in range(3):
        np.testing.assert_array_equal(batches[step].targets_BT, batches[step].inputs_BT + 1)
        assert batches[step].valid_BT.all()


def test_b79_epochs_have_different_orders_and_a_resume_has_the_same():
    stream = stream_of(161)
    running = train(stream)
    orders = [order_of(running, epoch) for epoch in range(3)]
    assert len({tuple(order) for order in orders}) == 3
    assert all(sorted(order) == list(range(40)) for order in orders)
    assert orders[0] != sorted(orders[0])
    for epoch in range(3):  # a new process knows nothing but seed and step
        assert order_of(train(stream), epoch) == orders[epoch]


def test_b79_the_next_seed_is_not_the_next_epoch():
    stream = stream_of(161)
    orders = [order_of(train(stream, seed=seed), epoch) for seed in range(3) for epoch in range(3)]
    assert len({tuple(order) for order in orders}) == 9


def test_a_batch_depends_on_seed_and_step_alone():
    stream = stream_of(161)
    forwards, backwards = train(stream), train(stream)
    kept = [forwards[step] for step in range(30)]
    for step in reversed(range(30)):
        assert_equal(backwards[step], kept[step])
    assert_equal(train(stream)[np.int64(29)], kept[29])
    other = train(stream, seed=1)[0]
    assert not np.array_equal(other.inputs_BT, kept[0].inputs_BT)


def test_the_ragged_end_differs_between_epochs():
    batches = train(stream_of(164), batch=1)  # 40 windows and 3 tokens to spare
    firsts = {min(first_inputs(batches, epoch)) for epoch in range(12)}
    assert firsts <= {1, 2, 3, 4}
    assert len(firsts) > 1


@pytest.mark.parametrize("kind", [TrainBatches, ValidationBatches])
def test_a_process_reads_its_rows_of_the_global_batch(kind):
    seed = {"seed": 5} if kind is TrainBatches else {}
    batches = kind(stream_of(50, 51), context=4, batch=6, seams="separate", **seed)
    whole = batches[2]
    for rows in (range(0, 3), range(3, 6), [1, 4]):
        part = batches.rows(2, rows)
        for a, b in zip(part, whole, strict=True):
            np.testing.assert_array_equal(a, b[list(rows)])
    with pytest.raises(ValueError, match=r"rows are \[5, 6\]; .* below the batch size 6"):
        batches.rows(0, range(5, 7))


@pytest.mark.parametrize("kind", [TrainBatches, ValidationBatches])
@pytest.mark.parametrize(("seams", "targets"), [("separate", 3), ("joined", 4)])
def test_b27_documents_of_3_and_2_tokens(kind, seams, targets):
    seed = {"seed": 0} if kind is TrainBatches else {}
    batch = kind(stream_of(3, 2), context=4, batch=1, seams=seams, **seed)[0]
    assert batch.valid_BT.sum() == targets
    assert batch.targets_BT.tolist() == [[2, 3, 4, 5]]
    if seams == "separate":
        assert batch.valid_BT.tolist() == [[True, True, False, True]]
        assert batch.segments_BT.tolist() == [[1, 1, 1, 2]]


@FEW
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=5),
    st.integers(1, 9),
    st.integers(1, 5),
    st.sampled_from(SEAMS),
)
def test_validation_holds_every_target_once_in_order(sizes, context, batch, seams):
    tokens = sum(sizes)
    if tokens < context + 1:
        return
    batches = ValidationBatches(stream_of(*sizes), context=context, batch=batch, seams=seams)
    read = list(batches)
    assert len(read) == len(batches)
    targets = np.concatenate([one.targets_BT[one.valid_BT] for one in read])
    firsts = {1 + sum(sizes[:number]) for number in range(len(sizes) if seams == "separate" else 1)}
    assert targets.tolist() == [token for token in range(1, tokens + 1) if token not in firsts]
    for one in read:
        assert one.inputs_BT.shape == (batch, context)
        np.testing.assert_array_equal(one.inputs_BT[one.valid_BT] + 1, one.targets_BT[one.valid_BT])
        padding = one.targets_BT == 0
        assert not one.valid_BT[padding].any()
        assert not one.inputs_BT[padding].any()
        if one.segments_BT is not None:
            np.testing.assert_array_equal(one.segments_BT == 0, padding)
    assert read[-1].valid_BT.any() or seams == "separate"


def test_validation_ends():
    batches = ValidationBatches(stream_of(17), context=4, batch=2, seams="joined")
    assert len(batches) == 2
    for number in (2, -1):
        with pytest.raises(IndexError, match="of 2 validation batches"):
            batches[number]


def test_what_is_refused():
    with pytest.raises(ValueError, match=r"data\.seams is 'seperate'; .*did you mean 'separate'"):
        train(stream_of(20), seams="seperate")
    with pytest.raises(ValueError, match=r"data\.seams is 'join'"):
        ValidationBatches(stream_of(20), context=4, batch=1, seams="join")
    with pytest.raises(ValueError, match=r"holds 10 tokens.*context \+ 1 = 17"):
        train(stream_of(10), context=16)
    with pytest.raises(ValueError, match="context is 0"):
        train(stream_of(10), context=0)
    with pytest.raises(ValueError, match=r"batch is 2\.0"):
        train(stream_of(10), batch=2.0)  # pyright: ignore[reportArgumentType]
    for seed in (-1, 2**32):
        with pytest.raises(ValueError, match=f"seed is {seed}"):
            train(stream_of(10), seed=seed)
    with pytest.raises(ValueError, match="step is -1"):
        train(stream_of(10))[-1]


def test_b86_a_window_behind_2_to_the_32_tokens_is_read(tmp_path):
    place, marker, context = 2**33, 40_961, 4096
    path = tmp_path / "large.bin"
    with open(path, "wb") as file:
        file.truncate(2 * (place + 10_000))
        file.seek(2 * place)
        file.write(np.array([marker], "<u2").tobytes())
    stream = TokenStream([np.memmap(path, "<u2", mode="r")])
    window = ValidationBatches(stream, context=context, batch=1, seams="joined")[2**21]
    assert window.inputs_BT[0, :2].tolist() == [marker, 0]
    assert stream.read(0, 1).tolist() == [0]

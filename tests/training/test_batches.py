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


def test_b27_documents_that_separators_end():
    """Documents 1 2 9 and 3 9 in one shard: 2 + 1 targets; the separator is the last target of its document."""
    stream = TokenStream([np.array([1, 2, 9, 3, 9], np.uint16)], separator=9)
    batch = ValidationBatches(stream, context=4, batch=1, seams="separate")[0]
    assert batch.targets_BT[batch.valid_BT].tolist() == [2, 9, 9]
    assert batch.segments_BT.tolist() == [[1, 1, 1, 2]]
    joined = ValidationBatches(stream, context=4, batch=1, seams="joined")[0]
    assert joined.targets_BT[joined.valid_BT].tolist() == [2, 9, 3, 9]  # the control: 4, one across the seam


@FEW
@given(
    st.lists(st.integers(1, 8), min_size=1, max_size=9),
    st.integers(0, 3),
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(1, 7),
)
def test_b27_packing_uses_every_token_and_counts_every_target_inside_its_document(
    sizes, open_end, context, batch, shard
):
    """Documents of n tokens, the separator among them, have n - 1 targets, however windows and shards are cut."""
    tokens = np.concatenate([*([1] * (size - 1) + [9] for size in sizes), [1] * open_end]).astype(np.uint16)
    if len(tokens) < context + 1:
        return
    stream = TokenStream(np.array_split(tokens, range(shard, len(tokens), shard)), separator=9)
    batches = ValidationBatches(stream, context=context, batch=batch, seams="separate")
    read = [batches[number] for number in range(len(batches))]
    expected = sum(size - 1 for size in sizes) + max(open_end - 1, 0)
    assert sum(int(one.valid_BT.sum()) for one in read) == expected
    for one in read:
        crossing = (one.inputs_BT == 9) & (one.segments_BT > 0)
        assert not one.valid_BT[crossing].any()
        assert (one.valid_BT | crossing)[one.segments_BT > 0].all()
    # Nothing is padded in training: every place of a window is a token of the stream.
    trained = train(stream, context=context, batch=batch, seams="separate")[0]
    assert (trained.inputs_BT > 0).all()
    assert (trained.segments_BT > 0).all()
    np.testing.assert_array_equal(trained.valid_BT, trained.inputs_BT != 9)


def test_separators_and_known_starts_give_the_same_batches():
    tokens = np.random.default_rng(0).integers(1, 6, 400).astype(np.uint16)
    by_separator = TokenStream([tokens], separator=3)
    by_starts = TokenStream([tokens], by_separator.starts)
    for step in range(3):
        assert_equal(
            train(by_separator, context=16, seams="separate")[step],
            train(by_starts, context=16, seams="separate")[step],
        )


@pytest.mark.parametrize("seams", SEAMS)
def test_b80_four_processes_stop_and_two_go_on(seams):
    """A process keeps nothing: after a restart with another number of them no row is lost and none read twice."""
    stream, batch, stop, end = stream_of(90, 71), 8, 7, 15

    def read(processes: int, steps: range) -> list[list[int]]:
        own = batch // processes
        hosts = [train(stream, batch=batch, seams=seams) for _ in range(processes)]
        return [
            row.tolist()
            for step in steps
            for host, batches in enumerate(hosts)
            for row in batches.rows(step, range(host * own, (host + 1) * own)).targets_BT
        ]

    unbroken = read(1, range(end))
    assert read(4, range(stop)) + read(2, range(stop, end)) == unbroken
    epoch = unbroken[: train(stream).windows]
    assert len({tuple(row) for row in epoch}) == len(epoch)  # nothing is repeated within an epoch


@pytest.mark.parametrize("seams", SEAMS)
def test_b82_seven_examples_on_two_processes_of_two_rows(seams):
    """Both make the same steps in one shape; together they count each of the targets once."""
    stream, context, own = stream_of(16, 13), 4, 2  # 28 targets: 7 windows
    hosts = [ValidationBatches(stream, context=context, batch=2 * own, seams=seams) for _ in range(2)]
    assert [len(host) for host in hosts] == [2, 2]
    parts = [
        host.rows(number, range(own * index, own * (index + 1)))
        for number in range(2)
        for index, host in enumerate(hosts)
    ]
    assert {part.inputs_BT.shape for part in parts} == {(own, context)}
    counted = np.concatenate([part.targets_BT[part.valid_BT] for part in parts]).tolist()
    seam = {17} if seams == "separate" else set()
    assert sorted(counted) == [token for token in range(2, 30) if token not in seam]
    assert not parts[-1].valid_BT[1].any()  # the eighth row is padding
    steps = [
        train(stream, batch=2 * own, seams=seams).rows(9, range(own * index, own * index + own))
        for index in (0, 1)
    ]
    assert all(step.valid_BT.shape == (own, context) for step in steps)  # training never ends for one alone


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


def test_b86_a_window_of_4_byte_tokens_behind_16_gib_is_read(tmp_path):
    """Sample 2^20 of length 4096 begins at token 2^32, byte 17 179 869 184; 32 bits would read offset 0."""
    place, marker, context = 2**32, 100_000, 4096
    path = tmp_path / "large.bin"
    with open(path, "wb") as file:
        file.truncate(4 * (place + 10_000))
        file.seek(4 * place)
        file.write(np.array([marker, 7, 7], "<u4").tobytes())
    stream = TokenStream([np.memmap(path, "<u4", mode="r")], separator=marker)
    window = ValidationBatches(stream, context=context, batch=1, seams="separate")[2**20]
    assert window.inputs_BT[0, :3].tolist() == [marker, 7, 7]
    assert window.segments_BT[0, :3].tolist() == [1, 2, 2]
    assert stream.read(0, 1).tolist() == [0]

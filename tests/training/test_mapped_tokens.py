"""Many shards: few open files, little read at the start, every id checked where it is read."""

import os
import shutil

import numpy as np
import pytest

from jaxblock.training import corpus as corpus_file
from jaxblock.training.batches import TrainBatches, ValidationBatches
from jaxblock.training.corpus import TokenStream, load_corpus
from jaxblock.training.mapped_tokens import MappedTokens, ShardMaps
from jaxblock.training.shards import FORMS, ShardWriter, form_for, map_shard, read_shard
from jaxblock.training.token_files import DataError
from tests.small_corpus import everything, load, write_shard


def shard(path, *, vocab_size: int = 256, most: int = 2):
    return map_shard(path, path.name, vocab_size=vocab_size, maps=ShardMaps(most)).tokens


def open_shards(folder) -> int:
    """Mapped files of this process in a folder: a mapping holds a descriptor."""
    links = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return sum(os.readlink(link).startswith(str(folder)) for link in links if os.path.islink(link))


@pytest.fixture
def large(monkeypatch):
    """A corpus above 1,000 bytes counts as a large one, of which blocks of 4 ids are read at the start."""
    monkeypatch.setattr(corpus_file, "_SAMPLED_BYTES", 1000)
    monkeypatch.setattr(corpus_file, "_BLOCK_TOKENS", 4)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_hundreds_of_shards_hold_few_open_files_and_read_like_one(tmp_path):
    ids = np.random.default_rng(0).integers(0, 256, (300, 50))
    for number, own in enumerate(ids):
        write_shard(tmp_path / f"train_{number:04d}.bin", own)
    corpus = load(tmp_path, context=8, validation_tokens=500)
    train = TrainBatches(corpus.train, context=8, batch=4, seed=0, seams="joined")
    for step in range(100):
        assert (train[step].targets_BT[:, :-1] == train[step].inputs_BT[:, 1:]).all()
        assert open_shards(tmp_path) <= 64
    assert everything(corpus.train) + everything(corpus.validation) == ids.ravel().tolist()
    held = [np.memmap(path, "<u2", mode="r") for path in sorted(tmp_path.iterdir())[:100]]
    assert open_shards(tmp_path) >= 100  # the control: mappings that are kept do hold files
    del held


def test_the_start_reads_blocks_of_a_large_corpus_and_all_of_a_small_one(tmp_path, monkeypatch, large):
    read = []
    whole = MappedTokens.__array__

    def count(tokens, *args, **kwargs):
        read.append(len(tokens))
        return whole(tokens, *args, **kwargs)

    monkeypatch.setattr(MappedTokens, "__array__", count)
    for number in range(20):
        write_shard(tmp_path / f"{number:02d}.bin", np.arange(1000) % 256)
    load(tmp_path)
    # The last shard is cut for validation: of 21 pieces each has 1024 // 21 = 48 blocks, but the 50 ids are read whole.
    assert sorted(read) == [4] * (20 * 48) + [50]
    read.clear()
    for path in list(tmp_path.iterdir())[1:]:
        path.unlink()
    monkeypatch.setattr(corpus_file, "_SAMPLED_BYTES", 2000)
    load(tmp_path)
    assert sorted(read) == [50, 950]


def test_an_id_that_is_too_large_is_refused_at_the_start_or_where_it_is_read(tmp_path, large):
    ids = np.arange(5000) % 256
    ids[777] = 300
    path = write_shard(tmp_path / "x.bin", ids, header=[20240520, 1, 5000])
    stream = load(path, context=8).train
    reason = r"x\.bin holds the token id 300 at offset 777 \(counted in tokens\), but vocab_size is 256"
    assert stream.read(700, 77).tolist() == (np.arange(700, 777) % 256).tolist()
    for start in (700, 777):
        with pytest.raises(DataError, match=reason):
            stream.read(start, 100)
    with pytest.raises(DataError, match=reason):  # what is scored is read whole
        read_shard(path, path.name, vocab_size=256)
    ids[0] = 400  # in a block that the fingerprint reads
    with pytest.raises(DataError, match=r"token id 400 at offset 0 "):
        load(write_shard(path, ids))
    small = write_shard(tmp_path / "y.bin", [1, 2, 300, 4] * 50)
    with pytest.raises(DataError, match=r"token id 300 at offset 2 "):
        load(small)


@pytest.mark.parametrize("change", ["deleted", "shorter", "longer"])
def test_a_shard_that_changes_while_it_is_in_use_is_a_sentence(tmp_path, change):
    path = write_shard(tmp_path / "x.bin", np.arange(100))
    stream = TokenStream([shard(path)])
    if change == "deleted":
        path.unlink()
    else:
        write_shard(path, np.arange(50 if change == "shorter" else 150))
    reason = r"x\.bin (cannot be read: No such file|has \d+ bytes and had 200 before: it was changed)"
    with pytest.raises(DataError, match=reason):
        stream.read(0, 4)


def test_a_slice_is_lazy_and_reads_like_an_arrays(tmp_path):
    path = write_shard(tmp_path / "x.bin", np.arange(100), header=[20240520, 1, 100])
    tokens = shard(path)
    shutil.move(path, tmp_path / "y.bin")
    piece = tokens[10:90][5:][:-5]  # nothing is read: the file is not even there
    assert (len(piece), piece.nbytes, piece.dtype) == (70, 140, np.dtype("<u2"))
    shutil.move(tmp_path / "y.bin", path)
    np.testing.assert_array_equal(piece, np.arange(15, 85))
    assert np.asarray(piece, np.int64).dtype == np.int64
    assert not np.asarray(tokens).flags.writeable
    assert np.array(tokens).flags.writeable
    assert len(tokens[200:]) == 0
    with pytest.raises(ValueError, match="step of a slice is 2"):
        tokens[::2]


def test_a_stream_can_be_cut(tmp_path):
    path = write_shard(tmp_path / "x.bin", np.arange(20))
    arrays = [shard(path), np.arange(20, 30, dtype=np.uint16)]
    for count in (1, 20, 25, 30, 99):
        known = TokenStream(arrays, np.array([0, 3, 24])).first(count)
        assert everything(known) == list(range(min(count, 30)))
        assert known.starts.tolist() == [start for start in (0, 3, 24) if start < count]
        separated = TokenStream(arrays, separator=4).first(count)
        assert separated.starts.tolist() == [start for start in (0, 5) if start < count]


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(2, "<u2"), (65_536, "<u2"), (65_537, "<u4"), (2**31 - 1, "<u4")]
)
def test_ids_take_2_bytes_up_to_65_536_of_them_and_4_beyond(tmp_path, vocab_size, dtype):
    form = form_for(vocab_size)
    assert form.dtype == np.dtype(dtype)
    ids = np.array([0, 1, vocab_size - 1] * 20, np.int64)
    writer = ShardWriter(tmp_path, "train", form, shard_tokens=50)
    writer.write(ids)
    writer.finish()
    header = np.fromfile(tmp_path / "train_000000.bin", "<i4", 3).tolist()
    assert header == [form.magic, form.version, 50]
    corpus = load_corpus(tmp_path, vocab_size=vocab_size, context=2)
    assert everything(corpus.train) + everything(corpus.validation) == ids.tolist()
    window = ValidationBatches(corpus.train, context=2, batch=1, seams="joined")[0]
    assert window.targets_BT.tolist() == [[1, vocab_size - 1]]
    assert window.targets_BT.dtype == np.int32
    if vocab_size == 65_537:  # the control: the narrower form would hold another id
        assert FORMS[0].dtype.type(0) == np.array(65_536).astype(FORMS[0].dtype)
        with pytest.raises(DataError, match=r"token id 65536 at offset 2 .*vocab_size is 65536"):
            load_corpus(tmp_path, vocab_size=65_536, context=2)

"""The readers: JSONL documents, `.bin` shards and mapped text give the tokens the file holds, or one sentence."""

import numpy as np
import pytest

from jaxblock.training import shards, token_files
from tests.small_corpus import content, everything, load, write_shard


def test_a_mapped_file_equals_a_read_one(tmp_path, monkeypatch):
    (tmp_path / "x.txt").write_bytes(bytes(range(256)) * 4)
    read = load(tmp_path / "x.txt")
    monkeypatch.setattr(token_files, "MAPPED_BYTES", 1)
    mapped = load(tmp_path / "x.txt")
    assert content(mapped.train) == content(read.train)
    assert mapped.fingerprint == read.fingerprint


# --- JSONL


def test_jsonl_texts_are_documents(tmp_path):
    lines = [
        b'\xef\xbb\xbf{"text": "abc"}\r\n',
        b"\n",
        b'{"id": 1, "text": ""}\n',
        '{"text": "ü\\n😀"}'.encode(),
    ]
    (tmp_path / "x.JSONL").write_bytes(b"".join(lines))
    file = token_files.read_jsonl(tmp_path / "x.JSONL", "x.JSONL")
    assert file.tokens.tobytes() == "abcü\n😀".encode()
    assert file.starts.tolist() == [0, 3]


def test_jsonl_documents_keep_their_seams_through_the_split(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": "0123456"}\n' * 10)
    corpus = load(tmp_path / "x.jsonl", validation_tokens=7)
    assert corpus.train.starts.tolist() == list(range(0, 63, 7))
    assert content(corpus.validation) == b"0123456"
    cut = load(tmp_path / "x.jsonl", validation_tokens=5)
    assert len(cut.train) == 65
    assert cut.train.starts.tolist() == list(range(0, 65, 7))
    assert cut.validation.starts.tolist() == [0]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "a"', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"text": 3}', "string field"),
        (b'{"body": "a"}', "string field"),
        (b'["text"]', "string field"),
        (b'{"text": "it\x92s"}', "not UTF-8 at byte 12"),
        (b'{"text": "\\ud800"}', "lone surrogate"),
    ],
)
def test_b84_a_bad_jsonl_line_is_named(tmp_path, line, reason):
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "good"}\n\n' + line + b"\n")
    with pytest.raises(ValueError, match=rf"x\.jsonl, line 3, .*{reason}"):
        load(tmp_path)


# --- .bin shards


@pytest.mark.parametrize("header", [None, [20240520, 1, 500]])
def test_a_shard_holds_uint16_tokens(tmp_path, header):
    tokens = np.arange(500) * 131
    corpus = load(write_shard(tmp_path / "x.bin", tokens, header=header), vocab_size=65536)
    assert everything(corpus.train) + everything(corpus.validation) == tokens.tolist()
    assert len(corpus.validation) == 50
    assert corpus.bytes_per_token is None


def write_uint32(path, tokens, *, version=7):
    header = np.array([20240801, version, len(tokens)] + [0] * 253, "<i4").tobytes()
    path.write_bytes(header + np.asarray(tokens, "<u4").tobytes())
    return path


def test_a_shard_with_the_other_magic_holds_uint32_tokens(tmp_path):
    tokens = 128_000 + np.arange(500) * 131
    corpus = load(write_uint32(tmp_path / "x.bin", tokens), vocab_size=200_000)
    read = everything(corpus.train) + everything(corpus.validation)
    assert read == tokens.tolist()
    assert read != (tokens % 2**16).tolist()  # the control: what 16 bits would hold
    with pytest.raises(
        ValueError, match=r"x\.bin holds the token id 193369 at offset 499 .*vocab_size is 193369"
    ):
        load(tmp_path / "x.bin", vocab_size=193_369)


def test_shards_of_both_widths_are_one_stream(tmp_path):
    write_shard(tmp_path / "0.bin", np.arange(50), header=[20240520, 1, 50])
    write_uint32(tmp_path / "1.bin", 70_000 + np.arange(50))
    corpus = load(tmp_path, vocab_size=70_050, validation_tokens=3)
    assert corpus.train.read(48, 4).tolist() == [48, 49, 70_000, 70_001]


def test_shards_named_val_are_validation(tmp_path):
    write_shard(tmp_path / "web_train_0.bin", np.full(100, 1))
    write_shard(tmp_path / "web_train_1.bin", np.full(100, 2), header=[20240520, 1, 100])
    write_shard(tmp_path / "web_VAL_0.bin", np.full(100, 3))
    (tmp_path / "input.txt").write_text("not read")
    corpus = load(tmp_path, vocab_size=4)
    assert everything(corpus.train) == [1] * 100 + [2] * 100
    assert everything(corpus.validation) == [3] * 50
    assert corpus.train.starts.tolist() == [0, 100]
    assert corpus.notes == ("Skipped 1 files or folders beside the .bin shards.",)


def test_without_a_val_shard_the_tail_is_validation(tmp_path):
    write_shard(tmp_path / "1.bin", np.full(5, 1))
    write_shard(tmp_path / "0.bin", np.full(95, 0))
    corpus = load(tmp_path, vocab_size=4)
    assert everything(corpus.train) == [0] * 90
    assert everything(corpus.validation) == [0] * 5 + [1] * 5
    assert corpus.validation.starts.tolist() == [0, 5]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b"abc", "odd number of bytes, 3"),
        (np.array([20240520, 1, 9], "<i4").tobytes(), "12 bytes: a header of 1024 bytes and no tokens"),
        (np.array([20240520, 1, 9] + [0] * 257, "<i4").tobytes(), "promises 9 tokens, but the file holds 8"),
        (np.array([20240520, 2, 8] + [0] * 257, "<i4").tobytes(), "header version 2; only version 1"),
        (np.array([20240801, 1, 4] + [0] * 257, "<i4").tobytes(), "header version 1; only version 7"),
        (
            np.array([20240801, 7, 2] + [0] * 254, "<i4").tobytes()[:-2],
            "promises 2 tokens, but the file holds 0 and 2",
        ),
        (np.array([20240801, 7, 9] + [0] * 257, "<i4").tobytes(), "promises 9 tokens, but the file holds 4"),
    ],
)
def test_b85_a_broken_shard_is_refused(tmp_path, content, reason):
    write_shard(tmp_path / "good.bin", np.arange(100))
    (tmp_path / "bad.bin").write_bytes(content)
    with pytest.raises(ValueError, match=rf"bad\.bin .*{reason}"):
        load(tmp_path)


def test_an_id_outside_the_vocabulary_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "_SCAN_TOKENS", 7)
    tokens = np.arange(100) % 50
    tokens[[61, 80]] = 50, 99
    path = write_shard(tmp_path / "x.bin", tokens)
    with pytest.raises(ValueError, match=r"x\.bin holds the token id 50 at offset 61 .*vocab_size is 50"):
        load(path, vocab_size=50)
    assert len(load(path, vocab_size=100).train) == 90


def test_b86_a_token_behind_16_gib_is_found(tmp_path):
    place, marker = 2**33, 40_961  # byte 17 179 869 184: offset 0 if a product wraps at 32 bits
    path = tmp_path / "large.bin"
    with open(path, "wb") as file:
        file.truncate(2 * (place + 10_000))
        file.seek(2 * place)
        file.write(np.array([marker], "<u2").tobytes())
    corpus = load(path, vocab_size=65536, validation_tokens=1000)
    assert len(corpus.train) == place + 9000
    assert corpus.train.read(2**20 * 8192 - 1, 3).tolist() == [0, marker, 0]
    assert corpus.train.read(0, 2).tolist() == [0, 0]

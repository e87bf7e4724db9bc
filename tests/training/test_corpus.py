"""The corpus: which tokens a path gives, that the split is disjoint and stable, and what is refused."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxblock.training import corpus as corpus_file
from jaxblock.training.batches import TrainBatches
from jaxblock.training.corpus import Corpus, TokenStream, load_corpus
from jaxblock.training.token_files import TokenFile
from jaxblock.training.tokenize import TokenizeSettings, plan_job
from jaxblock.training.tokenizers import BYTES
from tests.small_corpus import NAMES, content, everything, load, write_folder, write_shard
from tests.small_tokenizers import FOX

FEW = settings(deadline=None, max_examples=40)


def load_separated(path: Path, separator: int, *, vocab_size: int = 10) -> Corpus:
    sizes = {"vocab_size": vocab_size, "context": 2, "validation_tokens": 50}
    return load_corpus(path, **sizes, separator=separator)


# --- TokenStream


@FEW
@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.data())
def test_a_stream_reads_like_the_joined_arrays(sizes, data):
    numbers = iter(range(1000))
    arrays = [np.array([next(numbers) for _ in range(size)], np.uint16) for size in sizes]
    joined, owners = np.concatenate(arrays), np.repeat(np.arange(len(sizes)), sizes)
    stream = TokenStream(arrays)
    start = data.draw(st.integers(0, len(joined)))
    count = data.draw(st.integers(0, len(joined) - start))
    tokens, segments = stream.read(start, count), stream.segments(start, count)
    assert len(stream) == len(joined)
    assert tokens.dtype == segments.dtype == np.int32
    assert stream.starts.dtype == np.int64
    np.testing.assert_array_equal(tokens, joined[start : start + count])
    np.testing.assert_array_equal(
        np.diff(segments), np.diff(np.unique(owners[start : start + count], return_inverse=True)[1])
    )
    assert count == 0 or segments[0] == 1


@pytest.mark.parametrize(("start", "count"), [(-1, 2), (3, 3), (6, 0), (0, -1)])
def test_a_stream_refuses_a_span_outside_of_it(start, count):
    stream = TokenStream([np.arange(5, dtype=np.uint8)])
    for read in (stream.read, stream.segments):
        with pytest.raises(ValueError, match="outside the stream of 5 tokens"):
            read(start, count)


def test_starts_can_be_given_for_documents_inside_an_array():
    stream = TokenStream([np.arange(5, dtype=np.uint8)], np.array([0, 3]))
    assert stream.segments(0, 5).tolist() == [1, 1, 1, 2, 2]
    assert stream.segments(3, 2).tolist() == [1, 1]


# --- separators


@FEW
@given(st.lists(st.integers(0, 2), min_size=1, max_size=25), st.integers(1, 4), st.data())
def test_a_separator_ends_the_document_before_it(tokens, chunk, data):
    joined = np.array(tokens, np.uint16)
    edge = data.draw(st.integers(0, len(tokens)))
    stream = TokenStream([joined[:edge], joined[edge:]], separator=2)  # the edge of a shard is no seam
    starts = [0, *(place + 1 for place in range(len(tokens) - 1) if tokens[place] == 2)]
    owners = np.searchsorted(starts, np.arange(len(tokens)), side="right")
    start = data.draw(st.integers(0, len(tokens)))
    count = data.draw(st.integers(0, len(tokens) - start))
    segments = stream.segments(start, count)
    assert segments.dtype == np.int32
    assert segments.tolist() == (owners[start : start + count] - owners[start : start + 1] + 1).tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus_file, "_SCAN_TOKENS", chunk)
        assert stream.starts.tolist() == starts
        assert stream.has_targets() == bool(np.any(np.diff(starts, append=len(tokens)) > 1))
        assert TokenStream([joined], np.array(starts)).has_targets() == stream.has_targets()
    assert stream.starts.dtype == np.int64


def test_a_stream_takes_starts_or_a_separator():
    with pytest.raises(ValueError, match="not both"):
        TokenStream([np.arange(3)], np.zeros(1), separator=1)


def test_separators_in_plain_shards(tmp_path):
    """llm.c's way: 9 starts a document, so it stands behind the one before."""
    write_shard(tmp_path / "train_0.bin", [9, 1, 2, 9, 3] * 20)
    write_shard(tmp_path / "train_1.bin", [4, 4, 9, 5, 5] * 20)
    write_shard(tmp_path / "val_0.bin", [9, 7, 7, 7, 7] * 20)
    known = load_separated(tmp_path, 9)
    unknown = load(tmp_path, vocab_size=10)
    assert everything(known.train) == everything(unknown.train)
    assert known.fingerprint == unknown.fingerprint
    assert known.train.segments(95, 10).tolist() == [1, 2, 2, 2, 3, 3, 3, 3, 4, 4]
    assert unknown.train.segments(95, 10).tolist() == [1] * 5 + [2] * 5
    assert known.validation.starts.tolist() == [0, *range(1, 50, 5)]
    assert unknown.validation.starts.tolist() == [0]
    assert known.tokenizer is unknown.tokenizer is None


def test_separators_are_not_looked_for_until_documents_are_told_apart(tmp_path, monkeypatch):
    path = write_shard(tmp_path / "x.bin", np.arange(1000) % 7)
    monkeypatch.setattr(TokenStream, "_ends_document", None)
    corpus = load_separated(path, 3)
    TrainBatches(corpus.train, context=8, batch=2, seed=0, seams="joined")[3]
    with pytest.raises(TypeError):  # the control
        TrainBatches(corpus.train, context=8, batch=2, seed=0, seams="separate")[3]


def test_looking_for_separators_takes_memory_for_the_documents_alone(tmp_path):
    tokens = np.memmap(tmp_path / "x.bin", "<u2", mode="w+", shape=2**24)  # 32 MiB
    tokens[:: 2**20] = 5
    stream = TokenStream([tokens], separator=5)
    tracemalloc.start()
    try:
        assert stream.has_targets()
        early = tracemalloc.get_traced_memory()[1]
        assert len(stream.starts) == 17
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert early <= peak < 12 * 2**20


@pytest.mark.parametrize(
    ("name", "separator", "reason"),
    [
        ("x.bin", 10, "data.separator is 10; it must be a whole number of at most 9"),
        ("x.bin", -1, "data.separator is -1; .* at least 0"),
        ("x.txt", 3, r"data.separator is 3, but .*x\.txt is text, whose documents are known"),
    ],
)
def test_a_separator_that_cannot_be_is_refused(tmp_path, name, separator, reason):
    write_shard(tmp_path / "x.bin", np.arange(100) % 10)
    (tmp_path / "x.txt").write_bytes(b"x" * 100)
    with pytest.raises(ValueError, match=reason):
        load_separated(tmp_path / name, separator, vocab_size=256 if name == "x.txt" else 10)


# --- folders of `jaxblock tokenize`


def tokenized(folder: Path, tokenizer: str, **changes) -> Path:
    rows = [json.dumps({"text": FOX[:60] * (1 + number % 3)}) + "\n" for number in range(20)]
    folder.mkdir(exist_ok=True)
    (folder / "in.jsonl").write_text("".join(rows), encoding="utf-8")
    settings = TokenizeSettings(folder / "in.jsonl", folder / "out", tokenizer, validation=0.2, **changes)
    plan_job(settings, lambda *args: None).run(lambda *args: None)
    return folder / "out"


@pytest.mark.parametrize("tokenizer", ["bytes", "bytes(end_of_text=True)", "bpe(vocab_size=270)"])
def test_a_tokenized_folder_knows_its_documents_and_its_text(tmp_path, tokenizer):
    out = tokenized(tmp_path, tokenizer, shard_tokens=150)
    record = json.loads((out / "tokens.json").read_text())
    corpus = load(out, vocab_size=300, validation_tokens=10**6)
    counts = record["splits"]
    for stream, split in ((corpus.train, counts["train"]), (corpus.validation, counts["val"])):
        assert len(stream) == split["tokens"]
        if tokenizer != "bytes":
            assert len(stream.starts) == split["documents"]
            assert stream.read(int(stream.starts[1]) - 1, 1)[0] == record["tokenizer"]["end_of_text"]
    assert corpus.bytes_per_token == counts["val"]["bytes"] / counts["val"]["tokens"]
    assert corpus.tokenizer is not None
    assert corpus.tokenizer.decode(corpus.train.read(0, 60)).startswith(FOX[:40])
    assert corpus.notes == ()


def test_a_text_has_the_bytes_as_tokenizer(tmp_path):
    (tmp_path / "x.txt").write_bytes(b"x" * 100)
    assert load(tmp_path / "x.txt").tokenizer == BYTES


def test_a_tokenized_folder_that_does_not_fit_is_refused(tmp_path):
    out = tokenized(tmp_path, "bpe(vocab_size=270)")
    with pytest.raises(
        ValueError, match=r"vocab_size is 269; it must be at least 270 for the tokenizer 'bpe\("
    ):
        load(out, vocab_size=269)
    with pytest.raises(
        ValueError, match=r"data\.separator is 5, but the end of text in .*out is 0: leave it out"
    ):
        load_separated(out, 5, vocab_size=300)
    assert load_separated(out, 0, vocab_size=300).train.separator == 0
    (out / "train_000001.bin").write_bytes(b"ab")
    assert load(out, vocab_size=300).notes == ("Skipped 1 files or folders beside the .bin shards.",)
    shard = (out / "train_000000.bin").read_bytes()
    write_shard(out / "train_000000.bin", [1] * 99, header=[20240520, 1, 99])
    with pytest.raises(ValueError, match=r"train_000000\.bin holds 99 tokens, but tokens\.json says \d+$"):
        load(out, vocab_size=300)
    (out / "train_000000.bin").unlink()
    with pytest.raises(ValueError, match=r"train_000000\.bin cannot be read: No such file"):
        load(out, vocab_size=300)
    (out / "train_000000.bin").write_bytes(shard)
    (out / "tokenizer.json").write_text((out / "tokenizer.json").read_text() + " ")
    with pytest.raises(ValueError, match="its file was changed"):
        load(out, vocab_size=300)
    for text in ("{", "[]", "{}", '{"splits": {"train": 3}}'):
        (out / "tokens.json").write_text(text)
        with pytest.raises(ValueError, match=r"tokens\.json is not what `jaxblock tokenize` writes"):
            load(out, vocab_size=300)


def test_without_the_library_ids_stay_ids_and_a_note_says_so(tmp_path, monkeypatch):
    out = tokenized(tmp_path, "bpe(vocab_size=270)")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    corpus = load(out, vocab_size=270)
    assert corpus.tokenizer is None
    assert corpus.bytes_per_token is not None
    assert re.fullmatch(
        r"Ids stay ids: the tokenizer 'bpe.*' needs pip install \"jaxblock\[hf\]\"\.", corpus.notes[-1]
    )


# --- text


AWKWARD = {
    "utf8": "naïve — 😀".encode(),
    "no_utf8": b"it\x92s",
    "bom": b"\xef\xbb\xbfabc",
    "crlf": b"one\r\ntwo\rthree\n",
    "nul": b"a\0b",
}


@pytest.mark.parametrize("name", AWKWARD)
def test_b84_a_text_file_is_its_bytes(tmp_path, name):
    text = AWKWARD[name] * 10
    (tmp_path / "x.txt").write_bytes(text)
    corpus = load(tmp_path / "x.txt")
    assert content(corpus.train) + content(corpus.validation) == text
    assert corpus.bytes_per_token == 1


@pytest.mark.parametrize("name", ["no_utf8", "bom", "crlf"])
def test_b84_control_decoding_would_change_these_texts(tmp_path, name):
    (tmp_path / "x.txt").write_bytes(AWKWARD[name])
    decoded = (tmp_path / "x.txt").read_text(encoding="utf-8-sig", errors="replace")
    assert decoded.encode("utf-8") != AWKWARD[name]


def test_b84_the_locale_does_not_matter(tmp_path):
    (tmp_path / "naïve — 😀.txt").write_bytes(AWKWARD["utf8"] * 9)
    (tmp_path / "b.jsonl").write_text('{"text": "naïve — 😀"}\n' * 9, encoding="utf-8")
    (tmp_path / "c.txt").write_bytes(AWKWARD["no_utf8"] * 20)
    code = (
        "import sys, pathlib; from jaxblock.training.corpus import load_corpus as load;"
        "print(load(pathlib.Path(sys.argv[1]), vocab_size=256, context=2, validation_tokens=50).fingerprint)"
    )
    plain = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env={**os.environ, **plain},
        capture_output=True,
        check=True,
    )
    assert run.stdout.decode("ascii").strip() == load(tmp_path).fingerprint


def test_one_file_gives_its_tail_to_validation(tmp_path):
    text = bytes(range(200))
    (tmp_path / "x.txt").write_bytes(text)
    tenth = load(tmp_path / "x.txt")
    assert content(tenth.validation) == text[180:]
    few = load(tmp_path / "x.txt", validation_tokens=7)
    assert content(few.validation) == text[193:]
    assert content(few.train) == text[:193]


def test_bytes_need_256_ids(tmp_path):
    (tmp_path / "x.txt").write_bytes(b"x" * 100)
    with pytest.raises(ValueError, match=r"vocab_size is 255; .* at least 256 for the bytes of .*x\.txt"):
        load(tmp_path / "x.txt", vocab_size=255)


# --- folders


def test_a_folder_leaves_out_what_is_no_text_and_says_so(tmp_path):
    write_folder(tmp_path, ["a.txt", "b.txt", "sub/c.txt"])
    write_folder(tmp_path, [".hidden", ".git/config", "__pycache__/x.pyc", "sub/.deep/x"])
    (tmp_path / "image.png").write_bytes(b"\x89PNG" + b"x" * 500 + b"\0" + b"x" * 500)
    (tmp_path / "late.txt").write_bytes(b"l" * 8192 + b"\0")
    (tmp_path / "sub" / "firmware.bin").write_bytes(b"\1\2")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "broken").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    corpus = load(tmp_path, validation_tokens=10**6)
    notes = " ".join(corpus.notes)
    for note in (
        "Skipped 1 binary files",
        "Skipped 1 empty files",
        "Skipped 2 entries that are no regular",
        "Skipped 1 .bin files",
        "Skipped 4 hidden",
    ):
        assert note in notes
    assert "in 4 files" in corpus.source
    assert set(content(corpus.train) + content(corpus.validation)) <= set(b"ABCl\0")


def test_links_are_followed_once(tmp_path):
    outside = write_folder(tmp_path / "outside", ["x.txt"])
    folder = write_folder(tmp_path / "corpus", NAMES)
    plain = load(folder)
    (folder / "deep" / "loop").symlink_to(folder, target_is_directory=True)
    (folder / "0_alias.txt").symlink_to(folder / "a.txt")
    linked = load(folder)
    assert linked.fingerprint == plain.fingerprint
    assert "Skipped 1 files that are links to another one." in linked.notes
    (folder / "more").symlink_to(outside, target_is_directory=True)
    assert "in 7 files" in load(folder).source


def test_the_split_is_by_file_and_disjoint(tmp_path):
    folder = write_folder(tmp_path, NAMES)
    corpus = load(folder)
    train, validation = set(content(corpus.train)), set(content(corpus.validation))
    total = sum((folder / name).stat().st_size for name in NAMES)
    assert train
    assert validation
    assert not train & validation
    assert len(corpus.validation) == total // 10


def test_the_split_is_stable_wherever_the_folder_lies(tmp_path, monkeypatch):
    folder = write_folder(tmp_path / "here", NAMES)
    before = load(folder)
    moved = tmp_path / "some" / ".where" / "else"
    shutil.copytree(folder, moved)
    walk = os.walk

    def walk_backwards(top, onerror, followlinks):
        for root, folders, names in walk(top, onerror=onerror, followlinks=followlinks):
            folders.reverse()
            yield root, folders, sorted(names, reverse=True)

    monkeypatch.setattr(os, "walk", walk_backwards)
    after = load(moved)
    assert everything(after.train) == everything(before.train)
    assert everything(after.validation) == everything(before.validation)
    assert after.fingerprint == before.fingerprint


@pytest.mark.parametrize("change", ["content", "name", "validation"])
def test_the_fingerprint_sees_every_change(tmp_path, change):
    folder = write_folder(tmp_path, NAMES)
    before = load(folder).fingerprint
    if change == "content":
        (folder / "e.txt").write_bytes(b"?" + (folder / "e.txt").read_bytes()[1:])
        assert load(folder).fingerprint != before
    elif change == "name":  # of a single file: in a folder, the order of the split would change too
        single = load(folder / "e.txt").fingerprint
        assert load((folder / "e.txt").rename(folder / "e2.txt")).fingerprint != single
    else:
        assert load(folder, validation_tokens=9).fingerprint != before
    assert len(before) == 16


@FEW
@given(st.lists(st.integers(1, 40), min_size=2, max_size=12), st.integers(1, 30))
def test_any_two_files_give_two_disjoint_streams(sizes, validation_tokens):
    files = [
        TokenFile(f"{number}.txt", np.full(size, number, np.uint8), np.zeros(1, np.int64))
        for number, size in enumerate(sizes)
    ]
    total = sum(sizes)
    wanted = min(validation_tokens, max(1, total // 10))
    train, validation = corpus_file._split_by_file(files, wanted)
    assert train
    assert validation
    assert not {file.name for file in train} & {file.name for file in validation}
    assert all(2 * sizes[int(file.name[:-4])] <= total for file in validation)
    held = sum(map(len, validation))
    assert held <= wanted
    # Less than wanted only when every file that may go to validation went there whole.
    assert held == wanted or all(2 * len(file) > total for file in train)


@pytest.mark.parametrize("place", [0, 99_999])
def test_a_large_shard_is_sampled_at_both_ends(tmp_path, monkeypatch, place):
    monkeypatch.setattr(corpus_file, "_SAMPLED_BYTES", 1000)
    monkeypatch.setattr(corpus_file, "_BLOCK_TOKENS", 16)
    tokens = np.zeros(100_000, np.uint16)
    path = write_shard(tmp_path / "x.bin", tokens)
    before = load(path).fingerprint
    tokens[place] = 1
    assert load(write_shard(path, tokens)).fingerprint != before


# --- refusals


def test_b76_a_corpus_shorter_than_the_context(tmp_path):
    (tmp_path / "x.txt").write_bytes(b"0123456789")
    with pytest.raises(ValueError, match=r"train split of .*x\.txt holds 9 of 10 tokens.*context \+ 1 = 17"):
        load(tmp_path / "x.txt", context=16)
    (tmp_path / "y.txt").write_bytes(b"x" * 400)
    with pytest.raises(ValueError, match=r"validation split of .*y\.txt holds 40 of 400 .*context \+ 1 = 41"):
        load(tmp_path / "y.txt", context=40)
    assert len(load(tmp_path / "y.txt", context=39).validation) == 40
    (tmp_path / "shards").mkdir()
    write_shard(tmp_path / "shards" / "train.bin", np.arange(100))
    write_shard(tmp_path / "shards" / "val.bin", np.arange(10))
    with pytest.raises(ValueError, match=r"validation split of .*shards holds 10 .*context \+ 1 = 17"):
        load(tmp_path / "shards", context=16)
    assert len(load(tmp_path / "shards", context=9).validation) == 10


def test_b85_nothing_but_empty_files(tmp_path):
    (tmp_path / "x.txt").touch()
    with pytest.raises(ValueError, match=r"x\.txt is empty"):
        load(tmp_path / "x.txt")
    (tmp_path / "y.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(ValueError, match=r"is empty: it holds no text .*Skipped 2 empty files"):
        load(tmp_path)
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match=r"none is empty: it holds no text$"):
        load(tmp_path / "none")


def test_b85_one_empty_file_among_three_is_skipped_with_a_note(tmp_path):
    folder = write_folder(tmp_path, ["a.txt", "b.txt"])
    whole = load(folder)
    (folder / "c.txt").touch()
    corpus = load(folder)
    assert corpus.notes == ("Skipped 1 empty files.",)
    assert corpus.fingerprint == whole.fingerprint


def test_a_path_that_cannot_be_read_is_a_sentence(tmp_path, monkeypatch):
    (tmp_path / "input.txt").write_bytes(b"x" * 100)
    os.mkfifo(tmp_path / "pipe")
    for name, reason in {
        "imput.txt": r"imput\.txt does not exist \(did you mean 'input.txt'\?\)",
        "no/where": "does not exist",
        "input.txt/x": "does not exist",
        "x" * 300: "cannot be read: File name too long",
        "pipe": "neither a file nor a folder",
    }.items():
        with pytest.raises(ValueError, match=reason):
            load(tmp_path / name)

    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ValueError, match=r"input\.txt cannot be read: Permission denied"):
        load(tmp_path / "input.txt")


def test_a_folder_that_cannot_be_listed_is_a_sentence(tmp_path, monkeypatch):
    write_folder(tmp_path, NAMES)
    scandir = os.scandir

    def refuse(path):
        if Path(path).name == "deep":
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ValueError, match="cannot be read: Permission denied"):
        load(tmp_path)


@pytest.mark.parametrize("field", ["vocab_size", "context", "validation_tokens"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True])
def test_sizes_are_whole_numbers(field, value):
    sizes = {"vocab_size": 256, "context": 4, "validation_tokens": 10, field: value}
    with pytest.raises(ValueError, match=rf"{field} is {value}; .* whole number of at least 1"):
        load_corpus(None, **sizes)


# --- the standard library


def test_the_default_corpus_is_the_standard_library():
    corpus = load_corpus(None, vocab_size=256, context=256)
    again = load_corpus(None, vocab_size=256, context=256)
    assert corpus.fingerprint == again.fingerprint
    assert len(corpus.validation) == 262_144
    assert len(corpus.train) > 5_000_000
    assert corpus.source.startswith("the standard library of Python 3.")
    assert b"def " in bytes(corpus.train.read(0, 100_000).tolist())


def test_the_default_corpus_is_portable_source_only(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", {"stdlib": str(tmp_path)}.__getitem__)
    write_folder(tmp_path, ["os.py", "json/decoder.py", "re/_parser.py"])
    plain = load(None)
    for name in (
        "test/test_os.py",
        "json/tests/x.py",
        "idlelib/idle_test/x.py",
        "site-packages/x.py",
        "dist-packages/x.py",
        "__pycache__/x.py",
        "_sysconfigdata__linux.py",
        "config-3.11-x/python-config.py",
        "LICENSE.txt",
    ):
        write_folder(tmp_path, [name])
    assert load(None).fingerprint == plain.fingerprint
    assert load(None).notes == ()
    write_folder(tmp_path, ["testing.py"])
    assert load(None).fingerprint != plain.fingerprint


@pytest.mark.parametrize("folder", ["empty", "missing"])
def test_a_python_without_sources_asks_for_a_path(tmp_path, monkeypatch, folder):
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(sysconfig, "get_path", {"stdlib": str(tmp_path / folder)}.__getitem__)
    with pytest.raises(ValueError, match=r"no \.py sources .* --data\.path"):
        load(None)

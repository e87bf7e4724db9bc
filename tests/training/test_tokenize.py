"""`jaxblock tokenize`: every text exactly once, in one split; a kill at any moment changes no byte of the result."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxblock.cli.tokenize import tokenize
from jaxblock.training import document_split, documents
from jaxblock.training import tokenize as tokenize_file
from jaxblock.training.corpus import load_corpus
from jaxblock.training.document_split import Candidate, Scan, choose_split
from jaxblock.training.documents import Place
from jaxblock.training.tokenize import TokenizeSettings, plan_job
from jaxblock.training.tokenizers import BYTES, restore_tokenizer
from tests.small_tokenizers import FOX, word_file

FEW = settings(deadline=None, max_examples=60)
BPE = "bpe(vocab_size=280)"


def write_corpus(folder: Path) -> dict[tuple[str, int], bytes]:
    """Nine texts of 40 to 300 bytes in files and lines; return them by (name, line)."""
    texts = {(f"{name}.txt", 1): FOX[:size].encode() for name, size in zip("abc", (300, 41, 87), strict=True)}
    texts[("deep/d.md", 1)] = "\ufeffnaïve — 😀\r\n".encode() * 6
    lines = [(FOX[10 * number :])[: 50 + 30 * number] for number in range(5)]
    texts |= {("e.jsonl", 2 * number + 1): line.encode() for number, line in enumerate(lines)}
    (folder / "deep").mkdir(parents=True)
    for (name, _), text in texts.items():
        (folder / name).write_bytes(text)
    rows = [json.dumps({"text": line}) + "\n\n" for line in lines]
    (folder / "e.jsonl").write_text("".join(rows), encoding="utf-8")
    (folder / "empty.txt").touch()
    return texts


def run(source: Path | None, out: Path, tokenizer: str = "bytes", **changes) -> dict:
    job = plan_job(TokenizeSettings(source, out, tokenizer, **changes), lambda *args: None)
    return job.run(lambda *args: None)


def snapshot(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.exists() else {}


def ids_of(out: Path, split: str) -> list[int]:
    """Read the shards of a split without the library's reader."""
    ids: list[int] = []
    for path in sorted(out.glob(f"{split}_*.bin")):
        header = np.fromfile(path, "<i4", count=256)
        wide = header[0] == 20240801
        tokens = np.fromfile(path, "<u4" if wide else "<u2", offset=1024)
        assert header.tolist() == ([20240801, 7] if wide else [20240520, 1]) + [len(tokens)] + [0] * 253
        ids += tokens.tolist()
    return ids


def texts_of(out: Path, split: str, tokenizer) -> list[bytes]:
    """Return the documents of a split, by its ends of text."""
    ids = np.array(ids_of(out, split))
    ends = np.flatnonzero(ids == tokenizer.end_of_text)
    assert ends[-1] == len(ids) - 1
    return [
        tokenizer.decode(part[part != tokenizer.end_of_text]).encode()
        for part in np.split(ids, ends + 1)[:-1]
    ]


# --- what is written


@pytest.mark.parametrize("tokenizer", ["bytes(end_of_text=True)", BPE])
@pytest.mark.parametrize("validation", [0.02, 0.3])
def test_every_document_is_there_once_in_one_split(tokenizer, validation, tmp_path):
    texts = write_corpus(tmp_path / "in")
    result = run(tmp_path / "in", tmp_path / "out", tokenizer, shard_tokens=200, validation=validation)
    made = restore_tokenizer(result["tokenizer"], tmp_path / "out")
    parts = {split: texts_of(tmp_path / "out", split, made) for split in ("train", "val")}
    order = sorted(texts, key=lambda key: hashlib.sha256(f"{key[0]}\0{key[1]}".encode()).digest()[:8])
    wanted = int(np.ceil(validation * sum(map(len, texts.values()))))
    last = next(n for n in range(1, 10) if sum(len(texts[key]) for key in order[:n]) >= wanted)
    whole = set(order[: last - 1])
    cut = next(text for text in parts["val"] if text not in [texts[key] for key in whole])
    head = texts[order[last - 1]].removesuffix(cut)
    held = sum(map(len, parts["val"]))
    assert wanted <= held <= wanted + 80  # the cut is made where a word ends
    expected = {"train": [], "val": []}
    for key, text in texts.items():  # in the order of their names and lines
        if key == order[last - 1]:
            expected["train"] += [head] if head else []
            expected["val"] += [cut]
        else:
            expected["val" if key in whole else "train"].append(text)
    assert parts == expected
    for split, documents_there in parts.items():
        counts = result["splits"][split]
        assert counts["documents"] == len(documents_there)
        assert counts["bytes"] == sum(map(len, documents_there))
        assert counts["tokens"] == len(ids_of(tmp_path / "out", split))
        assert counts["bytes_per_token"] == counts["bytes"] / counts["tokens"]


def test_the_folder_says_what_it_is(tmp_path):
    write_corpus(tmp_path / "in")
    result = run(tmp_path / "in", tmp_path / "out", shard_tokens=200)
    assert result == json.loads((tmp_path / "out" / "tokens.json").read_text())
    train, val = (ids_of(tmp_path / "out", split) for split in ("train", "val"))
    sizes = [200] * (len(train) // 200) + [len(train) % 200]
    shards = [{"name": f"train_{n:06d}.bin", "tokens": size} for n, size in enumerate(sizes)]
    assert result["splits"]["train"]["shards"] == shards
    assert result["splits"]["val"]["shards"] == [{"name": "val_000000.bin", "tokens": len(val)}]
    names = {"tokens.json", "val_000000.bin", *(shard["name"] for shard in shards)}
    assert set(snapshot(tmp_path / "out")) == names
    assert (result["dtype"], result["tokenizer"]) == (
        "uint16",
        {
            "name": "bytes",
            "file": None,
            "vocab_size": 256,
            "end_of_text": None,
            "fingerprint": BYTES.fingerprint,
        },
    )


def test_the_size_of_pieces_batches_and_shards_changes_no_id(tmp_path, monkeypatch):
    write_corpus(tmp_path / "in")
    run(tmp_path / "in", tmp_path / "one", BPE)
    monkeypatch.setattr(document_split, "_BATCH_BYTES", 33)
    monkeypatch.setattr(documents, "PIECE_BYTES", 24)
    run(tmp_path / "in", tmp_path / "other", "bpe(vocab_size=280)", shard_tokens=7)
    for split in ("train", "val"):
        assert ids_of(tmp_path / "one", split) == ids_of(tmp_path / "other", split)


def test_one_file_gives_its_tail(tmp_path):
    (tmp_path / "x.txt").write_text(FOX)
    run(tmp_path / "x.txt", tmp_path / "out", validation=0.25)
    train, val = (bytes(ids_of(tmp_path / "out", split)) for split in ("train", "val"))
    assert train + val == FOX.encode()
    assert len(FOX.encode()) / 4 <= len(val) < len(FOX.encode()) / 4 + 10
    assert val.startswith((b" ", b"\n"))


@pytest.mark.parametrize(("tokenizer", "slack"), [("bytes", 10), (BPE, 20)])
def test_validation_can_be_a_number_of_tokens(tokenizer, slack, tmp_path):
    (tmp_path / "x.txt").write_text(FOX)
    result = run(tmp_path / "x.txt", tmp_path / "out", tokenizer, validation=100)
    assert 100 - slack / 2 <= result["splits"]["val"]["tokens"] <= 100 + slack
    with_half = run(tmp_path / "x.txt", tmp_path / "half", tokenizer, validation=10**6)
    assert with_half["splits"]["val"]["bytes"] == pytest.approx(len(FOX.encode()) / 2, abs=10)


@FEW
@given(
    st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(1, 30)), min_size=1, unique_by=lambda t: t[0]),
    st.data(),
)
def test_a_split_holds_what_is_wanted_and_leaves_train_something(pairs, data):
    total = sum(size for _, size in pairs)
    wanted = data.draw(st.integers(1, 2 * total))
    if total < 8:
        return
    lowest = sorted(Candidate(key, size, Place()) for key, size in pairs)
    split = choose_split(Scan(len(pairs), total, "", lowest), wanted)
    held = sum(size for key, size in pairs if key < split.last)
    held += next(size for key, size in pairs if key == split.last) - split.cut
    assert held == min(wanted, total - 4)


def test_the_scan_keeps_only_the_candidates(tmp_path):
    """What is held while scanning grows with the validation split, not with the corpus."""
    (tmp_path / "x.jsonl").write_text('{"text": "0123456789"}\n' * 500)
    texts = tokenize_file.find_texts(tmp_path / "x.jsonl")
    scan = document_split.scan_documents(texts, reads_utf8=True, wanted=55, report=lambda *args: None)
    every = document_split.scan_documents(texts, reads_utf8=True, wanted=10**6, report=lambda *args: None)
    assert (scan.documents, scan.size, len(scan.lowest), len(every.lowest)) == (500, 5000, 6, 500)
    assert scan.lowest == every.lowest[:6]


def test_ids_beyond_16_bits_are_written_as_32(tmp_path):
    path = word_file(tmp_path, {"a": 0, "b": 70_000, "<eos>": 65_535}, special=["<eos>"])
    (tmp_path / "x.jsonl").write_text('{"text": "a b a b b"}\n' * 9)
    result = run(tmp_path / "x.jsonl", tmp_path / "out", str(path), validation=0.2)
    assert result["dtype"] == "uint32"
    one = [0, 70_000, 0, 70_000, 70_000, 65_535]
    assert ids_of(tmp_path / "out", "train")[: 6 * 6] == one * 6
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == path.read_bytes()
    corpus = load_corpus(tmp_path / "out", vocab_size=70_001, context=4)
    assert corpus.train.read(0, 6).tolist() == one
    assert corpus.train.starts[:4].tolist() == [0, 6, 12, 18]


def test_the_default_source_is_the_standard_library(tmp_path, monkeypatch):
    texts = tokenize_file.find_texts(None)
    few = tokenize_file.TextFiles(texts.words, texts.files[:9], texts.notes)
    monkeypatch.setattr(tokenize_file, "find_texts", lambda path, field: few if path is None else None)
    result = run(None, tmp_path / "out")
    assert result["source"].startswith("the standard library of Python 3.")
    sizes = sum(path.stat().st_size for _, path in few.files)
    assert sum(split["bytes"] for split in result["splits"].values()) == sizes


# --- memory


@pytest.mark.parametrize("name", ["x.txt", "x.jsonl"])
def test_the_corpus_is_never_held(name, tmp_path, monkeypatch):
    monkeypatch.setattr(document_split, "_BATCH_BYTES", 2**18)
    text = FOX * 1000 if name == "x.txt" else json.dumps({"text": FOX * 10}) + "\n"
    with open(tmp_path / name, "w", encoding="utf-8") as file:
        for _ in range(16 if name == "x.txt" else 1_600):
            file.write(text)
    size = (tmp_path / name).stat().st_size
    tracemalloc.start()
    try:
        run(tmp_path / name, tmp_path / "out", shard_tokens=10**6)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert size > 19_000_000
    assert peak < 6_000_000


# --- kills


class Crash(BaseException):
    """What a kill is, inside one process."""


EFFECTS = ("write", "fsync", "replace", "truncate", "unlink", "mkdir")


def crash_at(patch: pytest.MonkeyPatch, moment: int, die) -> None:
    """Let the `moment`-th change of the disk not happen, a write by half, and die there."""
    left = [moment]

    def wrap(name):
        real = getattr(os, name)

        def effect(*args, **options):
            left[0] -= 1
            if left[0]:
                return real(*args, **options)
            if name == "write":
                real(args[0], bytes(args[1])[: len(args[1]) // 2])
            return die()

        return effect

    for name in EFFECTS:
        patch.setattr(os, name, wrap(name))


def raise_crash():
    raise Crash


def small_steps(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tokenize_file, "_CHECKPOINT_TOKENS", 150)
    patch.setattr(document_split, "_BATCH_BYTES", 100)
    patch.setattr(documents, "PIECE_BYTES", 64)


def crashes(moment: int, source: Path, out: Path, tokenizer: str) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        crash_at(patch, moment, raise_crash)
        try:
            run(source, out, tokenizer, shard_tokens=110, validation=0.3)
        except Crash:
            return True
    return False


@pytest.mark.parametrize(
    ("tokenizer", "stride"),
    [("bytes(end_of_text=True)", 3), (BPE, 7), pytest.param("bytes", 1, marks=pytest.mark.full)],
)
def test_a_crash_at_any_change_of_the_disk_changes_no_byte(tokenizer, stride, tmp_path, monkeypatch):
    write_corpus(tmp_path / "in")
    small_steps(monkeypatch)
    run(tmp_path / "in", tmp_path / "unbroken", tokenizer, shard_tokens=110, validation=0.3)
    expected = snapshot(tmp_path / "unbroken")
    assert len(expected) > 7
    moment = 1
    while crashes(moment, tmp_path / "in", out := tmp_path / f"out{moment}", tokenizer):
        second = moment // 2 + 1  # and once more, while the job is continued
        if crashes(second, tmp_path / "in", out, tokenizer):
            run(tmp_path / "in", out, tokenizer, shard_tokens=110, validation=0.3)
        assert snapshot(out) == expected, moment
        moment += stride
    assert moment > 60


def test_a_continued_job_does_not_start_again(tmp_path, monkeypatch):
    write_corpus(tmp_path / "in")
    small_steps(monkeypatch)
    assert crashes(80, tmp_path / "in", tmp_path / "out", "bytes")
    encoded = []
    encode = type(BYTES).encode_batch
    monkeypatch.setattr(type(BYTES), "encode_batch", lambda self, t: encoded.extend(t) or encode(self, t))
    result = run(tmp_path / "in", tmp_path / "out", shard_tokens=110, validation=0.3)
    total = sum(split["bytes"] for split in result["splits"].values())
    assert 0 < sum(map(len, encoded)) < total / 2


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.training.test_tokenize import crash_at, run, small_steps
from pytest import MonkeyPatch
moment, source, out, tokenizer = int(sys.argv[1]), *sys.argv[2:]
small_steps(MonkeyPatch())
crash_at(MonkeyPatch(), moment, lambda: os.kill(os.getpid(), signal.SIGKILL))
run(Path(source), Path(out), tokenizer, shard_tokens=110, validation=0.3)
"""


def killed(moment: int, *arguments: str) -> bool:
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(moment), *arguments], cwd=root, capture_output=True, check=False
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr.decode()
    return done.returncode != 0


@pytest.mark.parametrize(
    "moments",
    [
        (31, 12),
        *(pytest.param(pair, marks=pytest.mark.full) for pair in ((1, 2), (9, 40), (55, 3), (70, 20))),
    ],
)
def test_a_killed_job_goes_on(moments, tmp_path, monkeypatch):
    write_corpus(tmp_path / "in")
    for moment in moments:
        assert killed(moment, str(tmp_path / "in"), str(tmp_path / "out"), BPE)
    small_steps(monkeypatch)
    run(tmp_path / "in", tmp_path / "out", BPE, shard_tokens=110, validation=0.3)
    run(tmp_path / "in", tmp_path / "unbroken", BPE, shard_tokens=110, validation=0.3)
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "unbroken")


def test_an_unfinished_job_is_continued_by_the_same_command_alone(tmp_path, monkeypatch):
    write_corpus(tmp_path / "in")
    small_steps(monkeypatch)
    source, out = tmp_path / "in", tmp_path / "out"
    assert crashes(40, source, out, "bytes")
    before = snapshot(out)
    own = {"shard_tokens": 110, "validation": 0.3}
    with pytest.raises(ValueError, match=r"asked for, and there: shard_tokens: 50, 110; validation: 9, 0.3$"):
        run(source, out, shard_tokens=50, validation=9)
    with pytest.raises(
        ValueError, match=r"tokenizer: bpe\(vocab_size=280, .*\), bytes; tokenizer fingerprint: "
    ):
        run(source, out, BPE, **own)
    with pytest.raises(
        ValueError, match=r"out is an unfinished `jaxblock tokenize`; the same command again goes on"
    ):
        load_corpus(out, vocab_size=256, context=2)
    text = (source / "a.txt").read_bytes()
    (source / "a.txt").write_bytes(text[:-1] + b"?")
    with pytest.raises(ValueError, match=r"there: source fingerprint: \w{16}, \w{16}$"):
        run(source, out, **own)
    assert snapshot(out) == before
    (source / "a.txt").write_bytes(text)
    run(source, out, **own)
    with pytest.raises(ValueError, match=r"out is finished; nothing is overwritten"):
        run(source, out, **own)


def test_shards_that_were_taken_away_are_missed(tmp_path, monkeypatch):
    write_corpus(tmp_path / "in")
    small_steps(monkeypatch)
    assert crashes(45, tmp_path / "in", tmp_path / "out", "bytes")
    (tmp_path / "out" / "train_000000.bin").write_bytes(b"short")
    with pytest.raises(
        ValueError, match=r"train_000000\.bin is shorter than the 110 tokens that progress\.json"
    ):
        run(tmp_path / "in", tmp_path / "out", shard_tokens=110, validation=0.3)
    (tmp_path / "out" / "progress.json").write_text("{}")
    with pytest.raises(ValueError, match=r"progress\.json is not what `jaxblock tokenize` writes"):
        run(tmp_path / "in", tmp_path / "out", shard_tokens=110, validation=0.3)


def test_two_jobs_cannot_write_one_folder(tmp_path):
    write_corpus(tmp_path / "in")
    made = plan_job(TokenizeSettings(tmp_path / "in", tmp_path / "out"), lambda *args: None)
    words = []

    def also(stage, *counts):
        with pytest.raises(ValueError, match="is in use by another process"):
            run(tmp_path / "in", tmp_path / "out")
        words.append(stage)

    late = plan_job(TokenizeSettings(tmp_path / "in", tmp_path / "out"), lambda *args: None)
    made.run(also)
    assert "encode" in words
    before = snapshot(tmp_path / "out")
    with pytest.raises(ValueError, match="out is finished"):  # by another, after `late` was planned
        late.run(lambda *args: None)
    assert snapshot(tmp_path / "out") == before


# --- refusals


def test_b85_empty_files_are_left_out_with_a_note(tmp_path):
    write_corpus(tmp_path / "in")
    job = plan_job(TokenizeSettings(tmp_path / "in", tmp_path / "out"), lambda *args: None)
    assert job.notes == ("Skipped 1 empty files.",)
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "x.txt").touch()
    (tmp_path / "none" / "y.jsonl").write_text('{"text": ""}\n\n')
    with pytest.raises(
        ValueError, match=r"INPUT .*none is empty: it holds no text \(Skipped 1 empty files\.\)"
    ):
        run(tmp_path / "none", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_b84_text_that_is_not_utf8(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "PIECE_BYTES", 64)
    (tmp_path / "x.txt").write_bytes(FOX.encode()[:200] + b"it\x92s" + FOX.encode())
    with pytest.raises(
        ValueError, match=r"x\.txt is not UTF-8 at byte 202: convert it, or use --tokenizer bytes"
    ):
        run(tmp_path / "x.txt", tmp_path / "out", BPE)
    assert not (tmp_path / "out").exists()
    run(tmp_path / "x.txt", tmp_path / "out")  # bytes take every byte
    assert b"it\x92s" in bytes(ids_of(tmp_path / "out", "train"))


def test_b84_the_locale_does_not_matter(tmp_path):
    write_corpus(tmp_path / "in")
    code = (
        "import sys, pathlib; from tests.training.test_tokenize import run;"
        f"run(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), {BPE!r})"
    )
    plain = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "in"), str(tmp_path / "c")],
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, **plain},
        check=True,
    )
    run(tmp_path / "in", tmp_path / "utf8", BPE)
    assert snapshot(tmp_path / "c") == snapshot(tmp_path / "utf8")


def test_a_word_that_is_the_end_of_text_is_refused_where_it_would_be_read_as_one(tmp_path):
    path = word_file(tmp_path, {"a": 0, "stop": 1, "b": 2}, special=["stop"])
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "stop"}')
    (tmp_path / "x.txt").write_text("a b stop a b " * 9)
    with pytest.raises(ValueError, match=r"x\.txt has the end of text, id 1, inside its text"):
        run(tmp_path / "x.txt", tmp_path / "out", str(path))


def test_a_source_that_changes_is_noticed(tmp_path):
    (tmp_path / "x.txt").write_text(FOX)
    job = plan_job(TokenizeSettings(tmp_path / "x.txt", tmp_path / "out"), lambda *args: None)
    (tmp_path / "x.txt").write_text(FOX + "more")
    with pytest.raises(ValueError, match=r"x\.txt was changed while it was read"):
        job.run(lambda *args: None)
    assert (tmp_path / "out" / "progress.json").exists()


SENTENCES = {
    "no out": (["fox.txt"], r"--out is missing"),
    "flag": (["fox.txt", "--tokeniser", "bytes"], r"unknown flag 'tokeniser' \(did you mean 'tokenizer'\?\)"),
    "missing": (["fix.txt", "--out", "new"], r"INPUT fix.txt does not exist \(did you mean 'fox.txt'\?\)"),
    "shard": (["ids.bin", "--out", "new"], r"ids.bin holds .bin shards: these are tokens already"),
    "short": (["ten.txt", "--out", "new"], r"INPUT ten.txt holds 7 bytes of text; 8 are needed"),
    "share": (["fox.txt", "--out", "new", "--validation", "1.5"], r"validation is 1.5; it must be .* below 1"),
    "no tokens": (["fox.txt", "--out", "new", "--validation", "0"], r"validation is 0; .* at least 1"),
    "word": (["fox.txt", "--out", "new", "--validation", "half"], r"validation is 'half'; it must be a share"),
    "no shards": (["fox.txt", "--out", "new", "--shard_tokens", "0"], r"shard_tokens is 0; .* at least 1"),
    "too many": (["fox.txt", "--out", "new", "--shard_tokens=2147483648"], r"2147483648; .* at most 2147483647"),
    "tokenizer": (["fox.txt", "--out", "new", "--tokenizer", "byte"], r"tokenizer is 'byte'; .*'bytes'\?"),
    "folder": (["fox.txt", "--out", "there"], r"out there exists and is no unfinished `jaxblock tokenize`"),
    "file": (["fox.txt", "--out", "fox.txt"], r"out is 'fox.txt', but 'fox.txt' is not a folder"),
    "inside": (["there", "--out", "there/new"], r"out there/new lies in INPUT there"),
}  # fmt: skip


@pytest.mark.parametrize("case", SENTENCES)
def test_bad_input_is_one_sentence_and_nothing_is_written(case, tmp_path, monkeypatch):
    arguments, words = SENTENCES[case]
    monkeypatch.chdir(tmp_path)
    for name, text in {"fox.txt": FOX, "ten.txt": "0123456", "ids.bin": "ab"}.items():
        Path(name).write_text(text)
    Path("there").mkdir()
    Path("there", "x.txt").write_text(FOX)
    with pytest.raises(ValueError, match=words) as caught:
        tokenize(arguments)
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        "fox.txt",
        "ids.bin",
        "ten.txt",
        "there",
        "x.txt",
    ]


# --- the command and what reads its folder


def test_the_command_reports_and_its_folder_trains(tmp_path, capsys):
    write_corpus(tmp_path / "in")
    arguments = [
        str(tmp_path / "in"),
        "--out",
        str(tmp_path / "out"),
        "--tokenizer",
        BPE,
        "--validation",
        "0.3",
    ]
    assert tokenize([*arguments, "--json"])() == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert result == {
        "out": str(tmp_path / "out"),
        **json.loads((tmp_path / "out" / "tokens.json").read_text()),
    }
    assert captured.err == "Skipped 1 empty files.\n"
    assert tokenize([*arguments[:-4], "--out", str(tmp_path / "two")])() == 0
    words = capsys.readouterr().out
    assert re.search(r"train +[\d,]+ tokens +\d+ documents +1 shards +1\.000 bytes per token", words)
    assert f"--data.path {tmp_path / 'two'} --model.vocab_size 256" in words


def test_lines_now_and_then_say_how_far_it_is(tmp_path, capsys, monkeypatch):
    write_corpus(tmp_path / "in")
    small_steps(monkeypatch)
    monkeypatch.setattr(sys.modules[tokenize.__module__], "_SECONDS_BETWEEN_LINES", 0.0)
    assert tokenize([str(tmp_path / "in"), "--out", str(tmp_path / "out")])() == 0
    assert re.search(r"\nencode  [\d,]+ tokens/s  0 MiB  \d+ %  0:00 left\n", capsys.readouterr().err)


def test_a_disk_that_is_full_is_one_sentence(tmp_path, capsys, monkeypatch):
    write_corpus(tmp_path / "in")
    act = tokenize([str(tmp_path / "in"), "--out", str(tmp_path / "out")])

    def refuse(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", refuse)
    assert act() == 2
    monkeypatch.undo()
    assert "out cannot be written: No space left on device" in capsys.readouterr().err

"""Tokenizers: what is encoded comes back, no text can forge an end, and a file's tokenizer loses no token."""

import functools
import itertools
import json
import sys

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxblock.training import documents
from jaxblock.training.documents import iterate_documents
from jaxblock.training.tokenizer_library import has_library
from jaxblock.training.tokenizers import (
    BYTES,
    BytePairTraining,
    ByteTokenizer,
    FileTokenizer,
    choose_tokenizer,
    read_tokenizer_file,
    restore_tokenizer,
    tokenizer_record,
)
from tests.small_tokenizers import FOX, byte_pairs, word_file

FEW = settings(deadline=None, max_examples=40)
WITH_END = ByteTokenizer(256)
LETTERS = "the quick'42\r\n\tüé漢😀\ufeff\0\u3000<|>"


# --- bytes


@FEW
@given(st.binary(max_size=40))
@example(b"\xef\xbb\xbfa\r\n\x92")
def test_b84_bytes_are_ids_and_every_byte_is_taken(text):
    ids = BYTES.encode(text)
    assert ids.dtype == np.int32
    assert ids.tolist() == list(text) == WITH_END.encode(text).tolist()
    assert [one.tolist() for one in BYTES.encode_batch([text, b"x"])] == [list(text), [120]]
    assert BYTES.decode(ids) == text.decode("utf-8", errors="replace")


@FEW
@given(st.text(LETTERS, max_size=20))
def test_text_comes_back_from_bytes(text):
    assert BYTES.decode(BYTES.encode(text)) == text


def test_bytes_have_no_end_of_text_unless_it_is_asked_for():
    assert (BYTES.vocab_size, BYTES.end_of_text) == (256, None)
    assert (WITH_END.vocab_size, WITH_END.end_of_text) == (257, 256)
    assert BYTES.fingerprint != WITH_END.fingerprint
    ids = np.array([97, 256, 0xC3, 0xBC, 256, 300, -1])
    assert WITH_END.decode(ids) == "a<|endoftext|>ü<|endoftext|>\ufffd\ufffd"
    assert BYTES.decode(ids) == "a\ufffdü\ufffd\ufffd\ufffd"


# --- byte pairs


@FEW
@given(st.text(LETTERS, max_size=30))
@example("naïve — 😀\r\n\ufeff<|endoftext|>")
def test_text_comes_back_from_byte_pairs(text):
    """A byte order mark is a character and CRLF stays CRLF: nothing is normalised."""
    tokenizer = byte_pairs()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode(text.encode()).tolist() == ids.tolist()
    assert 0 not in ids


def test_byte_pairs_are_what_was_asked_for_and_shorten_text():
    tokenizer = byte_pairs()
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (300, 0)
    assert tokenizer.decode(np.array([0])) == "<|endoftext|>"
    assert len(tokenizer.encode(FOX)) < len(FOX) / 2
    control = BytePairTraining(257, 10**9).train([FOX.encode()])  # no merges: bytes in another order
    assert len(control.encode(FOX)) == len(FOX.encode())


def test_training_is_deterministic():
    texts = [FOX.encode(), b"pack my box with five dozen jugs " * 9]
    again, other = (BytePairTraining(290, 10**9).train(order) for order in (texts, texts[:1]))
    assert BytePairTraining(290, 10**9).train(iter(texts)).file_text() == again.file_text()
    assert other.fingerprint != again.fingerprint


def test_a_text_that_repeats_too_little_is_refused():
    with pytest.raises(ValueError, match=r"bpe\(vocab_size=900, .*pairs repeat for \d+ ids only"):
        BytePairTraining(900, 10**9).train([b"abc abc"])


def test_a_text_cannot_forge_the_end_of_text():
    tokenizer = byte_pairs()
    assert 0 not in tokenizer.encode("a<|endoftext|>b")
    library_default = pytest.importorskip("tokenizers").Tokenizer.from_str(tokenizer.file_text())
    assert 0 in library_default.encode("a<|endoftext|>b").ids  # the control


# --- pieces


def pieces_of(path, text: bytes) -> list[bytes]:
    path.write_bytes(text)
    (document,) = (
        [piece for _, piece in document.pieces(0, document.size)]
        for document in iterate_documents([(path.name, path)])
    )
    return document


@FEW
@given(
    st.lists(st.sampled_from(["the ", "quick\n", " 42\t", "dog's  ", "\r\ncats\r\n", "ü! a "]), min_size=1)
)
def test_a_document_in_pieces_has_the_tokens_of_the_whole(tmp_path_factory, words):
    text = "".join(words).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "PIECE_BYTES", 16)
        pieces = pieces_of(tmp_path_factory.getbasetemp() / "x.txt", text)
    assert b"".join(pieces) == text
    assert all(0 < len(piece) <= 16 for piece in pieces)
    assert all(a[-1:].isalnum() and b[:1] in b" \t\r\n" for a, b in itertools.pairwise(pieces))
    assert np.concatenate(byte_pairs().encode_batch(pieces)).tolist() == byte_pairs().encode(text).tolist()


def test_control_a_cut_inside_a_word_changes_tokens():
    whole = byte_pairs().encode("the quick").tolist()
    assert [*byte_pairs().encode("the q"), *byte_pairs().encode("uick")] != whole
    assert [*byte_pairs().encode("the"), *byte_pairs().encode(" quick")] == whole


@pytest.mark.parametrize("text", ["😀" * 20, "ü" * 33, "漢" * 30])
def test_no_character_is_cut(text, tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "PIECE_BYTES", 7)
    for piece in pieces_of(tmp_path / "x.txt", text.encode()):
        piece.decode("utf-8")


# --- files


def test_a_file_is_read_with_its_end_of_text(tmp_path):
    path = word_file(tmp_path, {"a": 0, "b": 70_000, "<eos>": 5}, special=["<eos>"])
    tokenizer = read_tokenizer_file(path)
    assert tokenizer.vocab_size == 70_001  # ids may have holes
    assert tokenizer.end_of_text == 5
    assert tokenizer.encode("a b a").tolist() == [0, 70_000, 0]
    assert tokenizer.decode(np.array([0, 7, 70_001, 70_000, -1])) == "a\ufffd\ufffdb\ufffd"
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "b"}}')
    assert read_tokenizer_file(path).end_of_text == 70_000
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "zzz"}')
    with pytest.raises(ValueError, match=r"tokenizer_config\.json names the \"eos_token\" 'zzz', which"):
        read_tokenizer_file(path)
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is not a tokenizer config"):
        read_tokenizer_file(path)


def test_without_a_known_end_there_is_none(tmp_path):
    assert (
        read_tokenizer_file(word_file(tmp_path, {"a": 0, "<stop>": 1}, special=["<stop>"])).end_of_text
        is None
    )
    # A word that is no added token may stand in any text.
    assert read_tokenizer_file(word_file(tmp_path, {"a": 0, "</s>": 1}, special=[])).end_of_text is None


def test_a_file_that_truncates_and_pads_loses_and_adds_no_token(tmp_path):
    path = word_file(tmp_path, {"a": 0, "b": 1, "<eos>": 2}, special=["<eos>"], truncation=2, padding=8)
    assert read_tokenizer_file(path).encode("a b a b").tolist() == [0, 1, 0, 1]
    library = pytest.importorskip("tokenizers").Tokenizer.from_file(str(path))
    assert len(library.encode("a b a b").ids) == 8  # the control: two tokens and six of padding


def test_a_tokenizer_is_stored_and_restored(tmp_path):
    for tokenizer in (BYTES, WITH_END):
        assert restore_tokenizer(tokenizer_record(tokenizer), tmp_path) == tokenizer
    tokenizer = byte_pairs()
    record = json.loads(json.dumps(tokenizer_record(tokenizer)))
    (tmp_path / "tokenizer.json").write_text(tokenizer.file_text(), encoding="utf-8")
    restored = restore_tokenizer(record, tmp_path)
    assert restored.encode(FOX).tolist() == tokenizer.encode(FOX).tolist()
    assert (restored.name, restored.end_of_text) == (tokenizer.name, 0)
    with pytest.raises(ValueError, match=r"has fingerprint .*its file was changed"):
        restore_tokenizer({**record, "end_of_text": 1}, tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read: No such file"):
        restore_tokenizer(record, tmp_path)


def test_b84_what_is_no_text_is_refused(tmp_path):
    for encode in (byte_pairs().encode, lambda text: byte_pairs().encode_batch([b"x", text])):
        with pytest.raises(ValueError, match="not UTF-8 at byte 2"):
            encode(b"it\x92s")
    with pytest.raises(ValueError, match="lone surrogate at character 1"):
        byte_pairs().encode("a\ud800")
    assert BYTES.encode("a\udc92").tolist() == [97, 0x92]  # a byte of a command line that is no UTF-8


CHOICES = {
    "byte": r"tokenizer is 'byte'; it must be one of bpe, bytes \(did you mean 'bytes'\?\)",
    "bpe(vocab=300)": r"'bpe' has no option 'vocab'; its options: vocab_size, most_bytes",
    "bpe(vocab_size=256)": r"vocab_size of bpe is 256; it must be a whole number of at least 257",
    "bpe(vocab_size=2.5)": r"option 'vocab_size' of 'bpe' is 2.5; it must be of type int",
    "bytes(end_of_text=1)": r"option 'end_of_text' of 'bytes' is 1; it must be of type bool",
    "folder/tokenizer": r"it must read \"name\" or \"name\(option=1\)\"",
    "nowhere.json": r"nowhere\.json cannot be read: No such file",
    "broken.json": r"broken\.json is not a tokenizer file: ",
    "latin.json": r"latin\.json is not UTF-8 at byte 1",
}


@pytest.mark.parametrize("text", CHOICES)
def test_a_bad_choice_is_one_sentence(text, tmp_path, monkeypatch):
    (tmp_path / "broken.json").write_text("{}")
    (tmp_path / "latin.json").write_bytes(b'"\xe9"')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=CHOICES[text]):
        choose_tokenizer(text)


def test_choices_are_printed_in_full():
    names = {text: choose_tokenizer(text).name for text in ("bytes", "bytes(end_of_text=True)", "bpe")}
    assert names.pop("bpe") == "bpe(vocab_size=4096, most_bytes=1000000000)"
    assert all(text == name for text, name in names.items())


def test_without_the_library_one_sentence_says_what_to_install(tmp_path, monkeypatch):
    path = word_file(tmp_path, {"a": 0}, special=[])
    stored = FileTokenizer(path.read_text(), "x", end_of_text=None)
    assert has_library()
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert not has_library()
    assert choose_tokenizer("bytes") == BYTES
    for use in (
        functools.partial(choose_tokenizer, "bpe"),
        functools.partial(choose_tokenizer, str(path)),
        functools.partial(stored.encode, "a"),
    ):
        with pytest.raises(ValueError, match=r'needs the library tokenizers: pip install "jaxblock\[hf\]"'):
            use()

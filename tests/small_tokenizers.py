"""Tokenizers small enough to make in a moment, shared by the tests of the data."""

import functools
import json
from pathlib import Path

from jaxblock.training.tokenizers import BytePairTraining, FileTokenizer

FOX = "the quick brown fox jumps over the lazy dog's 42 naïve cats.\n" * 20


@functools.cache
def byte_pairs() -> FileTokenizer:
    """A byte-level BPE with 300 ids, 43 of them merges."""
    return BytePairTraining(300, 10**9).train([FOX.encode()])


def word_file(
    folder: Path, ids: dict[str, int], *, special: list[str], truncation: int = 0, padding: int = 0
) -> Path:
    """Write a tokenizer.json of words between spaces, `special` among them as special tokens."""
    added = [
        {"id": ids[word], "content": word, "single_word": False, "lstrip": False, "rstrip": False}
        | {"normalized": False, "special": True}
        for word in special
    ]
    cut = {"direction": "Right", "max_length": truncation, "strategy": "LongestFirst", "stride": 0}
    pad = {"strategy": {"Fixed": padding}, "direction": "Right", "pad_to_multiple_of": None}
    pad |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "a"}
    content = {
        "version": "1.0",
        "truncation": cut if truncation else None,
        "padding": pad if padding else None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": ids, "unk_token": "a"},
    }
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(content))
    return path

"""Text as it comes: pieces join to the whole text, no character is cut, and `jaxblock sample` prints both forms."""

import functools
import io
import itertools
import json

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxblock.cli import main
from jaxblock.functional import SamplingRule
from jaxblock.models import generate
from jaxblock.training.checkpoint import Checkpoints
from jaxblock.training.config import RunConfig, SampleConfig, TrainConfig
from jaxblock.training.run_folder import RunFolder
from jaxblock.training.sampling import IDS, prompt_ids, separator, spell
from jaxblock.training.tokenizers import BYTES, tokenizer_record
from tests.small import built, config

# Spelling --------------------------------------------------------------------------------------------------


def pieces_of(ids: np.ndarray, cuts: list[int]) -> list[np.ndarray]:
    return np.split(ids, sorted(cut % (len(ids) + 1) for cut in cuts))


@settings(deadline=None, max_examples=100)
@given(text=st.text("aé—😀\n"), noise=st.binary(max_size=4), cuts=st.lists(st.integers(0, 60), max_size=8))
def test_pieces_join_to_the_text_decoded_at_once(text, noise, cuts):
    """However it is cut, and whatever else the bytes are: noise stands between two copies of the text."""
    ids = np.frombuffer(text.encode() + noise + text.encode(), np.uint8).astype(np.int32)
    for codec in (BYTES, IDS):
        assert "".join(spell(pieces_of(ids, cuts), codec)) == codec.decode(ids)


def test_a_character_comes_whole_and_as_soon_as_it_is_there():
    ids = np.frombuffer("naïve 😀".encode(), np.uint8).astype(np.int32)
    alone = [ids[i : i + 1] for i in range(len(ids))]
    assert list(spell(alone, BYTES)) == list("naïve 😀")
    # The control: each piece decoded by itself loses what is cut.
    assert "".join(BYTES.decode(piece) for piece in alone) == "na\ufffd\ufffdve \ufffd\ufffd\ufffd\ufffd"


def test_bytes_that_are_no_text_are_marked_when_what_follows_shows_it():
    assert list(spell([np.asarray([97]), np.asarray([0xE2]), np.asarray([98])], BYTES)) == ["a", "\ufffdb"]
    assert list(spell([np.asarray([97]), np.asarray([0xE2])], BYTES)) == ["a", "\ufffd"]
    assert list(spell([], BYTES)) == []


def test_ids_are_separated_by_spaces_across_pieces():
    assert list(spell([np.asarray([5]), np.asarray([17, 2])], IDS)) == ["5", " 17 2"]
    assert (separator(IDS), separator(BYTES)) == (" ", "")


# Prompts ---------------------------------------------------------------------------------------------------


def test_a_prompt_is_its_tokens():
    np.testing.assert_array_equal(prompt_ids("é", BYTES, vocab_size=256), [[0xC3, 0xA9]])
    np.testing.assert_array_equal(prompt_ids(" 3  1", IDS, vocab_size=4), [[3, 1]])
    assert prompt_ids("3", IDS, vocab_size=4).dtype == np.int32


@pytest.mark.parametrize(
    ("prompt", "codec", "words"),
    [
        ("", BYTES, "the prompt is empty; it must hold at least one token"),
        ("  ", IDS, "the prompt is empty"),
        ("fox", IDS, "the prompt is 'fox'; these data are token ids, so it must be ids separated by spaces"),
        ("1 300", IDS, "the prompt holds token id 300; ids must be below vocab_size = 256"),
        ("99999999999", IDS, "the prompt holds token id 99999999999"),
        ("9" * 30, IDS, "it must be ids separated by spaces"),
        ("1 -2", IDS, "the prompt holds token id -2"),
    ],
)
def test_a_prompt_that_has_no_tokens_is_refused(prompt, codec, words):
    with pytest.raises(ValueError, match=words):
        prompt_ids(prompt, codec, vocab_size=256)


# The command -----------------------------------------------------------------------------------------------

MODEL = config(
    vocab_size=256, context=16, depth=1, norm="rms_norm", bias=False, feed_forward="relu", positions="rope"
)
LENGTH, SEED = 20, 3


def run_folder(path, record):
    """Write the folder of a run with one checkpoint; `record` names its tokenizer."""
    run = TrainConfig(run=RunConfig(dir=str(path)), model=MODEL, sample=SampleConfig(length=LENGTH))
    folder = RunFolder(path)
    folder.create(run)
    facts = {"bytes_per_token": None if record is None else 1.0, "tokenizer": record}
    folder.start_metrics(run, facts, after=0, skipped=0)
    with Checkpoints(folder.checkpoints) as checkpoints:
        checkpoints.save(1, {"params": built(MODEL)[1]}, facts={})
    return str(path)


@functools.cache
def whole(prompt: tuple[int, ...]) -> np.ndarray:
    """Return the tokens that `generate` draws."""
    model, params = built(MODEL)
    key, rule = jax.random.key(SEED), SamplingRule(temperature=0.8, vocab_size=256)
    return np.asarray(generate(model, params, np.asarray([prompt], np.int32), key, length=LENGTH, rule=rule))[
        0
    ]


class Terminal(io.StringIO):
    """Standard output that knows what had been written at each flush."""

    def __init__(self):
        super().__init__()
        self.shown: list[str] = []

    def flush(self):
        self.shown.append(self.getvalue())


@pytest.mark.parametrize(
    ("record", "prompt", "codec"),
    [(tokenizer_record(BYTES), "ab", BYTES), (None, "97 98", IDS)],
    ids=["bytes", "ids"],
)
def test_the_command_prints_text_as_it_comes_or_one_line_of_json(
    tmp_path, monkeypatch, record, prompt, codec
):
    """Both are the text of the tokens that `generate` draws with the seed, in a context they outgrow."""
    run, text = run_folder(tmp_path / "run", record), codec.decode(whole((97, 98)))
    flags = ["--prompt", prompt, "--temperature", "0.8", "--seed", str(SEED)]

    def printed(*more: str) -> Terminal:
        terminal = Terminal()
        monkeypatch.setattr("sys.stdout", terminal)
        assert main(["sample", run, *flags, *more]) == 0
        return terminal

    terminal = printed()
    begin = prompt + separator(codec)
    assert terminal.getvalue() == begin + text + "\n"
    shown = terminal.shown
    assert shown[0] == begin  # before the first token
    assert len(set(shown)) >= 4  # and then piece by piece
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(shown))
    lines = printed("--json").getvalue().splitlines()
    assert [json.loads(line) for line in lines] == [{"prompt": prompt, "text": text}]
    assert printed("--seed", str(SEED + 1)).getvalue() != begin + text + "\n"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["--prompt", ""], "sample.prompt is empty"),
        ([], "has no prompt of its own; pass --prompt TEXT"),
        (["--prompt", "x", "--length", "0"], "sample.length is 0"),
    ],
)
def test_the_command_refuses_before_it_prints(tmp_path, capsys, changes, words):
    assert main(["sample", run_folder(tmp_path / "run", tokenizer_record(BYTES)), *changes]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err

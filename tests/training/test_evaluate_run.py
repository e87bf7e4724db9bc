"""`jaxblock eval`: every token once, with at least context - stride tokens before it, by the weights asked for."""

import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxblock.cli import main
from jaxblock.training.corpus import TokenStream
from jaxblock.training.evaluate_run import SlidingBatches
from tests.small_runs import restored, shared_programs, summary, train, write_text


@pytest.fixture(scope="module", autouse=True)
def _compile_once(tmp_path_factory):
    with shared_programs(tmp_path_factory.mktemp("programs")):
        yield


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 40), st.integers(1, 9), st.data())
def test_every_target_counts_once_and_sees_enough(tokens, context, data):
    stride, batch = data.draw(st.integers(1, context)), data.draw(st.integers(1, 4))
    stream = TokenStream([np.arange(tokens, dtype=np.uint8)])
    batches = SlidingBatches(stream, context=context, stride=stride, batch=batch, seams="joined")
    seen = []
    for part in batches:
        assert part.inputs_BT.shape == (batch, context)
        for row, place in zip(*np.nonzero(part.valid_BT), strict=True):
            target = int(part.targets_BT[row, place])
            seen.append(target)
            assert (
                target == part.inputs_BT[row, place] + 1
            )  # the stream counts up: a target follows its input
            assert place + 1 >= min(target, context - stride + 1)  # tokens read up to here, this one included
    assert sorted(seen) == list(range(1, tokens))
    assert len(list(batches)) == len(batches)


@pytest.mark.parametrize("stride", [0, 9])
def test_a_stride_outside_the_context_is_refused(stride):
    stream = TokenStream([np.arange(30, dtype=np.uint8)])
    with pytest.raises(ValueError, match=f"stride is {stride}; it must be a whole number"):
        SlidingBatches(stream, context=8, stride=stride, batch=2, seams="joined")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    text = write_text(tmp_path_factory.mktemp("data") / "fox.jsonl")
    run = tmp_path_factory.mktemp("runs") / "run"
    assert train(text, run, "--optimizer.average", "0.5") == 0
    return run


def evaluated(capsys, *arguments: str) -> dict:
    capsys.readouterr()
    assert main(["eval", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_validation_loss_of_the_run_comes_out_again(run, capsys):
    found = evaluated(capsys, str(run), "--stride", "16")  # side by side, as the run evaluates
    assert found["loss"] == pytest.approx(summary(run)["val_loss"], rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert found["step"] == 6
    average = evaluated(capsys, str(run), "--stride", "16", "--weights", "average")
    assert average["loss"] == pytest.approx(summary(run)["val_loss_average"], rel=1e-6)
    assert average["loss"] != found["loss"]


def test_a_file_is_scored_token_by_token(run, capsys, tmp_path):
    """The loss by windows of stride 1 is that of each token after the context's last ones, one at a time."""
    text = "the quick brown fox jumps over a café".encode()
    (tmp_path / "text.txt").write_bytes(text)
    found = evaluated(capsys, str(run), "--file", str(tmp_path / "text.txt"), "--stride", "1")
    assert found["tokens"] == len(text) - 1
    _, model, _, state = restored(run)
    apply = jax.jit(model.apply)
    nats = []
    for target in range(1, len(text)):
        inputs = list(text[max(0, target - 16) : target])
        padded_1T = np.asarray([inputs + [0] * (16 - len(inputs))])
        logits_V = np.float64(apply({"params": state.params}, padded_1T)[0, len(inputs) - 1])
        nats.append(np.log(np.exp(logits_V).sum()) - logits_V[text[target]])
    assert found["loss"] == pytest.approx(np.mean(nats), rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(np.mean(nats) / math.log(2), rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--stride", "17"], "stride is 17; it must be"),
        (["--stride", "x"], "stride is 'x'; it must be a whole number"),
        (["--file", "nowhere.txt"], "nowhere.txt cannot be read"),
        (["--weights", "best"], "weights is 'best'; it must be one of average, last"),
        (["--fiel", "x"], "unknown flag 'fiel' (did you mean 'file'?)"),
    ],
)
def test_bad_input_is_one_sentence(run, capsys, arguments, words):
    assert main(["eval", str(run), *arguments]) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_a_report_for_people(run, capsys):
    assert main(["eval", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("bits per byte") for line in lines)


@pytest.mark.parametrize("text", ["é".encode(), b"\xe9\xe8\xe7", "éa".encode()])
def test_bytes_that_are_no_character_of_their_own_are_counted_as_bytes(run, capsys, tmp_path, text):
    (tmp_path / "text.txt").write_bytes(text)
    found = evaluated(capsys, str(run), "--file", str(tmp_path / "text.txt"))
    assert found["tokens"] == len(text) - 1
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2))

"""Mixtures: shares, epochs of their own, validation in proportion, one name for data and weights, refusals."""

import json
from fractions import Fraction

import numpy as np
import pytest

from jaxblock.cli import main
from jaxblock.training import loop
from jaxblock.training.config import DataConfig, ModelConfig, TrainConfig
from jaxblock.training.language_task import language_task
from jaxblock.training.mixed_batches import MixedBatches, MixedValidation
from jaxblock.training.mixture import Mixture, load_mixture, shares_of
from jaxblock.training.task import Score, evaluate
from jaxblock.training.token_files import DataError
from tests.small_corpus import everything, write_shard
from tests.small_runs import SHORT, rows, shared_programs, summary
from tests.small_tokenizers import FOX

WEIGHTS = {"books": 0.5, "code": 0.3, "web": 0.2}
SIZES = {"books": 3000, "code": 1200, "web": 9000}


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Three folders; a byte tells its source, and is 64 s + (a number that no two neighbours share)."""
    monkeypatch.chdir(tmp_path)
    for number, (name, size) in enumerate(SIZES.items()):
        (tmp_path / name).mkdir()
        text = bytes(64 * (number + 1) + np.random.default_rng(number).integers(0, 64, size).astype(np.uint8))
        (tmp_path / name / "text.txt").write_bytes(text)
    return tmp_path


def mix(weights=WEIGHTS, *, context: int = 8, validation_tokens: int = 200, **changes) -> Mixture:
    given = {"vocab_size": 256, "context": context, "validation_tokens": validation_tokens, **changes}
    return load_mixture(weights, **given)


def train(mixture: Mixture, *, batch: int = 10, seed: int = 0) -> MixedBatches:
    shares = [source.share for source in mixture.sources]
    return MixedBatches(mixture.train, shares, context=8, batch=batch, seed=seed, seams="joined")


def sources_of(batch) -> np.ndarray:
    """The number of each row's source; every token of a row is of it."""
    numbers_BT = batch.inputs_BT // 64 - 1
    assert (numbers_BT == numbers_BT[:, :1]).all()
    return numbers_BT[:, 0]


def test_each_source_has_its_share_of_the_windows(folders):
    batches = train(mix(), batch=16)
    counts = np.bincount(np.concatenate([sources_of(batches[step]) for step in range(64)]), minlength=3)
    assert counts.tolist() == [512, 307, 205]  # of 1,024


def test_each_source_is_gone_through_in_its_own_epochs(folders):
    mixture = mix()
    batches = train(mixture)
    read = [batches[step] for step in range(400)]
    targets = np.concatenate([batch.targets_BT for batch in read])
    numbers = np.concatenate([sources_of(batch) for batch in read])
    for source, stream in zip(mixture.sources, mixture.train, strict=True):
        own = targets[numbers == list(SIZES).index(source.name)]
        windows = (len(stream) - 1) // 8
        assert len(own) // windows == {"books": 5, "code": 8, "web": 0}[source.name]
        epochs = [own[first : first + windows] for first in range(0, len(own) - windows + 1, windows)]
        text = np.array(everything(stream))
        for epoch in epochs:
            starts = {find(text, window) % 8 for window in epoch[:40]}
            assert len(starts) == 1  # one place of the first window in an epoch
            assert len({tuple(window) for window in epoch}) == windows  # each window once
        assert len({epoch.tobytes() for epoch in epochs}) == len(epochs)  # in another order


def find(text: np.ndarray, window: np.ndarray) -> int:
    """The one place of a window in a text."""
    places = np.flatnonzero(
        (np.lib.stride_tricks.sliding_window_view(text, len(window)) == window).all(axis=1)
    )
    assert len(places) == 1
    return int(places[0])


def test_sources_of_one_size_have_orders_of_their_own(folders):
    (folders / "code" / "text.txt").write_bytes(
        bytes(byte + 64 for byte in (folders / "books" / "text.txt").read_bytes())
    )
    mixture = mix({"books": 1.0, "code": 1.0})
    read = [train(mixture)[step] for step in range(20)]
    windows = {0: [], 1: []}
    for batch in read:
        for source, row in zip(sources_of(batch), batch.inputs_BT, strict=True):
            windows[int(source)].append(tuple(row - 64 * source))
    assert windows[0][:50] != windows[1][:50]


def test_the_order_of_listing_and_the_place_of_the_folders_change_nothing(folders, monkeypatch):
    before = mix()
    backwards = mix(dict(reversed(WEIGHTS.items())))
    (folders / "moved").mkdir()
    for name in WEIGHTS:
        (folders / name).rename(folders / "moved" / name)
    monkeypatch.chdir(folders / "moved")
    moved = mix({f"./{name}": 10 * weight for name, weight in WEIGHTS.items()})
    assert backwards.fingerprint == moved.fingerprint == before.fingerprint
    for other in (backwards, moved):
        np.testing.assert_array_equal(train(other)[7].inputs_BT, train(before)[7].inputs_BT)


@pytest.mark.parametrize("change", ["weights", "content", "sources", "validation"])
def test_the_fingerprint_sees_every_change(folders, change):
    before = mix().fingerprint
    weights, validation_tokens = dict(WEIGHTS), 200
    if change == "weights":
        weights["web"] = 0.20001
    elif change == "sources":
        del weights["web"]
    elif change == "validation":
        validation_tokens = 100
    else:
        path = folders / "code" / "text.txt"
        path.write_bytes(b"?" + path.read_bytes()[1:])
    assert mix(weights, validation_tokens=validation_tokens).fingerprint != before
    assert len(before) == 16


def test_shares_are_the_weights_as_they_are_written():
    found = shares_of({"a": 0.5, "b": 0.3, "c": 0.2})
    assert list(found.values()) == [Fraction(1, 2), Fraction(3, 10), Fraction(1, 5)]
    assert shares_of({"a": 5.0, "b": 3.0, "c": 2.0}) == found
    assert Fraction(0.3) != Fraction(3, 10)  # the control: the float itself is another number
    with pytest.raises(ValueError, match=r"b has weight 1e-06 of 2 in all; it must be at least a millionth"):
        shares_of({"a": 2.0, "b": 1e-6})


def test_validation_is_in_proportion_and_held_out(folders):
    mixture = mix()
    targets = {source.name: len(source.corpus.validation) - 1 for source in mixture.sources}
    assert targets == {"books": 98, "code": 59, "web": 39}  # of 197 = 200 - 3, rounded down
    for source in mixture.sources:
        text = list((folders / source.name / "text.txt").read_bytes())
        held = everything(source.corpus.train) + everything(source.corpus.validation)
        assert held == text[: len(held)]
    # code can hold out a tenth, 120 bytes: the others have no more than goes with its share.
    scarce = mix(validation_tokens=10_000)
    assert [len(stream) - 1 for stream in scarce.validation] == [198, 119, 79]
    assert "Validation holds 399 tokens, in proportion to the shares." in scarce.notes


def test_no_validation_batch_holds_two_sources_and_every_target_counts_once(folders):
    mixture = mix()
    validation = MixedValidation(mixture.validation, context=8, batch=4, seams="joined")
    assert len(validation) == len(list(validation)) == sum(map(len, validation.parts))
    counted = []
    for numbers, stream in zip(validation.parts, mixture.validation, strict=True):
        own = [validation[number] for number in numbers]
        found = np.concatenate([batch.targets_BT[batch.valid_BT] for batch in own]).tolist()
        assert found == everything(stream)[1:]
        counted += found
    assert len(counted) == sum(len(stream) - 1 for stream in mixture.validation)
    for number in (-1, len(validation)):
        with pytest.raises(IndexError, match=f"batch {number} of {len(validation)}"):
            validation[number]


def test_each_sources_loss_is_that_of_its_batches_and_the_loss_their_mean():
    nats, weight = [1.0, 2.0, 9.0], [2.0, 2.0, 3.0]
    batches = range(3)
    found = evaluate(
        lambda _, b: Score(np.float32(nats[b]), np.float32(weight[b]), {"hits": np.float32(1.0)}),  # pyright: ignore
        {},
        batches,
        parts={"books": range(2), "web": range(2, 3)},
    )
    assert found == {"loss": 12 / 7, "hits": 3 / 7, "loss/books": 3 / 4, "loss/web": 3.0}


def test_one_source_alone_is_what_the_path_gives(folders):
    model = ModelConfig(vocab_size=256, context=8, depth=1, width=8, heads=2)
    by_path, by_mixture = (
        language_task(TrainConfig(model=model, data=data))
        for data in (
            DataConfig(path="books", validation_tokens=50),
            DataConfig(mixture={"books": 3.0}, validation_tokens=50),
        )
    )
    assert by_mixture.parts == {}
    np.testing.assert_array_equal(by_mixture.train[3].inputs_BT, by_path.train[3].inputs_BT)


# --- refusals


def test_what_cannot_be_mixed_is_one_sentence(folders):
    (folders / "link").symlink_to(folders / "books")
    (folders / "books" / "more").mkdir()
    (folders / "books" / "more" / "x.txt").write_bytes(b"x" * 500)
    (folders / "tiny.txt").write_bytes(b"x" * 30)
    cases = [
        ({"books": 1.0, "link": 1.0}, {}, "names books and link, which are the same"),
        ({"books/more": 1.0, "books": 1.0}, {}, "names books/more and books, of which one lies in the other"),
        ({"books": 1.0, "nowhere": 1.0}, {}, r"nowhere does not exist"),
        ({"books": 1.0, "tiny.txt": 1.0}, {"context": 30}, r"tiny\.txt: 30 bytes .* context \+ 1 = 31"),
        ({"books": 1.0, "tiny.txt": 1.0}, {"separator": 3}, r"data\.separator is 3"),
        (
            {"books": 0.01, "tiny.txt": 1.0},
            {},
            r"books has a share of 0\.00990.* of the 2 validation targets",
        ),
        ({"books": 1.0, "web": 1.0}, {"validation_tokens": 2}, "not one of the 0 validation targets"),
    ]
    for weights, given, reason in cases:
        with pytest.raises(ValueError, match=reason) as caught:
            mix(weights, **given)
        assert "\n" not in str(caught.value)


def test_tokenizers_that_are_known_must_agree(folders, capsys):
    pytest.importorskip("tokenizers")
    (folders / "fox.txt").write_text(FOX * 3, encoding="utf-8")
    for name, tokenizer in (("books", "bytes"), ("code", "bytes"), ("fox.txt", "bpe(vocab_size=270)")):
        assert main(["tokenize", name, "--out", f"{name}_ids", "--tokenizer", tokenizer]) == 0
    mixture = mix({"books_ids": 1.0, "code_ids": 2.0, "web": 1.0}, vocab_size=257, validation_tokens=12)
    assert mixture.tokenizer is not None
    assert mixture.bytes_per_token == 1.0
    with pytest.raises(ValueError, match=r"books_ids and fox\.txt_ids are of different tokenizers"):
        mix({"books_ids": 1.0, "fox.txt_ids": 2.0}, vocab_size=270)
    (folders / "plain").mkdir()
    write_shard(folders / "plain" / "x.bin", np.arange(1000) % 250)
    mixed = mix({"books_ids": 1.0, "plain": 1.0}, vocab_size=257)
    assert any("Shards without a tokens.json are taken to hold ids" in note for note in mixed.notes)
    assert mixed.bytes_per_token is None
    capsys.readouterr()


def test_a_path_beside_a_mixture_and_a_classifier_with_one_are_refused(folders, capsys):
    mixture = ["--data.mixture", "{ books = 1.0, web = 2.0 }"]
    assert main(["train", *SHORT, "--data.path", "books", *mixture, "--run.dir", "run"]) == 2
    assert (
        "data.path is 'books' and data.mixture names others; one of them must be left out"
        in capsys.readouterr().err
    )
    task = ["--run.task", 'classifier(pooling="mean")', "--data.seams", "joined"]
    assert main(["train", *SHORT, *mixture, *task, "--run.dir", "run"]) == 2
    assert "data.mixture is {'books': 1.0, 'web': 2.0}; a classifier's rows" in capsys.readouterr().err
    assert not (folders / "run").exists()


# --- runs


@pytest.fixture(scope="module", autouse=True)
def programs(tmp_path_factory):
    with shared_programs(tmp_path_factory.mktemp("programs")):
        yield


def test_a_run_reports_each_sources_loss_and_goes_on_with_the_same_mixture_alone(folders, capsys):
    flags = ["--data.mixture", "{ books = 0.5, code = 0.3, web = 0.2 }", "--data.validation_tokens", "200"]
    assert main(["train", *SHORT, *flags, "--run.dir", "run", "--run.steps", "4"]) == 0
    found = [row for row in rows(folders / "run") if "val_loss" in row][-1]
    parts = [found[f"val_loss/{name}"] for name in WEIGHTS]
    assert found["val_loss"] == pytest.approx(np.average(parts, weights=[98, 59, 39]), rel=1e-6)
    assert summary(folders / "run")["val_loss/books"] == found["val_loss/books"]
    assert len(set(parts)) == 3
    capsys.readouterr()
    again = ["train", "--resume", "run"]
    (folders / "run" / "summary.json").unlink()
    assert main([*again, "--data.mixture", "{ books = 0.5, code = 0.2, web = 0.3 }"]) == 2
    assert "data.mixture" in capsys.readouterr().err
    (folders / "code" / "text.txt").write_bytes((folders / "code" / "text.txt").read_bytes()[::-1])
    assert main(again) == 2
    assert "started on data with fingerprint" in capsys.readouterr().err


@pytest.mark.full
def test_eval_scores_each_source_on_its_own(folders, capsys):
    flags = ["--data.mixture", "{ books = 0.5, code = 0.3, web = 0.2 }", "--data.validation_tokens", "200"]
    assert main(["train", *SHORT, *flags, "--run.dir", "run", "--run.steps", "4"]) == 0
    capsys.readouterr()
    assert main(["eval", "run", "--stride", "16", "--json"]) == 0
    scored = json.loads(capsys.readouterr().out)
    assert scored["tokens"] == 98 + 59 + 39
    assert scored["loss"] == pytest.approx(summary(folders / "run")["val_loss"], rel=1e-5)
    assert scored["bits_per_byte"] == pytest.approx(scored["loss"] / np.log(2))


def test_a_shard_that_is_found_bad_while_training_ends_the_run_with_a_sentence(folders, capsys, monkeypatch):
    def fail(prepared, folder):
        raise DataError("x.bin cannot be read: No such file or directory")

    monkeypatch.setattr(loop, "train", fail)
    assert main(["train", *SHORT, "--data.path", "books", "--run.dir", "run"]) == 1
    said = capsys.readouterr().err
    assert said == (
        "jaxblock: x.bin cannot be read: No such file or directory; continue with: jaxblock train --resume run\n"
    )

"""Bad input of every kind ends in exit code 2 and one printable line, and leaves nothing behind."""

import json
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxblock.choices import parse_choice
from jaxblock.cli import main
from jaxblock.cli.arguments import one_line, refuse
from jaxblock.contracts import check_file_name
from jaxblock.parallel import memory
from jaxblock.training import loop
from jaxblock.training.baseline import MOST_VOCAB
from jaxblock.training.labelled import load_labelled
from jaxblock.training.run_folder import RunError, RunFolder
from jaxblock.training.tokenizer_library import reported
from jaxblock.training.tokenizers import BYTES, read_tokenizer_file, tokenizer_record
from tests.small_runs import SHORT, write_text
from tests.small_tokenizers import byte_pairs


def refused(capsys, *arguments: str) -> str:
    """Run a command that is refused; return its sentence."""
    before = sorted(Path.cwd().rglob("*"))
    capsys.readouterr()
    assert main(arguments) == 2
    told = capsys.readouterr().err
    assert len(told.splitlines()) == 1
    assert told.rstrip("\n").isprintable()
    assert sorted(Path.cwd().rglob("*")) == before
    return told


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- the line


def test_a_refusal_is_one_printable_line(capsys):
    assert one_line("a é 😀 b") == "a é 😀 b"
    assert one_line("a\nb\x1b[31m\u202e\ud800") == "a\\nb\\x1b[31m\\u202e\\ud800"
    long = one_line("x" * 10_000 + "; it must be short")
    assert len(long) < 1300
    assert long.endswith("; it must be short")
    assert refuse(ValueError("a\nb")) == 2
    assert capsys.readouterr().err == "jaxblock: a\\nb\n"
    assert not "a\nb".isprintable()  # control


# --- configs


@pytest.mark.parametrize("text", ["f(x='\\d')", "f(x=1if 1else 2)", "f(x=0x1for x in y)"])
def test_what_python_warns_about_is_refused_without_a_warning(text):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with pytest.raises(ValueError, match="must read"):
            parse_choice("model.residual", text)
    assert not seen
    assert parse_choice("model.residual", "f(x='d')").options == {"x": "d"}  # control


@pytest.mark.parametrize("number", ["0x" + "f" * 5000, "9" * 5000])
def test_a_number_that_has_no_text_is_refused_by_its_field(here, capsys, number):
    assert "model.residual" in refused(capsys, "train", f"--model.residual=pre_norm(x={number})")
    Path("x.toml").write_text(f"[run]\nsteps = {number}\n")
    assert "run.steps" in refused(capsys, "train", "x.toml") or "x.toml" in refused(capsys, "train", "x.toml")
    assert "run.steps holds 9223372036854775808" in refused(capsys, "train", f"--run.steps={2**63}")
    assert "at most 2147483647" in refused(
        capsys, "train", f"--run.steps={2**63 - 1}"
    )  # control: TOML has it


def test_text_that_is_not_unicode_is_refused_by_its_field(here, capsys):
    assert "data.path is 'a\\udcff'" in refused(capsys, "train", "--data.path=a\udcff")
    assert "sample.prompt is" in refused(capsys, "train", "--sample.prompt=\ud800")


@pytest.mark.parametrize("depth", [9, 90, 400, 20_000])
def test_deep_nesting_is_refused(here, capsys, depth):
    text = "[" * depth + "]" * depth
    Path("x.toml").write_text(f"[run]\nsteps = {text}\n")
    refused(capsys, "train", "x.toml")
    assert "run.steps" in refused(capsys, "train", f"--run.steps={text}")


def test_a_file_name_can_be_one():
    for name in ("", "a\0b", "\ud800"):
        with pytest.raises(ValueError, match=r"data\.path is"):
            check_file_name("data.path", name)
    check_file_name("data.path", "../é b")  # control


def test_a_run_that_cannot_be_named_is_refused(here, capsys):
    assert "not a run" in refused(capsys, "train", "--resume", "a" * 5000)
    assert "run.dir" in refused(capsys, "train", "--run.dir", "a" * 5000)
    assert "run.dir" in refused(
        capsys, "train", "--data.path", str(write_text(here / "t")), "--run.dir", "a" * 250
    )


def test_a_batch_that_no_memory_holds_is_refused(here, capsys):
    path = str(write_text(here / "text.jsonl"))
    told = refused(capsys, "train", *SHORT, "--data.path", path, "--run.dir=run", f"--data.batch={2**31 - 1}")
    assert "data.batch is 2147483647 and model.context is 16" in told


def test_a_vocabulary_no_trigram_is_counted_for_is_refused_before_the_folder(here, capsys):
    path = str(write_text(here / "text.jsonl"))
    flags = [*SHORT, "--data.path", path, "--run.dir=run", f"--model.vocab_size={MOST_VOCAB + 1}"]
    assert f"model.vocab_size is {MOST_VOCAB + 1}" in refused(capsys, "train", *flags)


# --- data


def token_folder(folder: Path, ids) -> dict:
    """Write a folder as `jaxblock tokenize` does; return what tokens.json says."""
    folder.mkdir()
    counts = {}
    for split in ("train", "val"):
        np.asarray(ids, "<u2").tofile(folder / f"{split}_000000.bin")
        shards = [{"name": f"{split}_000000.bin", "tokens": len(ids)}]
        counts[split] = {"shards": shards, "tokens": len(ids), "bytes": len(ids)}
    record = {"splits": counts, "tokenizer": tokenizer_record(BYTES)}
    (folder / "tokens.json").write_text(json.dumps(record))
    return record


def test_a_run_that_is_refused_before_its_first_step_leaves_no_folder(here, capsys):
    """Ids of a token folder are read first by the baseline, when the run's folder is there."""
    token_folder(here / "tokens", [1, 2, 3] * 40 + [999])
    told = main(["train", *SHORT, "--data.path=tokens", "--run.dir=new/run"])
    assert told == 2
    assert "token id 999" in capsys.readouterr().err
    assert not (here / "new").exists()


def test_a_step_that_does_not_fit_is_refused_when_it_is_compiled(here, capsys, monkeypatch):
    """Exact, from the compiled program; the control has room, and trains."""
    text, told = write_text(here / "fox.jsonl"), []
    with monkeypatch.context() as patch:
        patch.setattr(memory, "device_bytes", lambda: told.append(1) or 1000)
        assert main(["train", *SHORT, "--data.path", str(text), "--run.dir=new/run"]) == 2
    assert told
    needed = capsys.readouterr().err.splitlines()[-1]
    assert needed.startswith("jaxblock: the compiled step needs ")
    assert "execution.remat" in needed
    assert not (here / "new").exists()
    monkeypatch.setattr(memory, "device_bytes", lambda: 2**40)
    assert main(["train", *SHORT, "--data.path", str(text), "--run.dir=new/run", "--run.steps=1"]) == 0


def test_memory_that_runs_out_in_a_step_is_said(here, capsys, monkeypatch):
    def no_room(*_):
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes."
        )

    text = write_text(here / "fox.jsonl")
    monkeypatch.setattr(loop._Loop, "_flush", no_room)
    assert main(["train", *SHORT, "--data.path", str(text), "--run.dir=run"]) == 1
    assert "memory ran out: RESOURCE_EXHAUSTED" in capsys.readouterr().err
    assert (here / "run" / "config.toml").exists()


def test_control_a_run_that_has_begun_keeps_its_folder(tmp_path):
    from jaxblock.training.config import TrainConfig

    folder = RunFolder(tmp_path / "new" / "run")
    folder.create(TrainConfig())
    folder.append_metrics([{"step": 1, "loss": 1.0}])
    folder.discard_unstarted()
    assert folder.path.exists()
    other = RunFolder(tmp_path / "new" / "other")
    other.create(TrainConfig())
    RunFolder(other.path).discard_unstarted()  # made by another
    assert other.path.exists()
    other.discard_unstarted()
    assert not other.path.exists()
    assert folder.path.exists()
    assert issubclass(RunError, ValueError)


@pytest.mark.parametrize(
    "damage",
    [
        lambda r: r["tokenizer"].update(vocab_size="9"),
        lambda r: r["tokenizer"].update(vocab_size=10**400),
        lambda r: r["tokenizer"].update(end_of_text=[1]),
        lambda r: r["tokenizer"].update(end_of_text=256),
        lambda r: r["tokenizer"].update(file="../x"),
        lambda r: r["tokenizer"].update(name=None),
        lambda r: r["splits"]["val"].update(bytes=10**400),
        lambda r: r["splits"]["val"].update(bytes=float("nan")),
        lambda r: r["splits"]["val"].update(shards=[{"name": "a", "tokens": True}]),
        lambda r: r["splits"]["val"].update(shards=r["splits"]["train"]["shards"]),
        lambda r: r["splits"]["val"].update(shards=5),
        lambda r: r.clear(),
    ],
)
def test_a_tokens_json_of_another_form_is_refused(here, capsys, damage):
    record = token_folder(here / "tokens", range(100))
    damage(record)
    (here / "tokens" / "tokens.json").write_text(json.dumps(record))
    told = refused(capsys, "train", *SHORT, "--data.path=tokens", "--run.dir=run")
    assert "tokens.json is not what `jaxblock tokenize` writes" in told


def test_deep_json_is_refused(here, capsys):
    token_folder(here / "tokens", range(100))
    deep = "[" * 100_000
    (here / "tokens" / "tokens.json").write_text(deep)
    assert "tokens.json" in refused(capsys, "train", *SHORT, "--data.path=tokens", "--run.dir=run")
    (here / "x.jsonl").write_text(deep)
    for task in ("language_model", "classifier"):
        flags = [*SHORT, "--data.seams=joined", "--data.path=x.jsonl", f"--run.task={task}"]
        assert "x.jsonl" in refused(capsys, "train", *flags, "--run.dir=run")


@pytest.mark.parametrize(
    "end", ["1.5", "[]", '{"content": 5}', '{"content": []}', "{}", "[" * 100_000, '"\\ud800"']
)
def test_an_end_of_text_of_another_form_is_refused(tmp_path, end):
    (tmp_path / "tokenizer.json").write_text(byte_pairs().file_text(), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(f'{{"eos_token": {end}}}')
    with pytest.raises(ValueError, match=r"tokenizer_config\.json"):
        read_tokenizer_file(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|endoftext|>"}}')
    assert read_tokenizer_file(tmp_path / "tokenizer.json").end_of_text == 0  # control


class PanicException(BaseException):
    """As a Rust library's."""


def test_a_panic_of_the_tokenizer_library_is_an_error():
    with pytest.raises(ValueError, match="x: index out of bounds"), reported("x"):
        raise PanicException("index out of bounds")
    with pytest.raises(KeyboardInterrupt), reported("x"):  # control
        raise KeyboardInterrupt


def test_a_label_that_is_not_unicode_is_refused(tmp_path):
    lines = [json.dumps({"text": f"text {n}", "label": "ab"[n % 2]}) for n in range(20)]
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    assert load_labelled(tmp_path / "x.jsonl", context=8).names == ("a", "b")  # control
    (tmp_path / "x.jsonl").write_text("\n".join([*lines, '{"text": "a", "label": "\\ud800"}']))
    with pytest.raises(ValueError, match="line 21, has a lone surrogate"):
        load_labelled(tmp_path / "x.jsonl", context=8)

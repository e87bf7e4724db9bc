"""Bad input, through the command: exit code 2, one sentence on stderr, nothing on stdout, nothing written."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxblock.cli import main
from jaxblock.training.config import TrainConfig
from jaxblock.training.config_file import write_config
from jaxblock.training.run_folder import RunFolder
from tests.small_corpus import write_shard

ROOT = Path(__file__).resolve().parents[1]
TEXT = b"the quick brown fox jumps over the lazy dog. " * 60

FILES: dict[str, bytes] = {
    "fox.txt": TEXT,
    "ten.txt": b"0123456789",
    "empty.txt": b"",
    "key.toml": b"[optimizer]\nlearning_rte = 1e-3\n",
    "nested.toml": b"[optimizer]\nweigth_decay = 0.1\n",
    "top.toml": b"learning_rte = 1e-3\n",
    "section.toml": b"[modle]\ndepth = 3\n",
    "misplaced.toml": b"[run]\ndepth = 3\n",
    "float.toml": b"[run]\nsteps = 3.0\n",
    "bool.toml": b"[run]\nsteps = true\n",
    "text.toml": b'[run]\nsteps = "3"\n',
    "date.toml": b"[run]\nname = 1979-05-27\n",
    "part.toml": b"[model]\ndepth = 3\n",
    "broken.toml": b"[run\n",
    "deep.toml": b"a = " + b"[" * 5000 + b"]" * 5000,
    "latin.toml": b'[run]\nname = "caf\xe9"\n',
}

# Arguments after `train`, and what the sentence must hold: field, value, what is allowed.
SENTENCES: dict[str, tuple[list[str], str]] = {
    # flags
    "unknown flag": (["--model.dpth", "3"], r"unknown flag 'model.dpth' \(did you mean 'model.depth'\?\)"),
    "b111 flag": (["--learning_rte=1e-3"], r"'learning_rte' \(did you mean 'optimizer.learning_rate'\?\)"),
    "b111 nested flag": (["--optimizer.weigth-decay", "0.1"], r"'optimizer.weigth_decay' .*'optimizer.weight_decay'"),
    "flag in the wrong section": (["--run.depth", "3"], r"'run.depth' \(did you mean 'model.depth'\?\)"),
    "flag without a value": (["--run.steps"], r"flag --run.steps needs a value; write --run.steps=VALUE"),
    "flag before a flag": (["--run.steps", "--json"], r"flag --run.steps needs a value"),
    "switch with a value": (["--json=yes"], r"flag --json takes no value"),
    "short flag": (["-s", "3"], r"unexpected argument '-s'"),
    "two files": (["key.toml", "top.toml"], r"unexpected argument 'top.toml'"),
    "huge option": (["--model.positions", f"rope(base=1{'0' * 400})"], r"model.positions: base is 10.*finite number"),
    "empty path": (["--data.path="], r"data.path is empty"),
    "impossible folder": (["--run.dir", "/proc/x"], r"run.dir is '/proc/x'"),
    "nested TOML": (["deep.toml"], r"config file 'deep.toml' is not TOML"),
    # files
    "missing file": (["tpo.toml"], r"config file 'tpo.toml' does not exist \(did you mean 'top.toml'\?\)"),
    "a folder as file": (["."], r"config file '.' cannot be read: .*directory"),
    "no TOML": (["broken.toml"], r"config file 'broken.toml' is not TOML: .*line 1"),
    "no UTF-8": (["latin.toml"], r"config file 'latin.toml' cannot be read: .*utf-8"),
    "b111 key": (["key.toml"], r"'optimizer.learning_rte' \(did you mean 'optimizer.learning_rate'\?\)"),
    "b111 nested key": (["nested.toml"], r"'optimizer.weigth_decay' \(did you mean 'optimizer.weight_decay'\?\)"),
    "b111 key without section": (["top.toml"], r"'learning_rte' \(did you mean 'optimizer.learning_rate'\?\)"),
    "b111 wrong section": (["misplaced.toml"], r"'run.depth' \(did you mean 'model.depth'\?\)"),
    "unknown section": (["section.toml"], r"unknown config section 'modle'; sections: run, .*'model'\?\)"),
    "missing key": (["part.toml"], r"model.vocab_size is missing"),
    # types
    "float for int in a file": (["float.toml"], r"run.steps is 3.0; it must be a valid integer"),
    "bool for int in a file": (["bool.toml"], r"run.steps is True; it must be a valid integer"),
    "text for int in a file": (["text.toml"], r"run.steps is '3'; it must be a valid integer"),
    "date for text": (["date.toml"], r"1979-05-27, a date or time"),
    "float for int": (["--run.steps", "3.0"], r"run.steps is 3.0; it must be a valid integer"),
    "word for int": (["--run.steps", "many"], r"run.steps is 'many'; it must be a valid integer"),
    "none for int": (["--run.steps", "none"], r"run.steps is 'none'; it must be a valid integer"),
    "word for bool": (["--model.bias", "yes"], r"model.bias is 'yes'; it must be a valid boolean"),
    "text for number": (["--optimizer.clip", '"1.0"'], r"optimizer.clip is '1.0'; it must be a valid number"),
    # values
    "no steps": (["--run.steps", "0"], r"run.steps is 0; it must be a whole number of at least 1"),
    "negative steps": (["--run.steps", "-3"], r"run.steps is -3; it must be .* at least 1"),
    "negative depth": (["--model.depth=-2"], r"model.depth is -2; it must be .* at least 1"),
    "negative batch": (["--data.batch", "-1"], r"data.batch is -1; it must be .* at least 1"),
    "width and heads": (["--model.width", "130"], r"width is 130 and model.heads is 4; heads must divide width"),
    "b23 kv_heads": (["--model.kv_heads", "3"], r"heads is 4 and model.kv_heads is 3; kv_heads must divide heads"),
    "unknown residual": (["--model.residual", "prenorm"], r"residual is 'prenorm'; .*branch_norm.*'pre_norm'\?\)"),
    "unknown option": (["--model.residual", "pre_norm(scale=2)"], r"'pre_norm' has no option 'scale'; its options: "),
    "code as residual": (["--model.residual", "__import__('os')"], r"model.residual is .* literal options"),
    "unknown schedule": (["--optimizer.schedule", "cosin"], r"schedule is 'cosin'; .*constant, .*'cosine'\?\)"),
    "b50 negative clip": (["--optimizer.clip", "-1"], r"optimizer.clip is -1.0; it must be .* at least 0"),
    "b50 nan clip": (["--optimizer.clip", "nan"], r"optimizer.clip is nan; it must be a finite number"),
    "learning rate beyond floats": (["--optimizer.learning_rate", "1e400"], r"learning_rate is inf; .* finite"),
    "empty prompt": (["--sample.prompt", ""], r"sample.prompt is empty"),
    # data
    "missing data": (["--data.path", "fix.txt"], r"data.path fix.txt does not exist \(did you mean 'fox.txt'\?\)"),
    "b85 empty data": (["--data.path", "empty.txt"], r"data.path empty.txt is empty"),
    "b76 short data": (["--data.path", "ten.txt"], r"train split of ten.txt holds 9 of 10 .* context \+ 1 = 17"),
    "b76 long context": (["--model.context", "300"], r"validation split of fox.txt .* context \+ 1 = 301"),
    "token id": (["--data.path", "ids.bin", "--model.vocab_size", "50"], r"id 50 at offset 50 .*vocab_size is 50"),
    "bytes without ids": (["--model.vocab_size", "255"], r"vocab_size is 255; it must be at least 256 for the bytes"),
    "prompt for shards": (["--data.path", "ids.bin", "--sample.prompt", "fox"], r"the prompt is 'fox'; .*token ids"),
    "prompt of bad ids": (["--data.path", "ids.bin", "--sample.prompt", "1 300"], r"token id 300; .* below .*256"),
    "cudnn on a CPU": (["--execution.attention", "cudnn", "--model.dtype", "bfloat16"], r"'cudnn' needs an NVIDIA GPU"),
    "cudnn in float32": (["--execution.attention", "cudnn"], r"'cudnn' needs bfloat16 or float16, not float32.*xla"),
    # folders
    "existing run": (["--run.dir", "there"], r"run.dir is 'there', which exists; .*--resume there"),
    "a file as run": (["--run.dir", "fox.txt/run"], r"run.dir is 'fox.txt/run', but .* is not a folder"),
    "resume nothing": (["--resume", "nowhere"], r"'nowhere' is not a run: it has no config.toml"),
}  # fmt: skip

OTHERS: dict[str, tuple[list[str], str]] = {
    "unknown command": (["trian"], r"command is 'trian'; it must be one of check, count, .*'train'"),
    "sample without a run": (["sample"], r"RUN is missing"),
    "sample of nothing": (["sample", "nowhere", "--prompt", "x"], r"'nowhere' is not a run"),
    "sample of no run": (["sample", "there", "--prompt", "x"], r"'there' is not a run"),
    "sample of a run not begun": (["sample", "begun", "--prompt", "x"], r"'begun' has not started"),
    "sample with a bad flag": (["sample", "begun", "--promt", "x"], r"'promt' \(did you mean 'prompt'\?\)"),
    "sample with two runs": (["sample", "begun", "there"], r"unexpected argument 'there'"),
    "sample with a bad number": (["sample", "begun", "--top_k", "x"], r"top_k is 'x'; it must be a valid integer"),
    "sample with a bad seed": (["sample", "begun", "--seed", "x"], r"seed is 'x'; it must be a whole number"),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A working folder with the files that the sentences speak of."""
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    write_shard(tmp_path / "ids.bin", np.arange(400) % 51)
    (tmp_path / "there").mkdir()
    (tmp_path / "begun").mkdir()
    write_config(TrainConfig(), tmp_path / "begun" / "config.toml")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def snapshot(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def assert_refused(arguments: list[str], words: str, folder: Path, capsys) -> None:
    before = snapshot(folder)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert re.fullmatch(rf"jaxblock: .*({words}).*\n", captured.err), captured.err
    assert captured.out == ""
    assert snapshot(folder) == before


@pytest.mark.parametrize("case", SENTENCES)
def test_bad_training_input_is_one_sentence(case, folder, capsys):
    """The case's own flags stand last, so that they win."""
    flags, words = SENTENCES[case]
    files = [flag for flag in flags if flag.endswith(".toml") or flag == "."]
    rest = [flag for flag in flags if flag not in files]
    good = (
        [] if "--resume" in rest else ["--data.path", "fox.txt", "--model.context", "16", "--run.dir", "new"]
    )
    assert_refused(["train", *files, *good, *rest], words, folder, capsys)


@pytest.mark.parametrize("case", OTHERS)
def test_other_bad_input_is_one_sentence(case, folder, capsys):
    arguments, words = OTHERS[case]
    assert_refused(arguments, words, folder, capsys)


def test_data_that_may_not_be_read_are_a_sentence(folder, capsys):
    (folder / "fox.txt").chmod(0)
    if os.access(folder / "fox.txt", os.R_OK):
        pytest.skip("this user (root) may read every file, whatever its mode")
    assert main(["train", "--data.path", "fox.txt", "--run.dir", "new"]) == 2
    assert re.fullmatch(r"jaxblock: fox.txt cannot be read: Permission denied\n", capsys.readouterr().err)


def test_a_folder_that_may_not_be_written_to_is_a_sentence(folder, capsys, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    flags = ["--data.path", "fox.txt", "--run.dir", "new/run"]
    assert_refused(
        ["train", *flags], r"run.dir is 'new/run', but .* is not a folder that can be", folder, capsys
    )


def test_the_same_flags_without_a_fault_pass_every_check(folder):
    """The control: what is refused above is refused for what each case adds."""
    from jaxblock.training.config_file import build_config
    from jaxblock.training.corpus import load_corpus

    config = build_config({}, {"data.path": "fox.txt", "model.context": 16, "run.dir": "new"})
    assert RunFolder.check_new(config).path == Path("new")
    assert len(load_corpus(Path("fox.txt"), vocab_size=256, context=16).train) == len(TEXT) * 9 // 10


def test_resume_needs_a_summary_that_is_not_done(folder, capsys):
    (folder / "begun" / "summary.json").write_text(json.dumps({"status": "done"}))
    assert_refused(
        ["train", "--resume", "begun"], "'begun' is done; there is nothing to resume", folder, capsys
    )
    depth = TrainConfig().model.depth
    words = rf"cannot be resumed with another config; .*: model.depth: 6, {depth}; model.window: \(3,\), \(\)"
    flags = ["--model.depth", "6", "--model.window", "[3]"]
    assert_refused(["train", "--resume", "begun", *flags], words, folder, capsys)


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_the_command_alone_says_what_there_is(arguments, capsys):
    assert main(arguments) == 0
    page = capsys.readouterr().out
    assert "jaxblock train" in page
    assert "jaxblock sample" in page


@pytest.mark.parametrize("arguments", [["train", "-h"], ["sample", "--help"], ["sample", "run", "-h"]])
def test_help_is_a_page_on_stdout(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 0
    captured = capsys.readouterr()
    assert f"usage: jaxblock {arguments[0]}" in captured.out
    assert captured.err == ""


def test_the_script_exits_with_2_and_no_traceback(folder):
    before = snapshot(folder)
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), "--model.dpth", "3"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "jaxblock: unknown flag 'model.dpth' (did you mean 'model.depth'?)\n"
    assert snapshot(folder) == before

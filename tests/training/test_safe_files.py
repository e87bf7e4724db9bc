"""Nothing that is read is unpickled or executed, and no name in it leads out of its folder."""

import ast
import contextlib
import json
import os
import pickle
import sys
import zlib
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jaxblock
from jaxblock.choices import parse_choice
from jaxblock.cli import main
from jaxblock.sweeps.states import state_from
from jaxblock.training.checkpoint import CheckpointDamaged, Checkpoints
from jaxblock.training.config import DataConfig, InitConfig, RunConfig
from jaxblock.training.files import replace_text
from jaxblock.training.mapped_tokens import ShardMaps
from jaxblock.training.safe_files import is_inside, path_inside, read_utf8_file
from jaxblock.training.shards import map_shard, read_token_folder
from jaxblock.training.tokenizers import BYTES, restore_tokenizer, tokenizer_record
from tests.small_tokenizers import byte_pairs

PACKAGE = Path(jaxblock.__file__).parent
UNPICKLERS = {
    "pickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "joblib",
    "yaml",
    "torch",
    "tarfile",
    "runpy",
}
CALLS = {"eval", "exec", "compile", "__import__"}
METHODS = {"import_module", "system", "popen", "extractall", "unpack_archive", "spec_from_file_location"}
IMPORTS = {  # modules by a name that is no literal: the package's own table, a literal one of optional packages
    "__init__.py": 2,
    "training/watch/__init__.py": 1,
}


# --- the source


def dangers(source: str) -> list[str]:
    """What in a source could run, unpickle or unpack what it reads."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found += [f"import {name}" for name in modules if name.partition(".")[0] in UNPICKLERS]
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            literal = bool(node.args) and isinstance(node.args[0], ast.Constant)
            words = {word.arg: getattr(word.value, "value", None) for word in node.keywords}
            is_numpy = isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", "") == "np"
            is_call = isinstance(node.func, ast.Name) and name in CALLS
            if is_call or (name in METHODS and not (name == "import_module" and literal)):
                found.append(name)
            elif words.get("allow_pickle", False) is not False or words.get("shell", False) is not False:
                found.append(f"{name}(allow_pickle or shell)")
            elif is_numpy and name == "load" and "allow_pickle" not in words:
                found.append("np.load without allow_pickle=False")
    return found


def test_the_source_runs_and_unpickles_nothing():
    found = {
        path.relative_to(PACKAGE).as_posix(): dangers(path.read_text()) for path in PACKAGE.rglob("*.py")
    }
    assert {name: names for name, names in found.items() if names and name not in IMPORTS} == {}
    assert {name: found[name] for name in IMPORTS} == {n: ["import_module"] * c for n, c in IMPORTS.items()}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from torch.serialization import load",
        "import yaml.loader",
        "eval(text)",
        "x = exec(text)",
        "compile(text, '', 'eval')",
        "__import__(name)",
        "importlib.import_module(name)",
        "np.load(path, allow_pickle=True)",
        "np.load(path, allow_pickle=flag)",
        "np.load(path)",
        "os.system(text)",
        "subprocess.run(text, shell=True)",
        "archive.extractall(folder)",
    ],
)
def test_control_the_walker_sees(source):
    assert dangers(source)
    assert not dangers(
        "np.load(path, allow_pickle=False); re.compile(text); ast.literal_eval(text); model.eval(x)"
    )


# --- what is executed


CODE = "__import__('os').mkdir('executed')"


@pytest.mark.parametrize(
    "text", [CODE, f"pre_norm(x={CODE})", f"pre_norm(**{CODE})", f"pre_norm(x=[{CODE}])"]
)
def test_the_text_of_an_option_is_not_executed(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="must read"):
        parse_choice("model.residual", text)
    (tmp_path / "x.toml").write_text(f'[run]\ntask = "{text}"\n')
    assert main(["train", "x.toml"]) == 2
    assert main(["train", f"--model.residual={text}"]) == 2
    assert not Path("executed").exists()
    with contextlib.suppress(TypeError):  # control: it would do something
        eval(text, {"pre_norm": dict})
    assert Path("executed").exists()


class Planted:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_pickled_array_is_not_read(tmp_path):
    objects = np.empty(1, object)
    objects[0] = Planted(tmp_path / "executed")
    np.savez(tmp_path / "state.npz", objects)
    assert state_from((tmp_path / "state.npz").read_bytes(), [jnp.zeros(1)]) is None
    assert not (tmp_path / "executed").exists()
    with np.load(tmp_path / "state.npz", allow_pickle=True) as arrays:  # control
        arrays["arr_0"]
    assert (tmp_path / "executed").exists()


UNPICKLED: list[str] = []
"""Classes that were looked up by an unpickler since an audit hook, which stays for the process, was added."""


def test_a_checkpoint_is_read_without_an_unpickler(tmp_path):
    def hook(event, arguments):
        if event == "pickle.find_class":
            UNPICKLED.append(str(arguments))

    sys.addaudithook(hook)
    like = {"params": {"a": jnp.arange(3.0)}}
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(1, like, facts={})
    del UNPICKLED[:]
    assert checkpoints.load(1, like)["params"]["a"].tolist() == [0, 1, 2]
    assert UNPICKLED == []
    pickle.loads(pickle.dumps(Path("x")))  # control
    assert UNPICKLED


# --- names that a file gives


def test_a_name_stays_in_its_folder(tmp_path):
    (tmp_path / "outside").write_text("secret")
    folder = tmp_path / "folder"
    (folder / "deep").mkdir(parents=True)
    (folder / "inside").write_text("x")
    (folder / "deep" / "inside").write_text("x")
    (folder / "out").symlink_to("../outside")
    (folder / "in").symlink_to("inside")
    (folder / "loop").symlink_to("loop")
    os.mkfifo(folder / "pipe")
    for name in ("inside", "in"):
        assert path_inside(folder, name, where="x").read_text() == "x"
    paths = [
        "../outside",
        str(tmp_path / "outside"),
        "deep/inside",
        "a\0b",
        "",
        ".",
        "..",
        "deep\\x",
        5,
        None,
    ]
    for name in paths:
        with pytest.raises(ValueError, match="must be a plain name"):
            path_inside(folder, name, where="x")
    for name, message in (
        ("out", "leads out"),
        ("loop", "cannot be read"),
        ("pipe", "no regular"),
        ("deep", "no r"),
    ):
        with pytest.raises(ValueError, match=message):
            path_inside(folder, name, where="x")
    assert (folder / "../outside").read_text() == (folder / "out").read_text() == "secret"  # control
    assert is_inside(folder, "deep/inside")
    for name in ("../outside", "deep/../../outside", str(folder / "inside"), "out", "a\0b"):
        assert not is_inside(folder, name)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ValueError, match="no regular file"):
            read_utf8_file(path)


@pytest.fixture
def tokens(tmp_path):
    """A folder as `jaxblock tokenize` writes it, and a shard outside."""
    folder = tmp_path / "tokens"
    folder.mkdir()
    for path in (folder / "train_000000.bin", folder / "val_000000.bin", tmp_path / "outside.bin"):
        path.write_bytes(np.arange(40, dtype="<u2").tobytes())
    write_tokens(folder)
    return folder


def write_tokens(folder, *, shard="train_000000.bin", **tokenizer):
    names = {"train": shard, "val": "val_000000.bin"}
    record = {
        "splits": {
            n: {"shards": [{"name": s, "tokens": 40}], "bytes": 40, "tokens": 40} for n, s in names.items()
        },
        "tokenizer": {**tokenizer_record(BYTES), **tokenizer},
    }
    (folder / "tokens.json").write_text(json.dumps(record))


def test_a_token_folder_reads_its_own_shards_only(tokens):
    found = read_token_folder(tokens)
    assert found is not None
    assert [len(file) for file in found.open(tokens, vocab_size=256, maps=ShardMaps())] == [40, 40]
    (tokens / "link.bin").symlink_to("../outside.bin")
    outside = str(tokens.parent / "outside.bin")
    for name, message in (
        ("../outside.bin", "plain"),
        (outside, "plain"),
        ("a\0", "plain"),
        ("link.bin", "leads out"),
    ):
        write_tokens(tokens, shard=name)
        found = read_token_folder(tokens)
        assert found is not None
        with pytest.raises(ValueError, match=message):
            found.open(tokens, vocab_size=256, maps=ShardMaps())
    assert [
        len(map_shard(tokens / path, "x", vocab_size=256, maps=ShardMaps()))
        for path in ("../outside.bin", "link.bin")
    ] == [40, 40]  # control


def test_a_tokenizer_lies_beside_its_tokens(tmp_path):
    tokenizer, folder = byte_pairs(), tmp_path / "tokens"
    folder.mkdir()
    (tmp_path / "tokenizer.json").write_text(tokenizer.file_text(), encoding="utf-8")
    record = tokenizer_record(tokenizer)
    for name in ("../tokenizer.json", str(tmp_path / "tokenizer.json"), "other.json", 5):
        with pytest.raises(ValueError, match="must be in"):
            restore_tokenizer({**record, "file": name}, folder)
    (folder / "tokenizer.json").symlink_to("../tokenizer.json")
    with pytest.raises(ValueError, match="leads out"):
        restore_tokenizer(record, folder)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").write_text(tokenizer.file_text(), encoding="utf-8")
    assert restore_tokenizer(record, folder) == tokenizer  # control: the file itself


def test_a_checkpoint_reads_its_own_files_only(tmp_path):
    like = {"params": {"a": jnp.arange(3.0)}}
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(1, like, facts={})
    path = tmp_path / "checkpoints" / "1" / "manifest.json"
    good = json.loads(path.read_text())["content"]
    (tmp_path / "outside").write_bytes(b"secret")
    outside = {"size": 6, "crc32": zlib.crc32(b"secret")}

    def write(content):
        text = json.dumps(content, sort_keys=True)
        path.write_text(json.dumps({"crc32": zlib.crc32(text.encode()), "content": content}))

    for name in ("../../outside", str(tmp_path / "outside"), "a\0b"):
        write({**good, "files": {**good["files"], name: outside}})
        with pytest.raises(CheckpointDamaged, match="leads out"):
            checkpoints.load(1, like)
    for content in (
        [],
        {"schema": good["schema"]},
        {**good, "files": []},
        {**good, "leaves": {"a": {}}},
        {**good, "x": 1},
    ):
        write(content)
        with pytest.raises(CheckpointDamaged, match="is damaged"):
            checkpoints.load(1, like)
    write(good)
    assert checkpoints.load(1, like)["params"]["a"].tolist() == [0, 1, 2]  # control
    data = next(
        file for file in (tmp_path / "checkpoints" / "1").rglob("*") if file.stat().st_size and file != path
    )
    data.rename(tmp_path / "moved")
    data.symlink_to(tmp_path / "moved")
    with pytest.raises(CheckpointDamaged, match="leads out"):
        checkpoints.load(1, like)


@pytest.mark.parametrize("name", ["../x", "/x", "a/b", "a\\b", "..", ".x", "", "a\0b", "a\nb", "a\x1bb"])
def test_a_run_has_a_plain_name(name):
    with pytest.raises(ValueError, match=r"run\.name is"):
        RunConfig(name=name)
    assert RunConfig(name="a b-é.1").name == "a b-é.1"  # control


@pytest.mark.parametrize("value", ["a\0b", "\ud800", ""])
def test_a_path_of_a_config_can_be_a_files(value):
    makers = (lambda v: RunConfig(dir=v), lambda v: DataConfig(path=v), lambda v: InitConfig(**{"from": v}))
    for make in makers:
        with pytest.raises(ValueError, match=r"run\.dir|data\.path|init\.from|init"):
            make(value)
        make("a/../b é")  # control


def test_a_file_is_not_written_through_a_link(tmp_path):
    (tmp_path / "outside").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "x.json.partial").symlink_to("../outside")
    replace_text(tmp_path / "run" / "x.json", "new")
    assert (tmp_path / "outside").read_text() == "mine"
    assert (tmp_path / "run" / "x.json").read_text() == "new"
    (tmp_path / "run" / "link").symlink_to("../outside")
    (tmp_path / "run" / "link").write_text("new")  # control: an ordinary write follows it
    assert (tmp_path / "outside").read_text() == "new"

"""A checkpoint is what was saved, bit by bit, or an error that says what it is instead."""

import ast
import inspect
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxblock.training import checkpoint as module
from jaxblock.training import checkpoint_manifest, orbax_arrays
from jaxblock.training.checkpoint import CheckpointDamaged, CheckpointMismatch, Checkpoints, kept_steps
from jaxblock.training.config import CheckpointConfig
from jaxblock.training.run_folder import RunError


class Moments(NamedTuple):
    count: Any
    mu: Any
    nu: Any


def parts(seed: int, *, depth: int = 3, width: int = 4) -> dict[str, Any]:
    """A small model's parts, drawn by numpy: nothing is compiled. Those of step 1 hold B96's key, 42."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    def params() -> dict[str, Any]:
        kernel = {"kernel": draw(depth, width, 2, 2)}
        return {"blocks": {"attention": {"query": kernel}}, "embedding": draw(8, width)}

    moments = Moments(jnp.asarray(seed, jnp.int32), params(), params())
    return {"params": params(), "optimizer": (moments, None, ()), "key": jax.random.key(41 + seed)}


def saved(folder: Path, *steps: int, keep: CheckpointConfig | None = None) -> Checkpoints:
    """Checkpoints whose step s holds `parts(s)`."""
    checkpoints = Checkpoints(folder, keep or CheckpointConfig(keep_latest=9))
    for step in steps:
        assert checkpoints.save(step, parts(step), facts={"val_loss": None})
    return checkpoints


def bits(tree: Any) -> list[tuple[str, tuple[int, ...], bytes]]:
    """Every leaf's dtype, shape and bytes."""

    def of(leaf: Any) -> tuple[str, tuple[int, ...], bytes]:
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        value = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
        return str(leaf.dtype), leaf.shape, value.tobytes()

    return [of(leaf) for leaf in jax.tree.leaves(tree)]


def assert_same(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert bits(found) == bits(expected)


def abstract(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


# What comes back


def test_every_dtype_and_container_comes_back_bit_by_bit(tmp_path):
    patterns = np.arange(2**16, dtype=np.uint16)  # every bfloat16: zeros of both signs, infinities, each NaN
    odd = {
        "bfloat16": jnp.asarray(patterns.view(jnp.bfloat16.dtype)),
        "float16": jnp.asarray(patterns.view(np.float16).reshape(2, -1)),
        "float8": jnp.ones(3, jnp.float8_e4m3fn),
        "int32": jnp.asarray([-(2**31), 2**31 - 1], jnp.int32),
        "uint8": np.arange(3, dtype=np.uint8),
        "bool": jnp.asarray([True, False]),
        "scalar": jnp.asarray(7, jnp.int32),
        "no entries": jnp.zeros((0, 3)),
        "nothing": None,
        "numbered": {3: [jnp.ones(1), (jnp.zeros(2),)], 10: jnp.ones(2)},
        "moments": Moments(jnp.ones(()), {}, None),
        "rbg": jax.random.key(5, impl="rbg"),
        "raw": jnp.asarray([1, 2], jnp.uint32),
    }
    state = {"odd": odd, "average": None, "key": jax.random.key(1)}
    checkpoints = Checkpoints(tmp_path / "run é #1 100%" / "checkpoints")
    assert checkpoints.save(0, state, facts={})
    for like in (state, abstract(state)):
        found = checkpoints.load(0, like)
        assert_same(found, state)
        assert all(leaf.devices() == {jax.devices()[0]} for leaf in jax.tree.leaves(found))
    changed = state | {"odd": odd | {"scalar": jnp.asarray(8, jnp.int32)}}
    with pytest.raises(AssertionError):
        assert_same(checkpoints.load(0, state), changed)


def test_only_the_named_parts_are_read(tmp_path, monkeypatch):
    checkpoints, read = saved(tmp_path / "checkpoints", 1), []
    load = orbax_arrays.orbax.load

    def spy(path: str, like: dict[str, Any], *, checkpointable_name: str) -> Any:
        read.extend(like)
        return load(path, like, checkpointable_name=checkpointable_name)

    monkeypatch.setattr(orbax_arrays.orbax, "load", spy)
    params = {"params": parts(1)["params"]}
    assert_same(checkpoints.load(1, abstract(params)), params)
    assert sorted(read) == ["params/blocks/attention/query/kernel", "params/embedding"]


def test_facts_come_back_with_the_form(tmp_path):
    facts = {"config": {"model": {"depth": 3, "x": 0.1}}, "val_loss": 1.25, "names": ["a", None, True]}
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(2, parts(2), facts=facts)
    assert Checkpoints(tmp_path / "checkpoints").facts(2) == {"schema": 2, **facts}


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"schema": 2}, "schema"),
        ({"val_loss": "low"}, "val_loss is 'low'"),
        ({"val_loss": float("nan")}, "val_loss is nan"),
        ({"x": float("inf")}, "JSON"),
        ({"x": np.float32(1)}, "JSON"),
        ({"x": [{3: 1}]}, "no text"),
    ],
)
def test_facts_that_would_not_come_back_are_refused(tmp_path, facts, words):
    with pytest.raises(ValueError, match=words):
        Checkpoints(tmp_path / "checkpoints").save(1, parts(1), facts=facts)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"params": {"x": 1.0}}, "params/x is a float"),
        ({"params": {"x": np.ones(2)}}, "params/x is float64"),
        ({"params": {"a/b": jnp.ones(2), "a": {"b": jnp.ones(2)}}}, "the path params/a/b"),
        ({"a/b": jnp.ones(2)}, "'a/b'"),
        ({"params": None}, "no array"),
    ],
)
def test_parts_that_would_not_come_back_are_refused(tmp_path, state, words):
    with pytest.raises(ValueError, match=words):
        Checkpoints(tmp_path / "checkpoints").save(1, state, facts={})
    assert list(tmp_path.iterdir()) == []


def test_a_relative_folder_stays_where_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoints = Checkpoints(Path("checkpoints"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    checkpoints.save(1, parts(1), facts={})
    assert (tmp_path / "checkpoints" / "1").is_dir()
    assert_same(checkpoints.load(1, parts(1)), parts(1))


# Another model


def test_orbax_2972_a_checkpoint_of_another_depth_is_refused_by_name(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(1, parts(1, depth=12), facts={})
    monkeypatch.setattr(orbax_arrays.orbax, "load", lambda *_, **__: pytest.fail("it was read"))
    with pytest.raises(CheckpointMismatch) as error:
        checkpoints.newest_whole(parts(1, depth=16))
    kernel = "blocks/attention/query/kernel [12, 4, 2, 2] saved, [16, 4, 2, 2] wanted"
    for place in ("params", "optimizer/0/mu", "optimizer/0/nu"):
        assert f"{place}/{kernel}" in str(error.value)
    assert "embedding" not in str(error.value)
    assert checkpoints.steps() == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"params": {"embedding": jnp.ones((8, 4))}},
            "params/blocks/attention/query/kernel saved, not wanted",
        ),
        ({"params": parts(1)["params"] | {"norm": jnp.ones(4)}}, "params/norm wanted, not saved"),
        ({"params": parts(1, width=6)["params"]}, "params/embedding [8, 4] saved, [8, 6] wanted"),
        ({"params": None}, "params/embedding saved, not wanted"),
        ({"average": parts(1)["params"]}, "average is not saved"),
        ({"average": None}, "average is not saved"),
        ({"optimizer": parts(1)["optimizer"][0]}, "optimizer/count wanted, not saved"),
        ({"key": jnp.zeros(2, jnp.uint32)}, "key [2] key<fry> saved, [2] uint32 wanted"),
        ({"key": jax.random.key(1, impl="rbg")}, "key [2] key<fry> saved, [4] key<rbg> wanted"),
        (
            {"params": jax.tree.map(lambda x: x.astype(jnp.bfloat16), parts(1)["params"])},
            "params/embedding [8, 4] float32 saved, [8, 4] bfloat16 wanted",
        ),
    ],
)
def test_another_structure_shape_or_dtype_is_refused_by_name(tmp_path, changes, words):
    checkpoints = saved(tmp_path / "checkpoints", 1)
    for like in (changes, abstract(changes)):
        with pytest.raises(CheckpointMismatch) as error:
            checkpoints.load(1, parts(1) | like)
        assert words in str(error.value)
    assert_same(checkpoints.load(1, parts(1)), parts(1))


def test_many_differences_are_counted_not_listed(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(1, {"params": {f"layer{i:02}": jnp.ones(2) for i in range(20)}}, facts={})
    with pytest.raises(CheckpointMismatch) as error:
        checkpoints.load(1, {"params": {f"layer{i:02}": jnp.ones(3) for i in range(20)}})
    assert str(error.value).count("wanted") == 5 + 1  # five leaves and "the model or optimizer wanted"
    assert str(error.value).endswith("and 15 more")


def test_another_form_is_a_mismatch_and_not_damage(tmp_path, monkeypatch):
    checkpoints = saved(tmp_path / "checkpoints", 1)
    monkeypatch.setattr(checkpoint_manifest, "SCHEMA", 3)
    with pytest.raises(CheckpointMismatch, match="form 2"):
        checkpoints.newest_whole(parts(1))
    assert checkpoints.steps() == [1]


# Damage


def damage(path: Path, kind: str) -> None:
    """Harm one file as a full disk, a power cut, a bad sector or a hand does."""
    content = path.read_bytes()
    if kind == "deleted":
        path.unlink()
    elif kind == "emptied":
        path.write_bytes(b"")
    elif kind == "truncated":
        path.write_bytes(content[: len(content) // 2])
    else:
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :])


def files_of(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def run_of_two(tmp_path_factory) -> Path:
    """A run's folder with checkpoints 1 and 2; copied, never changed."""
    run = tmp_path_factory.mktemp("master")
    saved(run / "checkpoints", 1, 2)
    return run


@pytest.mark.parametrize("kind", ["emptied", "truncated", "flipped", "deleted"])
def test_a_harmed_file_is_named_and_the_checkpoint_before_it_is_used(tmp_path, run_of_two, kind):
    """Whichever file it is; what is damaged is moved as it is, and its step can be saved again."""
    for number, name in enumerate(files_of(run_of_two / "checkpoints" / "2")):
        run = shutil.copytree(run_of_two, tmp_path / str(number))
        path = run / "checkpoints" / "2" / name
        if kind != "deleted" and not path.stat().st_size:
            continue  # there is nothing in it to harm
        damage(path, kind)
        harmed = files_of(run / "checkpoints" / "2")
        checkpoints = Checkpoints(run / "checkpoints")
        with pytest.raises(CheckpointDamaged, match=name):
            checkpoints.load(2, parts(2))
        step, found, notes = checkpoints.newest_whole(abstract(parts(1)))
        assert step == 1
        assert_same(found, parts(1))
        assert len(notes) == 1
        assert name in notes[0]
        assert str(run / "damaged" / "2") in notes[0]
        assert files_of(run / "damaged" / "2") == harmed
    assert checkpoints.save(2, parts(2), facts={})
    assert_same(checkpoints.load(2, parts(2)), parts(2))


def test_values_other_than_the_saved_ones_are_not_handed_out(tmp_path, run_of_two, monkeypatch):
    """Even where every file is as it was written: the reader itself is not trusted."""
    load = orbax_arrays.orbax.load

    def shifted(path: str, like: dict[str, Any], *, checkpointable_name: str) -> Any:
        read = load(path, like, checkpointable_name=checkpointable_name)
        return {
            name: np.nextafter(x, np.float32(9)) if name == "params/embedding" else x
            for name, x in read.items()
        }

    monkeypatch.setattr(orbax_arrays.orbax, "load", shifted)
    checkpoints = Checkpoints(run_of_two / "checkpoints")
    with pytest.raises(
        RunError, match="is whole, but params/embedding was not read as it was saved"
    ) as error:
        checkpoints.newest_whole(parts(2))
    assert not isinstance(error.value, CheckpointDamaged)
    assert_same(checkpoints.load(2, {"key": parts(2)["key"]}), {"key": parts(2)["key"]})


@pytest.mark.parametrize("text", ["", "null", "[]", "{}", '{"crc32": 1, "content": 2}', "\x00", "digit"])
def test_a_harmed_manifest_is_damage_and_never_another_model(tmp_path, run_of_two, text):
    """One digit of a shape changed is still a description of a model, but not the one that was written."""
    run = shutil.copytree(run_of_two, tmp_path / "run")
    path = run / "checkpoints" / "2" / "manifest.json"
    content = json.loads(path.read_text())
    content["content"]["leaves"]["params/embedding"]["shape"][0] = 9
    path.write_text(json.dumps(content) if text == "digit" else text)
    with pytest.raises(CheckpointDamaged, match=r"manifest\.json is not as it was written"):
        Checkpoints(run / "checkpoints").load(2, parts(2))
    path.write_bytes((run_of_two / "checkpoints" / "2" / "manifest.json").read_bytes())
    assert_same(Checkpoints(run / "checkpoints").load(2, parts(2)), parts(2))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
def test_a_pipe_in_a_manifests_place_is_damage_and_not_waited_for(tmp_path, run_of_two):
    run = shutil.copytree(run_of_two, tmp_path / "run")
    (run / "checkpoints" / "2" / "manifest.json").unlink()
    os.mkfifo(run / "checkpoints" / "2" / "manifest.json")
    with pytest.raises(CheckpointDamaged, match=r"manifest\.json is missing"):
        Checkpoints(run / "checkpoints").load(2, parts(2))


def test_missing_folders_are_damage(tmp_path, run_of_two):
    run = shutil.copytree(run_of_two, tmp_path / "run")
    shutil.rmtree(run / "checkpoints" / "2" / "arrays")
    (run / "checkpoints" / "3").mkdir()
    (run / "damaged" / "3").mkdir(parents=True)  # a name that is taken
    checkpoints = Checkpoints(run / "checkpoints")
    step, found, notes = checkpoints.newest_whole(parts(1))
    assert step == 1
    assert_same(found, parts(1))
    assert ["manifest.json is missing" in notes[0], "arrays/" in notes[1]] == [True, True]
    assert sorted(path.name for path in (run / "damaged").iterdir()) == ["2", "3", "3-2"]


def test_where_nothing_is_whole_there_is_nothing(tmp_path, run_of_two):
    assert Checkpoints(tmp_path / "none").newest_whole(parts(1)) == (None, None, [])
    assert Checkpoints(tmp_path / "none").latest() is None
    run = shutil.copytree(run_of_two, tmp_path / "run")
    for step in ("1", "2"):
        damage(run / "checkpoints" / step / "manifest.json", "truncated")
    step, found, notes = Checkpoints(run / "checkpoints").newest_whole(parts(1))
    assert (step, found, len(notes)) == (None, None, 2)


def test_a_reader_passes_over_damage_and_moves_nothing(tmp_path, run_of_two):
    run = shutil.copytree(run_of_two, tmp_path / "run")
    damage(run / "checkpoints" / "2" / "manifest.json", "emptied")
    before = files_of(run)
    step, found, notes = Checkpoints(run / "checkpoints").newest_whole(parts(1), set_aside=False)
    assert (step, len(notes)) == (1, 1)
    assert "passed over" in notes[0]
    assert_same(found, parts(1))
    assert files_of(run) == before


def test_a_step_under_another_name_is_damage(tmp_path, run_of_two):
    run = shutil.copytree(run_of_two, tmp_path / "run")
    (run / "checkpoints" / "2").rename(run / "checkpoints" / "7")
    with pytest.raises(CheckpointDamaged, match="holds step 2"):
        Checkpoints(run / "checkpoints").load(7, parts(2))


def test_what_goes_wrong_with_a_whole_checkpoint_is_not_damage(tmp_path, run_of_two, monkeypatch):
    """Out of memory, a library that changed: the checkpoint stays where it is."""
    run = shutil.copytree(run_of_two, tmp_path / "run")

    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("RESOURCE_EXHAUSTED: too many open files\nand a page of text")

    monkeypatch.setattr(orbax_arrays.orbax, "load", fail)
    with pytest.raises(RunError, match=r"is whole, but .*RESOURCE_EXHAUSTED: too many open files$") as error:
        Checkpoints(run / "checkpoints").newest_whole(parts(1))
    assert not isinstance(error.value, CheckpointDamaged | CheckpointMismatch)
    assert Checkpoints(run / "checkpoints").steps() == [1, 2]


def test_a_step_that_is_not_there_is_said(tmp_path, run_of_two):
    checkpoints = Checkpoints(run_of_two / "checkpoints")
    for read in (checkpoints.facts, lambda step: checkpoints.load(step, parts(1))):
        with pytest.raises(RunError, match=r"no checkpoint 5 .* saved are: 1, 2"):
            read(5)


# Saving


def test_b98_a_step_below_the_newest_is_refused_and_never_skipped(tmp_path):
    checkpoints = saved(tmp_path / "checkpoints", 100)
    with pytest.raises(RunError, match=r"step 5 cannot be saved .* holds step 100"):
        checkpoints.save(5, parts(5), facts={})
    assert checkpoints.steps() == [100]
    assert_same(checkpoints.load(100, parts(100)), parts(100))


def test_a_step_already_saved_is_left_and_said_to_be(tmp_path):
    folder = tmp_path / "checkpoints"
    checkpoints = saved(folder, 1, 2)
    before = (folder / "2" / "manifest.json").read_bytes()
    assert checkpoints.save(2, parts(2), facts={"val_loss": 3.0}) is False
    assert (folder / "2" / "manifest.json").read_bytes() == before
    with pytest.raises(CheckpointMismatch):
        checkpoints.save(2, parts(2, depth=5), facts={})
    damage(folder / "2" / "manifest.json", "emptied")
    assert checkpoints.save(2, parts(2), facts={}) is True
    assert_same(checkpoints.load(2, parts(2)), parts(2))
    assert (tmp_path / "damaged" / "2").is_dir()


def test_b91_a_file_in_the_way_is_an_error(tmp_path):
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(RunError, match="NotADirectoryError"):
        Checkpoints(tmp_path / "checkpoints").save(1, parts(1), facts={})
    checkpoints = saved(tmp_path / "others", 1)
    for name in ("2", "3.partial"):
        path = tmp_path / "others" / name
        path.write_text("in the way")
        with pytest.raises(RunError, match=r"step \d cannot be saved"):
            checkpoints.save(int(name[0]), parts(2), facts={})
        path.unlink()
        assert checkpoints.latest() == 1
    assert_same(checkpoints.load(1, parts(1)), parts(1))
    assert checkpoints.save(2, parts(2), facts={})


def test_b91_a_folder_taken_away_in_the_middle_is_an_error(tmp_path, monkeypatch):
    """Orbax writes in threads of its own: what fails there must come out here."""
    checkpoints = saved(tmp_path / "checkpoints", 1)
    copied = module.own_pieces

    def own_pieces(leaf: Any) -> Any:
        if (tmp_path / "checkpoints").is_dir():
            (tmp_path / "checkpoints").rename(tmp_path / "away")
            (tmp_path / "checkpoints").write_text("in the way")
        return copied(leaf)

    monkeypatch.setattr(module, "own_pieces", own_pieces)
    with pytest.raises(RunError, match="step 2 cannot be saved"):
        checkpoints.save(2, parts(2), facts={})


def test_leftovers_of_a_kill_are_no_checkpoints_and_do_not_stand_in_the_way(tmp_path):
    folder = tmp_path / "checkpoints"
    checkpoints = saved(folder, 1)
    ours = ["2.partial", "2.partial.orbax-checkpoint-tmp", "9.partial"]
    foreign = [
        "2.orbax-checkpoint-tmp",
        "2.orbax-checkpoint-tmp-1700000000",
        "03",
        "-4",
        "+5",
        "٣",
        "notes",
        " 6",
    ]
    for name in [*ours, *foreign]:
        shutil.copytree(folder / "1", folder / name)
    (folder / "8").write_text("a file")
    assert checkpoints.steps() == [1]
    assert checkpoints.newest_whole(parts(1))[0] == 1
    assert checkpoints.save(2, parts(2), facts={})
    assert checkpoints.steps() == [1, 2]
    assert sorted(path.name for path in folder.iterdir()) == sorted(["1", "2", "8", *foreign])


class Killed(BaseException):
    """What no `except Exception` stops."""


@pytest.mark.parametrize(
    "after",
    [
        "own_pieces",
        "save_async",
        "gathered_digests",
        "write_manifest",
        "sync",
        "bring_to_disk",
        "kept_steps",
        "_remove_leftovers",
    ],
)
def test_a_kill_at_any_stage_leaves_the_old_or_the_new_checkpoint(tmp_path, monkeypatch, after):
    folder, keep = tmp_path / "checkpoints", CheckpointConfig(keep_latest=1)
    checkpoints = saved(folder, 1, keep=keep)
    owner = {"save_async": orbax_arrays.orbax, "_remove_leftovers": Checkpoints}.get(after, module)
    work = getattr(owner, after)

    def killed(*given: Any, **named: Any) -> Any:
        done = work(*given, **named) if after != "_remove_leftovers" or not (folder / "2").exists() else None
        if after == "save_async":
            done.result()  # a process that is killed writes no more
        if after != "_remove_leftovers" or (folder / "2").exists():
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(owner, after, killed)
        with pytest.raises(Killed):
            checkpoints.save(2, parts(2), facts={})
    again = Checkpoints(folder, keep)
    step, found, notes = again.newest_whole(parts(1))
    assert notes == []
    assert step == (2 if after in ("sync", "kept_steps", "_remove_leftovers") else 1)
    assert_same(found, parts(step))
    assert again.save(3, parts(3), facts={})
    assert [path.name for path in folder.iterdir()] == ["3"]


# What stays


@settings(deadline=None, max_examples=200)
@given(
    losses=st.dictionaries(
        st.integers(0, 40), st.none() | st.sampled_from([0.5, 1.0, 1.5, 2.0]), max_size=12
    ),
    latest=st.integers(1, 4),
    best=st.integers(0, 4),
    every=st.integers(0, 6),
)
def test_the_newest_the_best_and_the_multiples_stay(losses, latest, best, every):
    """Against the definition: a step stays if fewer than `keep_best` others are better, and so on."""
    keep = CheckpointConfig(keep_latest=latest, keep_best=best, keep_every=every)

    def stays(step: int) -> bool:
        newer = sum(other > step for other in losses)
        loss = losses[step]
        better = [
            other
            for other, its in losses.items()
            if loss is not None and its is not None and (its < loss or (its == loss and other > step))
        ]
        is_best = loss is not None and len(better) < best
        return newer < latest or is_best or (every > 0 and step % every == 0)

    assert kept_steps(losses, keep) == {step for step in losses if stays(step)}
    if losses:
        assert max(losses) in kept_steps(losses, keep)


def test_the_best_is_still_known_after_a_restart(tmp_path):
    keep = CheckpointConfig(keep_latest=1, keep_best=1, keep_every=4)
    for step, loss in {1: 3.0, 2: 1.0, 3: None, 4: 2.0, 5: 1.5, 6: None, 7: 9.0}.items():
        checkpoints = Checkpoints(tmp_path / "checkpoints", keep)  # a new process, each time
        checkpoints.save(step, parts(step), facts={"val_loss": loss} if step != 6 else {})
        assert checkpoints.latest() == step
    assert checkpoints.steps() == [2, 4, 7]
    checkpoints.save(8, parts(8), facts={"val_loss": 1.0})
    assert checkpoints.steps() == [4, 8]  # equal to step 2, and newer
    for step in checkpoints.steps():
        assert_same(checkpoints.load(step, parts(step)), parts(step))


def test_a_damaged_old_checkpoint_is_not_deleted_and_does_not_count(tmp_path):
    folder = tmp_path / "checkpoints"
    checkpoints = saved(folder, 1, 2)
    damage(folder / "2" / "manifest.json", "truncated")
    checkpoints = saved(folder, 3, keep=CheckpointConfig(keep_latest=2))
    assert checkpoints.steps() == [1, 2, 3]
    checkpoints.save(4, parts(4), facts={})
    assert checkpoints.steps() == [2, 3, 4]


# Processes

BEGINNING = f"""
import itertools, os, resource, sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxblock.training.checkpoint import Checkpoints
from jaxblock.training.run_folder import RunError

{inspect.getsource(Moments)}
{inspect.getsource(parts)}
folder = Path(sys.argv[1])
"""

OTHER = """
with Checkpoints(folder) as checkpoints:
    restored = checkpoints.load(1, parts(0))
    print(np.asarray(jax.random.bits(restored["key"], (4,))).tolist())
    for step in range(2, 6):
        checkpoints.save(step, parts(step), facts={"val_loss": 1.0})
    checkpoints.newest_whole(parts(0))
    checkpoints.load(5, {"params": parts(0)["params"]})

resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
try:
    checkpoints.save(6, {"params": np.random.default_rng(0).random(500_000, np.float32)}, facts={})
except RunError as error:
    print("refused" if "step 6 cannot be saved" in str(error) and "too large" in str(error) else error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(checkpoints.steps(), flush=True)
checkpoints.save(7, parts(7), facts={})
os._exit(0)
"""

# A child is forked before JAX has computed anything, and so before it has threads.
SERVER = """
for _ in sys.stdin:
    child = os.fork()
    if child == 0:
        checkpoints = Checkpoints(folder)
        for step in itertools.count((checkpoints.latest() or 0) + 1):
            checkpoints.save(step, parts(step), facts={"val_loss": None})
            print("saved", step, flush=True)
    print("child", child, flush=True)
    os.waitpid(child, 0)
    print("dead", flush=True)
"""


def start(code: str, folder: Path) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", BEGINNING + code, str(folder)]
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.skipif(sys.platform == "win32", reason="a process has no limits there")
def test_b96_b91_another_process_goes_on_in_silence_meets_a_full_disk_and_ends_after_a_save(tmp_path):
    """A typed key goes on with the same numbers. Nothing is said on the way. A disk that takes no more is an error,
    with its reason. What was saved last is there, although the process ended without a word."""
    checkpoints = saved(tmp_path / "checkpoints", 1)
    process = start(OTHER, tmp_path / "checkpoints")
    said, trouble = process.communicate(timeout=250)
    assert (process.returncode, trouble) == (0, "")
    drawn, refused, steps = said.splitlines()
    assert ast.literal_eval(drawn) == np.asarray(jax.random.bits(jax.random.key(42), (4,))).tolist()
    assert ast.literal_eval(drawn) != np.asarray(jax.random.bits(jax.random.key(43), (4,))).tolist()
    assert (refused, steps) == ("refused", "[4, 5]")
    assert checkpoints.steps() == [5, 7]
    assert_same(checkpoints.load(7, parts(7)), parts(7))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process that has loaded JAX does not fork")
@pytest.mark.parametrize("kills", [4, pytest.param(30, marks=pytest.mark.full)])
def test_a_kill_at_a_random_moment_leaves_the_last_whole_checkpoint(tmp_path, kills):
    """What was said to be saved is there, bit by bit, whenever the process is killed."""
    server, draw = start(SERVER, tmp_path / "checkpoints"), random.Random(kills)
    assert server.stdin is not None
    assert server.stdout is not None
    for _ in range(kills):
        server.stdin.write("\n")
        server.stdin.flush()
        lines = [server.stdout.readline().split(), server.stdout.readline().split()]
        assert {line[0] for line in lines} == {"child", "saved"}, server.communicate()[1]
        time.sleep(draw.uniform(0, 0.6))
        os.kill(next(int(line[1]) for line in lines if line[0] == "child"), signal.SIGKILL)
        while lines[-1][0] != "dead":
            lines.append(server.stdout.readline().split())
        last = max(int(line[1]) for line in lines if line[0] == "saved")
        step, found, notes = Checkpoints(tmp_path / "checkpoints").newest_whole(parts(0))
        assert notes == []
        assert step in (last, last + 1)
        assert_same(found, parts(step))
    server.communicate(timeout=60)

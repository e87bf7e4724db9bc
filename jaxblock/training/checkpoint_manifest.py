"""What a checkpoint holds, leaf by leaf, and whether that is what is wanted: its `manifest.json`.

Arrays are told apart by their place in the tree, "params/blocks/attention/query/kernel", whatever the tree's
containers are. A checksum of the manifest itself tells a damaged one from one of another model.
"""

import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxblock.contracts import check_number
from jaxblock.training.checkpoint_pieces import is_key
from jaxblock.training.run_folder import RunError
from jaxblock.training.safe_files import is_inside

SCHEMA = 2
"""The form of a checkpoint; another number, another form."""
MANIFEST = "manifest.json"
_SHOWN = 5
_CHUNK = 2**24


class CheckpointMismatch(RunError):  # noqa: N818
    """A whole checkpoint is not of the model, optimizer or form that is wanted."""


class CheckpointDamaged(RunError):  # noqa: N818
    """A checkpoint is not what was written."""


class SavedLeaf(NamedTuple):
    """What is known of one saved array."""

    shape: list[int]
    """Of the key data, where it is a typed random key."""
    dtype: str
    generator: str | None
    """A typed random key's, such as threefry2x32."""
    digest: int
    """See `jaxblock.training.checkpoint_pieces.digest`."""


class WrittenFile(NamedTuple):
    """What is known of one file that Orbax wrote."""

    size: int
    crc32: int


class Manifest(NamedTuple):
    """Everything a checkpoint says about itself."""

    step: int
    facts: dict[str, Any]
    """The caller's JSON values."""
    parts: list[str]
    leaves: dict[str, SavedLeaf]
    files: dict[str, WrittenFile]
    """By their paths in the checkpoint's folder."""


def named_leaves(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return every leaf of named pytrees under its path, such as "params/blocks/attention/query/kernel".

    Raises:
      ValueError: a leaf is no array JAX can hold, two have one path (a dict's keys "a/b", and "a" with "b" in it),
        or a part's name is empty or has a slash.
    """
    named: dict[str, Any] = {}
    for part, tree in parts.items():
        if not part or "/" in part:
            raise ValueError(f"a part of a checkpoint is named {part!r}; it must have a name without a slash")
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            name = "/".join(
                [part, *([jax.tree_util.keystr(path, simple=True, separator="/")] if path else [])]
            )
            if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
                raise ValueError(f"{name} is a {type(leaf).__name__}; the leaves of a checkpoint are arrays")
            if not is_key(leaf) and jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
                raise ValueError(f"{name} is {leaf.dtype}, which JAX would cut to 32 bits; convert it")
            if name in named:
                raise ValueError(f"two leaves of a checkpoint have the path {name}; rename one")
            named[name] = leaf
    return named


def saved_leaf(leaf: Any, digest: int) -> SavedLeaf:
    """Return what is written down of a leaf."""
    generator = str(jax.random.key_impl(leaf)) if is_key(leaf) else None
    return SavedLeaf(list(raw_shape(leaf)), str(leaf.dtype), generator, digest)


def raw_shape(leaf: Any) -> tuple[int, ...]:
    """Return the shape of an array as it is written."""
    return jax.eval_shape(jax.random.key_data, leaf).shape if is_key(leaf) else leaf.shape


def written_files(folder: Path) -> dict[str, WrittenFile]:
    """Return what is written down of every file below a folder, by its path in it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): _written_file(path) for path in files}


def damaged_files(folder: Path, files: Mapping[str, WrittenFile]) -> list[str]:
    """Return one phrase for every file that is missing or not as it was written."""
    faults = []
    for name, written in files.items():
        path = folder / name
        if not is_inside(folder, name):
            faults.append(f"{name!r} leads out of its folder")
        elif not path.is_file():
            faults.append(f"{name} is missing")
        elif path.stat().st_size != written.size or _written_file(path) != written:
            faults.append(f"{name} is not as it was written")
    return faults


def check_facts(facts: Mapping[str, Any]) -> None:
    """Raise ValueError unless the facts are JSON values that come back as they are, and val_loss is a number."""
    if "schema" in facts:
        raise ValueError("a checkpoint's facts have the key 'schema', which is its own; choose another")
    if facts.get("val_loss") is not None:
        check_number("val_loss", facts["val_loss"])
    try:
        json.dumps(facts, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"a checkpoint's facts must be JSON values: {error}") from error
    if not _has_text_keys(facts):
        raise ValueError("a checkpoint's facts hold a key that is no text; JSON would make it one")


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write manifest.json."""
    content = {
        "schema": SCHEMA,
        **manifest._asdict(),
        "leaves": {name: leaf._asdict() for name, leaf in manifest.leaves.items()},
        "files": {name: file._asdict() for name, file in manifest.files.items()},
    }
    text = json.dumps({"crc32": _content_digest(content), "content": content}, indent=1)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> Manifest:
    """Return a checkpoint's manifest.

    Raises:
      CheckpointDamaged: it is missing or not as it was written.
      CheckpointMismatch: it is whole, in a form this version does not know.
      RunError: it cannot be read.
    """
    where = f"checkpoint {folder.name} in {str(folder.parent)!r}"
    try:
        if not (folder / MANIFEST).is_file():  # a pipe would be waited for
            raise FileNotFoundError
        found = json.loads((folder / MANIFEST).read_bytes())
        content = found["content"]
        whole = isinstance(content, dict) and found["crc32"] == _content_digest(content)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise CheckpointDamaged(f"{where} is damaged: {MANIFEST} is missing") from error
    except OSError as error:
        raise RunError(f"{where} cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError, RecursionError):  # not JSON, or other JSON
        whole, content = False, {}
    if not whole:
        raise CheckpointDamaged(f"{where} is damaged: {MANIFEST} is not as it was written")
    schema = content.pop("schema", None)
    if schema != SCHEMA:
        raise CheckpointMismatch(f"{where} has form {schema}; this version of jaxblock reads form {SCHEMA}")
    try:
        leaves = {name: SavedLeaf(**leaf) for name, leaf in content.pop("leaves").items()}
        files = {name: WrittenFile(**file) for name, file in content.pop("files").items()}
        manifest = Manifest(leaves=leaves, files=files, **content)
    except (AttributeError, KeyError, TypeError) as error:  # a checksum can be made by anyone
        raise CheckpointDamaged(f"{where} is damaged: {MANIFEST} is not of form {SCHEMA}") from error
    if str(manifest.step) != folder.name:
        raise CheckpointDamaged(f"{where} is damaged: it holds step {manifest.step}")
    return manifest


def differences(manifest: Manifest, like: Mapping[str, Any]) -> str | None:
    """Return where the named parts of `like` are not what is saved, the first few leaves named; None = nowhere.

    A part that `like` does not name is not compared.
    """
    found = [f"{part} is not saved" for part in like if part not in manifest.parts]
    found += _leaf_differences(
        manifest, {part: tree for part, tree in like.items() if part in manifest.parts}
    )
    more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return "; ".join(found[:_SHOWN]) + more if found else None


def _leaf_differences(manifest: Manifest, like: Mapping[str, Any]) -> Iterator[str]:
    wanted = named_leaves(like)
    for name, leaf in wanted.items():
        if name not in manifest.leaves:
            continue
        saved = manifest.leaves[name]
        shape = list(raw_shape(leaf))
        if saved.dtype != str(leaf.dtype):
            yield f"{name} {saved.shape} {saved.dtype} saved, {shape} {leaf.dtype} wanted"
        elif saved.shape != shape:
            yield f"{name} {saved.shape} saved, {shape} wanted"
    yield from (f"{name} wanted, not saved" for name in wanted if name not in manifest.leaves)
    for name in manifest.leaves:
        if name not in wanted and name.partition("/")[0] in like:
            yield f"{name} saved, not wanted"


def _has_text_keys(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _has_text_keys(inner) for key, inner in value.items())
    return not isinstance(value, list | tuple) or all(_has_text_keys(inner) for inner in value)


def _written_file(path: Path) -> WrittenFile:
    size = digest = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            size, digest = size + len(chunk), zlib.crc32(chunk, digest)
    return WrittenFile(size, digest)


def _content_digest(content: Any) -> int:
    """Return the CRC-32 of JSON values, however they are laid out in a file."""
    return zlib.crc32(json.dumps(content, sort_keys=True, allow_nan=False).encode())

"""TOML and command-line text to a checked `TrainConfig`, and back; every refusal is one sentence (ValueError).

A section that a file leaves out is as in `configs/quickstart.toml`; a section it opens is complete in itself.
"""

import functools
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pydantic
import tomli_w

from jaxblock.contracts import nearest
from jaxblock.training.config import TrainConfig
from jaxblock.training.files import replace_text

MOST_NESTED = 8
"""Lists and tables in each other in a value; no field has more than one."""


class Field(NamedTuple):
    """One field of a section as `--help` shows it."""

    section: str
    name: str
    type: str
    description: str
    default: Any
    optional: bool
    """Whether it can be left out: "none" is then no value, and a name everywhere else."""

    @property
    def path(self) -> str:
        """ "section.name", as errors and flags spell it."""
        return f"{self.section}.{self.name}"


@functools.cache
def fields() -> tuple[Field, ...]:
    """Return every field of every section, in order."""
    schema, found = TrainConfig.model_json_schema(), []
    for section, reference in schema["properties"].items():
        properties = schema["$defs"][reference["$ref"].rsplit("/", 1)[1]]["properties"]
        for name, entry in properties.items():
            kinds = [part.get("type") for part in entry.get("anyOf", [entry])]
            default = reference["default"][name]
            text = entry["description"]
            found.append(Field(section, name, str(kinds[0]), text, default, "null" in kinds))
    return tuple(found)


def read_config_file(path: Path) -> dict[str, Any]:
    """Return a TOML file's values.

    Raises:
      ValueError: the file is missing, unreadable or not TOML.
    """
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except FileNotFoundError as error:
        near = nearest(path.name, [file.name for file in path.parent.glob("*.toml")])
        raise ValueError(f"config file {str(path)!r} does not exist{near}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"config file {str(path)!r} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"config file {str(path)!r} is not TOML: {error}") from error


def parse_override(path: str, text: str) -> Any:
    """Return what a flag's text stands for: "none" where it can be left out, text where it is text, else TOML."""
    field = next(field for field in fields() if field.path == path)
    if field.optional and text == "none":
        return None
    return text if field.type == "string" else parse_literal(text)


def parse_literal(text: str) -> Any:
    """Return the value of a TOML literal, or of true and false in any case; any other text is itself."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return {"true": True, "false": False}.get(text.lower(), text)
    return parsed["value"] if len(parsed) == 1 else text


def build_config(values: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> TrainConfig:
    """Return the checked config of a file's values with `overrides` ({"model.depth": 6}) on top.

    Raises:
      ValueError: an unknown key, a missing one, a wrong type or a value that is not allowed.
    """
    _check_keys(values)
    merged = TrainConfig().values()
    for section, entries in values.items():
        merged[section] = entries
    for path, value in (overrides or {}).items():
        section, name = path.split(".")
        merged[section] = {**merged[section], name: value}
    for section, entries in merged.items():
        for name, value in entries.items():
            _check_plain(f"{section}.{name}", value)
    try:
        # In JSON, strict still reads a list as a tuple and a table as a record; nothing else is converted.
        return TrainConfig.model_validate_json(json.dumps(merged, default=_refuse_date))
    except pydantic.ValidationError as error:
        raise ValueError(_sentence(error)) from error


def _check_plain(path: str, value: Any, depth: int = 0) -> None:
    """Raise ValueError for what TOML or JSON does not have, or reads to a depth only, before pydantic meets it.

    A number above 64 bits, text that is not Unicode, lists in lists in lists.
    """
    if depth > MOST_NESTED:
        raise ValueError(
            f"{path} holds lists or tables in each other, more than {MOST_NESTED} deep; no field does"
        )
    if isinstance(value, dict | list):
        for inner in [*value, *value.values()] if isinstance(value, dict) else value:
            _check_plain(path, inner, depth + 1)
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(f"{path} holds {_shown(value)}; TOML has whole numbers of 64 bits, up to 2**63 - 1")
    elif isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
        raise ValueError(f"{path} is {value!r}, which is not Unicode text; a config is UTF-8 throughout")


def _shown(number: int) -> str:
    """Return a whole number as a person reads it: of a long one, how long it is."""
    bits = number.bit_length()
    return str(number) if bits <= 512 else f"a whole number of {bits:,} bits"


def _refuse_date(value: Any) -> Any:
    """Raise ValueError for the TOML values that JSON does not have: a date as text would pass for a name."""
    raise ValueError(f"the config holds {value}, a date or time; no field is one: write text in quotes")


def write_config(config: TrainConfig, path: Path) -> None:
    """Write the resolved config as TOML."""
    replace_text(path, tomli_w.dumps(config.as_dict()))


def differences(ours: TrainConfig, theirs: TrainConfig) -> list[str]:
    """Return "section.field: ours, theirs" for every field in which two configs differ."""
    left, right = ours.values(), theirs.values()
    return [
        f"{field.path}: {left[field.section][field.name]!r}, {right[field.section][field.name]!r}"
        for field in fields()
        if left[field.section][field.name] != right[field.section][field.name]
    ]


def check_path(path: str, noun: str) -> None:
    """Raise ValueError unless `path` names a field; the nearest field may stand in another section."""
    known = [field.path for field in fields()]
    if path in known:
        return
    name = path.rsplit(".", 1)[-1]
    elsewhere = [other for other in known if other.rsplit(".", 1)[-1] == name]
    hint = (
        f" (did you mean {elsewhere[0]!r}?)"
        if elsewhere
        else nearest(path, known) or _nearest_leaf(name, known)
    )
    raise ValueError(f"unknown {noun} {path!r}{hint}")


def _nearest_leaf(name: str, known: list[str]) -> str:
    """Compare the last part only: "learning_rte" is far from "optimizer.learning_rate" as a whole."""
    leaves = {path.rsplit(".", 1)[-1]: path for path in known}
    hint = nearest(name, leaves)
    for leaf, path in leaves.items():
        hint = hint.replace(f"{leaf!r}", f"{path!r}")
    return hint


def _check_keys(values: Mapping[str, Any]) -> None:
    sections = list(TrainConfig.model_fields)
    for section, entries in values.items():
        if section not in sections:
            if not isinstance(entries, dict):
                check_path(section, "config key")
            raise ValueError(
                f"unknown config section {section!r}; sections: {', '.join(sections)}{nearest(section, sections)}"
            )
        if not isinstance(entries, dict):
            raise ValueError(f"config key {section!r} is {entries!r}; it must be a section, [{section}]")
        for name in entries:
            check_path(f"{section}.{name}", "config key")


def _sentence(error: pydantic.ValidationError) -> str:
    """Return the first fault of a validation error as one sentence."""
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"][:2])
    if first["type"] == "value_error":
        return str(first.get("ctx", {})["error"])
    if first["type"].startswith("missing"):
        return f"{field} is missing; it has no default"
    wanted = first["msg"].replace("Input should be ", "it must be ")
    wanted = wanted.replace("an object", "a table, as in { name = 0.5 }")
    return f"{field} is {first['input']!r}; {wanted}"

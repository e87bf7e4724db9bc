"""The rooms of the house import downwards only, `import jaxblock` stays light, and every file keeps the rules."""

import ast
import importlib
import importlib.metadata
import importlib.resources
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import jaxblock

PACKAGE = Path(jaxblock.__file__).parent
ORDER = (
    ("version", "types", "contracts", "axes"),
    ("choices",),
    ("config",),
    ("functional",),
    ("modules",),
    ("residual",),
    ("models",),
    ("invariants", "accounting", "probes", "parallel", "interop"),
    ("training",),
    ("sweeps", "diagnose"),
    ("cli",),
    ("jaxblock",),  # the package itself: what a user imports, and nobody inside
)
FLOOR = {room: floor for floor, rooms in enumerate(ORDER) for room in rooms}
LONGEST = 400
ORBAX_USER = "training/orbax_arrays.py"


def python_files(package: Path) -> list[Path]:
    return sorted(package.rglob("*.py"))


def room_of(file: Path, package: Path) -> str:
    """jaxblock/functional/norms.py -> functional, jaxblock/config.py -> config, jaxblock/__init__.py -> jaxblock."""
    first = file.relative_to(package).parts[0].removesuffix(".py")
    return "jaxblock" if first in ("__init__", "__main__") else first


def imported_names(file: Path, package: Path) -> Iterator[str]:
    """Yield the full dotted name of everything a file imports, wherever the statement stands in it."""
    # A relative import of level n starts n packages up from the module; an __init__ file is its package.
    parents = file.relative_to(package.parent).parent.parts
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = parents[: len(parents) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def imported_rooms(file: Path, package: Path) -> Iterator[str]:
    """Yield the room of every import of the package's own."""
    for name in imported_names(file, package):
        first, _, rest = name.partition(".")
        if first == "jaxblock":
            room = rest.partition(".")[0]
            # `from jaxblock import Decoder` and `import jaxblock` load the package, which loads everything.
            is_room = (package / room).is_dir() or (package / f"{room}.py").is_file()
            yield room if room and is_room else "jaxblock"


def upward_imports(package: Path) -> list[str]:
    """Return one sentence for every import that breaks the order of the rooms."""
    faults = []
    for file in python_files(package):
        room = room_of(file, package)
        if room not in FLOOR:
            faults.append(f"{room} has no place in the order of the rooms")
            continue
        for other in imported_rooms(file, package):
            if other not in FLOOR:
                faults.append(f"{other} has no place in the order of the rooms")
            elif FLOOR[other] > FLOOR[room] or (room != "jaxblock" and other == "jaxblock"):
                faults.append(f"{file.relative_to(package).as_posix()} imports {other}, a room below it")
    return faults


def importers(package: Path, top: str) -> set[str]:
    """Return the files that import the distribution or package `top`."""
    return {
        file.relative_to(package).as_posix()
        for file in python_files(package)
        if any(name.partition(".")[0] == top for name in imported_names(file, package))
    }


def test_no_room_imports_upward():
    assert upward_imports(PACKAGE) == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("functional/norms.py", "from jaxblock.modules.norm import Norm"),
        ("functional/norms.py", "def f():\n    import jaxblock.models.block\n"),
        (
            "config.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from jaxblock.residual import Topology\n",
        ),
        ("modules/__init__.py", "from ..models import Block"),
        ("models/block.py", "from jaxblock import training"),
        ("models/block.py", "from jaxblock import Decoder"),
        ("training/loop.py", "import jaxblock"),
        ("attic/thing.py", "import math"),
    ],
    ids=["plain", "deferred", "type-checking", "relative", "room", "public", "package", "unknown-room"],
)
def test_a_planted_upward_import_is_caught(tmp_path, path, text):
    package = tmp_path / "jaxblock"
    for room in ("functional", "modules", "residual", "models", "training"):
        (package / room).mkdir(parents=True)
        (package / room / "__init__.py").touch()
    (package / "__init__.py").write_text("from jaxblock import models\nfrom jaxblock.config import C\n")
    (package / "config.py").write_text("")
    (package / "models" / "decoder.py").write_text("from .. import config\nfrom ..modules import x\n")
    assert upward_imports(package) == []
    (package / path).parent.mkdir(exist_ok=True)
    (package / path).write_text(text)
    assert len(upward_imports(package)) == 1


def test_the_mathematics_knows_no_flax_and_no_config():
    """`functional` and what it stands on: a researcher can copy these files and needs only jax, chex and numpy."""
    allowed = {"types", "contracts", "functional"}
    for file in python_files(PACKAGE):
        if room_of(file, PACKAGE) in allowed:
            assert set(imported_rooms(file, PACKAGE)) <= allowed, file
            assert not any(name.partition(".")[0] == "flax" for name in imported_names(file, PACKAGE)), file


def test_nothing_imports_experiments_or_tests():
    assert importers(PACKAGE, "experiments") | importers(PACKAGE, "tests") == set()


def test_orbax_is_imported_in_one_module():
    """A change of its interface is a change of one file."""
    assert importers(PACKAGE, "orbax") == {ORBAX_USER}


def printed(code: str) -> str:
    """Return what a fresh interpreter prints."""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_import_jaxblock_loads_nothing_until_a_name_is_asked_for():
    own = "sorted(name for name in sys.modules if name.partition('.')[0] in ('jaxblock', 'jax', 'flax', 'chex'))"
    assert printed(f"import sys, jaxblock; print({own})") == "['jaxblock', 'jaxblock.version']"
    rooms = "sorted({name.split('.')[1] for name in sys.modules if name.startswith('jaxblock.')})"
    config = printed(f"import sys; from jaxblock import ModelConfig; print({rooms})")
    assert config == "['choices', 'config', 'contracts', 'types', 'version']"
    models = printed(f"import sys; from jaxblock import Decoder; print({rooms})")
    above_models = sorted({room for floor in ORDER[: FLOOR["models"] + 1] for room in floor})
    assert models == str(above_models)


def test_all_public_names_load_only_what_computing_needs():
    """Nothing from outside the standard library beyond what jax, flax.linen and chex load themselves."""
    tops = "{name.partition('.')[0] for name in sys.modules}"

    def outside(statement: str) -> list[str]:
        code = f"import sys, jax, flax.linen, chex; old = {tops}; {statement}; print(sorted({tops} - old))"
        return [top for top in ast.literal_eval(printed(code)) if top not in sys.stdlib_module_names]

    assert outside("from jaxblock import *") == ["jaxblock"]
    assert {"pydantic", "optax"} <= set(outside("import jaxblock.training.step"))


def test_public_names_are_the_ones_a_type_checker_sees():
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    seen = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module not in (None, "typing")
        for alias in node.names
    }
    assert set(seen) == set(jaxblock.__all__)
    assert set(jaxblock.__all__) <= set(dir(jaxblock))
    for name, module in seen.items():
        found = getattr(jaxblock, name)
        home = importlib.import_module(f"{module}.{name}" if module == "jaxblock" else str(module))
        assert found is (home if module == "jaxblock" else getattr(home, name)), name
    with pytest.raises(AttributeError, match="no attribute 'Decodr'"):
        getattr(jaxblock, "Decodr")  # noqa: B009 - a checker reports the plain form


def test_no_file_is_long():
    lines = {file.name: len(file.read_text(encoding="utf-8").splitlines()) for file in python_files(PACKAGE)}
    assert {name: count for name, count in lines.items() if count > LONGEST} == {}


def missing_docstrings(tree: ast.Module) -> Iterator[str]:
    """Yield the public functions, classes and methods (with `__call__`) without a docstring, and "module"."""
    if not ast.get_docstring(tree):
        yield "module"
    definitions = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    for node in tree.body:
        if not isinstance(node, definitions) or node.name.startswith("_"):
            continue
        inner = node.body if isinstance(node, ast.ClassDef) else []
        methods = [
            method
            for method in inner
            if isinstance(method, definitions)
            and (not method.name.startswith("_") or method.name == "__call__")
        ]
        yield from (item.name for item in (node, *methods) if not ast.get_docstring(item))


def test_everything_public_has_a_docstring():
    missing = {
        file.relative_to(PACKAGE).as_posix(): list(
            missing_docstrings(ast.parse(file.read_text(encoding="utf-8")))
        )
        for file in python_files(PACKAGE)
    }
    assert {name: names for name, names in missing.items() if names} == {}
    bare = "'''M.'''\ndef f(): ...\nclass C:\n    def __call__(self): ...\ndef _g(): ...\n"
    assert list(missing_docstrings(ast.parse(bare))) == ["f", "C", "__call__"]


def test_the_package_is_typed_and_says_its_version():
    assert (importlib.resources.files("jaxblock") / "py.typed").is_file()
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["tool"]["setuptools"]["package-data"]["jaxblock"] == ["py.typed"]
    assert jaxblock.__version__ == importlib.metadata.version("jaxblock")

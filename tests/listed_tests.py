"""What the tables of claims and of faults name: tests as pytest names them, read from files that are not imported."""

import ast
import functools
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parent


@functools.cache
def _tree(path: str) -> ast.Module:
    return ast.parse((TESTS.parent / path).read_text(encoding="utf-8"))


@functools.cache
def functions(path: str) -> frozenset[str]:
    """Return the functions of a file that pytest can collect: a second one of a name would hide the first."""
    names = Counter(node.name for node in _tree(path).body if isinstance(node, ast.FunctionDef))
    assert set(names.values()) <= {1}, f"{path} defines twice: {[name for name in names if names[name] > 1]}"
    return frozenset(names)


@functools.cache
def _words(path: str) -> frozenset[str]:
    constants = (node.value for node in ast.walk(_tree(path)) if isinstance(node, ast.Constant))
    return frozenset(value for value in constants if isinstance(value, str))


def missing(test: str) -> str:
    """Return why pytest would not collect `path::name` or `path::name[case]`; "" where it would."""
    path, _, name = test.partition("::")
    name, _, case = name.partition("[")
    file = TESTS.parent / path
    if not (file.is_file() and file.name.startswith("test_") and file.is_relative_to(TESTS)):
        return f"{path} is no file of tests"
    if not name.startswith("test_") or name not in functions(path):
        return f"{path} has no test {name}"
    if case and case.removesuffix("]") not in _words(path):
        return f"{path} has no case {case.removesuffix(']')!r}"
    return ""

"""Functions of the standard library, each labelled with its top-level package: a classifier's data on any machine.

A function is what `def` or `async def` at the level of a module or a class makes: its lines with its decorators,
dedented, without its docstring (which would often name the package in words). What it says of itself stays, and is
real data: a call of `asyncio.sleep`, an import inside. Classes are the packages with enough functions in at least
two files, whatever Python has them; no file is in both splits, and no text occurs twice.
"""

import ast
import importlib.util
import platform
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from jaxblock.contracts import check_integer
from jaxblock.training.labelled import LabelledCorpus, LabelledExamples, make_corpus
from jaxblock.training.token_files import find_files, readable, relative_name

SHORTEST = 4
"""Lines of a function, blank ones not counted: below, many say nothing of where they come from."""
_NOT_SOURCE = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages"})
_Definition: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


class Function(NamedTuple):
    """One function of a library."""

    package: str
    file: str
    """Path below the library with forward slashes."""
    text: bytes
    """UTF-8."""


def load_functions(folder: Path | None = None, *, context: int, least: int = 100) -> LabelledCorpus:
    """Load the functions of a library, split by file.

    Args:
      folder: where packages lie; left out, the running Python's standard library, without its tests.
      context: bytes a model reads, for the note about what is cut.
      least: functions that a package must have to be a class.

    Raises:
      ValueError: no sources, or fewer than two packages with so many functions.
    """
    check_integer("least", least, least=1)
    words = str(folder)
    if folder is None:
        folder = Path(sysconfig.get_path("stdlib"))
        words = f"the functions of the standard library of Python {platform.python_version()}"
    if not folder.is_dir():
        raise ValueError(
            f"{words} cannot be read: {str(folder)!r} is no folder; name a .jsonl file with --data.path"
        )
    found, skipped = _read_package_files(folder)
    functions = list({function.text: function for function in reversed(found)}.values())[::-1]
    skipped["functions that occur again"] = len(found) - len(functions)
    names = _classes(functions, least)
    kept = [function for function in functions if function.package in names]
    skipped["functions of packages with too few of them"] = len(functions) - len(kept)
    if len(names) < 2:
        raise ValueError(
            f"{words} has {len(names)} packages with at least {least} functions in two files or more; a classifier "
            "needs 2: name a .jsonl file with --data.path"
        )
    labels = [names.index(function.package) for function in kept]
    return make_corpus(
        LabelledExamples.of([function.text for function in kept], labels, names),
        [function.file for function in kept],
        context=context,
        source=words,
        notes=[f"Skipped {count:,} {what}." for what, count in sorted(skipped.items()) if count],
    )


def read_functions(source: str) -> Iterator[str]:
    """Yield the text of every function of a module or class of `source`, in order.

    Raises:
      SyntaxError: it is not Python.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes and comparisons in other people's code
        tree = ast.parse(source)
    lines = source.split("\n")
    for node in _definitions(tree.body):
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        docstring = _docstring_lines(node)
        kept = [lines[n - 1] for n in range(first, (node.end_lineno or first) + 1) if n not in docstring]
        # Not textwrap.dedent: a string's lines may start further left than the function.
        indent = lines[first - 1][: node.col_offset]
        yield "\n".join(line.removeprefix(indent) for line in kept)


def _read_package_files(folder: Path) -> tuple[list[Function], Counter[str]]:
    """Return the functions long enough in packages of `folder`, by file and line, and counts of what was not read."""
    paths, _ = find_files(folder, without=_NOT_SOURCE)
    functions: list[Function] = []
    skipped: Counter[str] = Counter()
    for path in paths:
        name = relative_name(path, folder)
        package, _, rest = name.partition("/")
        if not rest or path.suffix != ".py" or not (folder / package / "__init__.py").is_file():
            continue
        with readable(path):
            content = path.read_bytes()
        try:
            texts = list(read_functions(importlib.util.decode_source(content)))
        except (SyntaxError, ValueError, RecursionError):  # ValueError: bytes that are no text, null bytes
            skipped["files that are not Python"] += 1
            continue
        longer = [text for text in texts if sum(map(bool, map(str.strip, text.split("\n")))) >= SHORTEST]
        skipped[f"functions shorter than {SHORTEST} lines"] += len(texts) - len(longer)
        functions += [Function(package, name, text.encode("utf-8", "replace")) for text in longer]
    return functions, skipped


def _classes(functions: Sequence[Function], least: int) -> tuple[str, ...]:
    """Return the packages with at least `least` functions in at least two files, sorted."""
    counts = Counter(function.package for function in functions)
    files = Counter(package for package, _ in {(function.package, function.file) for function in functions})
    return tuple(sorted(name for name, count in counts.items() if count >= least and files[name] > 1))


def _definitions(body: Sequence[ast.stmt]) -> Iterator[_Definition]:
    for node in body:
        if isinstance(node, _Definition):
            yield node
        elif isinstance(node, ast.ClassDef):
            yield from _definitions(node.body)


def _docstring_lines(node: _Definition) -> range:
    """Return the numbers of the docstring's lines; none where it shares a line with code or is all there is."""
    first = node.body[0]
    shares = first.lineno == node.lineno or (len(node.body) > 1 and node.body[1].lineno == first.end_lineno)
    if ast.get_docstring(node, clean=False) is None or len(node.body) == 1 or shares:
        return range(0)
    return range(first.lineno, (first.end_lineno or first.lineno) + 1)

"""Functions of a library with their package: what a function is, what a class is, and the split by file."""

import collections
import functools
import textwrap

import numpy as np
import pytest

from jaxblock.training.function_corpus import SHORTEST, load_functions, read_functions
from jaxblock.training.labelled import LabelledCorpus

SOURCE = '''
"""A module."""
import os

def plain(x):
    """Named in words,
    over two lines.
    """
    return x

class A:
    @property
    @functools.cache
    def method(self):
        def inner():
            """Inner."""
            return 1
        return inner

    class B:
        async def deep(self): "Doc on one line."; return 2

if os.name == "nt":
    def hidden():
        return 3

lambda_ = lambda: 4

class C:
    def left(self):
        return """
over to the left
        """

def only():
    """All there is."""

def multi(
    x="\\f",
):  # a form feed in the source is no new line
    r"""Doc."""
    return x
'''


def test_a_function_is_its_lines_dedented_without_its_docstring():
    found = list(read_functions(SOURCE))
    assert found == [
        "def plain(x):\n    return x",
        textwrap.dedent(
            '''
            @property
            @functools.cache
            def method(self):
                def inner():
                    """Inner."""
                    return 1
                return inner'''
        ).strip(),
        'async def deep(self): "Doc on one line."; return 2',
        'def left(self):\n    return """\nover to the left\n    """',
        'def only():\n    """All there is."""',
        'def multi(\n    x="\\f",\n):  # a form feed in the source is no new line\n    return x',
    ]


def function(name: str, *lines: str) -> str:
    body = "\n".join(f"    x = {line!r}" for line in lines)
    return f"def {name}(x):\n{body}\n    y = x\n    return y\n\n"


def library(folder, *, extra: str = ""):
    """Two packages of ten files of two functions, and others that are no classes."""
    for package in ("alpha", "beta"):
        (folder / package / "sub").mkdir(parents=True)
        (folder / package / "__init__.py").write_text("")
        for i in range(10):
            inside = "sub/" if i % 2 else ""
            text = function(f"f{i}", package, str(i)) + function(f"g{i}", package) + "def short(): pass\n"
            (folder / package / f"{inside}m{i}.py").write_text(
                text + (extra if package == "beta" and i == 3 else "")
            )
    (folder / "alone.py").write_text("".join(function(f"a{i}", "a") for i in range(50)))
    for name, where in (("bundle", "no_package"), ("tests", "alpha/tests"), ("one", "one_file")):
        (folder / where).mkdir()
        (folder / where / f"{name}.py").write_text("".join(function(f"{name}{i}", name) for i in range(50)))
    (folder / "one_file" / "__init__.py").write_text("")
    (folder / "alpha" / "broken.py").write_text("def f(:\n")
    (folder / "alpha" / "latin.py").write_bytes(
        b"# coding: latin-1\ndef l(x):\n    x = '\xe9'\n    x\n    return x\n"
    )
    return folder


def texts(corpus: LabelledCorpus) -> list[tuple[str, str]]:
    return [
        (corpus.names[part.labels_E[i]], part.text(i).tobytes().decode())
        for part in (corpus.train, corpus.validation)
        for i in range(len(part))
    ]


def test_classes_are_the_packages_with_enough_functions_in_two_files(tmp_path):
    corpus = load_functions(library(tmp_path), context=30, least=20)
    assert corpus.names == ("alpha", "beta")
    assert collections.Counter(name for name, _ in texts(corpus)) == {"alpha": 21, "beta": 20}
    assert ("alpha", "def l(x):\n    x = 'é'\n    x\n    return x") in texts(corpus)
    assert corpus.notes == (
        "Skipped 1 files that are not Python.",
        "Skipped 50 functions of packages with too few of them.",
        f"Skipped 20 functions shorter than {SHORTEST} lines.",
        "Cut 41 of 41 texts to their first 30 bytes.",
    )
    with pytest.raises(ValueError, match=r"has 1 packages with at least 21 functions in two files or more"):
        load_functions(tmp_path, context=30, least=21)


def test_no_file_is_in_both_splits_and_each_class_in_each(tmp_path):
    """A function is named after its file."""
    corpus = load_functions(library(tmp_path), context=300, least=20)
    sides = [
        {(part.labels_E[i], part.text(i).tobytes().split(b"(")[0][-1:]) for i in range(len(part))}
        for part in (corpus.train, corpus.validation)
    ]
    assert not sides[0] & sides[1]
    assert {label for label, _ in sides[1]} == {0, 1}
    # At most 15 in a hundred of 21 and of 20, in files of two and one of one.
    assert collections.Counter(corpus.validation.labels_E.tolist()) == {0: 3, 1: 2}
    assert len(corpus.train) + len(corpus.validation) == 41


def test_a_text_that_occurs_twice_stands_once_in_the_first_file(tmp_path):
    twin = function("f2", "alpha", "2")
    corpus = load_functions(library(tmp_path, extra=twin), context=300, least=20)
    found = [name for name, text in texts(corpus) if text == twin.strip()]
    assert found == ["alpha"]
    assert "Skipped 1 functions that occur again." in corpus.notes


def test_the_fingerprint_is_of_the_content_alone(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, moved = (load_functions(library(tmp_path / name), context=300, least=20) for name in "ab")
    assert first.fingerprint == moved.fingerprint
    assert texts(first) == texts(moved)
    path = tmp_path / "b" / "beta" / "m2.py"
    path.write_text(path.read_text().replace("y = x", "y = -x"))
    assert load_functions(tmp_path / "b", context=300, least=20).fingerprint != first.fingerprint


def test_a_library_without_sources_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has 0 packages"):
        load_functions(tmp_path, context=30)
    with pytest.raises(ValueError, match="is no folder"):
        load_functions(tmp_path / "missing", context=30)


@functools.cache
def standard_library() -> LabelledCorpus:
    return load_functions(context=256)


def test_the_running_pythons_library_is_a_task():
    """At least eight packages of at least 100 functions, none of them most of the data, all with held-out ones."""
    corpus = standard_library()
    held_out = np.bincount(corpus.validation.labels_E, minlength=len(corpus.names))
    counts = np.bincount(corpus.train.labels_E, minlength=len(corpus.names)) + held_out
    assert len(corpus.names) >= 8
    assert counts.min() >= 100
    assert counts.max() < 0.3 * counts.sum()
    assert held_out.min() >= 5
    assert 0.1 < held_out.sum() / counts.sum() < 0.25
    assert {"asyncio", "email", "unittest"} <= set(corpus.names)
    assert not {"test", "site-packages"} & set(corpus.names)
    everything = [text for _, text in texts(corpus)]
    assert len(set(everything)) == len(everything)
    assert all(text.startswith(("def ", "async def ", "@")) for text in everything)

"""`tests/faults.toml` keeps its word: every reported fault is there, and every test it names exists and says so."""

import re
import subprocess
import sys
import tomllib

import pytest

from tests.listed_tests import TESTS, functions, missing

ROWS = tomllib.loads((TESTS / "faults.toml").read_text(encoding="utf-8"))
# The numbers as they were given; those left out were no concern of this library.
NUMBERS = (
    *(4, 5, 6, 9, 11, 14, 15, 16, 18, 19, 21, 23, 27, 29, 32, 34, 36, 38, 41, 42, 44, 47, 48, 50, 52, 53),
    *(57, 61, 62, 65, 68, 72, 74, 76, 79, 80, 82, 83, 84, 85, 86, 88, 91, 94, 95, 96, 98, 101, 102, 105),
    *(106, 107, 109, 110, 111, 113),
)
WAITING = {"B83"}
"""Faults with a trial that is still to be made: a new `rest` must be added here."""


def numbers_in(name: str) -> set[str]:
    """test_s2_38_b11_prefill -> {"B11"}; "b111 nested key" -> {"B111"}."""
    return {
        f"B{number}" for number in re.findall(r"(?<![a-z0-9])b(\d{2,3})(?![a-z0-9])", name.replace("_", " "))
    }


def test_every_fault_has_its_row():
    assert list(ROWS) == [f"B{number:02d}" for number in NUMBERS]


@pytest.mark.parametrize("fault", ROWS)
def test_row_is_whole_and_its_tests_exist(fault):
    row = ROWS[fault]
    assert set(row) - {"rest"} == {"severity", "fault", "tests"}
    assert row["severity"] in ("S1", "S2", "S3")
    assert row["fault"]
    assert row["tests"]
    assert len(set(row["tests"])) == len(row["tests"])
    assert not [why for why in map(missing, row["tests"]) if why]
    assert any(fault in numbers_in(test.partition("::")[2]) for test in row["tests"]), (
        "no test bears its number"
    )


def test_what_is_still_to_be_tried_is_known():
    assert {fault for fault, row in ROWS.items() if "rest" in row} == WAITING


def test_every_test_that_bears_a_number_is_listed():
    listed = {test.partition("[")[0] for row in ROWS.values() for test in row["tests"]}
    for file in sorted(TESTS.rglob("test_*.py")):
        path = file.relative_to(TESTS.parent).as_posix()
        for name in functions(path):
            for fault in numbers_in(name):
                assert f"{path}::{name}" in listed, f"{path}::{name} is in no row of faults.toml"
                assert f"{path}::{name}" in ROWS[fault]["tests"], f"{path}::{name} is not in the row {fault}"


@pytest.mark.parametrize(
    ("test", "why"),
    [
        ("tests/test_fault.py::test_every_fault_has_its_row", "tests/test_fault.py is no file of tests"),
        ("tests/small.py::test_x", "tests/small.py is no file of tests"),
        ("tests/test_faults.py::test_no_fault_has_its_row", "has no test test_no_fault_has_its_row"),
        ("tests/test_faults.py::numbers_in", "has no test numbers_in"),
        ("tests/test_cli.py::test_bad_training_input_is_one_sentence[b23 kv heads]", "has no case 'b23 kv heads'"),
    ],
)  # fmt: skip
def test_control_a_test_that_is_not_there_is_noticed(test, why):
    assert why in missing(test)


def test_control_numbers_are_read_from_names():
    assert numbers_in("test_b36_b61_parameters") == {"B36", "B61"}
    assert numbers_in("test_s2_14b_x") == numbers_in("test_ab12_x") == numbers_in("test_b1234_x") == set()


@pytest.mark.full
def test_pytest_collects_every_test_that_is_named():
    named = {test for row in ROWS.values() for test in row["tests"]}
    command = [sys.executable, "-m", "pytest", "-n", "0", "--collect-only", "-m", "full"]
    files = sorted({test.partition("::")[0] for test in named})
    found = subprocess.run([*command, *files], cwd=TESTS.parent, capture_output=True, text=True, check=True)
    collected = set(found.stdout.splitlines())
    collected |= {test.partition("[")[0] for test in collected}
    assert not named - collected

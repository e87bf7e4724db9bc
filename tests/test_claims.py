"""`tests/claims.toml` keeps its word: every claim is there once, every test it names exists and bears its number."""

import re
import tomllib
from collections import Counter

import pytest

from tests.listed_tests import TESTS, functions

ROWS = tomllib.loads((TESTS / "claims.toml").read_text(encoding="utf-8"))
NUMBERS = {"S0": 31, "S1": 61, "S2": 39, "S3": 24, "S4": 14}  # S2 has a 14b


def numbers_in(name: str) -> set[str]:
    """test_s3_20_s3_22_all_four_cells -> {"S3-20", "S3-22"}."""
    return {f"S{text}-{number}" for text, number in re.findall(r"s(\d)_(\d\d[a-z]?)(?=_)", name)}


def test_every_claim_has_its_row():
    assert Counter(name[:2] for name in ROWS) == NUMBERS


@pytest.mark.parametrize("claim", ROWS)
def test_row_is_whole_and_its_tests_exist(claim):
    row = ROWS[claim]
    assert set(row["kind"].replace("/", "")) <= set("UPAET")
    assert row["claim"]
    if row["status"] == "later":
        assert row["where"]
        assert set(row) == {"kind", "claim", "status", "where"}
        return
    if row["status"] == "measured":
        assert set(row) == {"kind", "claim", "status", "where"}
        assert f'"{claim}"' in (TESTS.parent / row["where"]).read_text(encoding="utf-8")
        return
    assert row["status"] == "test"
    assert set(row) <= {"kind", "claim", "status", "tests", "rest"}
    assert row["tests"]
    for test in row["tests"]:
        path, name = test.split("::")
        assert name in functions(path), f"{claim}: {test} is not there"
        assert claim in numbers_in(name), f"{claim}: {name} does not bear the number"


def test_what_can_be_exact_waits_only_for_what_does_not_exist():
    """A new row of kind U, P or A that waits must be added here, with what it waits for in its `where`."""
    waiting = {
        name for name, row in ROWS.items() if row["status"] == "later" and set(row["kind"]) & set("UPA")
    }
    assert waiting == {"S0-05"}


def test_every_test_that_bears_a_number_is_listed():
    listed = {test for row in ROWS.values() for test in row.get("tests", ())}
    for file in sorted(TESTS.rglob("test_*.py")):
        path = file.relative_to(TESTS.parent).as_posix()
        for name in functions(path):
            if numbers_in(name):
                assert f"{path}::{name}" in listed, f"{path}::{name} is in no row of claims.toml"

"""Every README snippet runs as it stands: Python blocks whole, commands through the command itself."""

import random
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from jaxblock.cli import main
from jaxblock.residual import REGISTRY
from jaxblock.sweeps.plan import build_plan

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)
PYTHON = [text for language, text in BLOCKS if language == "python"]
COMMANDS = [line for language, text in BLOCKS if language == "bash" for line in text.splitlines() if line]


def test_readme_has_the_snippets_it_promises():
    assert len(PYTHON) >= 3
    assert {language for language, _ in BLOCKS} == {"python", "bash", "toml", "text"}


@pytest.mark.parametrize("snippet", PYTHON, ids=[f"snippet{i}" for i in range(len(PYTHON))])
def test_python_snippet_runs(snippet, monkeypatch):
    # A reader's session has JAX's defaults, not this test suite's stricter ones.
    import jax

    with jax.numpy_rank_promotion("allow"):
        exec(compile(snippet, "README.md", "exec"), {"__name__": "__main__"})


def test_commands_run_in_order(tmp_path, monkeypatch, capsys):
    """Every line, on a small text, trainings for two steps and the sweep as a dry run; installing is what CI does."""
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 60)
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 9))) for _ in range(300)]
    (tmp_path / "book.txt").write_text(" ".join(draw.choices(words, k=3000)))
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    short = ["--run.steps", "2", "--sample.length", "4"]
    short += ["--model.context", "16", "--model.width", "8", "--model.heads", "2"]
    for line in COMMANDS:
        words = shlex.split(line.split("&&")[-1].replace("4096", "320"))  # ids that a small text has
        if words[:2] == ["python", "train.py"]:
            data = [] if "--data.path" in words else ["--data.path", "text.txt"]
            assert main(["train", *words[2:], *short, *data]) == 0, line
        elif words[0] == "jaxblock":
            extra = {
                "sample": ["--length", "4"],
                "sweep": ["--dry-run"],
                "diagnose": ["--only", "shapes"],
            }.get(words[1], [])
            assert main([*words[1:], *extra]) == 0, line
        else:
            assert words == ["pytest"], line
    assert (tmp_path / "runs" / "deeper" / "summary.json").exists()
    assert "import os" in capsys.readouterr().out


@pytest.mark.parametrize("text", [text for language, text in BLOCKS if language == "toml"])
def test_a_plan_builds(text):
    assert len(build_plan(tomllib.loads(text)).runs()) == 150


def test_ci_runs_the_readmes_test_command():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert 'pip install -e ".[test]" && pytest' in README
    assert '".[test]"' in script
    assert "pytest" in script


def test_file_map_names_files_that_exist():
    table = README.split("## The files")[1].split("\n## ")[0]
    for row in table.splitlines():
        if row.startswith("| `"):
            for name in re.findall(r"`([^`]+)`", row.split("|")[1]):
                path = ROOT / name if (ROOT / name).exists() else ROOT / "jaxblock" / name
                assert path.exists(), name


def test_the_table_of_topologies_is_the_registry():
    table = README.split("| name and options |")[1].split("\n\n")[0]
    rows = [row for row in table.splitlines()[2:] if row.startswith("| `")]
    assert [re.split(r"[`(]", row)[1] for row in rows] == list(REGISTRY)
    for row, factory in zip(rows, REGISTRY.values(), strict=True):
        entry = factory()
        cells = [cell.strip().replace("&#124;", "|") for cell in row.strip("|").split(" | ")]
        assert cells[1:3] == [entry.equation, entry.source], row
        assert cells[3].rstrip("| ") == (entry.reduces_to or ""), row

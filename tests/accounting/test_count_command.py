"""`jaxblock count`: every number of a config, in tables or one line of JSON, with nothing allocated."""

import json
import re

import pytest

from jaxblock import cli
from jaxblock.cli.count import count
from jaxblock.cli.count_page import quantity, size

GPT2 = ("vocab_size=50257", "context=1024", "depth=12", "width=768", "heads=12", "kv_heads=none", "bias=true")
LLAMA2 = (
    "vocab_size=32000",
    "context=4096",
    "depth=80",
    "width=8192",
    "heads=64",
    "kv_heads=8",
    "hidden=28672",
)


@pytest.fixture(autouse=True)
def command(monkeypatch):
    monkeypatch.setitem(cli.COMMANDS, "count", count)  # pyright: ignore[reportArgumentType]


def flags(*fields: str) -> list[str]:
    return [f"--model.{field}" for field in fields]


def counted(arguments: list[str], capsys) -> dict:
    assert cli.main(["count", *arguments, "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    return json.loads(line)


def test_gpt2_small_in_one_line(capsys):
    named = ("feed_forward=gelu_tanh", "norm=layer_norm", "positions=learned")
    found = counted([*flags(*GPT2, *named), "--data.batch", "8", "--data.accumulation", "4"], capsys)
    assert found["parameters"]["total"] == sum(found["parameters"]["by_role"].values()) == 124_439_808
    assert found["parameters"]["blocks"] == 12 * sum(found["parameters"]["per_block"].values()) == 85_054_464
    training = {name: row["training"] for name, row in found["flops_per_token"]["conventions"].items()}
    assert training == {"full": 854438400, "causal": 797815296, "6N_total": 741192192, "6N_blocks": 509607936}
    memory = found["bytes"]
    assert memory["parameters"] == memory["gradients"] == 4 * 124_439_808
    assert 0 <= memory["optimizer"] - 2 * memory["parameters"] <= 16  # two moments and a counter
    assert memory["rows"] == 2  # a quarter of the batch at a time
    kept = memory["kept_for_backward"]
    assert kept["full"]["per_block"] == 2 * 1024 * 768 * 4
    assert kept["none"]["total"] > kept["dots"]["total"] > kept["branch_out"]["total"] > kept["full"]["total"]
    held = memory["parameters"] + memory["gradients"] + memory["optimizer"] + memory["average"]
    assert memory["training_step"] == held + kept[memory["remat"]]["total"]
    assert memory["kv_cache_one_sequence"] == 2 * 12 * 1024 * 768 * 4


@pytest.mark.full
def test_seventy_billion_parameters_are_counted_without_a_byte_of_them(capsys):
    found = counted([*flags(*LLAMA2, "head=untied"), "--optimizer.average", "0.999"], capsys)
    assert found["parameters"]["total"] == 68_976_648_192
    assert found["bytes"]["average"] == 4 * 68_976_648_192


def test_a_model_that_cannot_decode_with_a_cache_is_not_told_it_is_free(capsys):
    assert cli.main(["count", "--model.experts", "capacity(experts=4, active=2)"]) == 0
    assert "none: it cannot decode with one" in capsys.readouterr().out
    assert cli.main(["count", "--model.experts", "dropless(experts=4, active=2)"]) == 0
    assert "none: it cannot" not in capsys.readouterr().out


def test_the_tables_of_a_file(tmp_path, capsys):
    file = tmp_path / "dense.toml"
    file.write_text('[execution]\nremat = "branch_out"\n')
    assert cli.main(["count", str(file), "--model.residual", "dense_former"]) == 0
    page = capsys.readouterr().out
    for words in (
        "parameters by role",
        r"connection +9 +0\.0 %",
        "parameters of one block, of 3",
        r"total +562,057 +every parameter",
        r"FLOPs per token, sequences of 128",
        r"causal +\S+ [kM] +\S+ [kM] +every product",
        r"depth mixing +2\.304 k",
        r"branch_out .*<- this config",
        r"one sequence of 128 +96\.00 KiB",
    ):
        assert re.search(words, page), words
    assert page.count("<- this config") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model.dpth", "3"], r"unknown flag 'model.dpth' \(did you mean 'model.depth'\?\)"),
        (["--model.depth", "0"], r"model.depth is 0; it must be a whole number of at least 1"),
        (["--model.depth"], r"flag --model.depth needs a value"),
        (["--json=yes"], r"flag --json takes no value"),
        (["nowhere.toml"], r"config file 'nowhere.toml' does not exist"),
        (["a.toml", "b.toml"], r"unexpected argument 'b.toml'"),
        (["--model.residual", "attention_residual(heads=3)"], r"heads is 3 and model.width is 128"),
        (["--run.task", "classifier"], r"run.task is 'classifier'; jaxblock count counts language models"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(arguments, words, capsys):
    assert cli.main(["count", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(rf"jaxblock: .*{words}.*\n", captured.err), captured.err


def test_help_is_a_page(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["count", "--help"])
    assert caught.value.code == 0
    page = capsys.readouterr().out
    assert "usage: jaxblock count" in page
    assert "--model.depth" in page


def test_numbers_are_short():
    assert [quantity(x) for x in (0, 2304, 854_438_400, 3.63e11, 2.25e15)] == [
        "0  ",
        "2.304 k",
        "854.4 M",
        "363 G",
        "2.25 P",
    ]
    assert [size(x) for x in (10, 1536, 2**30, 2**41)] == ["10 B", "1.50 KiB", "1.00 GiB", "2.00 TiB"]

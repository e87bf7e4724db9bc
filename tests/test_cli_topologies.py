"""`jaxblock topologies`: the table, one entry's page, the line of JSON, refusals."""

import json

import pytest

from jaxblock import cli
from jaxblock.accounting import topology_facts
from jaxblock.residual import REGISTRY, Topology
from tests.small import config


def printed(arguments: list[str], capsys) -> str:
    assert cli.main(["topologies", *arguments]) == 0
    return capsys.readouterr().out


def test_the_table_names_every_entry_with_its_rule_and_source(capsys):
    table = printed([], capsys)
    for name, factory in REGISTRY.items():
        assert name in table
        assert f"{factory().equation}  ({factory().source})" in table


def test_json_carries_what_an_entry_declares(capsys):
    found = json.loads(printed(["--json", "--depth", "12", "--width=64"], capsys))
    assert (found["depth"], found["width"]) == (12, 64)
    rows = {row["name"]: row for row in found["topologies"]}
    assert list(rows) == list(REGISTRY)
    dense = rows["dense_former"]
    assert dense["parameters_extra"] == 90  # L (L + 3) / 2 weights: the paper's count for 12 blocks
    assert dense["flops"] == 2 * 64 * 90
    assert dense["options"] == {"dilation": 1, "period": 1}
    assert dense["reduces_to"] == "pre_norm"
    assert dense["stream_bytes"] == 4 * 64 * (1 + 12)  # the state, and a history of all states but the last
    assert rows["pre_norm"]["traffic_ratio"] == 1.0
    assert rows["ngpt"]["projects"]
    assert rows["ngpt"]["labels"][0]["decay"] is False


def test_a_page_says_what_is_known_of_one(capsys):
    page = printed(["dense_former", "--depth", "48"], capsys)
    for words in (
        "dense_former(dilation=1, period=1)",
        "2402.02622",
        "+1,224",
        "starts as     pre_norm",
        "advice",
    ):
        assert words in page

    assert "dense_former(dilation=4, period=5)" in printed(["dense_former(period=5, dilation=4)"], capsys)


def test_a_width_that_one_cannot_have_is_said_in_the_list_and_refuses_it_alone(capsys):
    table = printed(["--width", "33"], capsys)
    assert (
        "frac_connections            not of this size: model.residual: fractions is 2; it must divide"
        in table
    )
    assert "dense_former" in table
    assert cli.main(["topologies", "frac_connections", "--width", "33"]) == 2
    assert "fractions is 2" in capsys.readouterr().err
    narrow = printed(["--width", "4"], capsys)
    assert "laurel                      not of this size: model.residual: rank is 8" in narrow
    assert cli.main(["topologies", "attention_residual(heads=3)", "--width", "8"]) == 2
    assert "heads must divide width" in capsys.readouterr().err


def test_a_page_says_how_to_start_it(capsys):
    assert 'initialization "plain" or "gpt2"\n' in printed(["rezero"], capsys)
    assert 'initialization "plain"\n' in printed(["ngpt"], capsys)
    assert 'initialization "plain" or "gpt2" or "zero_output"\n' in printed(["pre_norm"], capsys)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["densformer"], "did you mean 'dense_former'"),
        (["dense_former(dilatoin=2)"], "did you mean 'dilation'"),
        (["--depth", "0"], "--depth is '0'"),
        (["--width", "4.5"], "--width is '4.5'"),
        (["--deph", "4"], "did you mean 'depth'"),
        (["pre_norm", "post_norm"], "unexpected argument 'post_norm'"),
    ],
)
def test_bad_input_is_one_sentence(arguments, words, capsys):
    assert cli.main(["topologies", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert words in printed.err
    assert printed.err.count("\n") == 1


def test_a_topology_of_ones_own_has_facts_and_says_what_it_does_not_declare():
    plain = REGISTRY["pre_norm"]()
    mine = lambda: Topology(plain.connection, "x + f(norm(x))", "mine")  # noqa: E731
    facts = topology_facts("mine", config(), registry={"mine": mine})
    assert (facts.parameters, facts.flops, facts.traffic_ratio) == (None, None, None)
    assert facts.stream_bytes == 4 * 8

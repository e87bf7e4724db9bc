"""Numbers of parameters: the tree and the formula agree to the integer; published models come out as published."""

import dataclasses

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxblock import ModelConfig
from jaxblock.accounting import (
    abstract_parameters,
    branch_parameters,
    count_parameters,
    decoder_parameters,
    pre_norm_parameters,
    table_parameters,
)
from jaxblock.residual import REGISTRY, topology
from tests.residual.entries import NAMES
from tests.small import config

GPT2 = ModelConfig(vocab_size=50257, context=1024, depth=12, width=768, heads=12)
LLAMA = {
    "bias": False,
    "feed_forward": "swiglu",
    "norm": "rms_norm",
    "positions": "rope",
    "head": "untied",
    "context": 4096,
}


def counted(model_config: ModelConfig):
    return count_parameters(abstract_parameters(model_config))


@pytest.mark.parametrize(
    ("bias", "total", "blocks"), [(True, 124_439_808, 85_054_464), (False, 124_337_664, 84_953_088)]
)
def test_gpt2_small_has_its_published_number(bias, total, blocks):
    count = counted(dataclasses.replace(GPT2, bias=bias))
    assert (count.total, count.blocks) == (total, blocks)
    assert count.non_embedding == total - 768 * (50257 + 1024)
    assert sum(count.by_role.values()) == total
    assert 12 * sum(count.per_block.values()) == blocks
    assert list(count.by_place) == ["embedding", "positions", "blocks", "final_norm"]
    assert count.by_role["up"] == count.by_role["down"] == 12 * 4 * 768**2
    assert count.by_role.get("bias", 0) == (12 * 9 * 768 if bias else 0)


@pytest.mark.parametrize(
    ("sizes", "total"),
    [
        ({"vocab_size": 32000, "depth": 32, "width": 4096, "heads": 32, "hidden": 11008}, 6_738_415_616),
        (
            {"vocab_size": 32000, "depth": 32, "width": 4096, "heads": 32, "kv_heads": 8, "hidden": 14336},
            7_241_732_096,
        ),
        (
            {"vocab_size": 128256, "depth": 32, "width": 4096, "heads": 32, "kv_heads": 8, "hidden": 14336},
            8_030_261_248,
        ),
        (
            {"vocab_size": 32000, "depth": 80, "width": 8192, "heads": 64, "kv_heads": 8, "hidden": 28672},
            68_976_648_192,
        ),
    ],
    ids=["llama2-7b", "mistral-7b", "llama3-8b", "llama2-70b"],
)
def test_published_models_of_grouped_heads_and_gates(sizes, total):
    model_config = ModelConfig(**LLAMA, **sizes)
    assert pre_norm_parameters(model_config) == total
    assert counted(model_config).total == total
    assert (
        pre_norm_parameters(dataclasses.replace(model_config, hidden=sizes["hidden"] + 1)) != total
    )  # control


@st.composite
def decoders(draw) -> ModelConfig:
    """Draw a pre-norm decoder over everything that decides a shape."""
    kv_heads, repeats, head_dim = (draw(st.integers(1, 3)) for _ in range(3))
    return ModelConfig(
        vocab_size=draw(st.integers(1, 40)),
        context=draw(st.integers(1, 9)),
        depth=draw(st.integers(1, 4)),
        width=2 * head_dim * kv_heads * repeats,
        heads=kv_heads * repeats,
        kv_heads=kv_heads,
        hidden=draw(st.none() | st.integers(1, 40)),
        feed_forward=draw(st.sampled_from(["gelu", "relu", "swiglu", "glu"])),
        norm=draw(st.sampled_from(["layer_norm", "rms_norm"])),
        bias=draw(st.booleans()),
        positions=draw(st.sampled_from(["none", "learned", "sinusoidal", "rope", "alibi"])),
        wiring=draw(st.sampled_from(["serial", "parallel"])),
        head=draw(st.sampled_from(["tied", "untied"])),
        vocab_multiple=draw(st.sampled_from([1, 16])),
    )


@settings(deadline=None, max_examples=12)
@given(model_config=decoders())
def test_the_formula_of_a_pre_norm_decoder_is_the_tree_to_the_integer(model_config):
    count = counted(model_config)
    assert pre_norm_parameters(model_config) == decoder_parameters(model_config) == count.total
    deeper = dataclasses.replace(model_config, depth=model_config.depth + 1)
    assert pre_norm_parameters(deeper) - count.total == sum(count.per_block.values())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in REGISTRY else (pytest.mark.full,)) for name in NAMES]
)
def test_every_topology_adds_what_it_declares(name):
    model_config = config(residual=name, depth=5)
    count = counted(model_config)
    assert count.total == decoder_parameters(model_config)
    declared = topology(name).parameters
    assert declared is not None
    # A norm inside the branches is its topology's, layer norms have two numbers per feature.
    inner = 2 * (model_config.width + model_config.num_hidden) if topology(name).inner_norm else 0
    per_block = count.per_block["attention"] + count.per_block["feed_forward"] - inner
    assert branch_parameters(model_config) == 5 * per_block
    assert table_parameters(model_config) == count.by_place["embedding"] + count.by_place["positions"]
    rest = sum(count.by_place.get(place, 0) for place in ("shared", "close", "final_norm"))
    connections = 5 * (count.per_block["connections"] + count.per_block.get("after_block", 0))
    assert rest + connections + 5 * inner == declared(model_config)


def test_the_pre_norm_formula_is_not_that_of_other_topologies():
    """Control: a norm more, a norm less, readers."""
    for name in ("peri_norm", "post_norm", "attention_residual"):
        assert counted(config(residual=name)).total != pre_norm_parameters(config())


def test_a_topology_of_ones_own_is_counted_too():
    own = dataclasses.replace(topology("pre_norm"), connection=topology("peri_norm").connection)
    count = count_parameters(abstract_parameters(config(), own))
    assert count.total == counted(config(residual="peri_norm")).total


@pytest.mark.parametrize("vocab_multiple", [1, 8])
def test_tying_the_head_changes_the_total_but_not_what_no_table_holds(vocab_multiple):
    tied, untied = (counted(config(head=head, vocab_multiple=vocab_multiple)) for head in ("tied", "untied"))
    assert tied.non_embedding == untied.non_embedding
    assert untied.total - tied.total == untied.by_place["head"] == tied.by_place["embedding"]


def test_a_topology_without_a_declared_number_has_no_formula(monkeypatch):
    undeclared = dataclasses.replace(topology("pre_norm"), parameters=None)
    monkeypatch.setattr("jaxblock.accounting.parameters.topology", lambda text: undeclared)
    with pytest.raises(ValueError, match=r"model.residual is 'pre_norm', which declares no number"):
        decoder_parameters(config())


def test_a_parameter_that_has_no_role_is_refused():
    params = abstract_parameters(config())
    params["blocks"]["extra"] = {"weight": jax.ShapeDtypeStruct((3, 2), "float32")}
    with pytest.raises(ValueError, match="blocks/extra/weight"):
        count_parameters(params)

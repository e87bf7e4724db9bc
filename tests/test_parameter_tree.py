"""The parameter tree of a fixed set of configs, pinned: a rename or a new shape breaks checkpoints and imports.

Where a change is meant, write the file anew from the repository root and read the difference before you commit:

    python -m tests.test_parameter_tree
"""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxblock import Decoder, ModelConfig
from jaxblock.axes import parameter_rule, path_name
from tests.small import CONNECTIONS, config

PINNED = Path(__file__).with_name("parameter_trees.txt")

CONFIGS: dict[str, ModelConfig] = {
    "gpt2": config(positions="learned", bias=True, head="tied", initialization="gpt2", vocab_multiple=4),
    "llama": config(
        positions="rope",
        feed_forward="swiglu",
        norm="rms_norm",
        heads=4,
        kv_heads=2,
        bias=False,
        head="untied",
        param_dtype="bfloat16",
    ),
    "gated_with_biases": config(feed_forward="geglu", hidden=12, positions="alibi", head="untied"),
    "parallel": config(wiring="parallel", positions="none"),
    **{f"residual_{name}": config(residual=name, positions="sinusoidal") for name in CONNECTIONS},
    "parallel_peri_norm": config(wiring="parallel", residual="peri_norm", window=(4, 0)),
}


@functools.cache
def leaves(model_config: ModelConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Return every parameter's path, shape and dtype; nothing is computed."""
    tokens_BT = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    params = jax.eval_shape(Decoder(model_config).init, jax.random.key(0), tokens_BT)["params"]
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}


def described(name: str) -> str:
    lines = [
        f"{path} {list(leaf.shape)} {leaf.dtype.name}" for path, leaf in sorted(leaves(CONFIGS[name]).items())
    ]
    return "\n".join([f"[{name}]", *lines])


def pinned() -> dict[str, str]:
    sections = PINNED.read_text(encoding="utf-8").strip().split("\n\n")
    return {section.splitlines()[0].strip("[]"): section for section in sections}


@pytest.mark.parametrize("name", CONFIGS)
def test_parameter_tree_is_the_pinned_one(name):
    assert described(name).splitlines() == pinned()[name].splitlines()


def test_the_pinned_file_holds_these_configs_and_no_other():
    assert list(pinned()) == list(CONFIGS)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_parameter_has_one_role_and_a_name_for_each_axis(name):
    for path, leaf in leaves(CONFIGS[name]).items():
        rule = parameter_rule(path)
        if rule.axes is None:
            assert rule.role == "connection"  # what a connection declares of its own is replicated
            continue
        assert len(rule.axes) == len(leaf.shape), path
        sizes = dict(zip(rule.axes, leaf.shape, strict=True))
        assert sizes.get("width", 8) == 8
        assert sizes.get("depth", 3) == 3


def test_a_parameter_without_a_role_is_refused():
    with pytest.raises(ValueError, match=r"blocks/attention/queries/kernel.*exactly one row.*none"):
        parameter_rule("blocks/attention/queries/kernel")


if __name__ == "__main__":
    PINNED.write_text("\n\n".join(map(described, CONFIGS)) + "\n", encoding="utf-8")

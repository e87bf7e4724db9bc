"""Depth is counted once: what a parametrization that scales branches does not go with, beside what it does go with."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxblock import Classifier, Decoder, Encoder
from jaxblock.axes import path_name
from jaxblock.residual import REGISTRY, check_depth_rules, initializations, topology
from jaxblock.training.config import OptimizerConfig, TrainConfig
from jaxblock.training.config_file import build_config
from tests.residual.battery import CHECKS
from tests.residual.given import Entry
from tests.small import config

SCALING = (
    "depth_mup(base_depth=1)",
    "complete_p(base_depth=1, base_width=4)",
    "complete_p(base_depth=3, base_width=8)",
)
SCALE_FREE = {name for name in REGISTRY if topology(name).scale_free}
DEEP_NORM = dataclasses.replace(
    topology("pre_norm"),
    gain=lambda config, role: (
        (8 * config.depth) ** -0.25 if role in ("value", "output", "up", "down") else 1.0
    ),
)


def counts_depth(name: str) -> bool:
    """Whether the rule's factors, or the initial values of its branches, depend on the number of blocks."""
    rule = topology(name)
    gains = {rule.gain(config(depth=depth), role) for depth in (2, 4) for role in ("value", "down")}
    return rule.depth_scaled or len(gains) > 1


COUNTED_TWICE = {name for name in REGISTRY if counts_depth(name)}


def test_which_topologies_count_depth():
    assert {"residual_multiplier", "deep_norm", "keel", "sub_norm"} <= COUNTED_TWICE
    # A factor by the block's number, or another rule in part of the blocks, is none by the number of blocks.
    assert (
        not {"pre_norm", "post_norm", "layer_norm_scaling", "mix_norm", "layer_scale", "rezero"}
        & COUNTED_TWICE
    )
    assert {"peri_norm", "branch_norm"} <= SCALE_FREE
    assert not SCALE_FREE & COUNTED_TWICE


@pytest.mark.parametrize("text", [*SCALING, "gpt2"])
@pytest.mark.parametrize("name", REGISTRY)
def test_a_topology_that_counts_depth_is_refused_beside_another_rule_that_does(name, text):
    field = "initialization" if text == "gpt2" else "parametrization"
    both, rule = config(residual=name, **{field: text}), topology(name)
    if name not in COUNTED_TWICE:
        if name not in SCALE_FREE and not (rule.sums_width and "base_width=4" in text):
            check_depth_rules(both, rule)
        return
    for use in (lambda: check_depth_rules(both, rule), lambda: TrainConfig(model=both)):
        with pytest.raises(
            ValueError, match=rf"model\.{field} is .* it would count twice; with it the {field} must"
        ):
            use()


@pytest.mark.parametrize("text", SCALING)
@pytest.mark.parametrize("name", [name for name in REGISTRY if name not in COUNTED_TWICE])
def test_a_connection_that_normalizes_its_branch_is_refused_and_no_other(name, text):
    scaled, plain = config(parametrization=text, residual=name), config(residual=name)
    check_depth_rules(plain, topology(name))
    TrainConfig(model=plain)
    if topology(name).sums_width and "base_width=4" in text:
        return  # refused as a wider model, below
    if name not in SCALE_FREE:
        assert Decoder(scaled).labels == topology(name).labels
        TrainConfig(model=scaled)
        return
    for use in (
        lambda: check_depth_rules(scaled, topology(name)),
        lambda: Decoder(scaled).labels,
        lambda: Encoder(scaled).connections,
        lambda: Classifier(scaled, classes=2).connections,
        lambda: TrainConfig(model=scaled),
    ):
        with pytest.raises(
            ValueError, match=r"a factor on the branch does nothing there; .* must be \"standard\""
        ):
            use()


@pytest.mark.parametrize("text", SCALING)
def test_a_topology_that_scales_initial_values_by_depth_is_refused(text):
    with pytest.raises(
        ValueError,
        match=r"scales the initial values of value kernels by the size of the model already: .* count twice",
    ):
        Decoder(config(parametrization=text), topology=DEEP_NORM).connections  # noqa: B018
    assert Decoder(config(), topology=DEEP_NORM).connections is DEEP_NORM
    constant = dataclasses.replace(DEEP_NORM, gain=lambda config, role: 0.5)
    assert Decoder(config(parametrization=text), topology=constant).connections is constant
    by_width = dataclasses.replace(DEEP_NORM, gain=lambda config, role: config.width**-0.5)
    with pytest.raises(
        ValueError, match="the initial values of query kernels by the size of the model already"
    ):
        Decoder(config(parametrization=text), topology=by_width).connections  # noqa: B018


@pytest.mark.parametrize("text", SCALING)
def test_the_initialization_that_scales_by_depth_is_refused(text):
    with pytest.raises(ValueError, match=r"gpt2.*depth would count twice; .* must be plain or zero_output"):
        config(parametrization=text, initialization="gpt2")
    for initialization in ("plain", "zero_output"):
        config(parametrization=text, initialization=initialization)
    config(initialization="gpt2")


@pytest.mark.parametrize("algorithm", ["lion", "adafactor", "muon"])
def test_the_rules_are_adamws(algorithm):
    optimizer = OptimizerConfig(algorithm=algorithm)
    for text in SCALING:
        with pytest.raises(ValueError, match=r"whose rules are AdamW's; the algorithm must be adamw"):
            TrainConfig(model=config(parametrization=text), optimizer=optimizer)
        TrainConfig(model=config(parametrization=text))
    TrainConfig(model=config(), optimizer=optimizer)


def test_a_file_that_counts_depth_twice_is_refused_with_the_sentence_alone():
    model = {"vocab_size": 11, "context": 8, "depth": 2, "width": 8, "heads": 2}
    values = {"model": {**model, "parametrization": SCALING[0], "residual": "peri_norm"}}
    with pytest.raises(ValueError, match=r"^model\.parametrization is 'depth_mup\(base_depth=1\)'"):
        build_config(values)


def test_what_was_left_out_is_named():
    with pytest.raises(
        ValueError, match=r"'complete_p' must be given base_depth \(int\) and base_width \(int\); there"
    ):
        config(parametrization="complete_p")
    with pytest.raises(
        ValueError, match=r"'complete_p' must be given base_width \(int\); there is no default"
    ):
        config(parametrization="complete_p(base_depth=2)")


@pytest.mark.parametrize(("name", "says"), [("pre_norm", True), ("branch_norm", False)])
def test_a_false_declaration_fails_the_battery(name, says):
    liar = dataclasses.replace(topology(name), scale_free=says)
    with pytest.raises(AssertionError, match=f"it declares scale_free = {says}"):
        CHECKS["scale_free"](Entry("liar", liar))


@pytest.mark.parametrize(
    ("name", "reason", "allowed"),
    [
        ("rezero", "of a product of two zeros neither ever moves", ("plain", "gpt2")),
        ("rezero(norm='pre')", "of a product of two zeros neither ever moves", ("plain", "gpt2")),
        ("layer_scale(start=0.0)", "of a product of two zeros neither ever moves", ("plain", "gpt2")),
        ("learned_scale(start=0.0)", "of a product of two zeros neither ever moves", ("plain", "gpt2")),
        ("none", "without a skip", ("plain", "gpt2")),
        ("ngpt", "an output of 0 has no direction", ("plain",)),
        ("deep_norm", "its gain on the kernels that write to the stream", ("plain",)),
        ("sub_norm", "its gain on the kernels that write to the stream", ("plain",)),
    ],
)
def test_branches_that_start_at_0_are_refused_with_the_rules_own_reason(name, reason, allowed):
    """The product of two zeros has no gradient in either: such a run would train its embedding alone."""
    assert initializations(config(residual=name), topology(name)) == allowed
    names = " or ".join(f'"{x}"' for x in allowed)
    with pytest.raises(
        ValueError, match=rf"model\.initialization is 'zero_output' .*{reason}.* must be {names}$"
    ):
        Decoder(config(residual=name, initialization="zero_output")).connections  # noqa: B018
    Decoder(config(residual=name)).connections  # noqa: B018
    for other in ("pre_norm", "layer_scale", "keel", "hyper_connections"):
        Decoder(config(residual=other, initialization="zero_output")).connections  # noqa: B018


@pytest.mark.parametrize("name", REGISTRY)
def test_what_sums_over_the_width_has_no_rule_for_a_wider_model(name):
    """By shape, too: a parameter of a connection with the width among its axes and one more is a matrix over it."""
    base = config(residual=name, norm="rms_norm", bias=False)
    wide = dataclasses.replace(base, parametrization="complete_p(base_depth=3, base_width=4)")
    rule = topology(name)
    shapes = jax.eval_shape(Decoder(base).init, jax.random.key(0), np.zeros((1, 2), np.int32))["params"][
        "blocks"
    ]
    matrices = [
        path_name(path)
        for path, leaf in jax.tree_util.tree_leaves_with_path(shapes)
        if "connection" in path_name(path) and leaf.ndim > 2 and base.width in leaf.shape[1:]
    ]
    assert rule.sums_width or not matrices
    if rule.sums_width:
        with pytest.raises(
            ValueError, match=r"over the width, and no known rule .*base_width is the model's width, 8"
        ):
            check_depth_rules(wide, rule)
        check_depth_rules(dataclasses.replace(wide, width=4), rule)


def test_a_mixer_of_positions_has_no_rule_for_a_wider_model():
    changes = {"token_mixer": "mlp(hidden=4)", "positions": "none"}
    with pytest.raises(ValueError, match=r"kernels sum over positions.*base_width must be model\.width, 8"):
        config(**changes, parametrization="complete_p(base_depth=3, base_width=4)")
    for text in ("complete_p(base_depth=3, base_width=8)", "depth_mup(base_depth=1)"):
        check_depth_rules(config(**changes, parametrization=text), topology("pre_norm"))
    config(
        **changes | {"token_mixer": "convolution"}, parametrization="complete_p(base_depth=3, base_width=4)"
    )


@pytest.mark.parametrize(
    ("field", "text", "names"),
    [
        ("stochastic_depth", "linear(rate=0.1)", SCALE_FREE),
        ("initialization", "gpt2", {name for name in REGISTRY if topology(name).project is not None}),
    ],
)
def test_what_would_do_nothing_beside_a_topology_is_refused(field, text, names):
    assert names
    for name in REGISTRY:
        asked, rule = config(residual=name, **{field: text}), topology(name)
        if name in names:
            with pytest.raises(ValueError, match=rf"model\.{field} is .*does nothing"):
                check_depth_rules(asked, rule)
        elif field == "stochastic_depth":
            check_depth_rules(asked, rule)

"""A block with PyTorch's weights is PyTorch's `TransformerEncoderLayer`, at four points and in every gradient.

The claims are S1-19, S1-29, S1-30 and S1-31. The reference is torch itself where the extra `parity`
is installed, and the golden file elsewhere; in train mode, where padded positions are ordinary queries, so that
all positions are compared (torch's fused eval path is another matter: fault B109, below).
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblock import Block, ExecutionConfig, ModelConfig
from jaxblock.functional import AttentionPattern
from jaxblock.models.block import LayerInputs
from jaxblock.modules import AttentionInputs
from jaxblock.residual.registry import topology
from tests.parity import torch_encoder_layer as torch_reference
from tests.parity.torch_encoder_layer import (
    CASES,
    EVALUATED,
    GOLDEN,
    GRADIENT_CASES,
    HEADS,
    HIDDEN,
    LENGTH,
    POINTS,
    WIDTH,
    Case,
    Reference,
)

HEAD_DIM = WIDTH // HEADS
TOLERANCE = 1e-5
DETECTED = 1e-3
PRE = Case(norm_first=True, padded=False, activation="relu")
POST = Case(norm_first=False, padded=False, activation="relu")
PADDED = Case(norm_first=True, padded=True, activation="relu")


@pytest.fixture(scope="module")
def reference() -> Reference:
    return torch_reference.reference()


def split_heads(weight: np.ndarray) -> np.ndarray:
    """torch's [H * K, D] -> [D, H, K]."""
    return weight.T.reshape(WIDTH, HEADS, HEAD_DIM)


def split_heads_minor(weight: np.ndarray) -> np.ndarray:
    """The same shape with heads and head dim the wrong way round: a control."""
    return weight.T.reshape(WIDTH, HEAD_DIM, HEADS).swapaxes(1, 2)


def block_tree(
    torch_values: Mapping[str, np.ndarray], split: Callable[[np.ndarray], np.ndarray] = split_heads
) -> dict:
    """Return torch's weights, or its gradients, as a block's tree: entries are moved, never computed with."""
    value = torch_values
    rows = np.split(value["self_attn.in_proj_weight"], 3)
    biases = value["self_attn.in_proj_bias"].reshape(3, HEADS, HEAD_DIM)
    roles = ("query", "key", "value")
    attention = {
        role: {"kernel": split(row), "bias": bias}
        for role, row, bias in zip(roles, rows, biases, strict=True)
    }
    output = value["self_attn.out_proj.weight"].T.reshape(HEADS, HEAD_DIM, WIDTH)
    attention["output"] = {"kernel": output, "bias": value["self_attn.out_proj.bias"]}
    norms = ("attention_connection", "norm1"), ("feed_forward_connection", "norm2")
    dense = ("up", "linear1"), ("down", "linear2")
    return {
        "attention": attention,
        "feed_forward": {
            ours: {"kernel": value[f"{theirs}.weight"].T, "bias": value[f"{theirs}.bias"]}
            for ours, theirs in dense
        },
        **{
            ours: {"norm": {"scale": value[f"{theirs}.weight"], "bias": value[f"{theirs}.bias"]}}
            for ours, theirs in norms
        },
    }


def block(connection: str, activation: str) -> Block:
    """Return an unbound block of torch's sizes."""
    config = ModelConfig(
        vocab_size=2,
        context=LENGTH,
        depth=1,
        width=WIDTH,
        heads=HEADS,
        hidden=HIDDEN,
        feed_forward=activation,
        positions="none",
    )
    return Block(config, ExecutionConfig(), topology(connection))


class Ours(NamedTuple):
    """A block's values at `POINTS`, and the gradients of sum(output * cotangent) in the block's tree."""

    points: Mapping[str, jax.Array]
    gradients: Mapping[str, Any]


@functools.cache
def _compiled(connection: str, activation: str) -> Callable:
    model = block(connection, activation)

    def loss(params, x_BTD, key_valid_BT, cotangent_BTD):
        inputs = AttentionInputs(AttentionPattern(causal=False, key_valid_BT=key_valid_BT))
        y_BTD, kept = model.apply({"params": params}, x_BTD, inputs, LayerInputs(), mutable=["intermediates"])
        return jnp.sum(y_BTD * cotangent_BTD), kept["intermediates"]

    return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))


def ours(
    reference: Reference,
    case: Case,
    *,
    connection: str | None = None,
    activation: str | None = None,
    split: Callable[[np.ndarray], np.ndarray] = split_heads,
    key_valid_BT: np.ndarray | None = None,
) -> Ours:
    """Run the block with torch's weights as `case` says, or with one thing done otherwise (the controls).

    Torch's mask is True where a key is ignored and ours is True where it is real: the mask is inverted here.
    """
    inputs = reference.inputs
    if case.padded and key_valid_BT is None:
        key_valid_BT = ~inputs.ignore_BT
    run = _compiled(connection or named(case), activation or case.activation)
    params = jax.tree.map(jnp.asarray, block_tree(inputs.weights, split))
    (of_params, of_input), points = run(params, inputs.x_BTD, key_valid_BT, inputs.cotangent_BTD)
    return Ours(points, {"params": of_params, "input": of_input})


def named(case: Case) -> str:
    return "pre_norm" if case.norm_first else "post_norm"


def differences(mine: Ours, reference: Reference, case: Case) -> dict[str, float]:
    """Return the largest absolute difference at each of the four points."""
    theirs = reference.points[case]
    for point in POINTS:
        chex.assert_equal_shape([mine.points[point], theirs[point]])
    return {point: float(np.abs(mine.points[point] - theirs[point]).max()) for point in POINTS}


def relative_difference(mine: jax.Array, theirs: np.ndarray) -> float:
    """Return the largest difference over torch's largest entry."""
    return float(np.abs(mine - theirs).max() / np.abs(theirs).max())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_s1_29_the_block_equals_torchs_layer_at_each_point(reference, case):
    found = differences(ours(reference, case), reference, case)
    assert max(found.values()) < TOLERANCE, found


@pytest.mark.parametrize("case", GRADIENT_CASES, ids=str)
def test_s1_29_gradients_of_the_input_and_of_every_weight_equal_torchs(reference, case):
    mine = ours(reference, case).gradients
    flat = reference.gradients[case]
    theirs = {"params": block_tree(flat), "input": flat["input"]}
    chex.assert_trees_all_equal_shapes(mine, theirs)
    # A key bias moves all scores of a query alike, which softmax does not see: its gradient is round-off.
    for gradients in (mine, theirs):
        assert np.abs(gradients["params"]["attention"]["key"].pop("bias")).max() < TOLERANCE
    found = jax.tree.map(relative_difference, mine, theirs)
    assert max(jax.tree.leaves(found)) < TOLERANCE, found


def test_s1_29_every_weight_is_copied_and_no_other_exists(reference):
    model, copied = block("pre_norm", "relu"), block_tree(reference.inputs.weights)
    made = jax.eval_shape(
        model.init,
        jax.random.key(0),
        reference.inputs.x_BTD,
        AttentionInputs(AttentionPattern()),
        LayerInputs(),
    )
    chex.assert_trees_all_equal_shapes_and_dtypes(jax.tree.map(jnp.asarray, copied), made["params"])


@pytest.mark.parametrize(
    ("change", "first"),
    [
        ({"connection": "post_norm"}, "attention_out"),
        ({"split": split_heads_minor}, "attention_out"),
        ({"activation": "gelu"}, "feed_forward_out"),
    ],
    ids=["post_norm", "heads_minor", "gelu"],
)
def test_s1_29_a_wrong_block_differs_from_the_sublayer_on_where_it_is_wrong(reference, change, first):
    """The weights fit every one of these blocks; only values tell."""
    found = differences(ours(reference, PRE, **change), reference, PRE)
    wrong = POINTS[POINTS.index(first) :]
    assert all((found[point] > DETECTED) == (point in wrong) for point in POINTS), found
    assert all(found[point] < TOLERANCE for point in POINTS if point not in wrong), found


def test_s1_29_pre_norm_differs_from_torchs_default_post_norm(reference):
    found = differences(ours(reference, POST, connection="pre_norm"), reference, POST)
    assert min(found.values()) > DETECTED, found


def test_s1_29_a_wrong_gradient_is_detected(reference):
    mine = ours(reference, PADDED, activation="gelu").gradients["params"]
    theirs = block_tree(reference.gradients[PADDED])
    found = jax.tree.map(relative_difference, mine, theirs)
    assert found["feed_forward"]["up"]["kernel"] > DETECTED
    assert found["attention"]["query"]["kernel"] > DETECTED


def test_s1_31_relu_against_gelu_is_seen_at_the_feed_forward_and_not_at_attention(reference):
    """Torch's default is relu (the reference is built without naming it), `ModelConfig`'s is gelu."""
    default = ModelConfig(vocab_size=2, context=LENGTH, depth=1, width=WIDTH, heads=HEADS).feed_forward
    found = differences(ours(reference, PADDED, activation=default), reference, PADDED)
    assert found["attention_out"] < TOLERANCE
    assert found["resid_mid"] < TOLERANCE
    assert found["feed_forward_out"] > DETECTED
    assert found["resid_post"] > DETECTED


def test_s1_31_the_tanh_form_is_not_torchs_gelu(reference):
    case = PADDED._replace(activation="gelu")
    found = differences(ours(reference, case, activation="gelu_tanh"), reference, case)
    assert found["attention_out"] < TOLERANCE < found["feed_forward_out"]


@pytest.mark.parametrize("norm_first", [True, False], ids=["pre_norm", "post_norm"])
def test_s1_19_torchs_mask_is_the_inverse_of_ours(reference, norm_first):
    """Torch: True = ignore. Here: True = real. `ours` inverts it, which is right; passed as it is, it is not."""
    case = PADDED._replace(norm_first=norm_first)
    ignore_BT = reference.inputs.ignore_BT
    right = differences(ours(reference, case, key_valid_BT=~ignore_BT), reference, case)
    inverted = differences(ours(reference, case, key_valid_BT=ignore_BT), reference, case)
    unmasked = differences(ours(reference, case._replace(padded=False)), reference, case)
    assert max(right.values()) < TOLERANCE
    assert min(inverted.values()) > DETECTED
    assert min(unmasked.values()) > DETECTED


def test_s1_19_a_mask_that_could_mean_either_is_refused(reference):
    with pytest.raises(
        ValueError, match="key_valid_BT has dtype int32; masks are boolean, True = may attend"
    ):
        ours(reference, PADDED, key_valid_BT=reference.inputs.ignore_BT.astype(np.int32))


def test_s1_30_positions_first_is_not_silently_the_same(reference):
    """A block reads [B, T, D]; torch's own default, [T, B, D], has the same rank."""
    inputs = reference.inputs._replace(
        x_BTD=reference.inputs.x_BTD.swapaxes(0, 1),
        cotangent_BTD=reference.inputs.cotangent_BTD.swapaxes(0, 1),
    )
    swapped = reference._replace(inputs=inputs)
    with pytest.raises(ValueError, match=r"key_valid_BT has shape \(2, 5\); it must be \[5 or 1, 2\]"):
        ours(swapped, PADDED)
    y_TBD = ours(swapped, PRE).points
    back = Ours({point: y_TBD[point].swapaxes(0, 1) for point in POINTS}, {})
    assert min(differences(back, reference, PRE).values()) > DETECTED


def test_b109_torchs_eval_path_is_comparable_at_real_positions_only(reference):
    real_BT = ~reference.inputs.ignore_BT
    gap_BT = np.abs(ours(reference, EVALUATED).points["resid_post"] - reference.evaluated_BTD).max(-1)
    assert gap_BT[real_BT].max() < TOLERANCE
    assert gap_BT[~real_BT].min() > DETECTED
    np.testing.assert_array_equal(reference.evaluated_BTD[~real_BT], 0)


@pytest.mark.skipif(
    not torch_reference.torch_installed(),
    reason="compares the golden file with torch, which is not installed: pip install -e '.[parity,test]'",
)
def test_s1_29_the_golden_file_is_what_torch_computes_today():
    """If torch has changed: python -m tests.parity.torch_encoder_layer, and say why in the commit."""
    live, golden = (
        torch_reference.pack(torch_reference.live()),
        torch_reference.pack(torch_reference.read_golden()),
    )
    assert live.keys() == golden.keys()

    def check(name: str, stored: np.ndarray) -> None:
        assert stored.dtype == live[name].dtype
        # Float32 round-off of another processor or release: a tenth of the comparison's own tolerance.
        scale = np.abs(live[name]).max()
        np.testing.assert_allclose(stored, live[name], rtol=0, atol=1e-6 * scale, err_msg=name)

    for name in live:
        check(name, golden[name])
    with pytest.raises(AssertionError):
        check("points", golden["points"][::-1])
    assert GOLDEN.stat().st_size < 60_000

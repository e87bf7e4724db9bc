"""The final norm: logits that keep their size when the stream grows, and a missing one caught by its name."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblock.invariants import describe_exit, switch_exit
from jaxblock.residual import topology
from tests.small import built, config, tokens

STREAM = np.random.default_rng(0).normal(size=(2, 4, 8))
HEAD = np.random.default_rng(1).normal(size=(8, 11))


def described(model, params):
    return describe_exit(functools.partial(jax.jit(switch_exit(model, tokens())), params))


@pytest.mark.parametrize(
    ("residual", "head"),
    [
        ("pre_norm", "tied"),
        ("pre_norm", "untied"),
        ("peri_norm", "tied"),
        ("post_norm", "tied"),
        ("attention_residual", "tied"),
    ],
)
def test_s1_14_every_exit_is_normalized(residual, head):
    model, params = built(config(residual=residual, head=head, positions="none"))
    structure = described(model, params)
    assert structure.name == "normalized"
    assert structure.affine > 0.5  # the control: these logits do not follow the stream


@pytest.mark.parametrize(
    ("residual", "head"), [("pre_norm", "tied"), ("pre_norm", "untied"), ("peri_norm", "tied")]
)
def test_s1_14_a_missing_final_norm_is_caught(residual, head):
    bare = dataclasses.replace(topology(residual), final_norm=False)
    model, params = built(config(residual=residual, head=head, positions="none"), topology=bare)
    structure = described(model, params)
    assert structure.name == "missing final norm"
    assert structure.invariant > 10


def test_a_small_embedding_and_a_head_bias_do_not_hide_it():
    """An embedding far below the norm's epsilon, as some models start, and logits that are affine."""

    def rms(x):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)

    x = 1e-3 * STREAM
    assert describe_exit(lambda scale: rms(np.asarray(scale) * x) @ HEAD + 1).name == "normalized"
    assert describe_exit(lambda scale: np.asarray(scale) * x @ HEAD + 1).name == "missing final norm"


def test_an_exit_of_another_kind_is_unknown():
    assert describe_exit(lambda scale: np.sqrt(np.asarray(scale)) * STREAM @ HEAD).name == "unknown"
    # Without a skip and without branches nothing of the stream arrives.
    blind = described(*built(config(residual="none", positions="none")))
    assert (blind.name, blind.varies) == ("unknown", 0.0)
    with pytest.raises(ValueError, match="logits are not finite"):
        describe_exit(lambda scale: jnp.full((1, 2, 3), jnp.nan))

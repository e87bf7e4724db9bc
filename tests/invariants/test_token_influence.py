"""Causality and padding: what holds for the decoder, and that a planted leak is seen and located."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblock.invariants import probe_causality, probe_padding
from tests.small import built, config, tokens

TOKENS = tokens()
OTHER = (TOKENS + 1) % 11
LEFT = jnp.asarray([[False, False, True, True, True, True], [False, True, True, True, True, True]])
RIGHT = LEFT[:, ::-1]
TABLE = jnp.asarray(np.random.default_rng(0).normal(size=(11, 4)), jnp.float32)


def logits(tokens_BT, valid_BT=None):
    model, params = built(config())
    return model.apply({"params": params}, tokens_BT, valid_BT=valid_BT)


def streams(tokens_BT, valid_BT):
    """Return the stream after each block, [L, B, T, D]."""
    model, params = built(config())
    _, variables = model.apply({"params": params}, tokens_BT, valid_BT=valid_BT, mutable=["intermediates"])
    return variables["intermediates"]["blocks"]["resid_post"]


@functools.cache
def padding(apply, mask: str):
    valid_BT = {"left": LEFT, "right": RIGHT}[mask]
    return jax.jit(lambda: probe_padding(apply, TOKENS, OTHER, valid_BT))()


# Causality -----------------------------------------------------------------------------------------------------------


def test_no_token_moves_an_earlier_logit_and_every_token_moves_a_later_one():
    report = jax.jit(jax.vmap(lambda t: probe_causality(logits, TOKENS, OTHER, position=t)))(jnp.arange(6))
    assert report.earlier_equal.all()
    assert (report.error == 0).all()
    assert (report.first_leak == -1).all()
    assert report.moved.all()
    np.testing.assert_array_equal(report.moved_later, [True] * 5 + [False])


@pytest.mark.parametrize("seen", [1, 2])
def test_a_leak_is_located(seen):
    """Each position also reads the token `seen` places after it."""

    def leaky(tokens_BT):
        x_BTD = TABLE[tokens_BT]
        return jnp.cumsum(x_BTD, axis=1) + 1e-3 * jnp.roll(x_BTD, -seen, axis=1)

    report = probe_causality(leaky, TOKENS, OTHER, position=4)
    assert not report.earlier_equal
    assert report.first_leak == 4 - seen
    assert 0 < report.error < 0.1
    assert probe_causality(lambda x: jnp.cumsum(TABLE[x], axis=1), TOKENS, OTHER, position=4).earlier_equal


def test_a_mean_over_positions_leaks_from_the_first_on():
    report = probe_causality(
        lambda x: TABLE[x] + TABLE[x].mean(axis=1, keepdims=True), TOKENS, OTHER, position=5
    )
    assert (bool(report.earlier_equal), int(report.first_leak)) == (False, 0)


def test_the_controls_say_when_a_causality_check_shows_nothing():
    same = probe_causality(lambda x: jnp.cumsum(TABLE[x], axis=1), TOKENS, TOKENS, position=2)
    assert (bool(same.earlier_equal), bool(same.moved), bool(same.moved_later)) == (True, False, False)
    local = probe_causality(lambda x: TABLE[x], TOKENS, OTHER, position=2)
    assert (bool(local.earlier_equal), bool(local.moved), bool(local.moved_later)) == (True, True, False)


# Padding -------------------------------------------------------------------------------------------------------------


def test_s1_38_padded_tokens_move_no_logit_of_a_real_token():
    report = padding(logits, "left")
    assert report.equal
    assert report.error == 0


def test_s1_38_padded_tokens_move_no_real_token_at_any_depth():
    report = padding(streams, "left")
    assert report.error.shape == (3,)
    assert (report.error < 1e-6).all()
    assert report.equal.all()


def test_s1_39_without_the_mask_they_do():
    assert padding(logits, "left").unmasked > 1e-3
    assert (padding(streams, "left").unmasked > 1e-3).all()
    ignored = padding(lambda tokens_BT, valid_BT: logits(tokens_BT), "left")
    assert not ignored.equal
    assert ignored.error == ignored.unmasked > 1e-3


def test_padding_on_the_right_of_a_causal_model_shows_nothing_and_says_so():
    report = padding(logits, "right")
    assert report.equal
    assert report.unmasked == 0


def test_masks_are_boolean():
    with pytest.raises(ValueError, match="valid_BT has dtype int32"):
        probe_padding(logits, TOKENS, OTHER, LEFT.astype(jnp.int32))

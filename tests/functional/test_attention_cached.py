"""Attention to a cache and new tokens is attention to all of them in one array."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxblock.functional.attention import attention
from jaxblock.functional.attention_cached import CachedKeys, attention_cached
from jaxblock.functional.attention_scores import ScoreRule
from jaxblock.functional.masks import AttentionPattern
from jaxblock.functional.positions import alibi_slopes

B, Q, H, G, S, K = 2, 2, 4, 2, 3, 3
POSITIONS = {
    "query_positions_BQ": jnp.asarray([[3, 4], [1, 2]], jnp.int32),
    "key_positions_BT": jnp.asarray([[0, 1, 2, 3, 4], [0, -2, -1, 1, 2]], jnp.int32),
    "key_valid_BT": jnp.asarray([[True] * 5, [True, False, False, True, True]]),
}


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def arrays():
    return draw(0, B, Q, H, K), draw(1, B, Q, G, K), draw(2, B, Q, G, K)


CACHED = CachedKeys(draw(3, B, G, S, K), draw(4, B, G, S, K))


@pytest.mark.parametrize(
    ("pattern", "rule"),
    [
        ({"causal": True, **POSITIONS}, ScoreRule()),
        ({"causal": True, "window": 2, **POSITIONS}, ScoreRule(alibi_slopes_H=alibi_slopes(H), soft_cap=2.0)),
        ({"mask": jnp.zeros((1, 1, 1, S + Q), bool)}, ScoreRule()),
    ],
    ids=["cache", "window-alibi-cap", "nothing-permitted"],
)
def test_two_places_are_one_array(pattern, rule):
    q, k, v = arrays()
    keys, values = CACHED.followed_by(k, v)
    want = attention(q, keys, values, AttentionPattern(**pattern), scores=rule)
    got = attention_cached(q, k, v, CACHED, AttentionPattern(**pattern), scores=rule)
    np.testing.assert_allclose(got, want, atol=1e-6)
    if "mask" in pattern:
        assert not np.any(got)
        return
    # The control: slots of another row, or the values where the keys belong, are not the same.
    for other in (CachedKeys(*(x[::-1] for x in CACHED)), CachedKeys(CACHED.values_BGSK, CACHED.keys_BGSK)):
        wrong = attention_cached(q, k, v, other, AttentionPattern(**pattern), scores=rule)
        assert np.abs(wrong - want).max() > 1e-2


def test_what_is_hidden_changes_nothing():
    q, k, v = arrays()
    pattern = AttentionPattern(causal=True, **POSITIONS)
    want = attention_cached(q, k, v, CACHED, pattern)
    hidden = CachedKeys(*(x.at[1, :, 1:].set(1e6) for x in CACHED))
    np.testing.assert_array_equal(attention_cached(q, k, v, hidden, pattern), want)
    seen = CachedKeys(*(x.at[1, :, :1].set(1e6) for x in CACHED))
    assert np.abs(attention_cached(q, k, v, seen, pattern) - want).max() > 1


def test_shapes_that_do_not_fit_are_refused():
    q, k, v = arrays()
    with pytest.raises(AssertionError):
        attention_cached(q, k, v, CACHED._replace(values_BGSK=CACHED.values_BGSK[:, :, 1:]))
    with pytest.raises(ValueError, match="key_valid_BT has shape"):
        attention_cached(q, k, v, CACHED, AttentionPattern(key_valid_BT=jnp.ones((B, S), bool)))

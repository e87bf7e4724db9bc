"""Sizes of logits against numpy in float64, over what is real: tokens, and ids of the vocabulary."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import logsumexp

from jaxblock.probes.logits import output_logits
from tests.small import built, config, tokens

B, T, V = 2, 4, 5
measured = jax.jit(output_logits, static_argnames="vocab_size")


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**6), size=st.sampled_from([1e-3, 1.0, 100.0]))
def test_the_numbers_are_numpys_and_nothing_unreal_counts(seed, size):
    draw = np.random.default_rng(seed)
    logits_BTV = (size * draw.normal(size=(B, T, V + 2))).astype(np.float32)
    valid_BT = draw.random((B, T)) < 0.6
    logits_BTV[..., V:] = 1e6  # padded ids
    logits_BTV[~valid_BT] = np.nan
    real = logits_BTV[valid_BT][:, :V].astype(np.float64)
    log_z = logsumexp(real, axis=-1) if len(real) else np.zeros(1)
    want = (np.sqrt(np.mean(real**2)) if len(real) else 0.0, log_z.mean(), np.mean(log_z**2))
    got = measured(jnp.asarray(logits_BTV), vocab_size=V, valid_BT=jnp.asarray(valid_BT))
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_a_models_logits_and_the_control_with_padded_ids_counted():
    """Zero logits have log Z = log V; three zero ids more would make it log(V + 3)."""
    model_config = config(vocab_multiple=7)  # 11 ids in 14 rows
    model, params = built(model_config)
    logits_BTV = jnp.zeros_like(model.apply({"params": params}, tokens()))
    assert logits_BTV.shape[-1] == 14
    got = measured(logits_BTV, vocab_size=11)
    np.testing.assert_allclose(got, (0.0, np.log(11), np.log(11) ** 2), rtol=1e-6)
    wrong = measured(logits_BTV, vocab_size=14)
    assert wrong.log_z - got.log_z > 0.2


def test_what_does_not_fit_is_refused():
    logits_BTV = jnp.zeros((B, T, V))
    for size in (0, V + 1):
        with pytest.raises(ValueError, match=f"vocab_size is {size}"):
            output_logits(logits_BTV, vocab_size=size)
    with pytest.raises(ValueError, match="valid_BT"):
        output_logits(logits_BTV, vocab_size=V, valid_BT=jnp.ones((B, T)))
    with pytest.raises(AssertionError):
        output_logits(logits_BTV, vocab_size=V, valid_BT=jnp.ones((B, 1), bool))

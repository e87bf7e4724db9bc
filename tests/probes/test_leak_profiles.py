"""Padding leaks nowhere, a model that leaks is found at the sublayer where it does; round-off grows with depth."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblock import Decoder, Encoder, ExecutionConfig
from jaxblock.modules import Norm
from jaxblock.probes.leaks import numerical_error_profile, padding_leak_profile
from jaxblock.residual import topology
from tests.small import CONNECTIONS, SCANNED, built, config, tokens

VALID = np.array([[0, 1, 1, 1, 1, 0], [0, 0, 1, 1, 0, 1]], bool)
"""Padding to the left and right of real tokens, and between them."""


def leaks(model, params):
    run = jax.jit(functools.partial(padding_leak_profile, model))
    return run(params, tokens(), jnp.asarray(VALID), key=jax.random.key(0))


@pytest.mark.parametrize(
    "residual",
    [pytest.param(name, marks=[] if name == "pre_norm" else pytest.mark.full) for name in CONNECTIONS],
)
def test_padding_leaks_nowhere_and_would_without_its_mask(residual):
    model, params = built(config(residual=residual))
    found = leaks(model, params)
    assert found.error_S.shape == found.unmasked_S.shape == (model.config.sublayers + 1,)
    np.testing.assert_array_equal(found.error_S, 0.0)
    assert found.unmasked_S[-1] > 1e-3
    assert found.unmasked_S[0] == 0.0  # before the first sublayer no token has seen another


BRANCHES = [
    {"wiring": "parallel", "positions": "rope", "kv_heads": 1, "value_residual": "learned", "window": (3, 0)},
    {"token_mixer": "convolution(size=3)"},
    {"experts": "dropless(experts=4)"},
    {"experts": "capacity(experts=4, factor=0.5)"},
    {"positions": "alibi", "soft_cap": 1.0, "stream_dtype": "bfloat16", "dtype": "bfloat16"},
]


@pytest.mark.full
@pytest.mark.parametrize("changes", BRANCHES, ids=str)
def test_no_branch_leaks(changes):
    found = leaks(*built(config(**changes)))
    np.testing.assert_array_equal(found.error_S, 0.0)
    assert found.unmasked_S[-1] > 1e-3


@pytest.mark.full
def test_no_encoder_leaks():
    params = built(config())[1]
    found = leaks(Encoder(config()), params)
    np.testing.assert_array_equal(found.error_S, 0.0)
    assert found.unmasked_S[-1] > 1e-3


class Leaks(nn.Module):
    """x + f(norm(x)), and in every feed-forward sublayer the mean over the row, padding and all."""

    config: object

    @nn.compact
    def __call__(self, x, f):
        update = f(Norm(self.config, name="norm")(x))
        mean = x.mean(1, keepdims=True) if "feed_forward" in self.name else jnp.zeros_like(x[:, :1])
        return x + update + mean


def test_a_model_that_leaks_is_found_where_it_does():
    model_config, params = config(), built(config())[1]
    leaky = Decoder(model_config, topology=dataclasses.replace(topology("pre_norm"), connection=Leaks))
    error_S = np.asarray(leaks(leaky, params).error_S)
    np.testing.assert_array_equal(error_S[:2], 0.0)  # before attention, and before the first feed-forward
    assert np.all(error_S[2:] > 1e-3)


def errors(other, *, reference=None, valid_BT=None):
    model, params = built(config())
    run = jax.jit(functools.partial(numerical_error_profile, reference or model, other=other))
    return np.asarray(run(params, tokens(), valid_BT=valid_BT))


def test_the_error_is_that_of_the_collected_streams():
    """A stream in bfloat16 is wrong by its half ulp from the start; branches in bfloat16 only from their first on."""
    model_config, params = config(), built(config())[1]
    other = Decoder(config(stream_dtype="bfloat16"))
    valid_BT = jnp.asarray(VALID)
    got = errors(other, valid_BT=valid_BT)
    runs = [
        model.apply({"params": params}, tokens(), valid_BT=valid_BT, mutable=["intermediates"])[1][
            "intermediates"
        ]
        for model in (Decoder(model_config), other)
    ]
    starts, ends = (
        [np.asarray(run[at] if at == "resid_final" else run["blocks"][at], np.float64) for run in runs]
        for at in ("resid_pre", "resid_final")
    )
    for s, (x, y) in {
        0: [z[0] for z in starts],
        2: [z[1] for z in starts],
        6: ends,
    }.items():
        want = np.linalg.norm((y - x)[VALID]) / np.linalg.norm(x[VALID])
        np.testing.assert_allclose(got[s], want, rtol=1e-4)
    assert 1e-4 < got[0] < 2.0**-8
    branches = errors(Decoder(config(dtype="bfloat16")))
    assert branches[0] == 0.0
    assert np.all(branches[1:] > 1e-5)


def test_the_same_model_has_no_error_and_another_run_of_it_little():
    np.testing.assert_array_equal(errors(built(config())[0]), 0.0)
    assert errors(Decoder(config(), ExecutionConfig(scan_unroll=3, attention="blocked"))).max() < 1e-5
    wrong = Decoder(config(norm_epsilon=0.1))  # control: a model that computes something else
    assert errors(wrong)[-1] > 1e-3


@pytest.mark.full
@pytest.mark.parametrize("residual", ["attention_residual", "hyper_connections", "muddformer", "lime"])
def test_of_a_stream_that_is_no_array_what_branches_read_is_compared(residual):
    model, params = built(config(residual=residual))
    other = Decoder(config(residual=residual, dtype="bfloat16", stream_dtype="bfloat16"))
    got = jax.jit(functools.partial(numerical_error_profile, model, other=other))(params, tokens())
    assert got.shape == (7,)
    assert np.all((np.asarray(got) > 1e-5) & (np.asarray(got) < 0.3))


def test_two_models_that_are_not_one_are_refused():
    model, params = built(config())
    with pytest.raises(ValueError, match=r"other\.config\.depth is 2 and model\.config\.depth 3"):
        numerical_error_profile(model, params, tokens(), other=Decoder(config(depth=2), SCANNED))
    with pytest.raises(ValueError, match="valid_BT"):
        padding_leak_profile(model, params, tokens(), jnp.ones((2, 6)), key=jax.random.key(0))

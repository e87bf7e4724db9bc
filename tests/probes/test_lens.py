"""The last lens is the model, the attributed parts sum to the logit, and both say where they have no meaning."""

import dataclasses
import functools

import flax.linen as nn
import jax
import numpy as np
import pytest

from jaxblock import Decoder, ModelConfig
from jaxblock.probes.lens import direct_attribution, logit_lens
from jaxblock.residual import topology
from tests.small import built, config, tokens

TARGETS = np.roll(np.asarray(tokens()), -1, axis=1)
VALID = np.array([[1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0]], bool)


def run(read, model_config, valid_BT=None):
    model, params = Decoder(model_config), built(model_config)[1]
    return jax.jit(functools.partial(read, model))(params, tokens(), TARGETS, valid_BT=valid_BT)


def log_p(model_config, valid_BT=None):
    model, params = Decoder(model_config), built(model_config)[1]
    logits_BTV = model.apply({"params": params}, tokens(), valid_BT=valid_BT)[..., : model_config.vocab_size]
    return np.asarray(jax.nn.log_softmax(logits_BTV)), np.asarray(logits_BTV)


CASES = [
    {},
    {"norm": "rms_norm", "bias": False, "head": "untied"},
    {"residual": "post_norm"},
    {"wiring": "parallel", "parametrization": "complete_p(base_depth=3, base_width=2)"},
]


@pytest.mark.parametrize(
    "changes",
    [CASES[0], pytest.param(CASES[1], marks=pytest.mark.full), *CASES[2:]],
    ids=["layer_norm", "rms_norm", "post_norm", "parallel"],
)
def test_the_last_lens_is_the_model_and_the_parts_sum_to_the_logit(changes):
    model_config = config(**changes)
    want, logits_BTV = log_p(model_config, VALID)
    lens = run(logit_lens, model_config, VALID)
    target = np.take_along_axis(want, TARGETS[..., None], -1)[..., 0]
    np.testing.assert_allclose(lens.cross_entropy[-1], -target[VALID].mean(), rtol=1e-4)
    np.testing.assert_allclose(lens.divergence[-1], 0.0, atol=1e-5)
    assert lens.agreement[-1] == 1.0
    assert lens.divergence[0] > 1e-3  # control: before, the prediction was another one
    found = run(direct_attribution, model_config, VALID)
    assert found.error < 1e-4
    logit = np.take_along_axis(logits_BTV, TARGETS[..., None], -1)[..., 0][VALID].mean()
    np.testing.assert_allclose(found.logit, logit, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.embedding + np.sum(found.parts_S), logit, rtol=1e-3, atol=1e-4)
    assert np.abs(found.parts_S).max() > 1e-3


class Grows(nn.Module):
    config: ModelConfig

    def __call__(self, stream):
        return 1.1 * stream


def test_what_is_changed_between_blocks_is_missing_from_the_parts():
    """The control of completeness: a stream that grows outside of every sublayer."""
    model_config = config()
    grows = dataclasses.replace(topology("pre_norm"), after_block=Grows)
    model, params = Decoder(model_config, topology=grows), built(model_config)[1]
    assert direct_attribution(model, params, tokens(), TARGETS).error > 1e-2


@pytest.mark.parametrize(
    "residual",
    [
        "dense_former",
        *(pytest.param(name, marks=pytest.mark.full) for name in ("attention_residual", "hyper_connections")),
    ],
)
def test_a_stream_that_is_no_array_has_neither(residual):
    assert run_or_none(logit_lens, residual) is None
    assert run_or_none(direct_attribution, residual) is None


def run_or_none(read, residual):
    model_config = config(residual=residual)
    return read(Decoder(model_config), built(model_config)[1], tokens(), TARGETS)

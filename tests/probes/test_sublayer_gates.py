"""Gates: a lesion is the model without that sublayer, a gate's gradient its derivative, effective depth their sum."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblock import Decoder
from jaxblock.functional import cross_entropy
from jaxblock.probes.gates import EffectiveDepth, effective_depth, gate_branches, gate_gradient, lesion_losses
from tests.small import built, config, tokens

KINDS = [
    {},
    {"wiring": "parallel"},
    {"experts": "dropless(experts=2, active=1)", "bias": False, "norm": "rms_norm"},
]


def loss_of(model_config):
    model = Decoder(model_config)

    def loss(params):
        logits_BTV = model.apply({"params": params}, tokens())
        return cross_entropy(logits_BTV[:, :-1], tokens()[:, 1:]).loss

    return loss


@pytest.mark.parametrize("changes", KINDS, ids=["serial", "parallel", "experts"])
def test_a_lesion_is_the_model_whose_branch_writes_nothing(changes):
    model_config = config(**changes)
    params, loss = built(model_config)[1], loss_of(model_config)
    lesions = jax.jit(functools.partial(lesion_losses, model_config, loss, at_once=2))(params)
    assert lesions.shape == (model_config.sublayers,)
    block, branch = (1, "feed_forward") if model_config.sublayers == 6 else (1, None)
    s = 3 if branch else 1
    off = jax.tree.map(lambda x: x, params)
    names = {"feed_forward": ("feed_forward", "down"), "attention": ("attention", "output")}
    if "experts" in changes:
        names["feed_forward"] = ("experts", "down")
    for outer, inner in names.values() if branch is None else [names[branch]]:
        off["blocks"][outer][inner] = jax.tree.map(
            lambda x: x.at[block].set(0.0), off["blocks"][outer][inner]
        )
    want = jax.jit(loss)(off)
    np.testing.assert_allclose(lesions[s], want, rtol=1e-5)
    assert (
        np.abs(np.asarray(lesions) - jax.jit(loss)(params)).min() > 1e-5
    )  # control: every sublayer does something
    others = np.delete(np.asarray(lesions), s)
    assert np.abs(others - want).min() > 1e-5


def test_a_gates_gradient_is_the_slope_of_the_loss():
    model_config = config()
    params, loss = built(model_config)[1], loss_of(model_config)
    slopes = jax.jit(functools.partial(gate_gradient, model_config, loss))(params)

    @jax.jit
    def at(gates):
        return loss(gate_branches(model_config, params, gates))

    for s in (0, 3):
        step = 0.02 * np.eye(6, dtype=np.float32)[s]
        np.testing.assert_allclose(slopes[s], (at(1 + step) - at(1 - step)) / 0.04, rtol=0.05, atol=2e-4)
    np.testing.assert_allclose(at(jnp.ones(6)), jax.jit(loss)(params), rtol=1e-6)


def test_gates_that_are_not_one_per_sublayer_are_refused():
    with pytest.raises(ValueError, match=r"gates have shape \(3,\); they must be one per sublayer, \(6,\)"):
        gate_branches(config(), built(config())[1], jnp.ones(3))


@pytest.mark.parametrize(
    ("lesions", "want"),
    [
        (np.ones(8), EffectiveDepth(4.0, 7.2, 8.0, 0.5, None)),
        (np.eye(8)[0], EffectiveDepth(0.5, 0.9, 1.0, 1 / 16, None)),
        (np.r_[-5.0, 0.0, 1.0, 1.0], EffectiveDepth(3.0, 3.8, 2.0, 0.75, None)),
    ],
    ids=["even", "the first alone", "one that helps to lose"],
)
def test_effective_depth(lesions, want):
    np.testing.assert_allclose(effective_depth(lesions)[:4], want[:4], rtol=1e-9)


def test_no_lesion_costs_anything_and_none_is_finite():
    assert effective_depth(np.zeros(4)) is None
    assert effective_depth(np.array([1.0, 0.1, 0.2]), np.array([0.2, 0.2, 0.1])).idle == 1 / 3
    with pytest.raises(ValueError, match="not finite"):
        effective_depth(np.array([1.0, np.nan]))

"""Names to topologies: options with their types, refusals with the nearest name, and rules invented outside."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblock import Decoder, ModelConfig
from jaxblock.axes import roles
from jaxblock.modules import Norm
from jaxblock.residual import REGISTRY, Topology, topology
from tests.small import CONNECTIONS, built, config, tokens


class Gated(nn.Module):
    """x + factor * gate * f(norm(x)), with a learned gate per channel: not in the package."""

    config: ModelConfig
    factor: float = 1.0

    @nn.compact
    def __call__(self, x, f):
        gate = self.param("gate", nn.initializers.ones, (self.config.width,))
        y = f(Norm(self.config, name="norm")(x))
        return x + self.factor * gate.reshape(1, 1, -1).astype(x.dtype) * y


def gated(*, factor: float = 1.0, steps: int = 2, mode: str = "plain", learned: bool = True) -> Topology:
    return Topology(functools.partial(Gated, factor=factor), f"{steps} {mode} {learned}", "a test")


MINE = {**REGISTRY, "gated": gated}


def test_every_entry_says_its_equation_and_its_source():
    for name in REGISTRY:
        entry = topology(name)
        assert "f(" in entry.equation
        assert entry.source


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("pre_nrom", r"model.residual is 'pre_nrom'; it must be one of .*did you mean 'pre_norm'"),
        (
            "xyz",
            r"it must be one of attention_residual, .*branch_norm, .*gated, .*none, .*post_norm, pre_norm, .*unet$",
        ),
        ("pre_norm(epsilon=1)", r"'pre_norm' has no option 'epsilon'; its options: none"),
        ("gated(facto=0.5)", r"'gated' has no option 'facto'; .*did you mean 'factor'"),
        ("gated(factor='big')", r"option 'factor' of 'gated' is 'big'; it must be of type float"),
        ("gated(factor=True)", "must be of type float"),
        ("gated(steps=2.0)", "must be of type int"),
        ("gated(steps=True)", "must be of type int"),
        ("gated(mode=1)", "must be of type str"),
        ("gated(learned=1)", "must be of type bool"),
        ("gated(0.5)", "with literal options"),
        ("gated(factor=2 * 3)", "with literal options"),
        ("gated(factor=open('x'))", "with literal options"),
        ("gated(**{})", "with literal options"),
        ("gated(factor=1, factor=2)", "with literal options"),
        ("gated)(", "with literal options"),
        ("a.gated", "with literal options"),
        ("", "with literal options"),
    ],
)
def test_a_wrong_choice_is_refused_with_a_sentence(text, sentence):
    with pytest.raises(ValueError, match=sentence):
        topology(text, MINE)


def test_options_are_the_factorys_keywords():
    assert topology("gated", MINE).equation == "2 plain True"
    entry = topology(" gated(factor=2, steps=3, mode='odd', learned=False) ", MINE)
    assert entry.equation == "3 odd False"
    assert entry.connection(config()).factor == 2


def test_a_config_refuses_what_cannot_be_a_choice():
    with pytest.raises(ValueError, match=r"model\.residual is 'pre norm'"):
        config(residual="pre norm")
    with pytest.raises(ValueError, match="did you mean 'pre_norm'"):
        jax.eval_shape(Decoder(config(residual="pre_nrom")).init, jax.random.key(0), tokens())


def without_gates(params: dict) -> dict:
    """Return the parameters of the same model with pre-norm: everything but the gates."""
    blocks = {
        name: {key: value for key, value in part.items() if key != "gate"}
        for name, part in params["blocks"].items()
    }
    return {**params, "blocks": blocks}


def test_an_invented_connection_trains_scans_and_is_labelled():
    """With a gate of one it is pre-norm, and the gate of every block has a gradient."""
    model, params = built(config(), topology=topology("gated(factor=1.0)", MINE))
    gates = [part for part in params["blocks"].values() if "gate" in part]
    assert [part["gate"].shape for part in gates] == [(3, 8), (3, 8)]
    params = jax.tree_util.tree_map_with_path(
        lambda path, x: jnp.ones_like(x) if path[-1].key == "gate" else x, params
    )
    assert roles(params)["blocks"]["feed_forward_connection"] == {
        "gate": "connection",
        "norm": {"scale": "norm", "bias": "norm"},
    }

    def objective(params):
        logits = model.apply({"params": params}, tokens())
        return jnp.sum(jnp.sin(logits)), logits

    (_, logits), gradient = jax.jit(jax.value_and_grad(objective, has_aux=True))(params)
    want = jax.jit(Decoder(config()).apply)({"params": without_gates(params)}, tokens())
    np.testing.assert_allclose(logits, want, rtol=1e-4, atol=1e-5)
    assert np.all(np.asarray(gradient["blocks"]["attention_connection"]["gate"]) != 0)


def test_a_plain_record_is_enough():
    """`Decoder(..., topology=Topology(...))` needs no registry; here every branch is switched off."""
    off = Topology(functools.partial(Gated, factor=0.0), "x", "a test", final_norm=False)
    model, params = built(config(positions="none"), topology=off)
    table = np.asarray(params["embedding"]["table"])
    logits = jax.jit(model.apply)({"params": params}, tokens())
    np.testing.assert_allclose(logits, table[np.asarray(tokens())] @ table.T, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CONNECTIONS)
def test_final_norm_exists_exactly_where_the_entry_says(name):
    params = jax.eval_shape(Decoder(config(residual=name)).init, jax.random.key(0), tokens())["params"]
    # The rule leaves the closed stream normalized.
    normalized = ("post_norm", "deep_norm", "keel", "resi_dual")
    assert ("final_norm" in params) == topology(name).final_norm == (name not in normalized)

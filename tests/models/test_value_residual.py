"""Value residual: V_l <- first * V_1 + own * V_l, for every block after the first, however the stack is run."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblock import Decoder, ExecutionConfig, init_cache, prefill
from jaxblock.functional.value_residual import mix_values
from tests.residual.battery.subject import compiled
from tests.small import built, carried, config, tokens

LEARNED = "learned(first=0.25, own=0.75)"


def logits(value_residual: str, params: Any, **changes: Any) -> np.ndarray:
    model = Decoder(config(value_residual=value_residual, **changes))
    return np.asarray(jax.jit(lambda p: model.apply({"params": p}, tokens()))(params))


def test_the_mix_is_the_equation_and_the_first_block_keeps_its_own():
    rng = np.random.default_rng(0)
    own, first = rng.normal(size=(2, 2, 3, 2, 4))
    mix = np.array([0.3, 0.9])
    of = functools.partial(mix_values, jnp.float32(own), jnp.float32(first), jnp.float32(mix))
    np.testing.assert_allclose(of(exist=jnp.array(True)), 0.3 * first + 0.9 * own, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(of(exist=jnp.array(False)), jnp.float32(own))
    with pytest.raises(AssertionError):
        mix_values(jnp.float32(own), jnp.float32(first[:1]), jnp.float32(mix), exist=jnp.array(True))


def test_weights_0_and_1_are_the_plain_model_and_others_are_not():
    """Invariant 24."""
    _, params = built(config())
    plain = logits("none", params)
    np.testing.assert_allclose(logits("fixed(first=0.0, own=1.0)", params), plain, atol=1e-6)
    assert np.abs(logits("fixed(first=0.5, own=0.5)", params) - plain).max() > 1e-2


def test_with_weights_1_and_0_no_block_but_the_first_reads_its_own_values():
    """Invariant 24: SVFormer; with other weights they are read."""
    _, params = built(config())
    moved = jax.tree.map(lambda x: x, params)
    value = moved["blocks"]["attention"]["value"]
    value["kernel"] = value["kernel"].at[1:].add(1.0)
    shared = "fixed(first=1.0, own=0.0)"
    np.testing.assert_array_equal(logits(shared, moved), logits(shared, params))
    assert np.abs(logits("fixed", moved) - logits("fixed", params)).max() > 1e-2
    value["kernel"] = value["kernel"].at[0].add(1.0)
    assert np.abs(logits(shared, moved) - logits(shared, params)).max() > 1e-2


@pytest.mark.parametrize(
    ("residual", "execution"),
    [
        ("pre_norm", ExecutionConfig(scan_unroll=3)),
        pytest.param("pre_norm", ExecutionConfig(remat="full"), marks=pytest.mark.full),
        pytest.param(
            "block_attention_residual(sublayers=4)",
            ExecutionConfig(history="plain", scan_unroll=2),
            marks=pytest.mark.full,
        ),
        pytest.param("attention_residual", ExecutionConfig(remat="full"), marks=pytest.mark.full),
        pytest.param("dense_former", ExecutionConfig(scan_unroll=3), marks=pytest.mark.full),
    ],
)
def test_loops_and_remat_change_nothing(residual, execution):
    small = config(value_residual=LEARNED, residual=residual, kv_heads=1, norm="rms_norm", positions="none")
    model, params = built(small)
    (_, want), want_gradients = compiled(model)(params, tokens(), None)
    (_, got), gradients = compiled(Decoder(small, execution))(params, tokens(), None)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    for a, b in zip(jax.tree.leaves(want_gradients), jax.tree.leaves(gradients), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5 * max(float(jnp.abs(a).max()), 0.1))
    mixes = want_gradients["blocks"]["attention"]["value_mix"]
    assert np.all(mixes[0] == 0.0), "the first block mixes nothing"
    assert np.all(mixes[1:] != 0.0)


@pytest.mark.full
def test_a_cache_goes_on_as_the_whole_sequence():
    """What is cached are the mixed values; a new token's first values are made anew."""
    small = config(value_residual=LEARNED)
    model, params = built(small)
    whole = model.apply({"params": params}, tokens())
    last, cache = prefill(model, params, tokens()[:, :4], init_cache(small, 2))
    np.testing.assert_allclose(last, whole[:, 3], rtol=1e-5, atol=1e-5)
    for t in (4, 5):
        step, cache = model.apply({"params": params}, tokens()[:, t : t + 1], cache=cache)
        np.testing.assert_allclose(step[:, 0], whole[:, t], rtol=1e-5, atol=1e-5)


def test_the_learned_weights_start_where_the_config_says_and_count_two_per_block():
    small = config(value_residual="learned(first=0.0, own=1.0)")
    shapes = jax.eval_shape(Decoder(small).init, jax.random.key(0), tokens(1, 2))["params"]
    assert shapes["blocks"]["attention"]["value_mix"].shape == (3, 2)
    from jaxblock.accounting import decoder_parameters

    assert decoder_parameters(small) == sum(leaf.size for leaf in jax.tree.leaves(shapes))


def test_a_model_without_it_has_no_first_values_in_its_program():
    """What is off costs nothing: the carry of the scan over depth is the stream."""
    arrays = {}
    for name in ("none", "fixed"):
        model, params = built(config(value_residual=name))
        traced = jax.make_jaxpr(lambda p, m=model: m.apply({"params": p}, tokens()))(params)
        (scan,) = [eqn for eqn in traced.eqns if eqn.primitive.name == "scan"]
        arrays[name] = len(carried(scan))
    assert arrays == {"none": 1, "fixed": 2}

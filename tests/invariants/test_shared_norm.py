"""One norm where two sublayers need two: caught by where its parameters act, and by their count."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblock.functional import residual as rules
from jaxblock.functional.norms import layer_norm
from jaxblock.invariants import find_shared_norms, switch_block
from tests.small import built, config

X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, 8)), jnp.float32)
RULES = {"pre_norm": rules.pre_norm, "post_norm": rules.post_norm, "branch_norm": rules.branch_norm}


def draw(*shape: int, seed: int):
    return jnp.asarray(np.random.default_rng(seed).normal(scale=0.5, size=shape), jnp.float32)


def parameters(*norms: str):
    """Return two branches' kernels and a norm's parameters under each name."""
    made = {name: {"scale": 1 + draw(8, seed=i), "bias": draw(8, seed=i + 9)} for i, name in enumerate(norms)}
    return {"attention": draw(8, 8, seed=20), "feed_forward": draw(8, 8, seed=21), **made}


def block(rule, first: str, second: str):
    """Return a block of two sublayers that use the norms of these names."""

    def apply(params, x, attention, feed_forward):
        def mix(h):
            return attention * jnp.cumsum(jnp.sin(h @ params["attention"]), axis=1)

        def feed(h):
            return feed_forward * jnp.sin(h @ params["feed_forward"])

        x = rule(x, mix, functools.partial(layer_norm, **params[first]))
        return rule(x, feed, functools.partial(layer_norm, **params[second]))

    return jax.jit(apply)


def count(params) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def test_s1_48_norms_of_their_own_are_not_shared():
    params = parameters("norm_1", "norm_2")
    sites = find_shared_norms(block(rules.pre_norm, "norm_1", "norm_2"), params, X)
    assert (sites.shared, sites.lone, sites.path) == ((), (), ())
    assert sites.attention == ("norm_1/bias", "norm_1/scale")
    assert sites.feed_forward == ("norm_2/bias", "norm_2/scale")


def test_s1_48_one_norm_used_twice_is_caught_and_counts_2d_less():
    shared, own = parameters("norm"), parameters("norm_1", "norm_2")
    sites = find_shared_norms(block(rules.pre_norm, "norm", "norm"), shared, X)
    assert sites.shared == ("norm/bias", "norm/scale")
    assert count(own) - count(shared) == 2 * 8


def test_s1_48_its_gradient_is_the_sum_of_the_two_sites():
    norm = parameters("norm")["norm"]
    apart = {**parameters("norm_1", "norm_2"), "norm_1": norm, "norm_2": norm}

    def gradient(first, second, params):
        apply = block(rules.pre_norm, first, second)
        return jax.grad(lambda params: jnp.sum(jnp.sin(apply(params, X, 1.0, 1.0))))(params)

    one, two = gradient("norm", "norm", parameters("norm")), gradient("norm_1", "norm_2", apart)
    for part in ("scale", "bias"):
        np.testing.assert_allclose(
            one["norm"][part], two["norm_1"][part] + two["norm_2"][part], rtol=1e-4, atol=1e-5
        )
        assert np.abs(two["norm_2"][part]).max() > 1e-2


def test_s1_48_a_shared_norm_on_the_path_is_the_only_one_there():
    """After a post-norm sublayer a norm acts whatever the gains: what shows is that there is one where two belong."""
    shared = find_shared_norms(block(rules.post_norm, "norm", "norm"), parameters("norm"), X)
    assert (shared.shared, shared.lone) == ((), ("norm/bias", "norm/scale"))
    own = find_shared_norms(block(rules.post_norm, "norm_1", "norm_2"), parameters("norm_1", "norm_2"), X)
    assert (own.shared, own.lone, len(own.path)) == ((), (), 4)


def test_s1_48_a_shared_norm_behind_the_branches_is_caught_by_its_scale():
    """Its bias acts whatever the gains."""
    shared = find_shared_norms(block(rules.branch_norm, "norm", "norm"), parameters("norm"), X)
    assert shared.shared == ("norm/scale",)
    own = find_shared_norms(block(rules.branch_norm, "norm_1", "norm_2"), parameters("norm_1", "norm_2"), X)
    assert own.shared == ()


@pytest.mark.parametrize("residual", ["pre_norm", "peri_norm"])
def test_s1_48_our_own_blocks_share_none(residual):
    model, params = built(config(residual=residual))
    sites = find_shared_norms(jax.jit(switch_block(model)), params, X)
    assert (sites.shared, sites.lone) == ((), ())
    assert all(
        name.startswith("blocks/attention_connection") for name in set(sites.attention) - set(sites.path)
    )
    assert len(sites.attention) >= 2


def test_norms_of_other_names_are_found_when_told():
    params = parameters("ln_1", "ln_2")
    apply = block(rules.pre_norm, "ln_1", "ln_2")
    with pytest.raises(ValueError, match="no parameter path is a norm's: pass is_norm"):
        find_shared_norms(apply, params, X)
    sites = find_shared_norms(apply, params, X, is_norm=lambda path: path.startswith("ln_"))
    assert len(sites.attention) == len(sites.feed_forward) == 2

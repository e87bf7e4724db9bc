"""What a probe observes is what the collected arrays give, however the stack is run, and costs nothing when off."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblock import Decoder, ExecutionConfig
from jaxblock.modules.intermediates import recorded_branches
from jaxblock.probes import EVERY, StreamProbe, stream, stream_profile
from jaxblock.residual import REGISTRY
from tests.small import SCANNED, built, config, tokens

EVERYTHING = StreamProbe(EVERY)


@functools.cache
def observed(model_config, execution=SCANNED, probe=EVERYTHING):
    """Return params -> (profile, intermediates), compiled."""
    model = Decoder(model_config, execution, observe=probe)

    @jax.jit
    def run(params):
        _, made = model.apply({"params": params}, tokens(), mutable=["observed", "intermediates"])
        return stream_profile(made["observed"]).values, made["intermediates"]

    return run


def test_the_profile_is_that_of_the_collected_arrays():
    model_config = config()
    params = built(model_config)[1]
    values, collected = observed(model_config)(params)
    blocks = collected["blocks"]
    ends = np.stack([blocks["resid_mid"], blocks["resid_post"]], 1).reshape(
        -1, *blocks["resid_pre"].shape[1:]
    )
    starts = np.concatenate([blocks["resid_pre"][:1], ends[:-1]])
    for s, (x, y) in enumerate(zip(starts, ends, strict=True)):
        np.testing.assert_allclose(values["stream_rms"][s], stream.root_mean_square(y), rtol=1e-5)
        np.testing.assert_allclose(values["relative_update"][s], stream.relative_update(x, y - x), rtol=1e-5)
        np.testing.assert_allclose(values["budget_cosine"][s], stream.norm_budget(x, y - x).cosine, atol=1e-5)
    reads = np.stack([blocks[f"{name}_in"] for name in recorded_branches(collected)], 1)
    want = np.sqrt(np.mean(np.square(reads), axis=(2, 3, 4))).reshape(-1)
    np.testing.assert_allclose(values["read_rms"], want, rtol=1e-5)
    assert np.std(values["stream_rms"]) > 0  # control: sublayers differ, so an order that is wrong would show


@pytest.mark.parametrize(
    "execution",
    [ExecutionConfig(scan_unroll=3), pytest.param(ExecutionConfig(remat="full"), marks=pytest.mark.full)],
)
def test_a_loop_and_remat_observe_the_same(execution):
    model_config = config()
    params = built(model_config)[1]
    want, got = observed(model_config)(params)[0], observed(model_config, execution)(params)[0]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), want, got)


@pytest.mark.parametrize("name", REGISTRY)
def test_every_topology_is_measured_and_says_what_its_stream_has_not(name):
    model = Decoder(config(residual=name), observe=EVERYTHING)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens())["params"]
    apply = functools.partial(model.apply, mutable=["observed"])
    made = jax.eval_shape(lambda p: apply({"params": p}, tokens())[1], params)
    shapes = jax.tree.leaves(made["observed"])
    assert all(leaf.shape == (3,) and leaf.dtype == jnp.float32 for leaf in shapes)
    one_array = name in ONE_ARRAY
    found = {key for branch in made["observed"]["blocks"].values() for key in branch}
    assert {"read_rms", "output_rms", "branch_gain", "not_finite"} <= found
    assert ("stream_rms" in found) == one_array


ONE_ARRAY = {
    name
    for name, make in REGISTRY.items()
    if isinstance(make().open(config(), jnp.zeros((1, 1, 8))), jax.Array)
}


def test_a_stream_that_is_no_array_has_its_missing_statistics_named():
    assert "pre_norm" in ONE_ARRAY
    assert "hyper_connections" not in ONE_ARRAY
    model_config = config(residual="attention_residual")
    model = Decoder(model_config, observe=EVERYTHING)
    _, made = model.apply({"params": built(model_config)[1]}, tokens(), mutable=["observed"])
    profile = stream_profile(made["observed"], EVERYTHING)
    assert set(profile.missing) == set(EVERY) - {"branch"}
    assert profile.branches == ("attention", "feed_forward")


def test_without_the_collection_a_probe_changes_no_program_and_with_it_it_does():
    params = jax.eval_shape(Decoder(config()).init, jax.random.key(0), tokens())["params"]

    def lowered(model, mutable):
        def loss(params):
            made = model.apply({"params": params}, tokens(), mutable=mutable)
            return jnp.sum(jnp.sin(made[0] if mutable else made)), made

        return jax.jit(jax.grad(loss, has_aux=True)).lower(params).as_text()

    plain = lowered(Decoder(config()), False)
    assert lowered(Decoder(config(), observe=EVERYTHING), False) == plain
    assert lowered(Decoder(config(), observe=EVERYTHING), ["observed"]) != plain


def test_the_gradient_does_not_see_a_probe():
    model_config = config()
    params = built(model_config)[1]
    gradients = []
    for probe in (None, EVERYTHING):
        model = Decoder(model_config, observe=probe)

        def loss(params, model=model):
            logits_BTV, made = model.apply({"params": params}, tokens(), mutable=["observed"])
            return jnp.sum(jnp.sin(logits_BTV)) + sum(jnp.sum(x) for x in jax.tree.leaves(made))

        gradients.append(jax.jit(jax.grad(loss))(params))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *gradients)


def test_what_is_not_asked_or_unknown():
    with pytest.raises(ValueError, match=r"probe\.statistics has 'size'; .*did you mean 'sizes'"):
        StreamProbe(("size",))
    with pytest.raises(ValueError, match="nothing was observed"):
        stream_profile({})

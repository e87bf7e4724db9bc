"""Models with experts: one function however the stack is run or decoded; what they report, start from and cost."""

import functools
from typing import Any, cast

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblock import Classifier, Decoder, ExecutionConfig, generate, init_cache
from jaxblock.accounting import abstract_parameters, count_parameters, decoder_parameters, flop_parts
from jaxblock.accounting.feed_forward import idle_parameters
from jaxblock.config import REMAT_POLICIES
from jaxblock.functional import SamplingRule
from jaxblock.models import Cache
from jaxblock.modules import Experts
from jaxblock.modules.experts import ROUTING
from jaxblock.residual import topology
from jaxblock.types import Views
from tests.models.test_cache import check_decoding, forms
from tests.small import CONNECTIONS, SCANNED, built, config, tokens

DROPLESS, CAPACITY = "dropless(experts=3)", "capacity(experts=3, factor=0.5)"
FEW = {
    "depth": 2,
    "norm": "rms_norm",
    "bias": False,
    "feed_forward": "relu",
    "hidden": 6,
    "positions": "none",
}
BOTH = pytest.mark.parametrize("experts", [DROPLESS, pytest.param(CAPACITY, marks=pytest.mark.full)])


def mixture(experts=DROPLESS, **changes):
    return config(**{**FEW, "experts": experts, **changes})


def key(seed=3):
    """Return a key of XLA's own generator: its draws compile in a tenth of the time threefry's take."""
    return jax.random.key(seed, impl="unsafe_rbg")


@functools.cache
def compiled(model_config, execution=SCANNED):
    """Return `(params, tokens, dropout key) -> ((objective, (logits, routing)), gradient)`, the balance in it."""
    model = Decoder(model_config, execution)

    def objective(params, tokens_BT, key):
        rngs = {} if key is None else {"dropout": key}
        made = model.apply({"params": params}, tokens_BT, rngs=rngs, mutable=[ROUTING])
        logits_BTV, collected = cast(tuple[jax.Array, Any], made)
        routing = collected[ROUTING]["blocks"]["experts"]
        return jnp.sum(jnp.sin(logits_BTV)) + jnp.sum(routing["balance_loss"]), (logits_BTV, routing)

    return jax.jit(jax.value_and_grad(objective, has_aux=True))


# How the stack is run --------------------------------------------------------------------------------------


@functools.cache
def forward(model_config, execution=SCANNED):
    """Return `(params, tokens) -> (logits, routing)`."""
    model = Decoder(model_config, execution)
    return jax.jit(lambda params, tokens_BT: model.apply({"params": params}, tokens_BT, mutable=[ROUTING]))


def test_a_loop_equals_the_scan():
    model_config = mixture(CAPACITY)
    _, params = built(model_config)
    found = [
        forward(model_config, how)(params, tokens()) for how in (SCANNED, ExecutionConfig(scan_unroll=2))
    ]
    chex.assert_trees_all_close(*found, rtol=1e-5, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("experts", [DROPLESS, CAPACITY])
@pytest.mark.parametrize(
    "execution",
    [ExecutionConfig(scan_unroll=2), *(ExecutionConfig(remat=remat) for remat in REMAT_POLICIES[1:])],
    ids=lambda execution: f"{execution.scan_unroll} {execution.remat}",
)
def test_loop_and_remat_equal_scan_with_dropout_and_balance(experts, execution):
    model_config = mixture(experts, hidden_dropout=0.2)
    _, params = built(model_config)
    found = [compiled(model_config, how)(params, tokens(), key()) for how in (SCANNED, execution)]
    chex.assert_trees_all_close(*found, rtol=1e-4, atol=1e-5)
    (_, (_, routing)), gradient = found[0]
    assert np.abs(gradient["blocks"]["experts"]["router"]["kernel"]).min() > 0
    assert (routing["dropped"].sum() > 0) == (experts == CAPACITY)


@pytest.mark.full
@pytest.mark.parametrize("experts", [DROPLESS, CAPACITY])
def test_balance_has_its_gradient_through_the_loop_over_a_history(experts):
    model_config = mixture(experts, residual="block_attention_residual(sublayers=2)")
    _, params = built(model_config)
    runs = [
        compiled(model_config, ExecutionConfig(history=history))(params, tokens(), None)
        for history in ("reverse", "plain")
    ]
    chex.assert_trees_all_close(*runs, rtol=1e-4, atol=1e-5)


# What it computes --------------------------------------------------------------------------------------------


@pytest.mark.full
def test_one_expert_is_the_model_with_a_feed_forward():
    model_config = mixture("dropless(experts=1, active=1)", bias=True, feed_forward="swiglu")
    model, params = built(model_config)
    blocks = dict(params["blocks"])
    experts = blocks.pop("experts")
    plain = {
        name: jax.tree.map(lambda x: x[:, 0], leaf) for name, leaf in experts.items() if name != "router"
    }
    whole = Decoder(config(**{**FEW, "bias": True, "feed_forward": "swiglu"}))
    want = jax.jit(whole.apply)({"params": {**params, "blocks": {**blocks, "feed_forward": plain}}}, tokens())
    got = jax.jit(model.apply)({"params": params}, tokens())
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert np.abs(want).max() > 0.1


def test_a_token_changes_no_earlier_one_and_no_other_row_in_any_bit():
    model_config = mixture(CAPACITY)
    _, params = built(model_config)
    run = functools.partial(forward(model_config), params)
    tokens_BT = np.asarray(tokens())
    before, collected = run(tokens_BT)
    assert collected[ROUTING]["blocks"]["experts"]["dropped"].min() > 0
    for t in (1, 4):
        changed = tokens_BT.copy()
        changed[1, t] = (changed[1, t] + 1) % 11
        after, _ = run(changed)
        np.testing.assert_array_equal(after[1, :t], before[1, :t])
        np.testing.assert_array_equal(after[0], before[0])
        assert np.abs(after[1, t:] - before[1, t:]).max() > 1e-3


@BOTH
def test_padding_reaches_nothing(experts):
    model = Classifier(mixture(experts, depth=1), classes=3)
    shapes = jax.eval_shape(model.init, jax.random.key(0), tokens(1, 2))["params"]
    draw = np.random.default_rng(0)
    params = jax.tree.map(lambda x: jnp.asarray(draw.normal(size=x.shape), x.dtype), shapes)
    valid_BT = np.array([[1, 1, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0]], bool)
    run = jax.jit(
        lambda tokens_BT: model.apply({"params": params}, tokens_BT, valid_BT=valid_BT, mutable=[ROUTING])
    )
    one_BT = np.asarray(tokens())
    other_BT = np.where(valid_BT, one_BT, 10**6)  # an id that is none is NaN where it is read
    found = run(one_BT)
    chex.assert_trees_all_equal(found, run(other_BT))
    routing = found[1][ROUTING]["blocks"]["experts"]
    assert routing["tokens_per_expert"].sum() == 3 * 2
    np.testing.assert_allclose(routing["balance_loss_B"][0, 0], routing["balance_loss"][0], rtol=1e-6)


@pytest.mark.full
def test_padding_gives_no_expert_more_places():
    """Two real tokens of a padded row have the places that two tokens alone have, not those of the row's length."""
    module, draw = Experts(mixture("capacity(experts=2, active=1, factor=1.0)")), np.random.default_rng(0)
    x_BTD = jnp.asarray(draw.normal(size=(1, 6, 8)), jnp.float32)
    x_BTD = jnp.concatenate(
        [x_BTD[:, :1]] * 2 + [x_BTD[:, 2:]], axis=1
    )  # two equal tokens, one choice for both
    params = module.init(jax.random.key(0), x_BTD, None)["params"]

    def run(x_BTD, valid_BT):
        y_BTD, collected = module.apply({"params": params}, x_BTD, valid_BT, mutable=[ROUTING])
        return y_BTD, collected[ROUTING]["dropped"]

    padded, dropped = run(x_BTD, jnp.arange(6)[None] < 2)
    alone, dropped_alone = run(x_BTD[:, :2], None)
    np.testing.assert_allclose(padded[:, :2], alone, rtol=1e-5, atol=1e-6)
    assert dropped == dropped_alone == 1.0
    assert np.abs(alone[0, 0]).max() > 0
    assert (
        run(x_BTD, None)[1] < 6
    )  # control: six real tokens have three places an expert, so the two equal ones fit
    np.testing.assert_array_equal(run(x_BTD, None)[0][0, 1], run(x_BTD, None)[0][0, 0])


# Decoding ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(3, 3), pytest.param((3, 1, 2), marks=pytest.mark.full)])
def test_decoding_is_the_full_forward(sizes):
    check_decoding(mixture(positions="learned"), sizes)


def test_padding_of_a_prompt_takes_no_part():
    model_config = mixture(positions="learned")
    full, call = forms(model_config)
    tokens_BT = np.asarray(tokens(2, 6))
    valid_BT = np.array([[0, 1, 1], [1, 1, 0]], bool)
    padded_BT = np.where(valid_BT, tokens_BT[:, :3], 10**6)
    padded_BT[0, 1:], padded_BT[1, :2] = tokens_BT[0, :2], tokens_BT[1, :2]
    logits_BTV, _ = call(init_cache(model_config, 2), jnp.asarray(padded_BT), valid_BT)
    want = np.asarray(full(tokens_BT))[:, :2]
    np.testing.assert_allclose(np.asarray(logits_BTV)[valid_BT], want.reshape(4, -1), rtol=1e-5, atol=1e-5)


@pytest.mark.full
def test_continuations_are_those_of_full_forwards():
    model_config = mixture(positions="learned")
    model, params = built(model_config)
    prompt_BT = tokens(2, 3)
    drawn_BT = generate(model, params, prompt_BT, key(), length=4, rule=SamplingRule(temperature=0.0))
    whole_BT = jnp.concatenate([prompt_BT, drawn_BT], axis=1)
    logits_BTV = jax.jit(model.apply)({"params": params}, whole_BT)
    np.testing.assert_array_equal(drawn_BT, logits_BTV[:, 2:-1].argmax(-1))


def test_a_capacity_and_a_cache_are_refused():
    model_config = mixture(CAPACITY)
    sentence = r"model.experts is 'capacity\(.*use \"dropless\", whose parameters are the same"
    with pytest.raises(ValueError, match=sentence):
        init_cache(model_config, 2)
    cache = init_cache(mixture(), 2)
    assert isinstance(cache, Cache)
    model = Decoder(model_config)
    params = abstract_parameters(model_config)
    with pytest.raises(ValueError, match=sentence):
        jax.eval_shape(lambda params: model.apply({"params": params}, tokens(), cache=cache), params)
    chex.assert_trees_all_equal_shapes_and_dtypes(params, abstract_parameters(mixture()))


# What it reports, and where it stands ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wiring", "names"),
    [
        ("serial", ["pre_norm", "sub_norm"]),
        ("parallel", ["block_attention_residual"]),
        pytest.param("serial", CONNECTIONS, marks=pytest.mark.full),
    ],
    ids=["one array", "a history", "every topology"],
)
def test_the_collection_is_stacked_over_blocks(wiring, names):
    for name in names:
        model_config = mixture(CAPACITY, residual=name, wiring=wiring)
        model, refused = Decoder(model_config), topology(name).inner_norm
        if refused:
            with pytest.raises(ValueError, match=r'which has a norm inside .* experts must be "none"'):
                abstract_parameters(model_config)
            continue
        params = abstract_parameters(model_config)
        run = functools.partial(model.apply, mutable=[ROUTING])
        _, collected = jax.eval_shape(run, {"params": params}, tokens())
        found = jax.tree.map(lambda x: (x.shape, x.dtype), collected[ROUTING]["blocks"]["experts"])
        shapes = {
            "balance_loss_B": (2, 2),
            "balance_loss": (2,),
            "tokens_per_expert": (2, 3),
            "dropped": (2,),
        }
        assert found == {key: (shape, jnp.float32) for key, shape in shapes.items()}


def test_nothing_is_reported_to_who_does_not_ask():
    model_config = mixture()
    logits = jax.eval_shape(
        lambda params: Decoder(model_config).apply({"params": params}, tokens()),
        abstract_parameters(model_config),
    )
    assert logits.shape == (2, 6, 11)


@pytest.mark.full
def test_each_expert_starts_as_a_feed_forward_of_its_own():
    model_config = mixture(
        "dropless(experts=4)", width=32, hidden=48, heads=1, initialization="plain", bias=True
    )
    params = jax.jit(Decoder(model_config).init)(key(), tokens())["params"]["blocks"]["experts"]
    shapes = jax.tree.map(jnp.shape, params)
    assert shapes == {
        "router": {"kernel": (2, 32, 4)},
        "up": {"kernel": (2, 4, 32, 48), "bias": (2, 4, 48)},
        "down": {"kernel": (2, 4, 48, 32), "bias": (2, 4, 32)},
    }
    for name, fan_in in (("up", 32), ("down", 48)):
        std = np.asarray(params[name]["kernel"]).std(axis=(2, 3))  # E counted, it would be half as large
        np.testing.assert_allclose(std, fan_in**-0.5, rtol=0.1)
        assert not np.asarray(params[name]["bias"]).any()
    np.testing.assert_allclose(np.std(params["router"]["kernel"]), 32**-0.5, rtol=0.2)
    assert not np.allclose(params["up"]["kernel"][:, 0], params["up"]["kernel"][:, 1])


def test_views_are_refused():
    x_BTD = jnp.zeros((1, 2, 8))
    with pytest.raises(ValueError, match="the experts read one array"):
        Experts(mixture()).init(key(), Views(x_BTD, x_BTD, x_BTD), None)


# What it costs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes", [{}, {"bias": True, "feed_forward": "swiglu"}], ids=["plain", "gated, biases"]
)
def test_parameters_and_flops_are_the_formulas(changes):
    model_config = mixture("dropless(experts=5, active=2)", **changes)
    one = config(**{**FEW, **changes})
    count = count_parameters(abstract_parameters(model_config))
    assert decoder_parameters(model_config) == count.total
    kernels = 3 if model_config.gated else 2
    feed_forward = kernels * 8 * 6 + (20 if changes else 0)  # biases: twice 6 and 8
    assert count.total - decoder_parameters(one) == 2 * (4 * feed_forward + 8 * 5)
    assert idle_parameters(model_config) == 2 * 3 * feed_forward
    assert idle_parameters(one) == 0
    # Two experts of the five, and the router.
    more = flop_parts(model_config).feed_forward - 2 * flop_parts(one).feed_forward
    assert more == 2 * 2 * 8 * 5

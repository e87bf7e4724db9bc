"""Bytes: what the derivative keeps is what compiled memory grows by; trees and caches are their arrays."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxblock import Decoder, ExecutionConfig, ModelConfig
from jaxblock.accounting import abstract_parameters, kept_bytes, kv_cache_bytes, tree_bytes
from jaxblock.config import REMAT_POLICIES
from jaxblock.functional.cross_entropy_blocked import cross_entropy_blocked
from jaxblock.functional.losses import cross_entropy
from jaxblock.functional.readout import Readout
from jaxblock.models.cache import init_cache
from tests.small import config

B, T, D = 2, 32, 32


def sized(**changes) -> ModelConfig:
    return config(**{"width": D, "heads": 4, "context": T, "depth": 4, **changes})


def kept(model_config: ModelConfig, remat: str, *, batch: int = B, length: int = T, **execution):
    return kept_bytes(
        model_config,
        ExecutionConfig(remat=remat, **execution),
        abstract_parameters(model_config),
        batch=batch,
        length=length,
    )


@functools.cache
def compiled_bytes(model_config: ModelConfig, remat: str, *, loop: bool = False) -> int:
    """Return the temporary memory of a compiled gradient of the training loss, scanned or a loop over the blocks."""
    unroll = model_config.depth if loop else 1
    model = Decoder(model_config, ExecutionConfig(remat=remat, scan_unroll=unroll))

    def loss(params, tokens_BT):
        return cross_entropy(model.apply({"params": params}, tokens_BT), tokens_BT).loss

    tokens_BT = jax.ShapeDtypeStruct((B, T), jnp.int32)
    compiled = jax.jit(jax.grad(loss)).lower(abstract_parameters(model_config), tokens_BT).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def compiled_slope(
    model_config: ModelConfig, remat: str, first: int, last: int, *, loop: bool = False
) -> float:
    """Return how many bytes a block adds, between two depths."""
    few, many = (
        compiled_bytes(dataclasses.replace(model_config, depth=n), remat, loop=loop) for n in (first, last)
    )
    return (many - few) / (last - first)


def test_b102_compiled_memory_grows_by_what_is_kept_per_block():
    """Equal to the byte when this was written; the band leaves XLA a hundredth. All policies: below, in full."""
    slope = compiled_slope(sized(), "dots", 2, 6)
    assert slope == pytest.approx(kept(sized(), "dots").per_block, rel=0.01)
    assert slope != pytest.approx(kept(sized(), "branch_out").per_block, rel=0.2)  # control


LLAMA = {"feed_forward": "swiglu", "kv_heads": 1, "positions": "rope", "bias": False}


@pytest.mark.full
@pytest.mark.parametrize(
    ("changes", "remat"), [*(({}, remat) for remat in REMAT_POLICIES), (LLAMA, "none"), (LLAMA, "dots")]
)
def test_b102_compiled_memory_grows_by_what_is_kept_at_three_depths(changes, remat):
    """In float32: where a CPU computes in bfloat16, XLA keeps float32 arrays."""
    expected = kept(sized(**changes), remat).per_block
    for first, last in ((4, 8), (8, 16)):
        assert compiled_slope(sized(**changes), remat, first, last) == pytest.approx(expected, rel=0.01)


@pytest.mark.full
def test_b102_a_block_adds_one_residual_stream_when_scanned_and_recomputed():
    stream = B * T * D * 4
    assert kept(sized(), "full").per_block == stream
    assert compiled_slope(sized(), "full", 4, 8) == pytest.approx(stream, rel=0.01)
    assert kept(sized(), "none").per_block > 10 * stream  # the control: what recomputing saves


@pytest.mark.full
@pytest.mark.parametrize("remat", ["none", "full"])
def test_b102_a_loop_is_linear_in_depth_too_and_keeps_at_most_what_a_scan_keeps_without_remat(remat):
    """XLA for CPUs computes an unrolled block's values once, whatever is asked for; a scan's body it cannot merge."""
    bound = 1.01 * kept(sized(), "none").per_block
    for first, last in ((4, 8), (8, 16)):
        assert B * T * D * 4 < compiled_slope(sized(), remat, first, last, loop=True) < bound


@pytest.mark.full
@pytest.mark.parametrize("residual", ["dense_former", "attention_residual"])
def test_a_history_is_kept_once_and_read_with_at_most_six_copies(residual):
    found = kept(sized(residual=residual), "full")
    slope = compiled_slope(sized(residual=residual), "full", 4, 8)
    assert found.per_block <= slope <= found.per_block + 6 * found.history / 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "changes", [{}, {"feed_forward": "swiglu", "hidden": 20, "kv_heads": 2}], ids=["plain", "gated"]
)
def test_each_policy_keeps_its_arrays(changes, dtype):
    """full: the stream. branch_out: attention's output too. dots: q, k, v, attention's output, up (and gate)."""
    model_config = sized(**changes, dtype=dtype)
    kv_width, hidden = model_config.num_kv_heads * 8, model_config.num_hidden * (2 if changes else 1)
    size = jnp.dtype(dtype).itemsize
    stream = B * T * D * 4
    assert kept(model_config, "full").per_block == stream
    assert kept(model_config, "branch_out").per_block == stream + B * T * D * size
    products = 2 * D + 2 * kv_width + hidden
    assert kept(model_config, "dots").per_block == stream + B * T * products * size
    assert kept(model_config, "none").per_block > kept(model_config, "dots").per_block


def test_what_is_kept_is_linear_in_batch_and_depth():
    once = kept(sized(), "dots")
    assert kept(sized(), "dots", batch=3 * B).total == 3 * once.total
    assert kept(sized(depth=12), "dots").blocks == 3 * once.blocks
    assert once.logits == 2 * 4 * B * T * 11
    assert once.total == once.blocks + once.logits
    # Control: scores make "none" grow faster than the length.
    assert kept(sized(), "none", length=T).blocks > 2 * kept(sized(), "none", length=T // 2).blocks


def test_attention_that_makes_no_scores_keeps_none():
    blocked = kept(sized(), "none", attention="blocked")
    assert blocked.blocks < kept(sized(), "none").blocks - 4 * B * 4 * T * T * 4
    half = sized(dtype="bfloat16")
    assert kept(half, "none", attention="cudnn") == kept(half, "none", attention="blocked")


def test_dropout_keeps_its_masks():
    dropped = kept(sized(hidden_dropout=0.1), "none").per_block - kept(sized(), "none").per_block
    assert dropped >= B * T * 4 * D  # a boolean for every hidden entry


@pytest.mark.parametrize(
    ("residual", "rows"),
    [
        ("pre_norm", 0),
        ("dense_former", 4),
        ("attention_residual", 8 + 1),
        ("block_attention_residual(sublayers=4)", 2 + 1),
    ],
)
def test_a_history_is_kept_once(residual, rows):
    found = kept(sized(residual=residual), "full")
    assert found.history == rows * B * T * D * 4
    assert found.per_block == (found.blocks + found.history) / 4
    if rows:  # control: the plain derivative saves every step's view
        assert kept(sized(residual=residual), "full", history="plain").blocks > 2 * found.history


@pytest.mark.full
def test_logits_and_their_gradient_are_what_the_vocabulary_costs():
    few, many = (sized(vocab_size=size, depth=1) for size in (4096, 8192))
    growth = compiled_bytes(many, "full") - compiled_bytes(few, "full")
    assert growth == pytest.approx(kept(many, "full").logits - kept(few, "full").logits, rel=0.02)


def test_a_blocked_loss_keeps_one_block_and_copies_of_head_and_states():
    sizes = {"batch": 8, "length": 1024}
    small, large = (
        kept(sized(vocab_size=V, context=1024), "full", loss="blocked", **sizes).logits for V in (11, 50_257)
    )
    assert small == kept(sized(context=1024), "full", **sizes).logits + 4 * D * (
        11 + 8 * 1024
    )  # a single block
    assert large == 2 * 4 * 8 * 41 * 50_257 + 4 * D * (50_257 + 8 * 1024)
    assert large < kept(sized(vocab_size=50_257, context=1024), "full", **sizes).logits / 20


@pytest.mark.full
def test_compiled_memory_of_a_blocked_loss_grows_with_the_vocabulary_as_counted():
    """The loss alone, as in a model another moment may need more; a head of more entries than a block has logits."""

    def compiled(columns: int, width: int) -> int:
        x_BTD = jax.ShapeDtypeStruct((8, 256, width), jnp.float32)
        readout = Readout(jax.ShapeDtypeStruct((columns, width), jnp.float32))  # pyright: ignore[reportArgumentType]
        targets_BT = jax.ShapeDtypeStruct((8, 256), jnp.int32)
        loss = jax.value_and_grad(lambda *given: cross_entropy_blocked(*given).loss, (0, 1))
        memory = jax.jit(loss).lower(x_BTD, readout, targets_BT).compile().memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    for columns, width in ((50_257, 768), (100_000, 256), (200_000, 256)):
        model_config = sized(vocab_size=columns, context=256, width=width)
        counted = kept(model_config, "full", batch=8, length=256, loss="blocked").logits
        assert compiled(columns, width) == pytest.approx(counted, rel=0.05)


def test_bytes_of_a_tree_are_those_of_its_arrays():
    tree = {"a": jnp.zeros((3, 2), jnp.bfloat16), "b": [jax.ShapeDtypeStruct((5,), jnp.int32)], "none": None}
    assert tree_bytes(tree) == 3 * 2 * 2 + 5 * 4
    assert tree_bytes(None) == 0
    params = abstract_parameters(sized(param_dtype="bfloat16"))
    assert 2 * tree_bytes(params) == tree_bytes(abstract_parameters(sized()))
    moments = jax.eval_shape(optax.adam(1e-3).init, params)
    assert tree_bytes(moments) == 2 * tree_bytes(params) + 4


@pytest.mark.parametrize(
    ("changes", "slots"),
    [
        ({}, 8),
        ({"kv_heads": 1}, 8),
        ({"dtype": "bfloat16"}, 8),
        ({"window": (3, 5)}, 5),
        ({"window": (3, 0)}, 8),
    ],
)
def test_the_cache_is_the_arrays_that_decoding_makes(changes, slots):
    model_config = config(**changes)
    cache = jax.eval_shape(lambda: init_cache(model_config, 2, capacity=slots))
    assert kv_cache_bytes(model_config, 2, 8) == tree_bytes((cache.keys_LBGSK, cache.values_LBGSK))
    size = jnp.dtype(model_config.dtype).itemsize
    assert kv_cache_bytes(model_config, 2, 8) == 2 * 3 * 2 * slots * model_config.num_kv_heads * 4 * size


@pytest.mark.parametrize(("batch", "length"), [(0, 8), (2, 0)])
def test_empty_batches_are_refused(batch, length):
    words = r"(batch|length) is 0; it must be a whole number of at least 1"
    with pytest.raises(ValueError, match=words):
        kv_cache_bytes(config(), batch, length)
    with pytest.raises(ValueError, match=words):
        kept(sized(), "none", batch=batch, length=length)

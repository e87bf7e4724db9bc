"""The norms of a Llama in bfloat16: at most one last place from transformers', whose cast order is another (B32).

Ours multiplies by the weight in float32 and casts once; transformers casts first. Either is within half a last place
of the exact product at each rounding, so that they part by one last place at most.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblock.functional import rms_norm
from tests.parity import llama_norms
from tests.parity.llama_norms import EPSILON, LENGTH, NORMS, WIDTH, NormRecord


@pytest.fixture(scope="module")
def golden() -> NormRecord:
    return llama_norms.read_golden()


def as_bfloat16(bits: np.ndarray) -> jax.Array:
    return jnp.asarray(bits.view(jnp.bfloat16.dtype))


def places_apart(ours: jax.Array, theirs: jax.Array) -> np.ndarray:
    """Return how many bfloat16 values lie between, through 0."""

    def ordered(x: jax.Array) -> np.ndarray:
        bits = np.asarray(x).view(np.int16).astype(np.int32)
        return np.where(bits < 0, -(bits & 0x7FFF), bits)

    assert ours.dtype == theirs.dtype == jnp.bfloat16
    return np.abs(ordered(ours) - ordered(theirs))


def assert_one_place_apart(reference: NormRecord) -> None:
    assert reference.read_NBTD.shape == (NORMS, 2, LENGTH, WIDTH)
    for weight_D, read_BTD, written_BTD in zip(*map(as_bfloat16, reference), strict=True):
        apart = places_apart(rms_norm(read_BTD, weight_D, epsilon=EPSILON), written_BTD)
        assert apart.max() <= 1
        assert (apart == 0).mean() > 0.5
        # Their order, written out, is theirs to the bit: the places are the order's, and no other difference.
        cast_first = rms_norm(read_BTD, epsilon=EPSILON) * weight_D[None, None]
        np.testing.assert_array_equal(places_apart(cast_first, written_BTD), 0)


def test_b32_every_norm_is_at_most_one_bfloat16_place_from_transformers(golden):
    assert_one_place_apart(golden)


def test_b32_control_statistics_in_bfloat16_and_a_factor_of_one_plus_the_weight_are_further_away(golden):
    for weight_D, read_BTD, written_BTD in zip(*map(as_bfloat16, golden), strict=True):
        squares = jnp.mean(read_BTD * read_BTD, axis=-1, keepdims=True)
        narrow = read_BTD * jax.lax.rsqrt(squares + jnp.bfloat16(EPSILON)) * weight_D[None, None]
        shifted = rms_norm(read_BTD, weight_D + 1, epsilon=EPSILON)
        for wrong in (narrow, shifted):
            assert places_apart(wrong, written_BTD).max() > 1


@pytest.mark.skipif(
    not llama_norms.installed(),
    reason="compares the golden file with transformers, which is not installed: pip install -e '.[parity,test]'",
)
def test_b32_the_golden_file_is_what_transformers_computes_today(golden):
    """If it has changed: python -m tests.parity.llama_norms, and say why in the commit."""
    live = llama_norms.live()
    assert_one_place_apart(live)
    np.testing.assert_array_equal(live.weights_ND, golden.weights_ND)
    # What a norm reads has come through products in bfloat16, whose order of sums is the processor's.
    values = [np.asarray(as_bfloat16(x.read_NBTD), np.float32) for x in (live, golden)]
    np.testing.assert_allclose(*values, rtol=0.05, atol=0.05)
    assert not np.allclose(values[0], values[1][::-1], rtol=0.05, atol=0.05)
    assert llama_norms.GOLDEN.stat().st_size < 10_000

"""The worked example on somebody's own stack: its numbers are that stack's, and its table prints them."""

import jax
import jax.numpy as jnp
import numpy as np

from experiments.own_stack import COLUMNS, own_stack, report
from jaxblock.probes.paths import PathSpectrum
from jaxblock.probes.stack import run_stack


def test_a_token_reads_only_those_before_it_and_feed_none():
    stack = own_stack(2, 0)
    moved = stack.stream.at[:, 5].add(1.0)
    first = jax.tree.map(lambda x: x[0], stack.params)
    changed = [
        np.flatnonzero(np.any(step(first, moved) != step(first, stack.stream), axis=(0, 2)))
        for step in stack.steps
    ]
    np.testing.assert_array_equal(changed[0], np.arange(5, 16))
    np.testing.assert_array_equal(changed[1], [5])
    assert run_stack(stack).shape == stack.stream.shape


def test_the_table_has_a_row_for_every_sublayer_and_every_length():
    rms_S = np.sqrt(1 + 0.5 * np.arange(7.0))
    found = {name: np.arange(6) + 100.0 * i for i, name in enumerate(COLUMNS)}
    paths = PathSpectrum(jnp.linspace(0, 1, 7), jnp.ones(7), jnp.asarray(1.25))
    text = report({**found, "rms": rms_S[1:], "first": rms_S[0], "paths": paths})
    lines = text.splitlines()
    assert lines[0].split() == ["sublayer", "rms", "u", "/", "x", *COLUMNS[2:]]
    assert lines[3].split() == ["2", "mix", f"{rms_S[3]:.4f}", *(f"{100 * i + 2:.4f}" for i in range(1, 9))]
    assert "additive     number  0.5000   relative error 0.0000" in text
    assert "paths: mean length 1.25 of 6" in text
    assert lines[-1].split() == ["6", "1.0000", "0.0156", "1.0000"]

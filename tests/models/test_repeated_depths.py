"""B105: a loop over depths keeps no compiled program of its own: a second pass over the same depths adds nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import gc, resource
import jax
from jaxblock.functional import cross_entropy
from tests.small import built, config, tokens

def sweep():
    for depth in range(1, 9):
        model, params = built.__wrapped__(config(depth=depth))
        def loss(params, model=model):
            return cross_entropy(model.apply({"params": params}, tokens()), tokens(seed=1)).loss
        compiled = jax.jit(jax.value_and_grad(loss))
        compiled(params)
    gc.collect()

def resident():
    pages = int(open("/proc/self/statm").read().split()[1])
    return pages * resource.getpagesize() / 2**20

sweep()
first = resident()
sweep()
print(first, resident())
"""


@pytest.mark.full
@pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="resident memory is read from Linux's /proc"
)
def test_b105_a_second_pass_over_eight_depths_adds_less_than_a_tenth():
    command = [sys.executable, "-c", PROGRAM]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=500)
    first, second = map(float, found.stdout.split())
    assert second < 1.1 * first, (first, second)

"""What a step frees is kept: pages faulted in, counted by the kernel, in processes of their own."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import jax, jax.numpy as jnp
from jaxblock.training.host_memory import keep_freed_memory

if sys.argv[1] == "keep":
    keep_freed_memory()
else:
    assert sys.argv[1] == "return"

# Temporaries of 80 MB, more than any heap but the main thread's holds; a result of 4 bytes.
wide = lambda x: jnp.broadcast_to(x, (20, 1_000_000))
f = jax.jit(lambda x: jax.lax.fori_loop(0, 2, lambda i, y: y[::-1] + i, wide(x)).max())
x = jnp.arange(1_000_000.0)
for _ in range(2):
    f(x).block_until_ready()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    f(x).block_until_ready()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 3)
"""


def pages(what, **environment):
    command = [sys.executable, "-c", PROGRAM, what]
    environment = {"PATH": "", "XLA_FLAGS": "--xla_backend_optimization_level=0", **environment}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc is told what to keep")
def test_temporaries_are_not_faulted_in_again_at_every_call():
    temporaries = 20 * 1_000_000 * 4 // 4096
    kept, returned = pages("keep", JAX_PLATFORMS="cpu"), pages("return", JAX_PLATFORMS="cpu")
    assert kept < temporaries // 100
    assert returned > temporaries // 2  # negative control: what happens without

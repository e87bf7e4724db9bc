"""Every probe says the same of a model however it runs: scan or loop, any remat, vmap, eager, 8 devices."""

import functools

import jax
import numpy as np
import pytest

from jaxblock import ExecutionConfig
from tests.probes.every_probe import batch, difference, every_probe, model_config
from tests.simulated_devices import printed_by
from tests.small import SCANNED, built

TOLERANCE = 2e-5
ALL = ("pre_norm", "attention_residual", "post_norm")
RESIDUALS = [ALL[0], *(pytest.param(x, marks=pytest.mark.full) for x in ALL[1:])]
WITH_LENSES = pytest.mark.parametrize(
    "lenses", [False, pytest.param(True, marks=pytest.mark.full)], ids=["", "lenses"]
)
EXECUTIONS = {
    "loop, full remat": ExecutionConfig(scan_unroll=3, remat="full"),
    "scan, full remat": ExecutionConfig(remat="full"),
    "scan, dots": ExecutionConfig(remat="dots"),
    "loop, branch_out": ExecutionConfig(scan_unroll=3, remat="branch_out"),
    "part of a loop, blocked": ExecutionConfig(scan_unroll=2, attention="blocked"),
    "loop": ExecutionConfig(scan_unroll=3),
}


@functools.cache
def measured(residual, execution=SCANNED, *, lenses):
    """Return the probes' compiled function and what it says of the small model, in numpy."""
    of = model_config(residual)
    run = jax.jit(every_probe(of, execution, lenses=lenses))
    return run, jax.device_get(run(built(of)[1], *batch()))


def equal(found, wanted):
    apart = difference(found, wanted)
    assert max(apart.values()) < TOLERANCE, {name: x for name, x in apart.items() if x >= TOLERANCE}


@pytest.mark.parametrize(
    ("residual", "how", "lenses"),
    [
        ("pre_norm", "loop, full remat", False),
        *(pytest.param(name, how, True, marks=pytest.mark.full) for name in ALL for how in EXECUTIONS),
    ],
)
def test_every_probe_says_the_same_however_the_stack_is_run(residual, how, lenses):
    wanted = measured(residual, lenses=lenses)[1]
    equal(measured(residual, EXECUTIONS[how], lenses=lenses)[1], wanted)
    read = {"lens", "attribution"} if lenses and residual != "attention_residual" else set()
    assert set(wanted) == {"stream", "attention", "gradient", "logits"} | read
    # Control: a number whose sublayers are the other way round would be seen.
    turned = {
        kind: {name: x[::-1] for name, x in numbers.items() if np.ndim(x)} for kind, numbers in wanted.items()
    }
    unmoved = {name for name, x in difference(turned, wanted).items() if x < 10 * TOLERANCE}
    assert unmoved <= {"stream/not_finite", "stream/absorbed"}  # both are 0 here


@WITH_LENSES
@pytest.mark.parametrize("residual", RESIDUALS)
def test_vmap_over_seeds_gives_what_each_gives_alone(residual, lenses):
    run, wanted = measured(residual, lenses=lenses)
    params = built(model_config(residual))[1]
    other = jax.tree.map(lambda x: 1.1 * x + 0.01, jax.device_get(params))
    both = jax.tree.map(lambda x, y: np.stack([x, y]), jax.device_get(params), other)
    over = jax.jit(
        jax.vmap(every_probe(model_config(residual), lenses=lenses), in_axes=(0, None, None, None))
    )
    found = jax.device_get(over(both, *batch()))
    one, two = (jax.tree.map(lambda x, i=i: x[i], found) for i in range(2))
    equal(one, wanted)
    equal(two, jax.device_get(run(other, *batch())))
    assert difference(one, two)["stream/output_rms"] > 1e-3  # control: they are two models


@pytest.mark.full
@pytest.mark.parametrize("residual", RESIDUALS)
def test_eager_gives_what_jit_gives(residual):
    of = model_config(residual)
    equal(every_probe(of, lenses=True)(built(of)[1], *batch()), measured(residual, lenses=True)[1])


@pytest.fixture(scope="module")
def report(request):
    """Return what `eight_devices.py` prints."""
    names = [
        item.name for item in request.session.items if item.path == request.path and "eight" in item.name
    ]
    asked = [residual for residual in ALL if any(residual in name for name in names)]
    lenses = "lenses" if len(asked) > 1 else "none"
    return printed_by("tests.probes.eight_devices", lenses, *asked)


@pytest.mark.parametrize("residual", RESIDUALS)
def test_eight_devices_say_what_one_says(report, residual):
    lenses = len(report) > 1
    run, wanted = measured(residual, lenses=lenses)
    assert report[residual]["devices"] == [8]
    assert report[residual]["rows"] == [1] * 8
    equal(report[residual]["found"], wanted)
    # Control: rows differ in real tokens, so the mean of what the rows give alone is another number.
    ids_BT, targets_BT, valid_BT = batch()
    params = built(model_config(residual))[1]
    alone = np.eye(len(ids_BT), dtype=bool)[..., None]
    rows = [jax.device_get(run(params, ids_BT, targets_BT, valid_BT & row_B1)) for row_B1 in alone]
    wrong = difference(jax.tree.map(lambda *x: np.mean(x, axis=0), *rows), wanted)
    for name in ("stream/read_rms", "stream/output_rms", "gradient/stream_S", "logits/log_z"):
        assert wrong[name] > 1e-3

"""Static or dynamic: the query and the key of attention over depth, a 2 x 2 grid of equal parameters.

    python -m experiments.query_key_grid [--store sweeps/query_key_grid] [--json]

h = sum_i a_i v_i,  a = softmax_i(q . k_i)  over the outputs v_i of all sublayers before (arXiv 2603.15031), with

                   key of the layer, k_i learned      key of the content, k_i = rms_norm(v_i)
    static query   learned scalar logits              the paper's default, q learned
    dynamic query  the cell no paper has filled       q = W rms_norm(newest v), the paper's ablation

and pre_norm as the reference. The same parameters for all (within 0.5 %): a dynamic query costs D^2 per reader, 13
readers, and the feed-forward's width pays for it. Of the 13, the first reads one source, which no query changes: its
parameters are counted and do nothing. Learning rate tuned per arm: 5 rates a factor 2 apart, up to 2 more where the
best lies at the edge; each side is read at its own fitted optimum and paired by seed.

Expected, if the paper's 436M models (1.766 pre_norm, 1.749 scalar logits, 1.737 default, 1.731 dynamic query, which
there pays nothing for its D^2) tell anything of 0.3M parameters and 154k tokens: pre_norm worst, a content key better
by about 0.01 nats, a dynamic query better by about 0.006 less what 47 of 192 hidden units are worth, which may well be
more. 3 seeds resolve differences of a few hundredths at best, so that most of the table should read "not resolved".

A difference is resolved where its interval leaves 0 out: t over seeds, Bonferroni for the 7 comparisons, widened by
the misfits of the parabolas, as in `jaxblock sweep`'s report; p is Holm's over the 7. MDE is the difference found with
80 % power on the same terms, from the spread of these very seeds. Writes results/query_key_grid.csv, .md and
figures/query_key_grid.png. Killed, the same command goes on. Wall time: about 30 minutes on two quiet cores.
"""

import argparse
import csv
import functools
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxblock.accounting import decoder_parameters
from jaxblock.config import ModelConfig
from jaxblock.sweeps.analysis import plain
from jaxblock.sweeps.findings.arms import Losses, Measured, measure_arm
from jaxblock.sweeps.plan import Plan, build_plan
from jaxblock.sweeps.reading import read_sweep
from jaxblock.sweeps.results import Result, Sweep
from jaxblock.sweeps.runner import prepare_sweep, run_sweep
from jaxblock.sweeps.statistics import Estimate, Refusal, holm, paired_difference
from jaxblock.sweeps.statistics.basin import Basin

HERE = Path(__file__).parent
NAME, STEPS, REFERENCE, FULL_HIDDEN = "query_key_grid", 300, "pre_norm", 192
RATES, SEEDS = (2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2), (0, 1, 2)
MODEL: Mapping[str, Any] = {
    "vocab_size": 256,
    "context": 64,
    "depth": 6,
    "width": 64,
    "heads": 4,
    "feed_forward": "swiglu",
    "norm": "rms_norm",
    "bias": False,
    "positions": "rope",
    "initialization": "plain",
}


class Cell(NamedTuple):
    """An arm."""

    name: str
    query: str
    key: str
    residual: str


CELLS = (
    Cell(REFERENCE, "", "", "pre_norm"),
    Cell("static_layer", "static", "layer", 'attention_residual(key="layer")'),
    Cell("static_content", "static", "content", "attention_residual()"),
    Cell("dynamic_layer", "dynamic", "layer", 'attention_residual(query="dynamic", key="layer")'),
    Cell("dynamic_content", "dynamic", "content", 'attention_residual(query="dynamic")'),
)
_GRID = tuple(cell for cell in CELLS if cell.query)


def _signed(positive: str, *, field: str, scale: float) -> dict[str, float]:
    return {cell.name: scale if getattr(cell, field) == positive else -scale for cell in _GRID}


_QUERY, _KEY = _signed("dynamic", field="query", scale=0.5), _signed("content", field="key", scale=0.5)
CONTRASTS: Mapping[str, Mapping[str, float]] = {
    "query: dynamic less static": _QUERY,
    "key: content less layer": _KEY,
    "interaction": {name: 4 * _QUERY[name] * _KEY[name] for name in _QUERY},
    **{f"{cell.name} less {REFERENCE}": {cell.name: 1.0, REFERENCE: -1.0} for cell in _GRID},
}
"""Name -> arm -> weight. Main effects are means over the other factor; the interaction is the query's effect under
content keys less its effect under layer keys."""


@functools.cache
def model_of(cell: Cell) -> ModelConfig:
    """Return the model whose feed-forward width brings the parameters nearest to pre-norm's with 192 hidden units."""
    total = decoder_parameters(ModelConfig(**MODEL, residual=REFERENCE, hidden=FULL_HIDDEN))
    models = [
        ModelConfig(**MODEL, residual=cell.residual, hidden=hidden) for hidden in range(1, FULL_HIDDEN + 1)
    ]
    return min(models, key=lambda model: abs(decoder_parameters(model) - total))


def plan_of(cell: Cell, *, steps: int = STEPS) -> Plan:
    """Return the sweep of one arm: rates and seeds are lanes of one program."""
    model = model_of(cell)
    return build_plan(
        {
            "sweep": {"name": f"{NAME}_{cell.name}", "workers": 1, "lanes": 15, "chunk": 25, "extend": 2},
            "axes": {"optimizer.learning_rate": list(RATES), "run.seed": list(SEEDS)},
            "run": {"steps": steps},
            "model": {**MODEL, "residual": cell.residual, "hidden": model.num_hidden},
            "execution": {"remat": "none"},
            "data": {"batch": 8, "validation_tokens": 32768},
        }
    )


def train(store: Path, *, steps: int = STEPS) -> dict[str, Sweep] | int:
    """Run what has no result yet, one store an arm; return every arm's sweep, or the code of an interrupted one."""
    prepared = {cell.name: prepare_sweep(plan_of(cell, steps=steps)) for cell in CELLS}
    for name, one in prepared.items():
        begun = time.perf_counter()
        code = run_sweep(one, store / name)
        if code:
            return code
        print(f"{name}: {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)
    return {name: read_sweep(store / name) for name in prepared}

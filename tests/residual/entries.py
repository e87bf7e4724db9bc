"""What the battery runs on: every name of the registry, and the options whose code differs.

By default the battery runs on REPRESENTATIVE, ALSO_BY_DEFAULT and, the cheapest checks, on every other name;
`pytest -m full` runs all of it on all.
"""

import pytest

from jaxblock.models.write_once import holds_history
from jaxblock.residual import REGISTRY, topology
from tests.residual.battery import CHECKS
from tests.residual.given import draw
from tests.small import config

REPRESENTATIVE = ("pre_norm", "dense_former", "attention_residual")
VARIANTS = (
    "block_attention_residual(sublayers=4)",
    "dense_former(dilation=2, period=3)",
    "dense_former(period=2)",
    "block_attention_residual(sublayers=1)",
    "block_attention_residual(sublayers=3)",
    "block_attention_residual(sublayers=4, query='dynamic', key='layer')",
    "block_attention_residual(sublayers=4, query='static', key='layer', window=1)",
    "attention_residual(score='sigmoid')",
    "attention_residual(query='dynamic')",
    "attention_residual(query='dynamic', key='layer')",
    "attention_residual(key='layer', heads=2)",
    "attention_residual(key_norm='none')",
    "attention_residual(window=2)",
    "attention_residual(heads=4)",
    "rezero(norm='pre', share='block')",
    "layer_scale(start=1.0)",
    "mix_norm(post=0.67)",
    "laurel(form='rw')",
    "laurel(form='lr', rank=2)",
    "input_injection(decay=1.1)",
    "unet(start=1.0)",
    "hyper_connections(weights='static')",
    "hyper_connections(streams=2, activation='none')",
    "frac_connections(fractions=4, weights='static')",
    "manifold_hyper_connections(mixing='permutations', streams=3)",
    "muddformer(weights='static')",
    "lime(weights='dynamic')",
)
NAMES = tuple(dict.fromkeys((*REPRESENTATIVE, *REGISTRY, *VARIANTS)))
EVERY_NAME = ("parameter_count", "positions_and_rows_stay_apart", "mixing_matrix", "zero_branch")
"""Checks that need no decoder, or no compilation."""
ALSO_BY_DEFAULT = {
    "post_norm": ("every_leaf_learns",),
    "layer_scale": ("every_leaf_learns", "every_own_leaf_matters"),
    "deep_norm": ("depth_scaled",),
    "manifold_hyper_connections": ("every_leaf_learns", "every_own_leaf_matters"),
    "peri_norm": ("scale_free",),
    "branch_norm": ("scale_free",),
}
SHOWN_BY_ANOTHER = {
    "pre_norm": ("reduces_to", "every_own_leaf_matters"),
    "dense_former": (
        "loop_equals_scan",
        "remat_equals_none",
        "parallel_wiring",
        "vmap_equals_each_alone",
        "every_leaf_learns",
        "every_own_leaf_matters",
        "moves_from_zero_output",
        "causal",
        "reduces_to",
        "one_block",
        "finite_in_bfloat16_at_100_blocks",
        "scale_free",
    ),
    "attention_residual": (
        "jit_equals_eager",
        "plain_derivative_equals_reverse",
        "scale_free",
        "vmap_equals_each_alone",
        "finite_in_bfloat16_at_100_blocks",
        "parallel_wiring",
        "one_block",
    ),
}
"""Checks of a representative whose code another one's default run goes through as well: compiling is what is slow."""
ONLY_HISTORIES = ("plain_derivative_equals_reverse", "memory_is_linear")
"""Checks that for other streams compare an ordinary scan with itself, or measure it: under `-m full` only."""


READS_WITH_WEIGHT_0 = (
    "attention_residual(window=2)",
    "block_attention_residual(sublayers=4, query='static', key='layer', window=1)",
    "block_attention_residual(sublayers=3)",
)
"""Their programs multiply rows outside the window, or sums not finished, by 0, which their `flops` do not count."""


def has_history(name: str) -> bool:
    return holds_history(topology(name).open(config(), draw(1, 1, 8)))


HISTORIES = tuple(name for name in NAMES if has_history(name))
PLAIN_STREAMS = tuple(name for name in NAMES if name not in HISTORIES)


def is_default(name: str, check: str) -> bool:
    if check in ONLY_HISTORIES and name in PLAIN_STREAMS:
        return False
    if check in SHOWN_BY_ANOTHER.get(name, ()):
        return False
    if name in REPRESENTATIVE or check in ALSO_BY_DEFAULT.get(name, ()):
        return True
    return name in REGISTRY and check in EVERY_NAME


def cases(names: tuple[str, ...]) -> list:
    return [
        pytest.param(
            name, check, marks=() if is_default(name, check) else (pytest.mark.full,), id=f"{name}-{check}"
        )
        for name in names
        for check in CHECKS
        if not (check == "flops" and name in READS_WITH_WEIGHT_0)
    ]

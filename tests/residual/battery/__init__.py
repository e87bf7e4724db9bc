"""What makes a topology accepted: checks that take any topology and raise AssertionError with a sentence.

`test_battery.py` runs them over the registry; to try one of your own:

    from tests.residual.battery import CHECKS, Entry
    for check in CHECKS.values():
        check(Entry("mine", my_topology()))

Everything is small: three blocks, width 8. What two executions may differ by is round-off, 1e-5 of a value's and
1e-4 of a gradient's size.
"""

from collections.abc import Callable

from tests.residual.battery import cost, execution, structure
from tests.residual.given import Entry

CHEAP: dict[str, Callable[[Entry], None]] = {
    "positions_and_rows_stay_apart": structure.check_positions_and_rows_stay_apart,
    "causal": structure.check_causal,
    "zero_branch": structure.check_zero_branch,
    "mixing_matrix": structure.check_mixing_matrix,
    "parameter_count": cost.check_parameter_count,
    "weight_decay_leaves_it_alone": structure.check_weight_decay_leaves_it_alone,
}
CHECKS: dict[str, Callable[[Entry], None]] = {
    **CHEAP,
    "loop_equals_scan": execution.check_loop_equals_scan,
    "remat_equals_none": execution.check_remat_equals_none,
    "plain_derivative_equals_reverse": execution.check_plain_derivative_equals_reverse,
    "parallel_wiring": execution.check_parallel_wiring,
    "one_block": execution.check_one_block,
    "jit_equals_eager": execution.check_jit_equals_eager,
    "vmap_equals_each_alone": execution.check_vmap_equals_each_alone,
    "reduces_to": structure.check_reduces_to,
    "scale_free": structure.check_scale_free,
    "depth_scaled": structure.check_depth_scaled,
    "flops": cost.check_flops,
    "every_leaf_learns": structure.check_every_leaf_learns,
    "every_own_leaf_matters": structure.check_every_own_leaf_matters,
    "moves_from_zero_output": structure.check_moves_from_zero_output,
    "memory_is_linear": cost.check_memory_is_linear,
    "finite_in_bfloat16_at_100_blocks": execution.check_finite_in_bfloat16_at_100_blocks,
    "traced_once": execution.check_traced_once,
}

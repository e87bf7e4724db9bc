"""AdamW with a schedule, a clip and a decay mask by role (arXiv 1711.05101)."""

from collections import Counter
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from jaxblock import axes
from jaxblock.training.config import OptimizerConfig
from jaxblock.types import Array, Params

DECAYED_ROLES = frozenset({"query", "key", "value", "output", "gate", "up", "down", "head"})
"""Dense kernels decay; norms, biases, tables and whatever a residual connection declares do not."""

Schedule = Callable[[jax.typing.ArrayLike], Array]


def learning_rate_schedule(config: OptimizerConfig, steps: int) -> Schedule:
    """Return the learning rate as a function of the number of updates already made, float32.

    With w = round(warmup * steps), update n (from 1) has peak * n / w while n <= w; after that it falls from the
    peak, at update w, to final * peak, at update `steps`. Warm-up 4 of 10, linear to 0, peak 1:
    1/4, 1/2, 3/4, 1, 5/6, 4/6, 3/6, 2/6, 1/6, 0.
    """
    warm = round(config.warmup * steps)
    name, options = config.schedule_choice
    final = options.get("final", 1.0)

    def schedule(updates: jax.typing.ArrayLike) -> Array:
        n = jnp.asarray(updates).astype(jnp.float32) + 1.0
        rise = n / max(warm, 1)
        progress = jnp.clip((n - warm) / max(steps - warm, 1), 0.0, 1.0)
        fall = 1.0 - progress if name == "linear" else 0.5 * (1.0 + jnp.cos(jnp.pi * progress))
        factor = jnp.where(n <= warm, rise, final + (1.0 - final) * fall)
        return jnp.float32(config.learning_rate) * factor

    return schedule


def decay_mask(params: Params) -> Params:
    """Return a tree of booleans: True where weight decay applies."""
    return jax.tree.map(lambda role: role in DECAYED_ROLES, axes.roles(params))


def decay_table(params: Params) -> str:
    """Return what decays and what does not, by role, with numbers of parameters."""
    counts: Counter[tuple[bool, str]] = Counter()
    for role, leaf in zip(jax.tree.leaves(axes.roles(params)), jax.tree.leaves(params), strict=True):
        counts[role in DECAYED_ROLES, role] += leaf.size

    def listed(*, decayed: bool) -> str:
        parts = [f"{role} {count:,}" for (flag, role), count in sorted(counts.items()) if flag == decayed]
        return ", ".join(parts) or "nothing"

    return f"weight decay on: {listed(decayed=True)}\nno weight decay on: {listed(decayed=False)}"


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Return clip -> Adam -> decay -> learning rate. Updates and moments keep the parameters' dtypes."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip) if config.clip > 0 else optax.identity(),
        optax.adamw(
            learning_rate_schedule(config, steps),
            b1=config.beta1,
            b2=config.beta2,
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            mask=decay_mask,
        ),
    )

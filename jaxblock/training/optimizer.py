"""AdamW with a schedule, a clip and a decay mask by role (arXiv 1711.05101)."""

import functools
from collections import Counter
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import optax

from jaxblock import axes
from jaxblock.axes import Label
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


def decay_mask(params: Params, labels: Sequence[Label] = ()) -> Params:
    """Return a tree of booleans: True where weight decay applies, by role unless a label says otherwise."""

    def decays(role: str, label: Label | None) -> bool:
        return role in DECAYED_ROLES if label is None or label.decay is None else label.decay

    return jax.tree.map(decays, axes.roles(params), axes.labelled(params, labels))


def rate_factors(params: Params, labels: Sequence[Label] = ()) -> Params:
    """Return a tree of floats: each parameter's own factor on the learning rate."""
    found = axes.labelled(params, labels)
    return jax.tree.map(lambda _, label: 1.0 if label is None else label.learning_rate, params, found)


def decay_table(params: Params, labels: Sequence[Label] = ()) -> str:
    """Return what decays and what does not, by role, with numbers of parameters."""
    counts: Counter[tuple[bool, str]] = Counter()
    decayed = jax.tree.leaves(decay_mask(params, labels))
    for flag, role, leaf in zip(
        decayed, jax.tree.leaves(axes.roles(params)), jax.tree.leaves(params), strict=True
    ):
        counts[flag, role] += leaf.size

    def listed(*, decayed: bool) -> str:
        parts = [f"{role} {count:,}" for (flag, role), count in sorted(counts.items()) if flag == decayed]
        return ", ".join(parts) or "nothing"

    return f"weight decay on: {listed(decayed=True)}\nno weight decay on: {listed(decayed=False)}"


def make_optimizer(
    config: OptimizerConfig, steps: int, labels: Sequence[Label] = ()
) -> optax.GradientTransformation:
    """Return clip -> Adam -> decay -> learning rate. Updates and moments keep the parameters' dtypes.

    Args:
      config: the run's optimizer.
      steps: length of the schedule.
      labels: what the model wants done differently with some of its parameters.
    """
    chain = _make_adamw(config, steps, labels)
    if all(label.learning_rate == 1.0 for label in labels):
        return chain

    def scale(updates: Params, params: Params | None) -> Params:
        return jax.tree.map(
            lambda u, factor: (u * factor).astype(u.dtype), updates, rate_factors(updates, labels)
        )

    return optax.chain(chain, optax.stateless(scale))


def _make_adamw(config: OptimizerConfig, steps: int, labels: Sequence[Label]) -> optax.GradientTransformation:
    return optax.chain(
        optax.clip_by_global_norm(config.clip) if config.clip > 0 else optax.identity(),
        optax.adamw(
            learning_rate_schedule(config, steps),
            b1=config.beta1,
            b2=config.beta2,
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            mask=functools.partial(decay_mask, labels=labels),
        ),
    )

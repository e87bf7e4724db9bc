"""The optimizer as a pure function of gradients, and the learning rate as a pure function of the step."""

from jaxblock.training.optimizer.roles import (
    DECAYED_ROLES,
    decay_mask,
    decay_table,
    optimizer_table,
    rate_factors,
)
from jaxblock.training.optimizer.schedule import Schedule, Tuned, learning_rate_schedule, tuned_of
from jaxblock.training.optimizer.update import make_optimizer

__all__ = [
    "DECAYED_ROLES",
    "Schedule",
    "Tuned",
    "decay_mask",
    "decay_table",
    "learning_rate_schedule",
    "make_optimizer",
    "optimizer_table",
    "rate_factors",
    "tuned_of",
]

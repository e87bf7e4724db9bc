"""How far one optimizer step moves the parameters, by role and block: rms(update) and rms(update) / rms(parameter)."""

from typing import NamedTuple

from jaxblock.probes.gradients import parameter_profile
from jaxblock.types import Array, Params


class ParameterUpdate(NamedTuple):
    """Of one role, float32: [L] for the parameters of blocks, a scalar for what lies outside them."""

    rms: Array
    """Root mean square of the update, learning rate included."""
    relative: Array
    """That over the parameters' own root mean square before the update; 0 where they are all 0."""


def update_profile(updates: Params, params: Params) -> dict[str, ParameterUpdate]:
    """Return by role how far an update moves the parameters; a pass over parameters and updates.

    Args:
      updates: what is added to the parameters, learning rate included (before a topology's projection).
      params: the parameters before it.
    """
    return {role: ParameterUpdate(*found) for role, found in parameter_profile(updates, params).items()}

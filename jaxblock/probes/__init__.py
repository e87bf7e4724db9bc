"""Measurements of the residual stream: pure functions over the same `apply` that training uses."""

from jaxblock.probes.gates import EffectiveDepth, effective_depth, gate_branches, gate_gradient, lesion_losses
from jaxblock.probes.gradients import GradientProfile, gradient_profile, open_taps, parameter_profile
from jaxblock.probes.growth import GrowthLaw, growth_laws
from jaxblock.probes.lens import Attribution, LensProfile, direct_attribution, logit_lens
from jaxblock.probes.observer import CHEAP, EVERY, StreamProbe, StreamProfile, stream_profile

__all__ = [
    "CHEAP",
    "EVERY",
    "Attribution",
    "EffectiveDepth",
    "GradientProfile",
    "GrowthLaw",
    "LensProfile",
    "StreamProbe",
    "StreamProfile",
    "direct_attribution",
    "effective_depth",
    "gate_branches",
    "gate_gradient",
    "gradient_profile",
    "growth_laws",
    "lesion_losses",
    "logit_lens",
    "open_taps",
    "parameter_profile",
    "stream_profile",
]

"""The mathematics of a transformer as pure functions: arrays in, arrays out, no parameters, no state, no config."""

from jaxblock.functional.attention import attention
from jaxblock.functional.attention_scores import ScoreRule
from jaxblock.functional.cross_entropy_blocked import cross_entropy_blocked
from jaxblock.functional.dense import dense, embed, logits, unembed
from jaxblock.functional.dropout import dropout
from jaxblock.functional.experts import (
    Routing,
    SlotLayout,
    balance_loss,
    capacity_layout,
    choices_per_expert,
    dropless_layout,
    dropped_choices,
    expert_feed_forward,
    mix_experts,
    route,
    slots_per_expert,
)
from jaxblock.functional.feed_forward import (
    ACTIVATIONS,
    GATES,
    FeedForwardWeights,
    GatedWeights,
    feed_forward,
    gated_feed_forward,
)
from jaxblock.functional.kv_cache import slot_positions, target_slots, token_positions, write_slots
from jaxblock.functional.losses import (
    CrossEntropy,
    LossOptions,
    cross_entropy,
    mean_over_targets,
    next_token_targets,
)
from jaxblock.functional.masks import AttentionPattern, visibility
from jaxblock.functional.norms import layer_norm, rms_norm
from jaxblock.functional.parametrization import Scaling, complete_p
from jaxblock.functional.pooling import first_real, last_real, masked_mean
from jaxblock.functional.positions import alibi_slopes, apply_rotary, learned, rotary_angles, sinusoidal
from jaxblock.functional.readout import Readout, read_out
from jaxblock.functional.residual import (
    branch_norm,
    deep_norm,
    keel,
    layer_norm_scaling,
    mix_norm,
    no_residual,
    peri_norm,
    post_norm,
    pre_norm,
    rezero,
    scaled_branch,
)
from jaxblock.functional.sampling import SamplingRule, greedy, keep_top_k, keep_top_p, sample
from jaxblock.functional.segments import segment_positions

__all__ = [
    "ACTIVATIONS",
    "GATES",
    "AttentionPattern",
    "CrossEntropy",
    "FeedForwardWeights",
    "GatedWeights",
    "LossOptions",
    "Readout",
    "Routing",
    "SamplingRule",
    "Scaling",
    "ScoreRule",
    "SlotLayout",
    "alibi_slopes",
    "apply_rotary",
    "attention",
    "balance_loss",
    "branch_norm",
    "capacity_layout",
    "choices_per_expert",
    "complete_p",
    "cross_entropy",
    "cross_entropy_blocked",
    "deep_norm",
    "dense",
    "dropless_layout",
    "dropout",
    "dropped_choices",
    "embed",
    "expert_feed_forward",
    "feed_forward",
    "first_real",
    "gated_feed_forward",
    "greedy",
    "keel",
    "keep_top_k",
    "keep_top_p",
    "last_real",
    "layer_norm",
    "layer_norm_scaling",
    "learned",
    "logits",
    "masked_mean",
    "mean_over_targets",
    "mix_experts",
    "mix_norm",
    "next_token_targets",
    "no_residual",
    "peri_norm",
    "post_norm",
    "pre_norm",
    "read_out",
    "rezero",
    "rms_norm",
    "rotary_angles",
    "route",
    "sample",
    "scaled_branch",
    "segment_positions",
    "sinusoidal",
    "slot_positions",
    "slots_per_expert",
    "target_slots",
    "token_positions",
    "unembed",
    "visibility",
    "write_slots",
]

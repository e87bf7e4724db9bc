"""A mixture of experts in the feed-forward's place: parameters around `functional.experts`."""

import functools
from collections.abc import Callable

import flax.linen as nn
import jax.numpy as jnp

from jaxblock.config import ModelConfig
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
from jaxblock.functional.feed_forward import FeedForwardWeights, GatedWeights
from jaxblock.modules.dropout import Dropout
from jaxblock.modules.kernel import Kernel, kernel_init, unit_gain
from jaxblock.types import Array, Views

ROUTING = "routing"
"""The collection to which experts give their load-balance loss and token counts, where the caller made it mutable."""


class Experts(nn.Module):
    """sum over a token's chosen experts of gate * feed_forward_e(x), as `config.experts` says.

    With the collection "routing" mutable it gives, over real tokens: `balance_loss_B`, each row's load-balance loss;
    `balance_loss`, their mean, a row weighing as much as it has tokens; `tokens_per_expert` [E], choices on each
    expert, dropped ones included; `dropped`, the number of choices that found no slot. All float32.
    """

    config: ModelConfig
    gain: Callable[[str], float] = unit_gain
    """Factor on a kernel's initial values, by role."""

    @nn.compact
    def __call__(self, x_BTD: Array, valid_BT: Array | None) -> Array:
        """Return the branch's output, [B, T, D] -> [B, T, D] in x's dtype; 0 where a token is not real.

        Args:
          x_BTD: the tokens.
          valid_BT: True = real, boolean [B or 1, T]; with a cache all keys', [B or 1, S + T], the tokens' last.
        """
        if isinstance(x_BTD, Views):
            raise ValueError(
                "the experts read one array and their connection gave them Views(query, key, value); only attention "
                'reads views, and only with wiring = "serial"'
            )
        config, options = self.config, self.config.experts_choice.options
        if valid_BT is not None:
            valid_BT = jnp.broadcast_to(valid_BT[:, -x_BTD.shape[1] :], x_BTD.shape[:2])
        router = Router(config, options["experts"], self.gain, name="router")()
        routing = route(x_BTD, router, active=options["active"], valid_BT=valid_BT)
        layout = self._layout(routing, padded=valid_BT is not None)
        self._report(routing, layout)
        branch = functools.partial(
            expert_feed_forward,
            weights=self._weights(),
            activation=config.feed_forward,
            expert_G=layout.expert_G,
            hidden_dropout=Dropout(config.hidden_dropout, name="hidden_dropout"),
        )
        return mix_experts(x_BTD, routing, layout, branch)

    def _layout(self, routing: Routing, *, padded: bool) -> SlotLayout:
        name, options = self.config.experts_choice
        if name == "dropless":
            return dropless_layout(routing)
        sizes = {key: options[key] for key in ("experts", "active", "factor")}
        length, limit_B = routing.valid_BT.shape[1], None
        if padded:  # A row's slots are those its real tokens would have alone.
            of_length = jnp.array([slots_per_expert(n, **sizes) for n in range(length + 1)], jnp.int32)
            limit_B = of_length[jnp.sum(routing.valid_BT, axis=1)]
        return capacity_layout(routing, slots=slots_per_expert(length, **sizes), limit_B=limit_B)

    def _weights(self) -> FeedForwardWeights | GatedWeights:
        """Return the experts' kernels [E, D, F], [E, F, D] and biases; each starts as if it were alone."""
        config, experts = self.config, self.config.experts_choice.options["experts"]
        kernel = functools.partial(Kernel, config, batch=1, gain=self.gain)
        wide, narrow = (experts, config.width, config.num_hidden), (experts, config.num_hidden, config.width)
        up, up_bias = kernel("up", wide, name="up")()
        down, down_bias = kernel("down", narrow, name="down")()
        if not config.gated:
            return FeedForwardWeights(up, down, up_bias, down_bias)
        gate, gate_bias = kernel("gate", wide, name="gate")()
        return GatedWeights(gate, up, down, gate_bias, up_bias, down_bias)

    def _report(self, routing: Routing, layout: SlotLayout) -> None:
        if not self.is_mutable_collection(ROUTING):
            return
        loss_B, real_B = balance_loss(routing), jnp.sum(routing.valid_BT, axis=1)
        found = {
            "balance_loss_B": loss_B,
            "balance_loss": jnp.sum(real_B * loss_B) / jnp.maximum(jnp.sum(real_B), 1),
            "tokens_per_expert": jnp.sum(choices_per_expert(routing), axis=0),
            "dropped": dropped_choices(routing, layout),
        }
        for name, value in found.items():
            self.put_variable(ROUTING, name, value.astype(jnp.float32))


class Router(nn.Module):
    """The kernel that scores experts, [D, E]; it has no bias."""

    config: ModelConfig
    experts: int
    gain: Callable[[str], float] = unit_gain

    @nn.compact
    def __call__(self) -> Array:
        """Return the kernel."""
        width = self.config.width
        init = kernel_init(self.config, "router", fan_in=width, gain=float(self.gain("router")))
        return self.param("kernel", init, (width, self.experts), jnp.dtype(self.config.param_dtype))

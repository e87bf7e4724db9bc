"""A decoder-only language model: embedding, stack of blocks, final norm where the topology needs one, head."""

from typing import Any, ClassVar, NamedTuple

import chex
import flax.linen as nn
import jax.numpy as jnp

from jaxblock.config import ModelConfig
from jaxblock.functional.readout import Readout, read_out
from jaxblock.functional.segments import segment_positions
from jaxblock.models.cache import CachedCall, CacheT, plan_call, read_cache, write_cache
from jaxblock.models.trunk import Trunk
from jaxblock.modules import AttentionInputs, scaling
from jaxblock.modules.kernel import kernel_init
from jaxblock.types import Array


class _Ran(NamedTuple):
    """What a decoder has run through, up to its head."""

    states_BTD: Array
    readout: Readout
    call: CachedCall | None
    """How the cache is read; None without one."""
    cache: Any
    """The cache as it was read."""
    written: dict[str, Any]
    """The new keys and values."""


class Decoder(Trunk):
    """A causal language model over token ids.

    A pure function once its parameters are given: `model.apply({"params": params}, tokens_BT)`; pass
    `rngs={"dropout": key}` and dropout is on, leave it out and it is off. With `mutable=["intermediates"]` it also
    returns what its branches read and wrote, every leaf stacked [L, ...] under "blocks" (see `Block`).
    Pass `cache=init_cache(config, batch)`, and the tokens go on where those read before end.

    Attributes:
      config: what the model is.
      execution: how its stack is run; changes neither values (beyond round-off) nor parameters.
      topology: a residual topology of your own; left out, the one `config.residual` names.
    """

    causal: ClassVar[bool] = True

    def __call__(
        self,
        tokens_BT: Array,
        *,
        valid_BT: Array | None = None,
        segments_BT: Array | None = None,
        positions_BT: Array | None = None,
        cache: CacheT | None = None,
    ) -> Array | tuple[Array, CacheT]:
        """Return float32 logits, [B, T] -> [B, T, padded V]; with a cache, (logits, the cache after these tokens).

        Args:
          tokens_BT: token ids, any integer dtype; an id >= V gives NaN logits, never another token's.
          valid_BT: boolean, True = real token; padding is never read, whatever its ids.
          segments_BT: integer document ids of packed rows; attention stays within a document.
          positions_BT: position of each token. Left out: its index, counted from its document's start.
          cache: what was read before, from `init_cache` or the call before; T may then be a prompt, a chunk of one
            or a single token, whose position is the number of real ones before it in its row.

        A token that a full cache has no room for (see `cache_limit`) is refused: with a ValueError where that can
        be known; under jit, where it cannot, it is not written, what the cache holds stays, and its logits are NaN.

        Raises:
          AssertionError: ranks, shapes or dtypes other than these.
          ValueError: more tokens than the learned position table has rows, a mask that is not boolean; with a cache:
            one of another model or batch, a full one, segments_BT or positions_BT.
        """
        ran = self._run(tokens_BT, valid_BT, segments_BT, positions_BT, cache)
        logits_BTV = read_out(ran.states_BTD, ran.readout)
        if ran.cache is None or ran.call is None:
            return logits_BTV
        return ran.call.mark_refused(logits_BTV), write_cache(ran.cache, ran.call, ran.written)

    def before_head(
        self,
        tokens_BT: Array,
        *,
        valid_BT: Array | None = None,
        segments_BT: Array | None = None,
        positions_BT: Array | None = None,
    ) -> tuple[Array, Readout]:
        """Return the last states, [B, T] -> [B, T, D] in the compute dtype, and the head that reads them.

        For a loss that does not need all logits at once: `model.apply(variables, tokens_BT, method="before_head")`;
        `jaxblock.functional.read_out(states, head)` makes the logits. Arguments and errors are those of the model's
        call without a cache.
        """
        ran = self._run(tokens_BT, valid_BT, segments_BT, positions_BT, None)
        return ran.states_BTD, ran.readout

    @nn.compact
    def _run(
        self,
        tokens_BT: Array,
        valid_BT: Array | None,
        segments_BT: Array | None,
        positions_BT: Array | None,
        cache: CacheT | None,
    ) -> "_Ran":
        chex.assert_rank(tokens_BT, 2)
        chex.assert_type(tokens_BT, int)
        config, call, cached = self.config, None, None
        pattern = self._pattern(valid_BT=valid_BT, segments_BT=segments_BT)
        if cache is not None:
            if segments_BT is not None or positions_BT is not None:
                raise ValueError(
                    "segments_BT and positions_BT do not go with a cache: each row is one document, read in order"
                )
            call = plan_call(config, cache, tokens_BT, valid_BT)
            cache, cached = read_cache(cache)
            positions_BT, pattern = call.positions_BT, call.seen(pattern)
        elif positions_BT is None:
            positions_BT = segment_positions(tokens_BT.shape[1], segments_BT)
        if valid_BT is not None:  # an id out of its table is NaN, and a hidden NaN still meets a weight of 0
            tokens_BT = jnp.where(valid_BT, tokens_BT, jnp.zeros_like(tokens_BT))
        x_BTD, embedding = self._embed(tokens_BT, positions_BT, limit=None if call is None else call.limit)
        attention = AttentionInputs(pattern, self._angles(positions_BT))
        x_BTD, written = self._stack(x_BTD, attention, cached=cached)
        readout = embedding.readout() if config.head == "tied" else Head(config, name="head")()
        return _Ran(x_BTD, readout, call, cache, written)


class Head(nn.Module):
    """An untied head: a kernel [D, V] of its own, no bias."""

    config: ModelConfig

    @nn.compact
    def __call__(self) -> Readout:
        """Declare the kernel and return what makes logits of states."""
        config, factors = self.config, scaling(self.config)
        shape = (config.width, config.padded_vocab_size)
        init = kernel_init(config, "head", fan_in=config.width, gain=factors.table_gain)
        kernel_DV = self.param("kernel", init, shape, jnp.dtype(config.param_dtype))
        return Readout(kernel_DV, "kernel", factors.logits)

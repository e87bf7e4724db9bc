"""Which statistics a forward pass takes of every sublayer, and the profile they make over depth, [S].

    probe = StreamProbe()                                    # the cheap ones; StreamProbe(EVERY) for all
    model = Decoder(config, observe=probe)
    logits, collected = model.apply({"params": params}, tokens, mutable=["observed"])
    profile = stream_profile(collected["observed"])           # name -> float32 [S] (or [S, ...])

Everything is reduced inside the stack. A statistic of the stream needs a stream that is one array: of a topology that
carries several, or a history, what the branch read and wrote is measured, and `profile.missing` says what is not.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxblock.contracts import nearest
from jaxblock.models.observation import Sublayer
from jaxblock.modules.intermediates import BRANCHES
from jaxblock.probes import stream
from jaxblock.types import Array


class Change(NamedTuple):
    """One sublayer of a stream that is one array: x, u = (stream after) - x, and what the branch read and wrote."""

    x: Array
    u: Array
    read: Array
    output: Array
    after: Array
    valid: Array | None


def _sizes(c: Change) -> dict[str, Array]:
    return {
        "stream_rms": stream.root_mean_square(c.after, c.valid),
        "stream_rms_before": stream.root_mean_square(c.x, c.valid),
        "update_rms": stream.root_mean_square(c.u, c.valid),
        "relative_update": stream.relative_update(c.x, c.u, c.valid),
    }


def _budget(c: Change) -> dict[str, Array]:
    found = stream.norm_budget(c.x, c.u, c.valid)
    return {f"budget_{name}": value for name, value in found._asdict().items()}


def _outliers(c: Change) -> dict[str, Array]:
    later = jnp.arange(c.after.shape[1])[None] > 0
    without = later if c.valid is None else later & c.valid
    found, rest = stream.outliers(c.after, c.valid), stream.outliers(c.after, without)
    return {
        "outlier": found.largest,
        "kurtosis": found.kurtosis,
        "outlier_without_first": rest.largest,
        "kurtosis_without_first": rest.kurtosis,
    }


def _absorption(c: Change) -> dict[str, Array]:
    found = stream.absorption(c.x, c.u.astype(c.x.dtype), c.valid)
    return {"absorbed": found.lost, "update_bits": found.bits}


STREAM: Mapping[str, Callable[[Change], dict[str, Array]]] = {
    "sizes": _sizes,
    "budget": _budget,
    "constant_share": lambda c: {"constant_share": stream.constant_share(c.after, c.valid)},
    "outliers": _outliers,
    "token_similarity": lambda c: {"token_similarity": stream.token_similarity(c.after, c.valid)},
    "absorption": _absorption,
    "effective_rank": lambda c: {
        "stream_rank": stream.effective_rank(c.after, c.valid),
        "update_rank": stream.effective_rank(c.u, c.valid),
    },
}
"""What is measured of a stream that is one array."""
_ONE_OF = {
    "sizes": "stream_rms",
    "budget": "budget_before",
    "constant_share": "constant_share",
    "outliers": "outlier",
    "token_similarity": "token_similarity",
    "absorption": "absorbed",
    "effective_rank": "stream_rank",
}
"""One number of each."""
CHEAP = ("sizes", "budget", "constant_share", "token_similarity", "branch")
"""A pass or two over the stream each."""
EVERY = (*STREAM, "branch")


@dataclasses.dataclass(frozen=True)
class StreamProbe:
    """An observer that takes these statistics of every sublayer."""

    statistics: tuple[str, ...] = CHEAP

    def __post_init__(self) -> None:
        """Raise ValueError for a statistic that is none."""
        for name in self.statistics:
            if name not in EVERY:
                raise ValueError(
                    f"probe.statistics has {name!r}; they are {', '.join(EVERY)}{nearest(str(name), EVERY)}"
                )

    def __call__(self, seen: Sublayer) -> dict[str, Array]:
        """Return the statistics of one sublayer, float32 scalars by name."""
        found: dict[str, Array] = {}
        if "branch" in self.statistics:
            found |= _branch(seen)
        if isinstance(seen.before, jax.Array):
            after, before = (
                x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in (seen.after, seen.before)
            )
            change = Change(seen.before, after - before, seen.read, seen.output, seen.after, seen.valid_BT)
            for name in self.statistics:
                if name in STREAM:
                    found |= STREAM[name](change)
        return found


def _branch(seen: Sublayer) -> dict[str, Array]:
    """Return what is there for every topology: sizes of what the branch read and wrote."""
    reads = jax.tree.leaves(seen.read)
    read = jnp.sqrt(sum(stream.root_mean_square(x, seen.valid_BT) ** 2 for x in reads) / len(reads))
    output = stream.root_mean_square(seen.output, seen.valid_BT)
    bad = [stream.not_finite(x, seen.valid_BT) for x in (*reads, seen.output, *_arrays(seen.after))]
    return {
        "read_rms": read,
        "output_rms": output,
        "branch_gain": jnp.where(read > 0, output / jnp.where(read > 0, read, 1.0), 0.0),
        "not_finite": jnp.any(jnp.stack(bad)).astype(jnp.float32),
    }


def _arrays(x: Any) -> list[Array]:
    """Return the [B, T, D] arrays of a stream that is one; of any other, nothing: its rows may not be written yet."""
    return [x] if isinstance(x, jax.Array) else []


class StreamProfile(NamedTuple):
    """Statistics over depth."""

    values: dict[str, Array]
    """Name -> float32 [S], sublayers in order."""
    branches: tuple[str, ...]
    """Names of a block's sublayers, in order."""
    missing: tuple[str, ...]
    """Statistics asked for that this topology's stream has not."""


def stream_profile(observed: Mapping[str, Any], probe: StreamProbe | None = None) -> StreamProfile:
    """Return the profile over sublayers of what a `StreamProbe` observed.

    Args:
      observed: the collection "observed" of a model with a probe, leaves [L].
      probe: what was asked for, to say what is missing; None = nothing is said.

    Raises:
      ValueError: nothing was observed.
    """
    branches, blocks = observed_branches(observed), observed["blocks"]
    values = {
        name: jnp.stack([blocks[branch][name] for branch in branches], axis=1).reshape(-1)
        for name in blocks[branches[0]]
    }
    missing = () if probe is None else missing_statistics(observed, probe.statistics)
    return StreamProfile(values, branches, missing)


def observed_branches(observed: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of a block's sublayers, in order.

    Raises:
      ValueError: nothing was observed.
    """
    blocks = observed.get("blocks", {})
    for branches in BRANCHES:
        if all(name in blocks for name in branches):
            return branches
    raise ValueError(
        "nothing was observed: give the model a probe, Decoder(config, observe=StreamProbe()), and apply it with "
        'mutable=["observed"]'
    )


def missing_statistics(observed: Mapping[str, Any], statistics: Sequence[str]) -> tuple[str, ...]:
    """Return which of these statistics are not there, since the topology's stream is not one array.

    Args:
      observed: the collection "observed" of a model with a probe that asks for them; shapes alone will do.
      statistics: names of `EVERY`.
    """
    found = observed["blocks"][observed_branches(observed)[0]]
    return tuple(name for name in statistics if name in _ONE_OF and _ONE_OF[name] not in found)

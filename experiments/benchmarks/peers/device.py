"""What the JAX contenders share: the batch, the platform, the memory."""

from typing import TYPE_CHECKING, Any

from experiments.benchmarks.contest import AbsentError
from experiments.benchmarks.sizes import Sizes

if TYPE_CHECKING:
    from jax import Array


def random_tokens(sizes: Sizes) -> tuple["Array", "Array"]:
    """Return inputs and the tokens that follow them, int32 [B, T]."""
    import jax

    tokens = jax.random.randint(jax.random.key(2), (sizes.batch, sizes.seq + 1), 0, sizes.vocab)
    return tokens[:, :-1], tokens[:, 1:]


def check_platform(platform: str | None) -> None:
    """Raise `AbsentError` where JAX computes on another platform than we do; None = whatever there is."""
    import jax

    if platform is not None and jax.default_backend() != platform:
        raise AbsentError(f"it would compute on {jax.default_backend()}, not on {platform}")


def peak_bytes() -> int | None:
    """Return the most bytes in use on the first device; None where the backend does not say, as on a CPU."""
    import jax

    statistics: dict[str, Any] | None = jax.devices()[0].memory_stats()
    return None if not statistics else statistics.get("peak_bytes_in_use")

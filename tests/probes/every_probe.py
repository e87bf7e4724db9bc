"""All probes of a model in one function, for tests of where and how it runs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxblock import Decoder, ExecutionConfig, ModelConfig
from jaxblock.functional.losses import cross_entropy
from jaxblock.probes import (
    EVERY,
    StreamProbe,
    direct_attribution,
    gradient_profile,
    logit_lens,
    stream_profile,
)
from jaxblock.probes.attention import collected_attention
from jaxblock.probes.logits import output_logits
from tests.small import SCANNED, config, tokens

ROWS = 8


def batch() -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return ids, targets and which tokens are real: from 1 to 6 of a row, so that rows differ in weight."""
    tokens_BT = tokens(ROWS)
    valid_BT = np.arange(6)[None] < np.array([6, 1, 5, 2, 6, 3, 4, 1])[:, None]
    return tokens_BT, jnp.roll(tokens_BT, -1, axis=1), jnp.asarray(valid_BT)


def model_config(residual: str) -> ModelConfig:
    """Return the small config, with what makes blocks differ: a window by layer."""
    return config(residual=residual, window=(0, 3), norm="rms_norm", bias=False)


def every_probe(
    of: ModelConfig, execution: ExecutionConfig = SCANNED, *, lenses: bool
) -> Callable[..., dict[str, Any]]:
    """Return (params, ids, targets, valid) -> every probe's arrays, by name; the two lenses are dear to compile."""
    model = Decoder(of, execution, observe=StreamProbe(EVERY))

    def measure(
        params: Any, tokens_BT: jax.Array, targets_BT: jax.Array, valid_BT: jax.Array
    ) -> dict[str, Any]:
        def loss(variables: Any) -> jax.Array:
            logits_BTV = model.apply(variables, tokens_BT, valid_BT=valid_BT)
            return cross_entropy(logits_BTV, targets_BT, valid_BT=valid_BT).loss

        logits_BTV, made = model.apply(
            {"params": params}, tokens_BT, valid_BT=valid_BT, mutable=["observed", "attention_health"]
        )
        read = {"targets_BT": targets_BT, "valid_BT": valid_BT}
        found = {
            "stream": stream_profile(made["observed"]).values,
            "attention": collected_attention(made)._asdict(),
            "gradient": {"stream_S": gradient_profile(of, loss, params).stream_S},
            "logits": output_logits(logits_BTV, vocab_size=of.vocab_size, valid_BT=valid_BT)._asdict(),
        }
        for name, probe in (("lens", logit_lens), ("attribution", direct_attribution)) if lenses else ():
            profile = probe(model, params, tokens_BT, **read)
            if profile is not None:
                found[name] = {key: x for key, x in profile._asdict().items() if key != "error"}
        return found

    return measure


def difference(found: Any, wanted: Any) -> dict[str, float]:
    """Return by number the largest difference along depth, against the largest size along depth.

    What `found` has not is not compared: lenses that were left out.
    """
    apart = {}
    for kind, numbers in found.items():
        for name, x in numbers.items():
            got, want = np.asarray(x, np.float64), np.asarray(wanted[kind][name], np.float64)
            # A cosine or an attribution may be near 0 by cancelling: 1 is the size of what cancels.
            size = max(np.abs(want).max(), 0.1)
            same = got.shape == want.shape
            apart[f"{kind}/{name}"] = float(np.abs(got - want).max() / size) if same else np.inf
    return apart

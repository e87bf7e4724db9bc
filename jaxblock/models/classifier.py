"""A classifier of sequences: encoder, one vector from the real tokens, a linear head."""

import functools
from collections.abc import Callable, Mapping
from typing import ClassVar, NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxblock.contracts import check_choice, check_integer
from jaxblock.functional.dense import logits
from jaxblock.functional.parametrization import scaled
from jaxblock.functional.pooling import first_real, last_real, masked_mean
from jaxblock.models.trunk import Trunk
from jaxblock.modules import Kernel, scaling
from jaxblock.types import Array, Params

POOLINGS: Mapping[str, Callable[[Array, Array], Array]] = {
    "mean": masked_mean,
    "first": first_real,
    "last": last_real,
}
"""From states [B, T, D] and valid [B, T] to one vector a row, [B, D]."""


class Prediction(NamedTuple):
    """What a classifier says about each row."""

    label_B: Array
    """The most probable class, int32; the first one of equals."""
    probability_BC: Array
    """softmax of the logits, float32: each row sums to 1."""


class Classifier(Trunk, kw_only=True):
    """logits = pool(encoder(tokens)) W + b, with the encoder's parameters and "classifier" for the head.

    Make it with `Classifier(config, classes=5)`. `config.bias` says whether the head has a bias, too; `config.head`
    is not read.

    Attributes:
      classes: C, number of classes.
      pooling: mean (over the real tokens), first or last (real token).
    """

    causal: ClassVar[bool] = False

    classes: int
    pooling: str = "mean"

    def __post_init__(self) -> None:
        """Raise ValueError for a number of classes below 1 or an unknown pooling."""
        check_integer("classes", self.classes, least=1)
        check_choice("pooling", self.pooling, POOLINGS)
        super().__post_init__()

    @nn.compact
    def __call__(
        self, tokens_BT: Array, *, valid_BT: Array | None = None, positions_BT: Array | None = None
    ) -> Array:
        """Return float32 logits, [B, T] -> [B, C].

        Args:
          tokens_BT: token ids, as in `Encoder`.
          valid_BT: boolean [B, T], True = real token; left out, all are. Padding has no effect, whatever its ids. A
            row without a real token pools to 0: its logits are the bias, 0 where there is none.
          positions_BT: position of each token. Left out: its index, so that padding to the left shifts them.

        Raises:
          AssertionError, ValueError: as `Encoder` does.
        """
        x_BTD, _ = self.states(tokens_BT, valid_BT=valid_BT, positions_BT=positions_BT)
        if valid_BT is None:
            valid_BT = jnp.ones(tokens_BT.shape, jnp.bool_)
        x_BD = POOLINGS[self.pooling](x_BTD, valid_BT)
        config, factors = self.config, scaling(self.config)
        gain = lambda role: factors.table_gain  # noqa: E731
        kernel, bias = Kernel(config, "head", (config.width, self.classes), gain=gain, name="classifier")()
        y_BC = scaled(logits(x_BD, kernel), factors.logits)
        return y_BC if bias is None else y_BC + bias.astype(y_BC.dtype)[None]


@functools.partial(jax.jit, static_argnames=("model",))
def predict(model: Classifier, params: Params, tokens_BT: Array, valid_BT: Array) -> Prediction:
    """Return each row's class and the probabilities of all, without dropout; one program per shape of tokens.

    Args:
      model: the classifier.
      params: its parameters.
      tokens_BT: token ids [B, T].
      valid_BT: boolean [B, T], True = real token.
    """
    logits_BC = cast(Array, model.apply({"params": params}, tokens_BT, valid_BT=valid_BT))
    return Prediction(jnp.argmax(logits_BC, axis=-1).astype(jnp.int32), jax.nn.softmax(logits_BC, axis=-1))

"""What a task minimises: `(model, params, batch) -> CrossEntropy`, and the model it belongs to."""

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp

from jaxblock.functional.losses import CrossEntropy, LossOptions, cross_entropy
from jaxblock.training.batches import Batch
from jaxblock.training.config import TrainConfig
from jaxblock.types import Array, Params

Loss = Callable[[Params, Any, Array | None], CrossEntropy]
"""(params, batch, dropout key or None) -> the loss of a batch."""


def language_loss(
    model: Any, params: Params, batch: Batch, *, options: LossOptions, dropout_key: Array | None = None
) -> CrossEntropy:
    """Return the next-token loss of a batch; dropout is on exactly when a key is passed."""
    rngs = {} if dropout_key is None else {"dropout": dropout_key}
    inputs_BT, targets_BT, valid_BT, segments_BT = jax.tree.map(jnp.asarray, batch)
    logits_BTV = model.apply({"params": params}, inputs_BT, segments_BT=segments_BT, rngs=rngs)
    return cross_entropy(cast(Array, logits_BTV), targets_BT, valid_BT=valid_BT, options=options)


def training_loss(model: Any, config: TrainConfig) -> Loss:
    """Return the objective of training: with dropout, smoothing and z-loss as the config says."""
    options = LossOptions(
        z_loss=config.loss.z_loss,
        label_smoothing=config.loss.label_smoothing,
        vocab_size=config.model.vocab_size,
    )
    return lambda params, batch, key: language_loss(model, params, batch, options=options, dropout_key=key)


def evaluation_loss(model: Any, config: TrainConfig) -> Callable[[Params, Batch], CrossEntropy]:
    """Return `(params, batch) -> CrossEntropy` without dropout, smoothing or z-loss; add `nats` and `weight`."""
    options = LossOptions(vocab_size=config.model.vocab_size)
    return lambda params, batch: language_loss(model, params, batch, options=options)

"""What a task minimises: `(model, params, batch) -> CrossEntropy`, and the model it belongs to.

A mixture of experts adds, in training only, balance * mean over blocks of its load-balance loss. That loss is a row's
own, and a row weighs as much as it has targets: a batch in pieces, or on many devices, has the objective of the whole.
"""

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp

from jaxblock.config import ModelConfig
from jaxblock.functional.losses import CrossEntropy, LossOptions, cross_entropy, mean_over_targets
from jaxblock.modules.experts import ROUTING
from jaxblock.training.batches import Batch
from jaxblock.training.config import TrainConfig
from jaxblock.types import Array, Params

Loss = Callable[[Params, Any, Array | None], CrossEntropy]
"""(params, batch, dropout key or None) -> the loss of a batch."""


def language_loss(
    model: Any,
    params: Params,
    batch: Batch,
    *,
    options: LossOptions,
    dropout_key: Array | None = None,
    balance: float = 0.0,
) -> CrossEntropy:
    """Return the next-token loss of a batch; dropout is on exactly when a key is passed.

    `balance` is the weight of the experts' load-balance loss, which a model without experts does not have.
    """
    rngs = {} if dropout_key is None else {"dropout": dropout_key}
    inputs_BT, targets_BT, valid_BT, segments_BT = jax.tree.map(jnp.asarray, batch)
    variables, given = {"params": params}, {"segments_BT": segments_BT, "rngs": rngs}
    if not balance:
        logits_BTV = model.apply(variables, inputs_BT, **given)
        return cross_entropy(cast(Array, logits_BTV), targets_BT, valid_BT=valid_BT, options=options)
    logits_BTV, collected = model.apply(variables, inputs_BT, **given, mutable=[ROUTING])
    result = cross_entropy(cast(Array, logits_BTV), targets_BT, valid_BT=valid_BT, options=options)
    return add_balance(result, collected[ROUTING], jnp.sum(valid_BT, axis=1), balance=balance)


def add_balance(result: CrossEntropy, routing: Any, weight_B: Array, *, balance: float) -> CrossEntropy:
    """Return the loss with balance * (mean over blocks of the load-balance loss) in `loss` and `total`.

    Args:
      result: the loss without it.
      routing: the collection "routing" of a model.
      weight_B: real targets of each row, which add up to `result.weight`.
      balance: its weight.
    """
    loss_B = jnp.mean(routing["blocks"]["experts"]["balance_loss_B"], axis=0)
    total = result.total + balance * jnp.sum(weight_B * loss_B)
    return result._replace(loss=mean_over_targets(total, result.weight), total=total)


def balance_weight(config: ModelConfig) -> float:
    """Return the weight of the experts' load-balance loss; 0 where there are none."""
    choice = config.experts_choice
    return 0.0 if choice.name == "none" else float(choice.options["balance"])


def training_loss(model: Any, config: TrainConfig) -> Loss:
    """Return the objective of training: with dropout, smoothing, z-loss and experts' balance as the config says."""
    options = LossOptions(
        z_loss=config.loss.z_loss,
        label_smoothing=config.loss.label_smoothing,
        vocab_size=config.model.vocab_size,
    )
    balance = balance_weight(config.model)
    return lambda params, batch, key: language_loss(
        model, params, batch, options=options, dropout_key=key, balance=balance
    )


def evaluation_loss(model: Any, config: TrainConfig) -> Callable[[Params, Batch], CrossEntropy]:
    """Return `(params, batch) -> CrossEntropy` in nats alone: no dropout, smoothing, z-loss or balance."""
    options = LossOptions(vocab_size=config.model.vocab_size)
    return lambda params, batch: language_loss(model, params, batch, options=options)

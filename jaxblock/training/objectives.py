"""What a task minimises: `(model, params, batch) -> CrossEntropy`, and the model it belongs to.

A mixture of experts adds, in training only, balance * mean over blocks of its load-balance loss. That loss is a row's
own, and a row weighs as much as it has targets: a batch in pieces, or on many devices, has the objective of the whole.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxblock.config import ModelConfig
from jaxblock.functional.cross_entropy_blocked import cross_entropy_blocked
from jaxblock.functional.losses import CrossEntropy, LossOptions, cross_entropy, mean_over_targets
from jaxblock.models.decoder import Decoder
from jaxblock.models.observation import OBSERVED
from jaxblock.models.trunk import Trunk
from jaxblock.modules.experts import ROUTING
from jaxblock.probes import StreamProbe
from jaxblock.training.batches import Batch
from jaxblock.training.config import TrainConfig
from jaxblock.types import Array, Params

Loss = Callable[[Params, Any, Array | None], CrossEntropy]
"""(params, batch, dropout key or None) -> the loss of a batch."""
ProbedLoss = Callable[[Mapping[str, Any], Any, Array | None], tuple[CrossEntropy, Mapping[str, Any]]]
"""({"params"} and perhaps {"taps"}, batch, dropout key or None) -> the loss of a batch, and what was observed on the
way: the collection "observed" of the same forward pass, {} where the model has no observer."""


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
    return observed_language_loss(
        model, {"params": params}, batch, options=options, dropout_key=dropout_key, balance=balance
    )[0]


def observed_language_loss(
    model: Any,
    variables: Mapping[str, Any],
    batch: Batch,
    *,
    options: LossOptions,
    dropout_key: Array | None = None,
    balance: float = 0.0,
) -> tuple[CrossEntropy, Mapping[str, Any]]:
    """Return the loss as `language_loss` does, and what the model's observer saw: {} where it has none."""
    made: Any  # logits, or what stands before the head
    rngs = {} if dropout_key is None else {"dropout": dropout_key}
    inputs_BT, targets_BT, valid_BT, segments_BT = jax.tree.map(jnp.asarray, batch)
    given: dict[str, Any] = {"segments_BT": segments_BT, "rngs": rngs}
    mutable = collections_of(model, balance)
    blocked = takes_blocks(model)
    if blocked:
        given["method"] = "before_head"
    if mutable:
        made, collected = model.apply(variables, inputs_BT, **given, mutable=mutable)
    else:
        made, collected = model.apply(variables, inputs_BT, **given), {}
    if blocked:
        x_BTD, readout = made
        result = cross_entropy_blocked(x_BTD, readout, targets_BT, valid_BT=valid_BT, options=options)
    else:
        result = cross_entropy(made, targets_BT, valid_BT=valid_BT, options=options)
    if balance:
        result = add_balance(result, collected[ROUTING], jnp.sum(valid_BT, axis=1), balance=balance)
    return result, collected.get(OBSERVED, {})


def takes_blocks(model: Any) -> bool:
    """Return whether a model's next-token loss is to be taken in blocks, from what stands before its head."""
    return isinstance(model, Decoder) and model.execution.loss == "blocked"


def collections_of(model: Any, balance: float) -> list[str]:
    """Return what a model has to hand out besides its logits: for the experts' balance, and for its observer."""
    observes = isinstance(model, Trunk) and model.observe is not None
    return [*([ROUTING] if balance else []), *([OBSERVED] if observes else [])]


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
    options, balance = training_options(config), balance_weight(config.model)
    return lambda params, batch, key: language_loss(
        model, params, batch, options=options, dropout_key=key, balance=balance
    )


def probed_training_loss(model: Any, config: TrainConfig, statistics: Sequence[str]) -> ProbedLoss:
    """Return the objective of training with these statistics of every sublayer, from the same forward pass."""
    observed = observing(model, statistics)
    options, balance = training_options(config), balance_weight(config.model)
    return lambda variables, batch, key: observed_language_loss(
        observed, variables, batch, options=options, dropout_key=key, balance=balance
    )


def observing(model: Any, statistics: Sequence[str]) -> Any:
    """Return the model with an observer that takes these statistics; with none of them, the model itself."""
    return model.clone(observe=StreamProbe(tuple(statistics))) if statistics else model


def training_options(config: TrainConfig) -> LossOptions:
    """Return what training's loss adds to the plain one."""
    return LossOptions(
        z_loss=config.loss.z_loss,
        label_smoothing=config.loss.label_smoothing,
        vocab_size=config.model.vocab_size,
    )


def evaluation_loss(model: Any, config: TrainConfig) -> Callable[[Params, Batch], CrossEntropy]:
    """Return `(params, batch) -> CrossEntropy` in nats alone: no dropout, smoothing, z-loss or balance."""
    options = LossOptions(vocab_size=config.model.vocab_size)
    return lambda params, batch: language_loss(model, params, batch, options=options)

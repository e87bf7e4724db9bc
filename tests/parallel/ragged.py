"""A batch whose rows differ in real targets, and the trainer's loss of it as sums; shared by the tests here."""

from typing import Any

import jax
import numpy as np

from jaxblock import Decoder
from jaxblock.functional import LossOptions
from jaxblock.parallel.pmap import LossSums
from jaxblock.training.batches import Batch
from jaxblock.training.objectives import language_loss
from tests.small import tokens


def ragged_batch(rows: int) -> Batch:
    """Return rows of 6 targets, of which 6, 3 or (rows 4 and 5, one device's share of 16 over 8) none are real."""
    tokens_BT = np.asarray(tokens(rows, 7))
    real_B = np.where(np.arange(rows) % 8 < 4, 3, 6)
    real_B[4:6] = 0
    return Batch(tokens_BT[:, :-1], tokens_BT[:, 1:], np.arange(6)[None, :] < real_B[:, None], None)


def loss_sums_of(model: Decoder) -> LossSums:
    """Return the summed loss and the number of real targets of a batch."""

    def loss_sums(params: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        result = language_loss(model, params, batch, options=LossOptions())
        return result.total, result.weight

    return loss_sums

"""A config made ready to run: data loaded, model traced, every refusal said before anything is written."""

import functools
import math
import os
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from jaxblock.models.decoder import Decoder
from jaxblock.training.batches import TrainBatches, ValidationBatches
from jaxblock.training.config import TrainConfig
from jaxblock.training.corpus import Corpus, load_corpus
from jaxblock.training.sampling import encode_prompt
from jaxblock.training.step import TrainState, init_state, make_step
from jaxblock.types import Array

PROMPT_TOKENS = 32
"""Tokens of the validation slice that are continued where no prompt is given."""


class Prepared(NamedTuple):
    """A run that nothing can refuse any more."""

    config: TrainConfig
    corpus: Corpus
    model: Decoder
    train: TrainBatches
    validation: ValidationBatches
    prompt_1T: np.ndarray


class Keys(NamedTuple):
    """The run's keys, one per purpose."""

    init: Array
    dropout: Array
    sample: Array


def run_keys(seed: int) -> Keys:
    """Return the keys of a seed."""
    return Keys(*jax.random.split(jax.random.key(seed), 3))


def prepare(config: TrainConfig) -> Prepared:
    """Load the data and trace the step, so that whatever is wrong is said before anything is written.

    Raises:
      ValueError: the data do not fit the config, or the model cannot run as asked.
    """
    corpus = load_corpus(
        None if config.data.path is None else Path(config.data.path),
        vocab_size=config.model.vocab_size,
        context=config.model.context,
        validation_tokens=config.data.validation_tokens,
    )
    prompt_1T = corpus.validation.read(0, min(PROMPT_TOKENS, len(corpus.validation)))[None]
    if config.sample.prompt is not None:
        as_bytes = corpus.bytes_per_token is not None
        prompt_1T = encode_prompt(config.sample.prompt, as_bytes=as_bytes, vocab_size=config.model.vocab_size)
    model = Decoder(config.model, config.execution)
    shape = {"context": config.model.context, "batch": config.data.batch, "seams": config.data.seams}
    train = TrainBatches(corpus.train, seed=config.run.seed, **shape)
    validation = ValidationBatches(corpus.validation, **shape)
    keys = run_keys(config.run.seed)
    state = jax.eval_shape(functools.partial(init_state, model, config), keys.init)
    _check_memory(state)
    jax.eval_shape(make_step(model, config), state, train[0], keys.dropout)
    if config.data.seams == "separate":
        _check_targets(corpus)
    return Prepared(config, corpus, model, train, validation, prompt_1T)


def _check_targets(corpus: Corpus) -> None:
    """Raise ValueError if all documents of a split have one token, which has nothing to predict."""
    for split, stream in (("train", corpus.train), ("validation", corpus.validation)):
        if np.diff(stream.starts, append=len(stream)).max() < 2:
            raise ValueError(
                f"data.seams is 'separate', but every document of the {split} split has one token and no target"
            )


def _check_memory(state: TrainState) -> None:
    """Raise ValueError if parameters and optimizer state alone are larger than the device's memory."""
    needed = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    statistics = jax.devices()[0].memory_stats() or {}
    available = statistics.get("bytes_limit")
    if available is None and hasattr(os, "sysconf"):  # a CPU has no limit of its own
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if available is not None and needed > available:
        raise ValueError(
            f"parameters and optimizer state need {needed / 2**30:,.1f} GiB and the device has "
            f"{available / 2**30:,.1f} GiB; choose a smaller model.width, model.depth or model.vocab_size"
        )

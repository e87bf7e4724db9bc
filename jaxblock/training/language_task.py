"""The language model as a task: windows of a corpus, next-token loss, a trigram model to beat, a sample at the end."""

import functools
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp

from jaxblock.accounting import model_flops_utilisation
from jaxblock.models.cache import check_cacheable
from jaxblock.models.decoder import Decoder
from jaxblock.residual import Topology
from jaxblock.training.baseline import MOST_TOKENS, MOST_VOCAB, trigram_baseline
from jaxblock.training.batches import Batch, TrainBatches
from jaxblock.training.config import TrainConfig
from jaxblock.training.corpus import load_corpus
from jaxblock.training.mixed_batches import MixedBatches, MixedValidation
from jaxblock.training.mixture import Mixture, load_mixture, one_source
from jaxblock.training.objectives import evaluation_loss, probed_training_loss, training_loss
from jaxblock.training.sampling import IDS, continue_prompt, prompt_ids, separator
from jaxblock.training.task import Baseline, Batches, Score, Task
from jaxblock.training.tokenizers import TOKENIZER_FILE, tokenizer_record
from jaxblock.types import Array, Params

PROMPT_TOKENS = 32
"""Tokens of the validation slice that are continued where no prompt is given."""


def language_task(config: TrainConfig, *, topology: Topology | None = None) -> Task:
    """Load the corpus and return the task.

    Args:
      config: the run.
      topology: a residual topology of your own in place of the one `config.model.residual` names.

    Raises:
      ValueError: the data do not fit the config.
    """
    if config.model.vocab_size > MOST_VOCAB:
        raise ValueError(
            f"model.vocab_size is {config.model.vocab_size}; the trigram a language model is compared with is counted "
            f"up to {MOST_VOCAB}"
        )
    data = load_run_data(config)
    if config.data.seams == "separate":
        _check_targets(data)
    text = data.tokenizer or IDS
    first = data.validation[0]
    prompt_1T = first.read(0, min(PROMPT_TOKENS, len(first)))[None]
    if config.sample.prompt is not None:
        prompt_1T = prompt_ids(config.sample.prompt, text, vocab_size=config.model.vocab_size)
    model = Decoder(config.model, config.execution, topology)
    shape = {"context": config.model.context, "batch": config.data.batch, "seams": config.data.seams}
    batches = functools.partial(_train_batches, data, shape)
    validation = MixedValidation(data.validation, **shape)
    plain = evaluation_loss(model, config)

    def score(params: Params, batch: Batch) -> Score:
        result = plain(params, batch)
        return Score(result.nats, result.weight, {})

    def baseline() -> Baseline:
        found = trigram_baseline(data.sample(MOST_TOKENS), data.validation, config.model.vocab_size)
        return Baseline(found.loss, "a trigram model")

    def finish(params: Params, key: Array) -> str:
        try:  # what is drawn goes through a cache
            check_cacheable(config.model)
        except ValueError as error:
            return f"No sample: {error}\n"
        tokens = continue_prompt(model, params, prompt_1T, config.sample, key=key)
        try:
            return text.decode(prompt_1T[0]) + separator(text) + text.decode(tokens) + "\n"
        except ValueError as error:  # of a tokenizer file
            return f"No sample: {error}\n"

    def utilisation(per_second: float) -> float | None:
        kind = jax.devices()[0].device_kind
        return model_flops_utilisation(per_second, config.model, device_kind=kind)

    def forward(params: Params, batch: Batch, key: Array | None) -> tuple[Array, dict[str, Any]]:
        rngs = {} if key is None else {"dropout": key}
        inputs_BT, _, _, segments_BT = jax.tree.map(jnp.asarray, batch)
        variables, given = {"params": params}, {"segments_BT": segments_BT, "rngs": rngs}
        logits_BTV, collected = model.apply(variables, inputs_BT, **given, mutable=["intermediates"])
        return cast(Array, logits_BTV), dict(collected["intermediates"])

    return Task(
        model=model,
        init=lambda key: model.init(key, jnp.zeros((1, 1), jnp.int32))["params"],
        loss=training_loss(model, config),
        probed=functools.partial(probed_training_loss, model, config),
        score=score,
        batches=batches,
        train=batches(config.run.seed),
        validation=validation,
        parts=_parts(data, validation),
        facts={
            "corpus": data.source,
            "corpus_fingerprint": data.fingerprint,
            "bytes_per_token": data.bytes_per_token,
            "tokenizer": None if data.tokenizer is None else tokenizer_record(data.tokenizer),
        },
        files=_tokenizer_files(data),
        words=(data.source, *data.notes),
        baseline=baseline,
        finish=finish,
        forward=forward,
        utilisation=utilisation,
    )


def load_run_data(config: TrainConfig) -> Mixture:
    """Return the corpus, or the mixture of corpora, that a run's config names.

    Raises:
      ValueError: as `load_corpus` and `load_mixture` do.
    """
    data = config.data
    given = {
        "vocab_size": config.model.vocab_size,
        "context": config.model.context,
        "validation_tokens": data.validation_tokens,
        "separator": data.separator,
    }
    if data.mixture:
        return load_mixture(data.mixture, **given)
    return one_source(load_corpus(None if data.path is None else Path(data.path), **given))


def _train_batches(data: Mixture, shape: dict[str, Any], seed: int) -> Batches:
    """Return the training batches of a seed."""
    if len(data.sources) == 1:
        return TrainBatches(data.train[0], seed=seed, **shape)
    return MixedBatches(data.train, [source.share for source in data.sources], seed=seed, **shape)


def _parts(data: Mixture, validation: MixedValidation) -> dict[str, range]:
    """Return the validation batches of each source by its name; {} where there is one source."""
    if len(data.sources) == 1:
        return {}
    return {source.name: part for source, part in zip(data.sources, validation.parts, strict=True)}


def _tokenizer_files(data: Mixture) -> dict[str, str]:
    """Return what a run needs beside its checkpoints to read text, by file name."""
    text = None if data.tokenizer is None else data.tokenizer.file_text()
    return {} if text is None else {TOKENIZER_FILE: text}


def _check_targets(data: Mixture) -> None:
    """Raise ValueError if all documents of a split have one token, which has nothing to predict."""
    for source in data.sources:
        for split, stream in (("train", source.corpus.train), ("validation", source.corpus.validation)):
            if not stream.has_targets():
                of = f" of {source.name}" if source.name else ""
                raise ValueError(
                    f"data.seams is 'separate', but every document of the {split} split{of} has one token and no target"
                )

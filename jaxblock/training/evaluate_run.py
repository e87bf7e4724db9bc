"""How good a run's newest checkpoint is on its validation data or on a file: every token once, with sliding context."""

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxblock.contracts import check_choice, check_integer
from jaxblock.models.decoder import Decoder
from jaxblock.training.batches import Batch, read_windows
from jaxblock.training.config import TrainConfig
from jaxblock.training.corpus import TokenStream
from jaxblock.training.documents import iterate_documents
from jaxblock.training.language_task import load_run_data
from jaxblock.training.objectives import evaluation_loss
from jaxblock.training.prepare import TASKS, run_keys
from jaxblock.training.run_folder import RunFolder
from jaxblock.training.shards import read_shard
from jaxblock.training.task import Score, evaluate
from jaxblock.training.token_files import readable
from jaxblock.training.tokenizers import Tokenizer, restore_tokenizer
from jaxblock.training.weights import load_weights

NATS_PER_BIT = math.log(2.0)


class SlidingBatches:
    """A stream of N tokens in which each of the N - 1 targets counts once, read with at least context - stride
    tokens before it (the first ones with all there are).

    Window k reads tokens k * stride to k * stride + context; of its targets those count that window k - 1 did not
    reach. With stride = context windows lie side by side, as in a run's own evaluations.
    """

    def __init__(self, stream: TokenStream, *, context: int, stride: int, batch: int, seams: str):
        check_integer("stride", stride, least=1, most=context)
        if len(stream) < 2:
            raise ValueError(f"the text holds {len(stream)} tokens, but it must hold at least 2")
        self._stream, self._context, self._stride = stream, context, stride
        self._batch, self._seams = batch, seams
        self.windows = 1 + max(0, -(-(len(stream) - 1 - context) // stride))

    def __len__(self) -> int:
        return -(-self.windows // self._batch)

    def __iter__(self) -> Iterator[Batch]:
        for first in range(0, self.windows, self._batch):
            numbers = np.arange(first, first + self._batch)
            starts = np.where(numbers < self.windows, numbers * self._stride, len(self._stream))
            batch = read_windows(self._stream, starts.tolist(), context=self._context, seams=self._seams)
            # Window k - 1 reached all but the last `stride` places of window k.
            is_new_BT = (numbers == 0)[:, None] | (np.arange(self._context) >= self._context - self._stride)
            yield batch._replace(valid_BT=batch.valid_BT & is_new_BT)


class _Text(NamedTuple):
    """What is scored."""

    words: str
    streams: tuple[TokenStream, ...]
    """One, or a mixture's sources."""
    bytes: float | None
    """Bytes behind the targets; None where they are unknown."""


def evaluate_run(path: Path, *, file: Path | None, stride: int | None, weights: str) -> dict[str, Any]:
    """Return the loss and what follows from it, by the newest checkpoint of the run in `path`.

    A file is one text: its documents, if it is JSONL, follow each other.

    Args:
      path: the run's folder; nothing in it is changed.
      file: text (or a `.bin` shard) to score; None = the run's validation data.
      stride: tokens a window moves on; None = half the context.
      weights: "last", or "average" for the moving average.

    Returns:
      Of a language model: loss (nats per token), perplexity, bits_per_byte (None where bytes are unknown), tokens
      scored; of a classifier: loss and accuracy over its validation data. Also run, step, weights, data.

    Raises:
      ValueError: no run, no checkpoint, data that changed since the run started, text the tokenizer cannot read.
    """
    check_choice("weights", weights, ("last", "average"))
    folder = RunFolder.open(path)
    config = folder.read_config()
    folder.start_row()  # refuses a run that has not begun
    about = {"run": str(path), "weights": weights}
    if config.run.task_choice.name != "language_model":
        if file is not None or stride is not None:
            raise ValueError(
                f"the run in {str(path)!r} is a {config.run.task_choice.name}; it is evaluated on its own data, "
                "without --file and --stride"
            )
        return about | _evaluate_task(folder, config, weights)
    text = _own_text(folder, config) if file is None else _text_of(file, folder, config)
    context = config.model.context
    batches = [
        SlidingBatches(
            stream,
            context=context,
            stride=max(1, context // 2) if stride is None else stride,
            batch=config.data.batch,
            seams=config.data.seams if file is None else "joined",
        )
        for stream in text.streams
    ]
    model = Decoder(config.model, config.execution)
    like = jax.eval_shape(lambda key: model.init(key, np.zeros((1, 1), np.int32))["params"], run_keys(0).init)
    found = load_weights(path, like, which=weights)
    plain = evaluation_loss(model, config)

    @jax.jit
    def score(params: Any, batch: Batch) -> Score:
        result = plain(params, batch)
        return Score(result.nats, result.weight, {"tokens": result.weight})

    means = evaluate(score, found.params, itertools.chain.from_iterable(batches))
    tokens = sum(int(batch.valid_BT.sum()) for part in batches for batch in part)
    return {
        **about,
        "step": found.step,
        "data": text.words,
        "tokens": tokens,
        "loss": means["loss"],
        "perplexity": math.exp(min(means["loss"], 700.0)),
        "bits_per_byte": None if text.bytes is None else means["loss"] * tokens / NATS_PER_BIT / text.bytes,
    }


def _evaluate_task(folder: RunFolder, config: TrainConfig, weights: str) -> dict[str, Any]:
    """Score a run's own validation data, as the run itself does."""
    task = TASKS[config.run.task_choice.name](config)
    folder.check_data(task.facts)
    found = load_weights(
        folder.path, jax.eval_shape(task.init, run_keys(config.run.seed).init), which=weights
    )
    means = evaluate(jax.jit(task.score), found.params, task.validation, parts=task.parts)
    return {"step": found.step, "data": task.facts["corpus"], **means}


def _own_text(folder: RunFolder, config: TrainConfig) -> _Text:
    """Return the run's validation slice."""
    data = load_run_data(config)
    folder.check_data({"corpus_fingerprint": data.fingerprint})
    per_token, targets = data.bytes_per_token, sum(len(stream) - 1 for stream in data.validation)
    size = None if per_token is None else per_token * targets
    return _Text(f"validation slice of {data.source}", data.validation, size)


def _text_of(file: Path, folder: RunFolder, config: TrainConfig) -> _Text:
    """Return a file's tokens: a shard's ids, or a text's by the run's tokenizer."""
    vocab_size = config.model.vocab_size
    if file.suffix.lower() == ".bin":
        shard = read_shard(file, file.name, vocab_size=vocab_size)
        return _Text(str(file), (TokenStream([shard.tokens]),), None)
    tokenizer = tokenizer_of(folder)
    if tokenizer is None:
        raise ValueError(
            f"the run in {str(folder.path)!r} learnt ids of an unknown tokenizer; it can score .bin shards, not {file}"
        )
    parts, size = [], 0
    with readable(file):
        for document in iterate_documents([(file.name, file)]):
            parts += [tokenizer.encode(piece) for _, piece in document.pieces(0, document.size)]
            size += document.size
            if tokenizer.end_of_text is not None:
                parts.append(np.asarray([tokenizer.end_of_text]))
    tokens = np.concatenate([np.zeros(0, np.int32), *parts]).astype(np.int32)
    if len(tokens) and tokens.max() >= vocab_size:
        raise ValueError(f"{file} holds token id {tokens.max()}; model.vocab_size is {vocab_size}")
    # The first token is no target: its share is taken as that of any other, which for bytes is exact.
    return _Text(str(file), (TokenStream([tokens]),), size * (len(tokens) - 1) / max(len(tokens), 1))


def tokenizer_of(folder: RunFolder) -> Tokenizer | None:
    """Return the tokenizer a run recorded when it started; None where its tokens are ids of unknown text."""
    record = folder.start_row()["tokenizer"]
    return None if record is None else restore_tokenizer(record, folder.path)

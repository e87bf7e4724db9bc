"""Continue a prompt with the newest checkpoint of a run's folder."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxblock.contracts import check_integer
from jaxblock.models.cache import check_cacheable
from jaxblock.models.decoder import Decoder
from jaxblock.training.config_file import build_config
from jaxblock.training.evaluate_run import tokenizer_of
from jaxblock.training.run_folder import RunFolder
from jaxblock.training.sampling import IDS, prompt_ids, separator, spell, stream_prompt
from jaxblock.training.weights import load_weights


class Continuation(NamedTuple):
    """A prompt and what the model says after it."""

    prompt: str
    separator: str
    """What stands between the two: nothing, or a space between ids."""
    pieces: Iterator[str]
    """The continuation, piece by piece as it is drawn; it can be read once."""


def sample_run(path: Path, given: Mapping[str, Any], *, seed: int) -> Continuation:
    """Return a continuation by the newest checkpoint of the run in `path`, its moving average where it keeps one.

    Args:
      path: the run's folder.
      given: values of the config's `sample` section that stand in for the run's own.
      seed: another seed, another continuation.

    Raises:
      ValueError: no run, no language model, no checkpoint, no prompt, a prompt the model's vocabulary cannot hold, or
        a tokenizer that cannot be read here.
    """
    check_integer("seed", seed, least=0, most=2**32 - 1)
    folder = RunFolder.open(path)
    run = folder.read_config()
    config = build_config(run.as_dict(), {f"sample.{name}": value for name, value in given.items()}).sample
    if run.run.task_choice.name != "language_model":
        raise ValueError(
            f"the run in {str(path)!r} is a {run.run.task}; only a language_model continues prompts"
        )
    check_cacheable(run.model)
    text = tokenizer_of(folder) or IDS
    if config.prompt is None:
        raise ValueError(f"the run in {str(path)!r} has no prompt of its own; pass --prompt TEXT")
    prompt_1T = prompt_ids(config.prompt, text, vocab_size=run.model.vocab_size)
    model = Decoder(run.model)  # however the run was executed, as on a GPU by cuDNN: nothing depends on it
    like = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    params = load_weights(path, like, which="average" if run.optimizer.average else "last").params
    pieces = stream_prompt(model, params, prompt_1T, config, key=jax.random.key(seed))
    return Continuation(config.prompt, separator(text), spell(pieces, text))

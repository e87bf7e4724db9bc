"""Continue a prompt with the newest checkpoint of a run's folder."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxblock.contracts import check_integer
from jaxblock.models.decoder import Decoder
from jaxblock.training.checkpoint import Checkpoints
from jaxblock.training.config_file import build_config
from jaxblock.training.prepare import run_keys
from jaxblock.training.run_folder import RunFolder
from jaxblock.training.sampling import continue_prompt, decode, encode_prompt
from jaxblock.training.step import init_state


class Continuation(NamedTuple):
    """A prompt and what the model says after it."""

    prompt: str
    text: str


def sample_run(path: Path, given: Mapping[str, Any], *, seed: int) -> Continuation:
    """Return a continuation by the newest checkpoint of the run in `path`.

    Args:
      path: the run's folder.
      given: values of the config's `sample` section that stand in for the run's own.
      seed: another seed, another continuation.

    Raises:
      ValueError: no run, no checkpoint, no prompt, or a prompt the model's vocabulary cannot hold.
    """
    check_integer("seed", seed, least=0, most=2**32 - 1)
    folder = RunFolder.open(path)
    run = folder.read_config()
    config = build_config(run.as_dict(), {f"sample.{name}": value for name, value in given.items()}).sample
    as_bytes = folder.reads_bytes()
    if config.prompt is None:
        raise ValueError(f"the run in {str(path)!r} has no prompt of its own; pass --prompt TEXT")
    prompt_1T = encode_prompt(config.prompt, as_bytes=as_bytes, vocab_size=run.model.vocab_size)
    model = Decoder(run.model, run.execution)
    state = jax.eval_shape(functools.partial(init_state, model, run), run_keys(run.run.seed).init)
    with Checkpoints(folder.checkpoints) as checkpoints:
        saved = checkpoints.latest()
        if saved is None:
            raise ValueError(f"the run in {str(path)!r} has no checkpoint yet")
        params = checkpoints.restore(saved, state).params
    tokens = continue_prompt(model, params, prompt_1T, config, key=jax.random.key(seed))
    return Continuation(config.prompt, decode(tokens, as_bytes=as_bytes))

"""Text to tokens and back around `models.generate`: what a trained model says after a prompt."""

import numpy as np

from jaxblock.functional.sampling import SamplingRule
from jaxblock.models.decoder import Decoder
from jaxblock.models.generation import generate
from jaxblock.training.config import SampleConfig
from jaxblock.types import Array, Params


def continue_prompt(
    model: Decoder, params: Params, prompt_1T: np.ndarray, config: SampleConfig, *, key: Array
) -> np.ndarray:
    """Return `config.length` new tokens after the prompt, int32 [length]."""
    rule = SamplingRule(
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        vocab_size=model.config.vocab_size,
    )
    return np.asarray(generate(model, params, prompt_1T, key, length=config.length, rule=rule))[0]


def encode_prompt(prompt: str, *, as_bytes: bool, vocab_size: int) -> np.ndarray:
    """Return a prompt's tokens, int32 [1, T]: its UTF-8 bytes, or ids separated by spaces.

    Raises:
      ValueError: an empty prompt, ids that are not numbers or not below `vocab_size`.
    """
    if as_bytes:
        ids = list(prompt.encode("utf-8", errors="surrogateescape"))
    else:
        try:
            ids = [int(word) for word in prompt.split()]
        except ValueError as error:
            raise ValueError(
                f"the prompt is {prompt!r}; these data are token ids, so it must be ids separated by spaces"
            ) from error
    if not ids:
        raise ValueError("the prompt is empty; it must hold at least one token")
    wrong = [token for token in ids if not 0 <= token < vocab_size]
    if wrong:
        raise ValueError(f"the prompt holds token id {wrong[0]}; ids must be below vocab_size = {vocab_size}")
    return np.asarray([ids], np.int32)


def decode(tokens: np.ndarray, *, as_bytes: bool) -> str:
    """Return tokens as text: bytes as UTF-8 with a mark for what is not, or ids separated by spaces."""
    if as_bytes:
        # An id that is no byte, in a vocabulary larger than 256, is marked like a byte that is no text.
        return bytes(np.where(tokens < 256, tokens, 255).tolist()).decode("utf-8", errors="replace")
    return " ".join(str(token) for token in tokens.tolist())

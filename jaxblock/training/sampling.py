"""Text to tokens and back around `models.generate`: what a trained model says after a prompt, whole or as it comes."""

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

from jaxblock.functional.sampling import SamplingRule
from jaxblock.models.decoder import Decoder
from jaxblock.models.generation import generate, stream
from jaxblock.training.config import SampleConfig
from jaxblock.types import Array, Params

_UNSETTLED = "\ufffd"


class TokenText(Protocol):
    """How tokens read as text: a `tokenizers.Tokenizer`, or `IDS`."""

    def encode(self, text: str, /) -> np.ndarray:
        """Return the ids of a text, integers [N]; ValueError for a text that has none."""
        ...

    def decode(self, ids: np.ndarray, /) -> str:
        """Return the text of ids [N]."""
        ...


class IdText:
    """Tokens whose tokenizer is not known: ids separated by spaces."""

    def encode(self, text: str, /) -> np.ndarray:
        """Return the numbers of a text, int64 [N].

        Raises:
          ValueError: something in it is no number, or no int64.
        """
        try:
            return np.asarray([int(word) for word in text.split()], np.int64)
        except (ValueError, OverflowError) as error:
            raise ValueError(
                f"the prompt is {text!r}; these data are token ids, so it must be ids separated by spaces"
            ) from error

    def decode(self, ids: np.ndarray, /) -> str:
        """Return the ids, separated by spaces."""
        return " ".join(str(token) for token in ids.tolist())


IDS = IdText()


def separator(text: TokenText) -> str:
    """Return what stands between a prompt and its continuation."""
    return " " if isinstance(text, IdText) else ""


def prompt_ids(prompt: str, text: TokenText, *, vocab_size: int) -> np.ndarray:
    """Return a prompt's tokens, int32 [1, T].

    Raises:
      ValueError: a prompt that is empty, is no such text, or has ids not below `vocab_size`.
    """
    ids = text.encode(prompt)
    if not len(ids):
        raise ValueError("the prompt is empty; it must hold at least one token")
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if len(wrong):
        raise ValueError(f"the prompt holds token id {wrong[0]}; ids must be below vocab_size = {vocab_size}")
    return np.asarray(ids, np.int32)[None]


def continue_prompt(
    model: Decoder, params: Params, prompt_1T: np.ndarray, config: SampleConfig, *, key: Array
) -> np.ndarray:
    """Return `config.length` new tokens after the prompt, int32 [length]."""
    drawn = generate(model, params, jnp.asarray(prompt_1T), key, **_drawing(model, config))
    return np.asarray(drawn)[0]


def stream_prompt(
    model: Decoder, params: Params, prompt_1T: np.ndarray, config: SampleConfig, *, key: Array
) -> Iterator[np.ndarray]:
    """Return an iterator over the tokens of `continue_prompt`, int32 [n] at a time, as they are drawn."""
    pieces = stream(model, params, jnp.asarray(prompt_1T), key, **_drawing(model, config))
    return (piece_1T[0] for piece_1T in pieces)


def spell(pieces: Iterable[np.ndarray], text: TokenText) -> Iterator[str]:
    """Yield the text of tokens that come in pieces; together it is the text of all tokens decoded at once.

    A U+FFFD at the end is held back, since it may be a character whose last bytes are still to come. All tokens so
    far are decoded at every piece: what one of them says can depend on those before it.
    """
    ids, said = np.zeros((0,), np.int32), 0
    for piece in pieces:
        ids = np.concatenate([ids, piece])
        settled = text.decode(ids).rstrip(_UNSETTLED)
        if len(settled) > said:
            yield settled[said:]
            said = len(settled)
    rest = text.decode(ids)[said:]
    if rest:
        yield rest


def _drawing(model: Decoder, config: SampleConfig) -> dict[str, Any]:
    rule = SamplingRule(
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        vocab_size=model.config.vocab_size,
    )
    return {"length": config.length, "rule": rule}

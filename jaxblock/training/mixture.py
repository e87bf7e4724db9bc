"""What a language model reads: one corpus, or several with the share of the training windows that each has.

Shares are exact fractions of the weights as they are written: 0.5, 0.3 and 0.2 are 1/2, 3/10 and 1/5.

Validation: every source holds out its own tokens, and of these as many are used as make the targets of all sources
proportional to the shares. So the mean over targets is the loss on the mixture, and each source's own loss is known.
There are at most `validation_tokens` in all, fewer where a source cannot hold out its part.
"""

import hashlib
import math
import os
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from jaxblock.training.corpus import Corpus, TokenStream, load_corpus
from jaxblock.training.interleave import SMALLEST_SHARE
from jaxblock.training.mapped_tokens import ShardMaps
from jaxblock.training.token_files import find_shards
from jaxblock.training.tokenizers import Tokenizer


class Source(NamedTuple):
    """A corpus in a mixture."""

    name: str
    """Its path, as the config writes it."""
    share: Fraction
    corpus: Corpus
    """Its `validation` is what is used of it."""


@dataclass(frozen=True, eq=False)
class Mixture:
    """Sources, those with the largest share first, and what a run records about all of them.

    `fingerprint` names the data and the shares, whatever the order in which they are listed and wherever they lie;
    of one source it is the corpus's own. The other fields are as a `Corpus` has them.
    """

    sources: tuple[Source, ...]
    fingerprint: str
    source: str
    notes: tuple[str, ...]
    bytes_per_token: float | None
    tokenizer: Tokenizer | None

    @property
    def train(self) -> tuple[TokenStream, ...]:
        """Each source's training tokens."""
        return tuple(source.corpus.train for source in self.sources)

    @property
    def validation(self) -> tuple[TokenStream, ...]:
        """Each source's validation tokens."""
        return tuple(source.corpus.validation for source in self.sources)

    def sample(self, tokens: int) -> TokenStream:
        """Return the first training tokens of each source, `tokens` in all, in proportion as far as they reach.

        Of one source it is all of them: whoever needs no more stops reading.
        """
        if len(self.sources) == 1:
            return self.train[0]
        parts = [source.corpus.train.first(int(source.share * tokens)) for source in self.sources]
        return TokenStream([array for part in parts for array in part.arrays])


def one_source(corpus: Corpus) -> Mixture:
    """Return a corpus as a mixture of one."""
    return _mixture((Source("", Fraction(1), corpus),), corpus.fingerprint, corpus.source, corpus.notes)


def load_mixture(
    weights: Mapping[str, float],
    *,
    vocab_size: int,
    context: int,
    validation_tokens: int = 262_144,
    separator: int | None = None,
) -> Mixture:
    """Load the corpora at several paths.

    Args:
      weights: path -> weight, above 0; a share is a weight over the sum of all.
      vocab_size: ids of the model.
      context: tokens of a window; each source must hold one to train on.
      validation_tokens: most tokens held out of all sources together.
      separator: as `load_corpus` has it, for every source.

    Raises:
      ValueError: what `load_corpus` refuses, in any source; a path twice, or one inside another; weights of which one
        is less than a millionth of all; sources of different tokenizers; a source whose share of the validation
        tokens is not even one target.
    """
    shares = shares_of(weights)
    _check_apart(list(weights))
    maps, corpora = ShardMaps(), dict[str, Corpus]()
    for name, share in shares.items():
        corpora[name] = load_corpus(
            Path(name),
            vocab_size=vocab_size,
            context=1,
            validation_tokens=1 + max(1, math.ceil(share * _targets(validation_tokens, shares))),
            separator=separator,
            maps=maps,
        )
        if len(corpora[name].train) < context + 1:
            raise ValueError(
                f"the train split of {corpora[name].source} holds {len(corpora[name].train)} tokens, but it must hold "
                f"at least context + 1 = {context + 1}: use a shorter context or more data"
            )
    _check_tokenizers(corpora)
    sources = [Source(name, share, corpora[name]) for name, share in shares.items()]
    sources = _cut_validation(sources, validation_tokens)
    sources.sort(key=lambda source: (-source.share, source.corpus.fingerprint))
    digest = hashlib.sha256("\0".join(f"{s.corpus.fingerprint} {s.share}" for s in sources).encode())
    parts = [f"{float(100 * source.share):.4g} % {source.corpus.source}" for source in sources]
    notes = [note for source in sources for note in source.corpus.notes]
    held = sum(len(source.corpus.validation) for source in sources)
    notes.append(f"Validation holds {held:,} tokens, in proportion to the shares.")
    if len({corpus.tokenizer_fingerprint for corpus in corpora.values()}) > 1:
        notes.append(
            "Shards without a tokens.json are taken to hold ids of the tokenizer of the other sources."
        )
    return _mixture(tuple(sources), digest.hexdigest()[:16], "; ".join(parts), tuple(notes))


def shares_of(weights: Mapping[str, float]) -> dict[str, Fraction]:
    """Return each weight over the sum of all, exactly.

    Raises:
      ValueError: a share below a millionth.
    """
    exact = {name: Fraction(str(weight)) for name, weight in weights.items()}
    total = sum(exact.values())
    shares = {name: weight / total for name, weight in exact.items()}
    for name, share in shares.items():
        if share < SMALLEST_SHARE:
            raise ValueError(
                f"data.mixture: {name} has weight {weights[name]!r} of {float(total):g} in all; it must be at least a "
                "millionth of that"
            )
    return shares


def _mixture(sources: tuple[Source, ...], fingerprint: str, words: str, notes: tuple[str, ...]) -> Mixture:
    """Return the record, with what follows from its sources."""
    corpora = [source.corpus for source in sources]
    tokenizer = next((corpus.tokenizer for corpus in corpora if corpus.tokenizer is not None), None)
    return Mixture(sources, fingerprint, words, notes, _bytes_per_token(corpora), tokenizer)


def _bytes_per_token(corpora: Sequence[Corpus]) -> float | None:
    """Return the mean over the validation targets; None where a source's is unknown."""
    known = [corpus.bytes_per_token for corpus in corpora if corpus.bytes_per_token is not None]
    if len(known) < len(corpora):
        return None
    if len(set(known)) == 1:
        return known[0]
    targets = [len(corpus.validation) - 1 for corpus in corpora]
    return sum(ratio * count for ratio, count in zip(known, targets, strict=True)) / sum(targets)


def _targets(tokens: int, sources: Sized) -> int:
    """Return the most targets in so many tokens: the first token of each source is none."""
    return max(0, tokens - len(sources))


def _cut_validation(sources: Sequence[Source], most: int) -> list[Source]:
    """Return the sources with validation targets in proportion to the shares."""
    held = {source.name: len(source.corpus.validation) - 1 for source in sources}
    room = Fraction(_targets(most, sources))
    targets = min(room, *(held[source.name] / source.share for source in sources))
    cut = []
    for source in sources:
        own = int(targets * source.share)
        if own < 1:
            scarce = min(sources, key=lambda other: held[other.name] / other.share)
            raise ValueError(
                f"data.mixture: {source.name} has a share of {float(source.share):g}, which is not one of the "
                f"{int(targets)} validation targets that data.validation_tokens = {most} and the data of "
                f"{scarce.name} leave: raise its weight or data.validation_tokens, or use more data"
            )
        corpus = replace(source.corpus, validation=source.corpus.validation.first(own + 1))
        cut.append(source._replace(corpus=corpus))
    return cut


def _check_apart(names: Sequence[str]) -> None:
    """Raise ValueError if two paths are one place, or text below one is also below another."""
    places = [(name, os.path.realpath(name)) for name in names]
    for number, (name, place) in enumerate(places):
        for other, other_place in places[number + 1 :]:
            if place == other_place:
                raise ValueError(
                    f"data.mixture names {name} and {other}, which are the same; each must be there once"
                )
            for outer, inner in ((place, other_place), (other_place, place)):
                if os.path.commonpath([outer, inner]) == outer and not find_shards(Path(outer)):
                    raise ValueError(
                        f"data.mixture names {name} and {other}, of which one lies in the other and would be read "
                        "twice"
                    )


def _check_tokenizers(corpora: Mapping[str, Corpus]) -> None:
    """Raise ValueError if two sources are known to be of different tokenizers: one id would be two words."""
    known = {name: corpus.tokenizer_fingerprint for name, corpus in corpora.items()}
    known = {name: fingerprint for name, fingerprint in known.items() if fingerprint is not None}
    first = next(iter(known), None)
    for name, fingerprint in known.items():
        if first is not None and fingerprint != known[first]:
            raise ValueError(
                f"data.mixture: {first} and {name} are of different tokenizers, and their ids mean different things: "
                "make both with the same --tokenizer (jaxblock tokenize)"
            )

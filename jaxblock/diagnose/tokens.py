"""Which places see which: padding, the order of time, what a target is, and whether evaluation draws at random.

padding     what stands in a padded place moves no output at a real one, nor a pooled one
order       no output before a token moves with it
reach       block 0's token mixing at place i moves with token j exactly where the mask says i may see j
targets     the loss is that of the next token
evaluation  a score is the loss without dropout, and the same twice
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxblock.contracts import check_integer
from jaxblock.diagnose.finding import FAIL, PASS, Control, Finding, skipped
from jaxblock.diagnose.planted import Rolled, drawn, small_model
from jaxblock.diagnose.subject import Subject, as_float, quick
from jaxblock.models import Decoder
from jaxblock.types import Array

PLACES, SHORT = 8, 4
ROUND_OFF = 1e-4
SAME = 1e-3
"""Nats by which two ways to compute one loss may differ."""


class Bidirectional(Decoder):
    """The control of causality: the same model, in which every token sees all."""

    causal = False


def padding(subject: Subject) -> Finding:
    """Step 3: other ids in padded places move nothing, and a padded row gives what its real tokens give alone."""
    tokens_BT, other_BT = _tokens(subject), _tokens(subject, seed=1)
    length = tokens_BT.shape[1]
    if length < SHORT:
        return skipped(f"model.context is {length}: too few places for padding on both sides")
    real_T = np.zeros(length, bool)
    real_T[length // 4 : length - 1] = True
    valid_BT = jnp.broadcast_to(real_T, tokens_BT.shape)
    places_BT = jnp.broadcast_to(jnp.arange(length), tokens_BT.shape)
    at_real = (lambda y: y[:, real_T]) if subject.causal else (lambda y: y)

    def outputs(tokens_BT: Array, given_BT: Array, places_BT: Array) -> Array:
        more = {"valid_BT": given_BT, "positions_BT": places_BT}
        return subject.logits(subject.exact, subject.stirred, tokens_BT, **more)

    filled = jnp.stack([jnp.where(valid_BT, tokens_BT, t_BT) for t_BT in (tokens_BT, other_BT)])

    def moved(given_BT: Array) -> Array:
        return _distance(*_same_program(lambda t_BT: at_real(outputs(t_BT, given_BT, places_BT)), filled))

    @quick
    def apart(valid_BT: Array) -> Array:
        alone = outputs(tokens_BT[:, real_T], jnp.ones_like(valid_BT[:, real_T]), places_BT[:, real_T])
        padded = at_real(outputs(tokens_BT, valid_BT, places_BT))
        return _distance(padded, alone) / jnp.max(jnp.abs(alone))

    everything_BT = jnp.ones_like(valid_BT)
    error, bare = as_float(moved(valid_BT)), as_float(moved(everything_BT))
    cuts = _reads_any_length(subject)
    distance, shown = (as_float(apart(valid_BT)), as_float(apart(everything_BT))) if cuts else (0.0, 0.0)
    what = "logits at real places" if subject.causal else "logits of a row"
    also = f"; without padding they are {distance:.2g} away" if cuts else ""
    return Finding(
        PASS if error == 0 and distance < ROUND_OFF else FAIL,
        f"{what} move by {error:.3g} with what stands in padded places{also}",
        max(error, distance),
        f"exactly 0; {ROUND_OFF:g} of the largest logit",
        Control("all places declared real", max(bare, shown), bare > 0 and (shown > ROUND_OFF or not cuts)),
        "the mask's sense (True = a real token), and pooling over real places only",
    )


def _same_program(apply: Callable[[Array], Array], variants_N: Array) -> Array:
    """Return apply of every variant by one loop: two copies in a program may be rounded differently."""
    return quick(lambda variants_N: jax.lax.map(apply, variants_N))(variants_N)


def _distance(x: Array, y: Array) -> Array:
    """Return the largest difference; a NaN is one, too: a row may not lose its numbers to what it must not see."""
    distance = jnp.abs(x - y)
    return jnp.where(jnp.isnan(distance), jnp.inf, distance).max()


def _reads_any_length(subject: Subject) -> bool:
    """Whether a row without its padding is the same sum: not of mixers of fixed places, nor where experts are full."""
    config = subject.model.config
    return config.token_mixer_choice.name == "attention" and config.experts_choice.name != "capacity"


def causality(subject: Subject) -> Finding:
    """No logit before a token moves with it."""
    if not subject.causal:
        return skipped("the model sees both sides by design")
    tokens_BT, other_BT = _tokens(subject), _others(subject)
    model = subject.exact

    length = tokens_BT.shape[1]
    replaced = jnp.where(jnp.eye(length, dtype=bool)[:, None], other_BT[None], tokens_BT[None])

    def leak(model: Any) -> float:
        apply = lambda t_BT: subject.logits(model, subject.stirred, t_BT)  # noqa: E731
        plain, *changed = np.asarray(_same_program(apply, jnp.concatenate([tokens_BT[None], replaced])))
        distances = [np.abs(after - plain)[:, :place] for place, after in enumerate(changed)]
        return max(float(np.where(np.isnan(d), np.inf, d).max(initial=0.0)) for d in distances)

    other = Bidirectional(model.config, model.execution, model.topology)
    error, bare = leak(model), leak(other)
    return Finding(
        PASS if error == 0 else FAIL,
        f"logits before a token move by {error:.3g} with it, at every one of {tokens_BT.shape[1]} places",
        error,
        "exactly 0",
        Control("attention that sees both sides", bare, bare > 0),
        "the causal mask: place i reads places up to i; and what else mixes places (pooling, a norm over tokens)",
    )


def rows(subject: Subject) -> Finding:
    """No row's output moves with another row: the batch is many sequences, not one."""
    tokens_BT = _tokens(subject)
    variants = jnp.stack([tokens_BT, tokens_BT.at[1].set(_others(subject)[1])])

    def moved(model: Any, params: Any, variants: Array) -> float:
        apply = lambda t_BT: model.apply({"params": params}, t_BT)  # noqa: E731
        plain, other = np.asarray(_same_program(apply, variants))
        return as_float(_distance(jnp.asarray(plain[[0, 2, 3]]), jnp.asarray(other[[0, 2, 3]])))

    rolled = small_model(Rolled)
    error = moved(subject.exact, subject.stirred, variants)
    bare = moved(rolled, drawn(rolled), variants[:, :, : rolled.config.context] % rolled.config.vocab_size)
    return Finding(
        PASS if error == 0 else FAIL,
        f"outputs of a row move by {error:.3g} with another row",
        error,
        "exactly 0",
        Control("branches that read the row before", bare, bare > 0),
        "an axis: a norm, a softmax, a roll or a mean over the batch",
    )


def reach(subject: Subject) -> Finding:
    """What block 0's token mixing writes at i moves with token j exactly where i may see j: no place more or less."""
    config = subject.model.config
    tokens_BT, other_BT = _tokens(subject)[:1], _others(subject)[:1]
    length = tokens_BT.shape[1]
    replaced = jnp.where(jnp.eye(length, dtype=bool)[:, None], other_BT[None], tokens_BT[None])

    def reached(model: Any) -> np.ndarray:
        def written(t_BT: Array) -> Array:
            made = model.apply({"params": subject.stirred}, t_BT, mutable=["intermediates"])[1]
            blocks = made["intermediates"]["blocks"]
            name = next(
                (f"{n}_out" for n in ("attention", "token_mixer") if f"{n}_out" in blocks), "parallel_out"
            )
            return blocks[name][0, 0]

        first, *changed = np.asarray(_same_program(written, jnp.concatenate([tokens_BT[None], replaced])))
        return np.stack([np.any(after != first, axis=-1) for after in changed], axis=1)

    if length < SHORT:
        return skipped(f"model.context is {length}: too few places to tell masks apart")
    if config.token_mixer_choice.name != "attention":
        return skipped(f"the token mixer {config.token_mixer!r} has no mask to hold it against")
    if subject.model.connections.groups is not None or config.wiring == "parallel":
        return skipped("attention is not written to the stream alone here")
    window = (config.window or (0,))[0]
    distance = np.arange(length)[:, None] - np.arange(length)[None]
    allowed = (np.abs(distance) < (window or length)) & ((distance >= 0) | (not subject.causal))
    wrong = int((reached(subject.exact) != allowed).sum())
    planted = subject.exact.clone(config=dataclasses.replace(subject.exact.config, window=(2,)))
    if window == 2:
        planted = planted.clone(config=dataclasses.replace(planted.config, window=()))
    bare = int((reached(planted) != allowed).sum())
    return Finding(
        PASS if wrong == 0 else FAIL,
        f"{wrong} of {length * length} pairs of places are seen and should not be, or the reverse",
        float(wrong),
        "0",
        Control(f"a sliding window of {planted.config.window or 'any size'}", float(bare), bare > 0),
        "where queries and keys are aligned: with as many of each, place i sees itself and what is before",
    )


def targets(subject: Subject) -> Finding:
    """The loss of a place is the cross entropy of the next token, computed here from the logits alone."""
    if not subject.causal:
        return skipped("a label belongs to a whole row")
    task, batch = subject.task, subject.batch
    inputs_BT, real_BT = jnp.asarray(batch.inputs_BT), jnp.asarray(batch.valid_BT)
    columns = jnp.arange(1, inputs_BT.shape[1] - 2)
    rows = columns % inputs_BT.shape[0]

    @quick
    def losses(params: Any) -> tuple[Array, Array, Array, Array]:
        logits_BTV = task.forward(params, batch, None)[0][..., : subject.model.config.vocab_size]
        log_p = jax.nn.log_softmax(logits_BTV.astype(jnp.float32))

        def of_place(place: tuple[Array, Array]) -> tuple[Array, Array, Array, Array]:
            row, column = place
            alone = jnp.zeros_like(real_BT).at[row, column].set(real_BT[row, column])
            found = task.loss(params, batch._replace(valid_BT=alone), None)
            near_3 = -log_p[row, column, inputs_BT[row, column + jnp.arange(3)]]
            # One real target: the mean that is minimised is its total, whatever smoothing and z-loss add to it.
            return found.nats, near_3, real_BT[row, column], jnp.abs(found.loss - found.total)

        return jax.lax.map(of_place, (rows, columns))

    own_N, near_N3, counts_N, minimised_N = jax.device_get(losses(subject.stirred))
    if not counts_N.any():
        return skipped("no place of the first rows, but the last ones, has a next token of its own document")
    errors_3 = np.abs(own_N[:, None] - near_N3)[counts_N].max(0)
    errors_3 = np.where(np.isnan(errors_3), np.inf, errors_3)
    hints = ("the token itself", "the next token", "the one after the next")
    scaled = float(np.where(np.isnan(minimised_N), np.inf, minimised_N)[counts_N].max())
    fine = errors_3[1] < SAME and scaled < SAME
    best = int(errors_3.argmin())
    hint = hints[best] if errors_3[best] < SAME else "none of these: itself, the next, the one after"
    bare = float(np.sort(errors_3)[1])  # of the two that are not scored, the nearer one
    return Finding(
        PASS if fine else FAIL,
        f"at {int(counts_N.sum())} places the loss is within {errors_3[1]:.2g} nats of that of the next token, what is "
        f"minimised within {scaled:.2g} of its mean over real targets",
        max(float(errors_3[1]), scaled),
        f"within {SAME:g} nats",
        Control("targets one place too early or too late", bare, bare > SAME),
        f"the shift between inputs and targets: what is scored is {hint}"
        if errors_3[1] >= SAME
        else "what the loss is divided by: the real targets, not all places",
    )


def evaluation(subject: Subject) -> Finding:
    """Step 7: a score is the loss without dropout, and the same twice; with a key dropout is on, where there is any."""
    task, batch = subject.task, subject.batch

    @quick
    def scores(params: Any) -> tuple[Array, Array, Array]:
        score, plain = task.score(params, batch), task.loss(params, batch, None)
        keyed = [task.loss(params, batch, jax.random.key(seed)).nats / plain.weight for seed in (0, 1)]
        return score.nats / score.weight, plain.nats / plain.weight, jnp.stack(keyed)

    params = jax.tree.map(lambda x, y: x.astype(y.dtype), subject.stirred, subject.params)
    first, again = jax.device_get(scores(params)), jax.device_get(scores(params))
    error = max(abs(float(first[0] - first[1])), abs(float(first[0] - again[0])))
    drawn = abs(float(first[2][0] - first[2][1]))
    bare = _dropped(subject)
    config = subject.model.config
    has = max(config.attention_dropout, config.hidden_dropout, config.branch_dropout) > 0
    whole = config.stochastic_depth_choice.name != "none"  # of few rows often none is dropped: not judged
    fine = error < SAME and (whole or (drawn > 0) == has)
    words = f"with two keys the loss differs by {drawn:.3g}" if has or whole else "the config has no dropout"
    return Finding(
        PASS if fine else FAIL,
        f"score and loss without a key differ by {error:.3g} nats; {words}",
        error,
        f"within {SAME:g} nats, and the same twice",
        Control("dropout of 0.5 left on", bare, bare > SAME),
        "what passes a dropout key to an evaluation, or none to training",
    )


def _dropped(subject: Subject) -> float:
    """Return how far the logits of the model with dropout on are from those without, in float32."""
    model = subject.exact
    model = model.clone(config=dataclasses.replace(model.config, branch_dropout=0.5))
    tokens_BT = _tokens(subject)

    @quick
    def distance(params: Any) -> Array:
        on = model.apply({"params": params}, tokens_BT, rngs={"dropout": jax.random.key(0)})
        return jnp.abs(on - model.apply({"params": params}, tokens_BT)).max()

    return as_float(distance(subject.stirred))


def _tokens(subject: Subject, *, seed: int = 0) -> Array:
    """Return random ids, [4, T]: few places, but for a mixer that reads a fixed number."""
    config = subject.model.config
    length = PLACES if config.token_mixer_choice.name == "attention" else config.context
    length = min(length, config.context)
    check_integer("model.context", length, least=2)
    drawn = np.random.default_rng(seed).integers(0, config.vocab_size, (4, length))
    return jnp.asarray(drawn, jnp.int32)


def _others(subject: Subject) -> Array:
    """Return ids that differ from `_tokens` everywhere."""
    return (_tokens(subject) + 1) % subject.model.config.vocab_size

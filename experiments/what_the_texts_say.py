"""What five texts on residual blocks say, and what this code measures: agreed, corrected or not resolved.

    python -m experiments.what_the_texts_say [--no-tests] [--json]

The 169 claims are those of tests/claims.toml. Each gets a line from one of four places:

    tests       what is exact: the tests that bear its number are run now; those that hold a corrected form say so
    start       measured here at initial values, 5 seeds: mean and 95 % t interval against a band fixed beforehand
    trained     measured here on three small runs (pre-norm twice, post-norm once); one run is one run, and it is said
    elsewhere   a prediction of another experiment, read from its results

A band is [low, high]. "agreed": the whole interval lies in it; "corrected": all of it lies outside, and the number is
the correction; else "not resolved". What nothing measures yet is "not resolved", too, with what would resolve it.

Bands, with S sublayers, r the size of the stream, G the norm of its gradient, rho the relative update:

    kept        cos(x_S, x_0) at 48 blocks: pre-norm within 0.1 of r_0 / r_S; a bare chain f(x) below 3 / sqrt(D)
    chains      log G_0 against blocks: a bare chain below -0.02 a block; pre-norm within 0.5 in all, a power law
    growth      r^2 of pre-norm: the additive law is best by AICc; of x + f(x) the exponential one
    decides     G of the last feed-forward and rho against depth: slopes -0.5 +- 0.15
    identity    branch gain times r / r_1: within a factor 2 along the stack
    trained     late half's mean lesion less the early half's, below 0; what two runs say without an interval (ranks of
                rho and lesion, CKA of topologies) is "not resolved", whatever the number

Writes results/what_the_texts_say.md. Wall time on two cores: about 10 minutes without the tests.
"""

import argparse
import csv
import dataclasses
import functools
import json
import subprocess
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from scipy.stats import spearmanr

from experiments.residual_growth import BARE, Claim, exponent, near
from jaxblock import Decoder, ModelConfig
from jaxblock.models.observation import TAPS
from jaxblock.probes import (
    StreamProbe,
    growth_laws,
    lesion_losses,
    open_taps,
    stream_gradient,
    stream_profile,
)
from jaxblock.probes.jacobians import gains, jacobian_growth
from jaxblock.probes.similarity import linear_cka, token_states
from jaxblock.probes.stack import stack_of
from jaxblock.residual import Topology, topology
from jaxblock.sweeps.statistics.estimate import Estimate, Refusal
from jaxblock.sweeps.statistics.means import mean_interval
from jaxblock.training.config_file import build_config
from jaxblock.training.language_task import language_task
from jaxblock.training.step import first_state, make_step
from jaxblock.types import Array, Branch, Params

HERE, NAME = Path(__file__).parent, "what_the_texts_say"
ROOT = HERE.parent
CLAIMS = tomllib.loads((ROOT / "tests" / "claims.toml").read_text(encoding="utf-8"))
AGREED, CORRECTED, OPEN = "agreed", "corrected", "not resolved"
VERDICTS = {"as predicted": AGREED, "not as predicted": CORRECTED, "not resolved": OPEN}
SEEDS, BATCH, LENGTH, WIDTH, VOCAB = 5, 4, 32, 64, 32
DEPTHS, DEEP = (3, 6, 12, 24, 48), (80, 96)
CORRECTIONS = {
    "S1-09": "with an epsilon of 1e-5 the result is +-0.99992, not +-1",
    "S2-08": "RMSNorm gives mean(x) / rms(x): the mean is rescaled, not kept",
    "S2-14b": "(1 + s)^L grows: the skip removes vanishing, not explosion",
    "S2-19": "a real norm's factor is 1 / sqrt(1 + v), with which post-norm need not vanish",
    "S2-25": "exactly twice only for F = 4 D, no bias, as many key and value heads as heads, no gate",
    "S2-30": "exact for the blocks' matrices alone: vectors and tables grow otherwise",
    "S2-33": "a sum over all paths exactly for linear blocks; for others only once linearised",
}
"""What a claim's tests hold in place of its wording."""


class Line(NamedTuple):
    """One claim's answer."""

    claim: str
    found: str
    verdict: str
    by: str
    """tests, start, trained, the name of another experiment, or nothing yet."""


class NoNorm(nn.Module):
    """x + f(x)."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: Array, f: Branch) -> Array:
        """Return x + f(x)."""
        return x + f(x)


ARMS: Mapping[str, Topology] = {
    "pre_norm": topology("pre_norm"),
    "post_norm": topology("post_norm"),
    "none": topology("none"),
    "bare": BARE,
    "no_norm": Topology(NoNorm, "x + f(x)", "control, no norm", final_norm=False),
    "no_final": dataclasses.replace(topology("pre_norm"), final_norm=False),
}


def quick(f: Callable) -> Callable:
    """Return f compiled for a few calls."""
    return jax.jit(f, compiler_options={"xla_backend_optimization_level": 0})


def model_of(arm: str, depth: int) -> Decoder:
    """Return an arm's model of so many blocks."""
    sizes = {"vocab_size": VOCAB, "context": LENGTH, "width": WIDTH, "heads": 4, "feed_forward": "relu"}
    return Decoder(ModelConfig(**sizes, depth=depth), topology=ARMS[arm])


@functools.cache
def initial(arm: str) -> Params:
    """Return initial parameters of the deepest model, every leaf [R, ...]; a block's depend on its own key alone."""
    model, tokens = model_of(arm, DEEP[-1]), jnp.zeros((1, 1), jnp.int32)
    return quick(lambda seeds: jax.lax.map(lambda s: model.init(jax.random.key(s), tokens)["params"], seeds))(
        jnp.arange(SEEDS)
    )


@functools.cache
def start(arm: str, depth: int, *, jacobians: bool = False) -> dict[str, np.ndarray]:
    """Return what is measured at initial values, by name, every array [R, ...]."""
    model = model_of(arm, depth).clone(observe=StreamProbe(("sizes", "token_similarity", "branch")))

    def of_seed(given: tuple[Array, Params]) -> dict[str, Array]:
        seed, params = given
        params = {**params, "blocks": jax.tree.map(lambda x: x[:depth], params["blocks"])}
        key = jax.random.key(1000 + seed)
        tokens, targets = jax.random.randint(key, (2, BATCH, LENGTH), 0, VOCAB)

        def loss(params: Params, taps: Any) -> tuple[Array, Any]:
            logits, made = model.apply(
                {"params": params, TAPS: taps}, tokens, mutable=["observed", "intermediates"]
            )
            log_p = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)
            return -jnp.mean(log_p), (logits, made)

        taps = open_taps(model.config)
        (gradient, tapped), (logits, made) = jax.grad(loss, (0, 1), has_aux=True)(params, taps)
        values = stream_profile(made["observed"]).values
        kept = made["intermediates"]
        first, last = kept["blocks"]["resid_pre"][0], kept["resid_final"]
        cosine = jnp.sum(first * last, -1) / (
            jnp.linalg.norm(first, axis=-1) * jnp.linalg.norm(last, axis=-1)
        )
        norms = lambda tree: jnp.sqrt(  # noqa: E731
            sum(jnp.sum(jnp.square(x), axis=tuple(range(1, x.ndim))) for x in jax.tree.leaves(tree))
        )
        found = {
            "stream": jnp.concatenate([values["stream_rms_before"][:1], values["stream_rms"]]),
            "rho": values["relative_update"],
            "written": values["output_rms"],
            "gradient": stream_gradient(tapped),
            "cosine": jnp.mean(cosine),
            "logits": jnp.sqrt(jnp.mean(jnp.square(logits))),
            "last_down": norms(gradient["blocks"]["feed_forward"]["down"])[-1],
            "first_block": norms(gradient["blocks"])[0],
            "tokens": tokens,
            "states": last,
            "table": params["embedding"]["table"],
        }
        if jacobians:
            stack = stack_of(model_of(arm, depth), params, tokens)
            key_g, key_j = jax.random.split(key)
            assert stack is not None
            found["branch_gain"] = gains(stack, key_g, samples=4).update.value
            found["product"] = jacobian_growth(stack, key_j, samples=4).value
        return found

    return jax.tree.map(
        np.asarray, quick(lambda x: jax.lax.map(of_seed, x))((jnp.arange(SEEDS), initial(arm)))
    )


def shown(found: Estimate | Refusal) -> str:
    """Return a number with its interval."""
    if isinstance(found, Refusal):
        return f"refused ({found.rule})"
    return f"{found.value:+.3g} [{found.low:+.3g}, {found.high:+.3g}]"


def line(claim: str, what: str, found: Estimate | Refusal, band: Claim, by: str = "start") -> Line:
    """Return a claim's line: its number, interval and band."""
    return Line(claim, f"{what}: {shown(found)}, said {band.words}", VERDICTS[band.verdict(found)], by)


def all_of(claim: str, lines: Sequence[Line]) -> Line:
    """Return one line of several parts: as good as its worst part, corrected before not resolved."""
    verdicts = [part.verdict for part in lines]
    verdict = next((v for v in (CORRECTED, OPEN) if v in verdicts), AGREED)
    return Line(claim, "; ".join(part.found for part in lines), verdict, lines[0].by)


def against_depth(
    arm: str, name: str, place: Any = slice(None), *, jacobians: bool = False
) -> Estimate | Refusal:
    """Return the exponent of a quantity against blocks."""
    found = [start(arm, depth, jacobians=jacobians)[name] for depth in DEPTHS]
    return exponent(DEPTHS, np.stack([x if x.ndim == 1 else x[:, place] for x in found]))


def a_block(arm: str, name: str, place: Any) -> Estimate | Refusal:
    """Return d ln y / d blocks, a slope per seed."""
    y_NR = np.log(np.stack([start(arm, depth)[name][:, place] for depth in DEPTHS]))
    return mean_interval(np.polyfit(DEPTHS, y_NR, 1)[0])


def law(claim: str, arm: str, expected: str) -> Line:
    """Return which law the stream's size follows at the largest depth."""
    laws = growth_laws(start(arm, DEPTHS[-1])["stream"])
    ahead = laws[1].aicc - laws[0].aicc
    words = f"{arm}'s stream: {laws[0].name} by AICc, {ahead:.0f} ahead of {laws[1].name}; number {laws[0].number:+.3g}"
    verdict = AGREED if laws[0].name == expected and ahead > 2 else CORRECTED if ahead > 2 else OPEN
    return Line(claim, f"{words}, said {expected}", verdict, "start")


def decodable(arm: str, depth: int) -> np.ndarray:
    """Return how often the embedding row nearest to a token's last state, both about their means, is its own, [R]."""
    found = start(arm, depth)
    states, table = (found[name] - found[name].mean(axes, keepdims=True) for name, axes in NEAREST.items())
    nearest = np.einsum("rbtd,rvd->rbtv", states, table).argmax(-1)
    return np.mean(nearest == found["tokens"], axis=(1, 2))


NEAREST = {"states": (1, 2), "table": (1,)}


def at_start() -> list[Line]:
    """Return what is measured at initial values."""
    deep, ratio = DEPTHS[-1], lambda x: x[:, 0] / x[:, -1]
    pre, bare, post, wide = (start(arm, deep) for arm in ("pre_norm", "bare", "post_norm", "no_norm"))
    kept = pre["cosine"] - pre["stream"][:, 0] / pre["stream"][:, -1]
    bound = 3 / WIDTH**0.5
    below = lambda high: Claim(low=-np.inf, high=high)  # noqa: E731
    above = lambda low: Claim(low=low, high=np.inf)  # noqa: E731
    exploding = lambda arm: np.log10(np.concatenate([start(arm, d)["first_block"][:, None] for d in DEEP], 1))  # noqa: E731
    half = near(0.5, 0.15, alternative=0.0)
    down = near(-0.5, 0.15, alternative=0.0)
    jac = start("pre_norm", deep, jacobians=True)
    r = jac["stream"][:, :-1]
    steady = np.sqrt(jac["branch_gain"]) * r
    decay = mean_interval(np.log(steady[:, -8:].mean(1) / steady[:, 2:10].mean(1)))
    product = np.log(start("bare", deep, jacobians=True)["product"][:, -1]) / (2 * deep)
    double = np.log(jac["product"][:, [deep // 2, deep, 2 * deep]])
    increments = (double[:, 2] - double[:, 1]) / (double[:, 1] - double[:, 0])
    few = np.log(start("no_norm", 8)["stream"][:, -1] / start("no_norm", 8)["stream"][:, 0]) / 8
    predicted = few * 24 - np.log(wide["stream"][:, 48] / wide["stream"][:, 0])
    rise = np.log(start("no_final", deep)["logits"] / start("no_final", DEPTHS[0])["logits"])
    flat = np.log(pre["logits"] / start("pre_norm", DEPTHS[0])["logits"])
    doublings = np.log2(ratio(post["gradient"][:, :-1]))
    skip_less = decodable("pre_norm", deep) - decodable("none", deep)
    rho_slope = exponent(np.arange(3, 2 * deep + 1), pre["rho"][:, 2:].T)
    write = np.log(pre["written"][:, -8:].mean(1) / pre["written"][:, :8].mean(1))
    radial = mean_interval(np.log2(pre["gradient"][:, 0] / pre["gradient"][:, -1]))
    return [
        all_of(
            "S0-07",
            [
                line("", "pre-norm's cos(x_S, x_0) less r_0 / r_S", mean_interval(kept), near(0.0, 0.1)),
                line("", "bare chain's |cos|", mean_interval(np.abs(bare["cosine"])), below(bound)),
            ],
        ),
        all_of(
            "S0-08",
            [
                line("", "bare chain's ln G_0 a block", a_block("bare", "gradient", 0), below(-0.02)),
                line(
                    "",
                    "pre-norm's G_0 against depth, exponent",
                    against_depth("pre_norm", "gradient", 0),
                    near(0, 0.5),
                ),
            ],
        ),
        all_of("S0-13", [law("", "no_norm", "exponential"), law("", "pre_norm", "additive")]),
        all_of(
            "S0-26",
            [
                line("", "bare chain's ln |J|^2 a sublayer", mean_interval(product), below(-0.02)),
                line(
                    "",
                    "pre-norm's ln |J|^2, its growth from 48 to 96 sublayers over that from 24 to 48 (1: logarithmic, "
                    "2: linear)",
                    mean_interval(increments),
                    Claim(low=-np.inf, high=1.5, alternative=2.0),
                ),
            ],
        ),
        all_of(
            "S1-14",
            [
                line(
                    "",
                    "ln of logits at 48 over at 3 blocks without final norm",
                    mean_interval(rise),
                    above(0.5),
                ),
                line("", "with it", mean_interval(flat), near(0.0, 0.2)),
            ],
        ),
        line(
            "S2-05",
            "x + f(x): ln growth over 24 blocks, 8 blocks' rate less measured",
            mean_interval(predicted),
            near(0, 1.0),
        ),
        line("S2-14", "bare chain's ln G_0 a block", a_block("bare", "gradient", 0), below(-0.02)),
        all_of(
            "S2-17",
            [
                line(
                    "",
                    "log10 of the first block's gradient at 80 and 96 blocks, bare",
                    mean_interval(exploding("bare").mean(1)),
                    below(-6.0),
                ),
                line("", "f(norm(x))", mean_interval(exploding("none").mean(1)), below(-6.0)),
                line("", "pre-norm", mean_interval(exploding("pre_norm").mean(1)), near(0.0, 1.5)),
            ],
        ),
        line(
            "S2-19",
            "post-norm's doublings of G from the last to the first sublayer",
            mean_interval(doublings),
            near(0, 1),
        ),
        all_of(
            "S2-20",
            [
                law("", "pre_norm", "additive"),
                line("", "r_S against depth, exponent", against_depth("pre_norm", "stream", -1), half),
            ],
        ),
        line(
            "S2-22", "ln of logits at 48 over at 3 blocks without final norm", mean_interval(rise), above(0.5)
        ),
        all_of(
            "S3-02",
            [
                line("", "bare chain's ln G_0 a block", a_block("bare", "gradient", 0), below(-0.02)),
                line(
                    "",
                    "pre-norm's G_0 against depth, exponent",
                    against_depth("pre_norm", "gradient", 0),
                    near(0, 0.5),
                ),
            ],
        ),
        line(
            "S3-06",
            "post-norm's doublings of G from the first sublayer to the last",
            mean_interval(-doublings),
            above(1.0),
        ),
        line(
            "S3-07",
            "pre-norm's last feed-forward gradient against depth, exponent",
            against_depth("pre_norm", "last_down"),
            down,
        ),
        line("S3-11", "r_S against depth, exponent", against_depth("pre_norm", "stream", -1), half),
        line(
            "S3-12",
            "ln of what the last 8 sublayers write over the first 8",
            mean_interval(write),
            near(0.0, 0.35),
        ),
        line("S3-13", "rho against the sublayer, exponent", rho_slope, down),
        line(
            "S4-02",
            f"share of tokens named by their state at {deep} blocks, pre-norm less f(norm(x))",
            mean_interval(skip_less),
            above(0.1),
        ),
        line("S4-07", "ln of |J of the update| r, last 8 over sublayers 3 to 10", decay, near(0.0, 0.7)),
        line(
            "S4-08",
            "pre-norm's doublings of G from the last to the first sublayer, which post-norm lacks",
            radial,
            above(1.0),
        ),
        line(
            "S3-15",
            "log2 of rho, last 8 sublayers over first 8",
            mean_interval(np.log2(pre["rho"][:, -8:].mean(1) / pre["rho"][:, :8].mean(1))),
            below(-1.0),
        ),
    ]


BASE = {
    "model.depth": 8,
    "model.width": 64,
    "model.heads": 4,
    "model.kv_heads": 4,
    "model.context": 64,
    "model.initialization": "plain",
    "execution.remat": "none",
    "data.batch": 16,
    "data.validation_tokens": 65536,
    "optimizer.learning_rate": 3e-3,
    "optimizer.warmup": 0.1,
}
STEPS, WINDOWS, PLACES = 600, 64, 512


class Trained(NamedTuple):
    """One run, measured on held-out windows."""

    loss: np.ndarray
    """[W], nats per token of each window."""
    lesions: np.ndarray
    """[S, W], loss without a sublayer less the loss."""
    rho: np.ndarray
    """[S]."""
    states: np.ndarray
    """[S + 1, K, D] of some tokens."""
    longer: tuple[float, float]
    """Loss of the second half of windows twice as long as trained, and of the first."""


@functools.cache
def trained(residual: str, seed: int) -> Trained:
    """Train a small model and measure it."""
    config = build_config({}, {**BASE, "model.residual": residual, "run.seed": seed, "run.steps": STEPS})
    task = language_task(config)
    model, key = task.model, jax.random.key(seed)
    state = first_state(model, config, quick(task.init)(key))
    step = jax.jit(make_step(model, config, task.loss), donate_argnums=0)
    for number in range(STEPS):
        state, _ = step(state, task.train[number], key)
    params = jax.device_get(state.params)
    rows = [batch for _, batch in zip(range(WINDOWS // config.data.batch), task.validation, strict=False)]
    tokens, targets = (
        jnp.asarray(np.concatenate([getattr(b, n) for b in rows])) for n in ("inputs_BT", "targets_BT")
    )

    def losses(params: Params, tokens: Array, targets: Array) -> Array:
        logits: Any = model.apply({"params": params}, tokens)
        log_p = jax.nn.log_softmax(logits)
        return -jnp.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0]

    of_windows = lambda params: losses(params, tokens, targets).mean(-1)  # noqa: E731
    whole = np.asarray(jax.jit(of_windows)(params))
    without = np.asarray(jax.jit(lambda p: lesion_losses(model.config, of_windows, p))(params))
    probed = model.clone(observe=StreamProbe(("sizes",)))
    made: Any = jax.jit(lambda p: probed.apply({"params": p}, tokens, mutable=["observed"])[1])(params)
    rho = np.asarray(stream_profile(made["observed"]).values["relative_update"])
    places = np.random.default_rng(0).choice(tokens.size, PLACES, replace=False)
    stack_at: Any = lambda p: stack_of(model, p, tokens)  # noqa: E731
    states = jax.jit(lambda p: token_states(stack_at(p), places))(params)
    pairs = lambda x: x.reshape(-1, 2 * x.shape[1])  # noqa: E731
    both = np.asarray(jax.jit(losses)(params, pairs(tokens), pairs(targets)))
    half = both.shape[1] // 2
    longer = float(both[:, half:].mean()), float(both[:, :half].mean())
    return Trained(whole, without - whole, rho, np.asarray(states), longer)


def after_training() -> list[Line]:
    """Return what is measured on trained runs; intervals are over held-out windows of one run."""
    pre, again, post = trained("pre_norm", 0), trained("pre_norm", 1), trained("post_norm", 0)
    count = len(pre.rho)
    below, above = Claim(low=-np.inf, high=0.0), Claim(low=0.0, high=np.inf)

    def late(run: Trained) -> Estimate | Refusal:
        halves = run.lesions[count // 2 :].mean(0) - run.lesions[: count // 2].mean(0)
        return mean_interval(halves)

    def rank(run: Trained) -> float:
        return float(spearmanr(run.rho, run.lesions.mean(1))[0])  # pyright: ignore[reportArgumentType]

    def alike(one: Trained, other: Trained) -> np.ndarray:
        return np.array([float(linear_cka(a, b)) for a, b in zip(one.states, other.states, strict=True)])

    kinds = [pre.lesions[first::2].mean(0) for first in (0, 1)]
    spread = mean_interval(pre.lesions.max(0) - np.median(pre.lesions, axis=0))
    same, other = alike(pre, again)[1:], alike(pre, post)[1:]
    worst = int(pre.lesions.mean(1).argmax())
    ranks = [rank(pre), rank(again)]
    far, near_half = pre.longer
    more = mean_interval(
        (post.lesions[count // 2 :].mean(0) / post.lesions.mean(0))
        - (pre.lesions[count // 2 :].mean(0) / pre.lesions.mean(0))
    )
    by = "trained"
    return [
        line("S3-04", f"largest lesion (sublayer {worst + 1}) less the median one, nats", spread, above, by),
        line("S3-09", "late half's share of the lesions, post-norm less pre-norm", more, above, by),
        line("S3-14", "late half's mean lesion less the early half's, nats", late(pre), below, by),
        Line(
            "S4-03",
            f"relative update: median {np.median(pre.rho):.2g}, largest {pre.rho.max():.2g}, said below 1",
            AGREED if pre.rho.max() < 1 else CORRECTED,
            by,
        ),
        line(
            "S2-28",
            "mean lesion of a feed-forward less of an attention, nats (all tokens, not facts)",
            mean_interval(kinds[1] - kinds[0]),
            above,
            by,
        )._replace(verdict=OPEN),
        Line(
            "S4-13",
            f"Spearman of relative update and lesion: {ranks[0]:+.2f} and {ranks[1]:+.2f} in two runs, no interval",
            OPEN,
            by,
        ),
        Line(
            "S4-14",
            f"CKA by layer of two seeds {same.mean():.3f}, of pre-norm and post-norm {other.mean():.3f}: one pair each",
            OPEN,
            by,
        ),
        Line(
            "S1-57",
            f"loss of the second {BASE['model.context']} tokens of windows twice as long {far:.3f} nats, of the first "
            f"{near_half:.3f}: rope alone, scale not varied",
            OPEN,
            by,
        ),
    ]


class Elsewhere(NamedTuple):
    """A prediction of another experiment: the row of its results that answers a claim."""

    experiment: str
    row: Mapping[str, str]
    what: str


ELSEWHERE: Mapping[str, Elsewhere] = {
    "S3-23": Elsewhere(
        "residual_growth",
        {"item": "1", "arm": "attention_residual", "quantity": "slope"},
        "what is read, exponent in l",
    ),
}


def elsewhere() -> list[Line]:
    """Return the claims that other experiments answer, as their results stand."""
    lines = []
    for claim, (experiment, wanted, what) in ELSEWHERE.items():
        with (HERE / "results" / f"{experiment}.csv").open(encoding="utf-8") as file:
            (row,) = (r for r in csv.DictReader(file) if all(r[k] == v for k, v in wanted.items()))
        low, high = float(row["low"]), float(row["high"])
        words = f"{what}: {row['found']} [{row['low']}, {row['high']}], said not above 0"
        verdict = AGREED if high <= 0 else CORRECTED if low > 0 else OPEN
        lines.append(Line(claim, words, verdict, f"experiments/{experiment}.py"))
    return lines


def tested(*, run: bool) -> list[Line]:
    """Return the claims that tests hold, by a run of those tests."""
    rows = {name: row for name, row in CLAIMS.items() if row["status"] == "test"}
    outcomes = _run_tests(sorted({test for row in rows.values() for test in row["tests"]})) if run else {}
    lines = []
    for name, row in rows.items():
        results = [outcomes.get(test) for test in row["tests"]]
        count = f"{len(results)} test{'s' if len(results) > 1 else ''}"
        if None in results:
            lines.append(Line(name, f"{count}, not run", OPEN, "tests"))
            continue
        if not all(results):
            lines.append(Line(name, f"{results.count(False)} of {count} failed", OPEN, "tests"))
            continue
        rest = f"; left: {row['rest']}" if "rest" in row else ""
        words = CORRECTIONS.get(name, row["claim"])
        lines.append(
            Line(
                name, f"{words} ({count} passed{rest})", CORRECTED if name in CORRECTIONS else AGREED, "tests"
            )
        )
    return lines


def _run_tests(names: Sequence[str]) -> dict[str, bool]:
    """Run tests; return whether every case of each passed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-n", "2", f"--junitxml={report}", *names]
        subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=False)
        cases = ElementTree.parse(report).iter("testcase")
        found: dict[str, bool] = {}
        for case in cases:
            path = case.get("classname", "").replace(".", "/") + ".py"
            name = f"{path}::{case.get('name', '').partition('[')[0]}"
            found[name] = found.get(name, True) and not len(case.findall("failure") + case.findall("error"))
    return found


def write(lines: Sequence[Line], *, run: str) -> str:
    """Write and return the page."""
    counts = Counter(entry.verdict for entry in lines)
    parts = [
        "# What the texts say",
        f"{run} on {jax.default_backend()}; jax {jax.__version__}, Python {sys.version.split()[0]}.",
        f"{len(lines)} claims: " + ", ".join(f"{counts[v]} {v}" for v in (AGREED, CORRECTED, OPEN)) + ".",
        f"At initial values: width {WIDTH}, 4 heads, ReLU, {BATCH} x {LENGTH} random tokens, {SEEDS} seeds, mean and "
        f"95 % t interval. Trained: {BASE['model.depth']} blocks, width {BASE['model.width']}, {STEPS} steps; "
        "intervals are there over held-out windows of one run, not over seeds. Bands and sources: `python -m pydoc "
        f"experiments.{NAME}`; the claims are those of `tests/claims.toml`.",
    ]
    for text in ("S0", "S1", "S2", "S3", "S4"):
        rows = [entry for entry in lines if entry.claim.startswith(text)]
        table = ["| claim | it says | measured | verdict | by |", "| --- | --- | --- | --- | --- |"]
        for entry in rows:
            said = CLAIMS[entry.claim]["claim"].replace("|", "\\|")
            found = entry.found.replace("|", "\\|")
            table.append(f"| {entry.claim} | {said} | {found} | {entry.verdict} | {entry.by} |")
        parts += [f"## {text}", "\n".join(table)]
    page = "\n\n".join(parts) + "\n"
    (HERE / "results" / f"{NAME}.md").write_text(page, encoding="utf-8")
    return page


def main() -> int:
    """Measure, write, print."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument(
        "--no-tests", action="store_true", help="say of exact claims that their tests were not run"
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of the page")
    arguments = parser.parse_args()
    begun = time.perf_counter()
    found: dict[str, Line] = {}
    for name, part in (("elsewhere", elsewhere), ("start", at_start), ("trained", after_training)):
        found |= {entry.claim: entry for entry in part()}
        print(f"{name}: {time.perf_counter() - begun:.0f} s", file=sys.stderr)
    by_tests = {entry.claim: entry for entry in tested(run=not arguments.no_tests)}
    print(f"tests: {time.perf_counter() - begun:.0f} s", file=sys.stderr)
    lines = []
    for claim, row in CLAIMS.items():
        here, test = found.get(claim), by_tests.get(claim)
        if here is not None and test is not None:
            here = Line(
                claim, f"{test.found}; {here.found}", all_of(claim, [test, here]).verdict, f"tests, {here.by}"
            )
        nothing = Line(claim, f"nothing yet: {row.get('where', '')}", OPEN, "nothing yet")
        lines.append(here or test or nothing)
    words = " --no-tests" if arguments.no_tests else ""
    page = write(lines, run=f"`python -m experiments.{NAME}{words}`: {time.perf_counter() - begun:.0f} s")
    print(json.dumps([entry._asdict() for entry in lines]) if arguments.json else page)
    return 0


if __name__ == "__main__":
    sys.exit(main())

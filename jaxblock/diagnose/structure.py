"""What the block is from how it behaves: shapes, the place of norms and skips, the exit, branches at 0."""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxblock.axes import path_name
from jaxblock.config import ModelConfig
from jaxblock.diagnose.finding import FAIL, PASS, WARN, Control, Finding, skipped
from jaxblock.diagnose.planted import (
    Doubled,
    Flipped,
    PreNorm,
    Skipless,
    Stopped,
    Widened,
    drawn,
    small_model,
)
from jaxblock.diagnose.subject import Subject, as_float, quick
from jaxblock.invariants import (
    describe_block,
    describe_exit,
    find_shared_norms,
    probe_zero_branches,
    switch_block,
    switch_exit,
)
from jaxblock.invariants import zero_branches as zeroed
from jaxblock.residual.contract import open_array
from jaxblock.types import Array

WRONG = ("second norm after the add", "norm on the skip path", "has a skip", "no_norm")
"""Parts of the names of wirings that are mistakes wherever they are found."""
EXPECTED = ("none", "pre_norm", "post_norm", "peri_norm", "branch_norm")
"""Registry names that are names of wirings, too."""
ROUND_OFF = 1e-5


def shapes(subject: Subject) -> Finding:
    """Step 2: every branch reads and writes [B, T, D], and so does the stream, in the dtypes of the config."""
    config, batch = subject.model.config, subject.batch
    _, made = jax.eval_shape(lambda params: subject.task.forward(params, batch, None), subject.params)
    rows, length = batch.inputs_BT.shape
    want = (config.depth, rows, length, config.width)
    dtype = "float32" if config.dtype == "bfloat16" else "bfloat16"
    model = subject.model.clone(config=dataclasses.replace(config, dtype=dtype))
    run = lambda params: model.apply({"params": params}, batch.inputs_BT, mutable=["intermediates"])  # noqa: E731
    other = jax.eval_shape(run, subject.params)[1]["intermediates"]
    bad, count = _misshapen(made["blocks"], want, config)
    planted, _ = _misshapen(other["blocks"], want, config)
    refused = False
    try:
        jax.eval_shape(small_model(Widened).init, jax.random.key(0), jnp.zeros((2, 4), jnp.int32))
    except (AssertionError, ValueError, TypeError):
        refused = True
    return Finding(
        FAIL if bad else PASS,
        f"{count - len(bad)} of {count} arrays of the blocks are [{rows}, {length}, {config.width}]"
        + (f"; not {bad[0]}" if bad else f", the stream {config.stream_dtype}"),
        float(len(bad)),
        "none of another shape or dtype",
        Control(
            "branches in another dtype; and a connection that adds a row, which is refused",
            float(len(planted)),
            bool(planted) and refused,
        ),
        "the projection back to the width, and broadcasting in an addition",
    )


def _misshapen(blocks: Any, want: tuple[int, ...], config: ModelConfig) -> tuple[list[str], int]:
    """Return which recorded arrays of the blocks have another shape or dtype, and how many there are."""
    recorded = re.compile(r"resid_(pre|mid|post)|(attention|token_mixer|feed_forward|parallel)_(in|out)")
    found = jax.tree_util.tree_leaves_with_path(blocks)
    leaves = [(str(path[0].key), x) for path, x in found if recorded.fullmatch(str(path[0].key))]
    dtype = lambda name: config.stream_dtype if name.startswith("resid") else config.dtype  # noqa: E731
    bad = [
        f"{name} {x.dtype}{list(x.shape)}" for name, x in leaves if x.shape != want or x.dtype != dtype(name)
    ]
    return bad, len(leaves)


def wiring(subject: Subject) -> Finding:
    """What a block is: where its norms stand and which sublayers have a skip, from fifty calls of it."""
    model, name = subject.exact, subject.model.config.residual.partition("(")[0]
    reason = _no_block(model)
    if reason:
        return skipped(reason)
    found = _describe(model, subject.stirred)
    published = subject.model.topology is None
    own = published and name in EXPECTED
    wrong = (
        name not in found.split(" or ") if own else not published and any(words in found for words in WRONG)
    )
    plain = small_model(Skipless)
    planted = _describe(plain, drawn(plain))
    unclear = found.startswith("unknown") and not published
    return Finding(
        FAIL if wrong else WARN if unclear else PASS,
        f"a block behaves as {found!r}" + (f"; the config says {name!r}" if wrong and own else ""),
        None,
        f"{name!r}"
        if own
        else f"{name!r}, a published rule with an equation of its own"
        if published
        else "no wiring known to be a mistake",
        Control("a feed-forward without skip", None, any(words in planted for words in WRONG)),
        "the connection's equation: x + f(norm(x)) and nothing after the addition"
        if wrong
        else "the equation of a rule of your own; diagnose knows eight wirings by their behaviour",
    )


def exit_norm(subject: Subject) -> Finding:
    """Whether logits follow the size of the stream: a final norm, or none."""
    if not subject.causal:
        return skipped("the exit of a classifier is its pooling; see padding")
    model, planted = subject.exact, small_model(PreNorm, final_norm=False)
    try:
        found = _exit(model, subject.stirred)
    except ValueError as error:
        return skipped(str(error))
    if found.name == "unknown" and model.topology is None:
        return skipped(
            "with branches at 0 this rule's stream is no multiple of the embedding: its exit is not told"
        )
    bare = _exit(planted, drawn(planted))
    return Finding(
        PASS if found.name == "normalized" else FAIL if found.name.startswith("missing") else WARN,
        f"logits of a stream 16 times as large differ by {found.invariant:.2g}: {found.name}",
        found.invariant,
        "0 to round-off (5e-3)",
        Control("no final norm", bare.invariant, bare.name.startswith("missing")),
        "final_norm of the topology, and that nothing comes after it but the head",
    )


def norms_apart(subject: Subject) -> Finding:
    """Each norm parameter acts in one sublayer; a norm instance used twice acts in both."""
    model = subject.exact
    reason = _no_block(model)
    if reason:
        return skipped(reason)
    if model.config.wiring == "parallel":
        return skipped("a parallel block has one norm by construction")

    paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(subject.stirred["blocks"])]
    if not any("norm" in path for path in paths):
        return skipped("its connections have no norm with parameters")
    found = find_shared_norms(jax.jit(switch_block(model)), subject.stirred, _stream(model))
    bare = _shared_control(model.config)
    shared = [*found.shared]
    return Finding(
        FAIL if shared else PASS,
        f"{len(shared)} norm parameters act in both sublayers" + (f": {shared[0]}" if shared else ""),
        float(len(shared)),
        "0",
        Control("one norm for both sublayers", float(bare), bare > 0),
        "two norms with names of their own, a scale each",
    )


def zero_branches(subject: Subject) -> Finding:
    """Step 4: with every branch at 0 the stack is what its topology declares, for most the embedding itself.

    Where it is the embedding, so is the stream after every sublayer, and so is the gradient on its way back.
    """
    model = subject.exact
    if not subject.causal:
        return skipped("asked of language models")
    topology = model.connections
    if topology.zero_branch is None:
        return skipped("the topology declares nothing of it")
    tokens_BT = subject.batch.inputs_BT[:, :8] if _cuts(model) else subject.batch.inputs_BT
    error = as_float(
        quick(functools.partial(probe_zero_branches, model))(_with_connections(subject), tokens_BT).error
    )
    x_BTD = jnp.ones((1, 1, model.config.width))
    keeps = topology.open is open_array and topology.zero_branch(model.config, x_BTD) is x_BTD
    if keeps and topology.groups is None:
        error = max(error, _kept(model, _with_connections(subject), tokens_BT))
    controls = []
    for connection in (Doubled, Flipped, Stopped):
        second = small_model(connection)
        ids = tokens_BT[:, : second.config.context] % second.config.vocab_size
        controls.append(_kept(second, drawn(second), ids))
    bare = min(controls)
    return Finding(
        PASS if error < ROUND_OFF else FAIL,
        f"with both branches of every block at 0 the stream is {error:.2g} from what the topology declares"
        + (", after every sublayer, and so its gradient" if keeps else ""),
        error,
        f"below {ROUND_OFF:g}",
        Control("a skip of 2 x, of -x, of stop_gradient(x): least", bare, not bare < ROUND_OFF),
        "what stands on the skip path besides x; the line on the wiring says what a block behaves as",
    )


def _kept(model: Any, params: Any, tokens_BT: Array) -> float:
    """Return how far the stream with branches at 0 is from the opened one anywhere, and its gradient from what it was.

    The gradient with respect to the embedding's table of <w, last stream> is held against that of <w, first stream>.
    """

    @quick
    def distances(params: Any) -> Array:
        def streams(table: Array) -> tuple[Array, Array]:
            own = zeroed({**params, "embedding": {"table": table}})
            _, made = model.apply({"params": own}, tokens_BT, mutable=["intermediates"])
            kept = made["intermediates"]
            blocks = kept["blocks"]
            all_NBTD = jnp.concatenate(
                [blocks[n] for n in ("resid_pre", "resid_mid", "resid_post") if n in blocks]
            )
            return jnp.concatenate([all_NBTD, kept["resid_final"][None]]), kept["resid_final"]

        table = params["embedding"]["table"]
        (all_NBTD, last_BTD), pull = jax.vjp(streams, table)
        w_BTD = jnp.cos(jnp.arange(last_BTD.size, dtype=jnp.float32)).reshape(last_BTD.shape)
        first = jnp.zeros_like(all_NBTD).at[0].set(w_BTD)
        back = pull((jnp.zeros_like(all_NBTD), w_BTD))[0] - pull((first, jnp.zeros_like(w_BTD)))[0]
        return jnp.maximum(jnp.max(jnp.abs(all_NBTD - all_NBTD[:1])), jnp.max(jnp.abs(back)))

    found = as_float(distances(params))
    return found if np.isfinite(found) else float("inf")


def _no_block(model: Any) -> str:
    """Return why a block of this model cannot be described alone; nothing where it can."""
    if model.config.token_mixer_choice.name != "attention":
        return f"the token mixer {model.config.token_mixer!r} is not attention: its block is not described"
    if model.config.experts_choice.name != "none":
        return "a mixture of experts jumps where the choice of experts changes: its block is not described"
    if model.config.value_residual_choice.name != "none":
        return "values of the first block enter the others besides the stream"
    try:
        switch_block(model)
    except ValueError as error:
        return str(error)
    return ""


def _describe(model: Any, params: Any) -> str:
    apply = functools.partial(quick(switch_block(model)), params)
    try:
        return describe_block(apply, np.asarray(_stream(model))).name
    except ValueError as error:
        return f"unknown ({error})"


def _exit(model: Any, params: Any) -> Any:
    tokens_BT = jnp.arange(8)[None] % model.config.vocab_size
    return describe_exit(functools.partial(quick(switch_exit(model, tokens_BT)), params))


def _shared_control(config: ModelConfig) -> int:
    """Return how many norm parameters of a block with one norm for both sublayers act in both."""
    draw = np.random.default_rng(0)
    d = config.width
    up, down = (jnp.asarray(draw.normal(size=(d, d)) / d**0.5, jnp.float32) for _ in range(2))

    def apply(params: Any, x: Array, attention: Array, feed_forward: Array) -> Array:
        norm = lambda x: params["norm"]["scale"] * x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True))  # noqa: E731
        x = x + attention * jnp.tanh(norm(x) @ up)
        return x + feed_forward * jnp.tanh(norm(x) @ down)

    params = {"norm": {"scale": jnp.ones((1, 1, d))}}
    x_BTD = jnp.asarray(draw.normal(size=(2, 4, d)), jnp.float32)
    return len(find_shared_norms(apply, params, x_BTD).shared)


def _stream(model: Any) -> Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, model.config.width)), jnp.float32)


def _cuts(model: Any) -> bool:
    return model.config.token_mixer_choice.name == "attention"


def _with_connections(subject: Subject) -> Any:
    """Return stirred branches with the connections' parameters as they start, where a topology says what it does."""
    is_branch: Callable[[str], Any] = re.compile(
        r"blocks/(attention|feed_forward|experts|token_mixer)/.*"
    ).fullmatch
    return jax.tree_util.tree_map_with_path(
        lambda path, stirred, initial: stirred if is_branch(path_name(path)) else initial.astype(jnp.float32),
        subject.stirred,
        subject.initial,
    )

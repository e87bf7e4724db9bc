"""Along depth: how much each sublayer writes, how the gradient comes back, and who gets none; and who is decayed.

Taken at the checkpoint, or, of a model not yet trained, after a few steps: initial values that are 0 (an output
kernel, a gate) hide the gradients of what they multiply, and that is no fault.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxblock.axes import Label, path_name, roles
from jaxblock.diagnose.finding import FAIL, PASS, WARN, Control, Finding, skipped
from jaxblock.diagnose.planted import Faded, drawn, small_model
from jaxblock.diagnose.subject import Subject, quick
from jaxblock.functional.losses import LossOptions, cross_entropy
from jaxblock.models.observation import TAPS
from jaxblock.probes import StreamProbe, gradient_profile, open_taps, stream_profile
from jaxblock.probes import stream_gradient as norms_of_taps
from jaxblock.residual.contract import NoGradient
from jaxblock.training.optimizer import make_optimizer
from jaxblock.training.step import first_state, make_step
from jaxblock.types import Array, Params

WARM = 3
"""Steps after which nothing that is to move still stands at 0."""
TENS, FADES = 10.0, 1e3
NOT_DECAYED = ("norm", "bias", "embedding", "position")
"""Roles of parameters that no weight decay may move."""


class Depth(NamedTuple):
    """What was measured along depth, after `WARM` steps or at the checkpoint."""

    profile: dict[str, np.ndarray]
    """By statistic, [S]; see `StreamProbe`."""
    branches: tuple[str, ...]
    stream_gradient: np.ndarray
    """[S + 1]; 0 before every sublayer where the stream is not one array."""
    leaves: dict[str, np.ndarray]
    """Root mean square of each parameter's gradient, [L] for the blocks', else []."""


def warmed(subject: Subject) -> Params:
    """Return the checkpoint's parameters, or those after a few steps on the subject's rows."""
    if subject.step is not None:
        return subject.params
    config = subject.config
    steps = {"schedule": "constant", "warmup": 0.0}
    run = config.model_copy(
        update={
            "optimizer": config.optimizer.model_copy(update=steps),
            "data": config.data.model_copy(update={"accumulation": 1}),
        }
    )
    step = quick(
        make_step(subject.model, run, lambda params, batch, key: subject.task.loss(params, batch, None))
    )
    state = first_state(subject.model, run, subject.params)
    for _ in range(WARM):
        state, _ = step(state, subject.batch, jax.random.key(0))
    return state.params


def measurer(subject: Subject) -> Callable[[Params], Depth]:
    """Return what measures everything by one forward and one backward pass of the task's own model."""
    probe = StreamProbe()
    model, batch = subject.model.clone(observe=probe), subject.batch
    taps = open_taps(model.config)
    # The probe's pass is the task's: padding and documents as training gives them.
    given = {"segments_BT": batch.segments_BT} if subject.causal else {"valid_BT": batch.valid_BT}

    @quick
    def both(params: Params) -> tuple[Any, Any, Any]:
        def loss(params: Params, taps: Any) -> tuple[Array, Any]:
            variables = {"params": params, TAPS: taps}
            logits, made = model.apply(variables, batch.inputs_BT, **given, mutable=["observed"])
            return _mean_loss(subject, logits), made["observed"]

        (_, observed), tapped = jax.value_and_grad(loss, argnums=1, has_aux=True)(params, taps)
        # Of the parameters the gradient is that of the task's own loss, whatever it is.
        gradient = jax.grad(lambda params: subject.task.loss(params, batch, None).loss)(params)
        return observed, tapped, _sizes(gradient)

    def measure(params: Params) -> Depth:
        observed, tapped, leaves = jax.device_get(both(params))
        profile = stream_profile(observed)
        gradient_S = np.asarray(norms_of_taps(tapped))
        values = {name: np.asarray(value, np.float64) for name, value in profile.values.items()}
        return Depth(values, profile.branches, gradient_S, leaves)

    return measure


def planted(subject: Subject, params: Params, *, factor: float) -> Params:
    """Return parameters whose first block's last sublayer has every kernel and bias multiplied by a factor."""
    both = "attention|token_mixer|" if subject.model.config.wiring == "parallel" else ""
    last = re.compile(rf"blocks/({both}feed_forward|experts)/.*(kernel|bias)")

    def leaf(path: tuple, x: Array) -> Array:
        return x.at[0].multiply(factor) if last.fullmatch(path_name(path)) else x

    return jax.tree_util.tree_map_with_path(leaf, params)


def _mean_loss(subject: Subject, logits: Array) -> Array:
    """Return the plain cross entropy, without smoothing and z-loss."""
    batch = subject.batch
    if subject.causal:
        options = LossOptions(vocab_size=subject.model.config.vocab_size)
        return cross_entropy(logits, batch.targets_BT, valid_BT=batch.valid_BT, options=options).loss
    return cross_entropy(logits[:, None], batch.labels_B[:, None], valid_BT=batch.real_B[:, None]).loss


def _sizes(gradient: Params) -> dict[str, Array]:
    """Return the largest entry of each parameter's gradient, by block where it has one."""

    def size(path: tuple, x: Array) -> Array:
        axes = tuple(range(1, x.ndim)) if path[0].key == "blocks" else None
        return jnp.max(jnp.abs(x.astype(jnp.float32)), axis=axes)

    leaves = jax.tree_util.tree_leaves_with_path(gradient)
    return {path_name(path): size(path, x) for path, x in leaves}


def _blocks_of(depth: Depth, values: np.ndarray) -> list[str]:
    """Return what each sublayer is called, in order."""
    count = len(depth.branches)
    return [f"block {s // count}, {depth.branches[s % count].replace('_', ' ')}" for s in range(len(values))]


def relative_update(depth: Depth, bare: Depth, *, planted: str) -> Finding:
    """Step 5: how much of the stream each sublayer writes; tens of times it is a rate, a start or a number gone wrong.

    Of a stream that is not one array: how large the branches' outputs are. `bare` is the control, measured, and
    `planted` what it has.
    """
    worst, place = _largest_write(depth)
    own = "relative_update" in depth.profile
    what = "|update| / |stream| is at most" if own else "the stream is not one array; branches write at most"
    verdict = lambda largest: FAIL if not np.isfinite(largest) else WARN if largest > TENS else PASS  # noqa: E731
    wild = _largest_write(bare)[0]
    return Finding(
        verdict(worst),
        f"{what} {worst:.2g} ({place})",
        worst,
        f"below {TENS:g}, and finite",
        Control(planted, wild, verdict(wild) != PASS),
        "the learning rate, the initial values of that branch, a mask that lets a strange value through",
    )


def _largest_write(depth: Depth) -> tuple[float, str]:
    name = "relative_update" if "relative_update" in depth.profile else "output_rms"
    size_S = depth.profile[name]
    size_S = np.where(np.isnan(size_S), np.inf, size_S)
    worst = int(size_S.argmax())
    return float(size_S[worst]), _blocks_of(depth, size_S)[worst]


def stream_gradient(depth: Depth) -> Finding:
    """Step 6: the gradient of the stream before every sublayer, from the closed stream back to the embedding."""
    if not depth.stream_gradient[:-1].any():
        return skipped("the stream is not one array: there is no gradient before a sublayer to compare")
    ratio_S, faded_S = _against_last(depth.stream_gradient), _against_last(_faded())
    fades = lambda ratio_S: bool((ratio_S > FADES).any() or (ratio_S < 1 / FADES).any())  # noqa: E731
    per = ratio_S[0] ** (1 / len(ratio_S))
    return Finding(
        FAIL if not np.isfinite(ratio_S).all() else WARN if fades(ratio_S) else PASS,
        f"from the last stream back to the first the gradient's norm changes {ratio_S[0]:.3g} times, {per:.3g} a "
        "sublayer",
        float(ratio_S[0]),
        f"between {1 / FADES:g} and {FADES:g} times everywhere",
        Control("f(x) / 20 without skip and norm", float(faded_S[0]), fades(faded_S)),
        "where the skip path is scaled or normed: a factor c a block compounds to c^L",
    )


def _faded() -> np.ndarray:
    """Return the norms of the gradient where nothing is skipped and every branch is small."""
    model, tokens_BT = small_model(Faded), jnp.arange(8)[None]

    def loss(variables: Any) -> Array:
        logits_BTV: Any = model.apply(variables, tokens_BT)
        return jnp.sum(jnp.square(logits_BTV))

    found = quick(lambda params: gradient_profile(model.config, loss, params).stream_S)
    return np.asarray(found(drawn(model)))


def _against_last(norms_S: np.ndarray) -> np.ndarray:
    """Return the norms before every sublayer over that of the closed stream, [S]; infinite where it has none."""
    inner_S, last = norms_S[:-1], float(norms_S[-1])
    ratio_S = inner_S / last if last > 0 else np.full_like(inner_S, np.inf)
    return np.where(np.isnan(ratio_S), np.inf, ratio_S)


def dead_layers(depth: Depth, bare: Depth) -> Finding:
    """A sublayer none of whose kernels gets a gradient will never learn, whether it writes something or not."""
    names, found, control = _blocks_of(depth, depth.profile["output_rms"]), _dead(depth), _dead(bare)
    return Finding(
        FAIL if found else PASS,
        f"{len(found)} of {len(names)} sublayers have no kernel with a gradient"
        + (f": {names[found[0]]}" if found else ""),
        float(len(found)),
        "0",
        Control("block 0's feed-forward kernels at 0", float(len(control)), len(control) > len(found)),
        "an activation that is always off, a kernel or gate of 0 before one of 0, stop_gradient",
    )


def _dead(depth: Depth) -> list[int]:
    """Return the sublayers that are dead, by number."""
    found = []
    for s in range(len(depth.profile["output_rms"])):
        block, branch = divmod(s, len(depth.branches))
        if all(gradient[block] == 0 for gradient in _kernels_of(depth.branches[branch], depth.leaves)):
            found.append(s)
    return found


def _kernels_of(branch: str, leaves: dict[str, np.ndarray]) -> list[np.ndarray]:
    modules = {"parallel": "attention|feed_forward", "feed_forward": "feed_forward|experts"}.get(
        branch, branch
    )
    found = re.compile(rf"blocks/({modules})/(?!router).*kernel")  # a router learns from the balance alone
    return [x for name, x in leaves.items() if found.fullmatch(name)]


def idle_leaves(depth: Depth, bare: Depth, subject: Subject) -> Finding:
    """Every parameter of every block gets a gradient, but for what its topology declares."""
    declared = [*subject.model.connections.no_gradient]
    if subject.model.config.value_residual_choice.name == "learned":
        declared.append(NoGradient("blocks/attention/value_mix", 0, "block 0 has no values but its own"))
    found, control = _idle(depth, declared), _idle(bare, declared)
    total = sum(np.size(x) for x in depth.leaves.values())
    only_experts = all("/experts/" in name for name in found)
    return Finding(
        PASS if not found else WARN if only_experts else FAIL,
        f"{len(found)} of {total} parameters (each block's its own) get no gradient"
        + (f": {', '.join(found[:2])}" if found else ""),
        float(len(found)),
        "0, but for what the topology declares",
        Control("block 0's feed-forward kernels at 0", float(len(control)), len(control) > len(found)),
        "a parameter that nothing reads, two factors that both start at 0, stop_gradient, a mask that hides its input",
    )


def _idle(depth: Depth, declared: Sequence[NoGradient]) -> list[str]:
    """Return the parameters whose gradient is exactly 0, or no number, and that nothing declares so."""
    found = []
    for name, size in depth.leaves.items():
        for block in np.flatnonzero(np.atleast_1d(~(size > 0))):
            known = any(
                re.fullmatch(rule.pattern, name)
                and (rule.block is None or rule.block % max(np.size(size), 1) == block)
                for rule in declared
            )
            if not known:
                found.append(f"{name}, block {block}" if np.ndim(size) else name)
    return found


def decay(subject: Subject) -> Finding:
    """With gradients of 0 the optimizer moves what it decays: that must be no norm, bias, or table of embeddings.

    What connections decay of their own is declared by their topology, and not judged.
    """
    config = subject.config.optimizer.model_copy(update={"weight_decay": 0.1})
    names = {path_name(path): role for (path, _), role in _roles(subject.params)}

    def decayed(labels: tuple) -> list[str]:
        optimizer = make_optimizer(config, labels, scaling=subject.model.scaling)

        @quick
        def moved(params: Params) -> dict[str, Array]:
            still = jax.tree.map(jnp.zeros_like, params)
            updates, _ = optimizer.update(still, optimizer.init(params), params)
            leaves = jax.tree_util.tree_leaves_with_path(updates)
            return {path_name(path): jnp.max(jnp.abs(x)) for path, x in leaves}

        params = jax.tree.map(lambda x, y: x.astype(y.dtype), subject.stirred, subject.params)
        found = jax.device_get(moved(params))
        return [name for name, size in found.items() if size > 0 and names[name] in NOT_DECAYED]

    found = decayed(subject.model.labels)
    bare = decayed((Label(".*(norm/scale|bias|table)", decay=True),))
    return Finding(
        FAIL if found else PASS,
        f"{len(found)} norm parameters, biases and tables shrink without a gradient"
        + (f": {found[0]}" if found else ""),
        float(len(found)),
        "0",
        Control("a label that decays norms, biases and tables", float(len(bare)), bool(bare)),
        "the optimizer's decay mask and the topology's labels",
    )


def _roles(params: Params) -> Any:
    return zip(jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(roles(params)), strict=True)

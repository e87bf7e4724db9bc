"""Every mistake that has the right shapes is caught when it is planted, and a right model passes every check.

Mistakes are planted in the code that runs (a mask, a pooling, a connection, a label), not in what the checks plant
themselves as controls.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxblock.modules.attention as attention_module
from jaxblock import ModelConfig
from jaxblock.axes import Label
from jaxblock.diagnose import (
    CHECKS,
    FAIL,
    PASS,
    SKIP,
    WARN,
    Control,
    Finding,
    Measured,
    Subject,
    gradients,
    official,
    run_checks,
    subject_of_config,
)
from jaxblock.diagnose.finding import settle
from jaxblock.diagnose.planted import Faded, PreNorm, drawn, small_model
from jaxblock.models import Block
from jaxblock.models.classifier import POOLINGS
from jaxblock.models.trunk import Trunk
from jaxblock.modules import Norm
from jaxblock.probes import gradient_profile
from jaxblock.residual import Topology, place, topology
from jaxblock.training.config_file import build_config
from jaxblock.types import Array, Branch
from tests.claims.claims import equations
from tests.small_runs import write_text

TINY = {
    "model.context": 16,
    "model.depth": 2,
    "model.width": 16,
    "model.heads": 2,
    "model.kv_heads": 1,
    "data.batch": 4,
    "data.validation_tokens": 200,
    "optimizer.learning_rate": 0.02,
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("data") / "text.jsonl")


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw = np.random.default_rng(0)
    words = {"low": "abcd", "high": "wxyz"}
    rows = [
        {"text": "".join(draw.choice(list(words[label]), draw.integers(3, 14))), "label": label}
        for label in ["low", "high"] * 20
    ]
    path = tmp_path_factory.mktemp("data") / "labelled.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


def subject(path: Path, *, rule: Topology | None = None, **changes: Any) -> Subject:
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    return subject_of_config(build_config({}, {**TINY, "data.path": str(path), **changes}), topology=rule)


def ask(name: str, given: Subject) -> Finding:
    (row,) = run_checks(Measured(given), [name])
    return row.finding


def changed(given: Subject, **parts: Any) -> Subject:
    return dataclasses.replace(given, task=dataclasses.replace(given.task, **parts))


@pytest.fixture(scope="module")
def right(text: Path) -> dict[str, Finding]:
    return {row.name: row.finding for row in run_checks(Measured(subject(text)))}


@pytest.mark.parametrize("name", CHECKS)
def test_s4_11_a_right_model_passes_and_every_control_is_caught(right: dict[str, Finding], name: str) -> None:
    finding = right[name]
    assert finding.verdict == PASS, finding
    assert finding.control is not None
    assert finding.control.caught


class OnPath(nn.Module):
    config: ModelConfig

    @nn.compact
    def __call__(self, x: Array, f: Branch) -> Array:
        h = Norm(self.config, name="norm")(x)
        return h + f(h)


class SecondNorm(nn.Module):
    config: ModelConfig

    @nn.compact
    def __call__(self, x: Array, f: Branch) -> Array:
        return Norm(self.config, name="after")(x + f(Norm(self.config, name="norm")(x)))


class NoAttentionSkip(nn.Module):
    config: ModelConfig

    @nn.compact
    def __call__(self, x: Array, f: Branch) -> Array:
        y = f(Norm(self.config, name="norm")(x))
        return y if str(self.name).startswith("attention") else x + y


class DeadBlock(nn.Module):
    config: ModelConfig

    @nn.compact
    def __call__(self, x: Array, f: Branch) -> Array:
        alive = (place(self).block != 1).astype(x.dtype)
        return x + alive * f(Norm(self.config, name="norm")(x))


class UnreadScale(nn.Module):
    config: ModelConfig

    @nn.compact
    def __call__(self, x: Array, f: Branch) -> Array:
        gate = self.param("gate", nn.initializers.ones, (self.config.width,))
        return x + jax.lax.stop_gradient(gate).reshape(1, 1, -1) * f(Norm(self.config, name="norm")(x))


class Negated(nn.Module):
    config: ModelConfig

    @nn.compact
    def __call__(self, x: Array, f: Branch) -> Array:
        return -x + f(Norm(self.config, name="norm")(x))


class NoGradientSkip(nn.Module):
    config: ModelConfig

    @nn.compact
    def __call__(self, x: Array, f: Branch) -> Array:
        return jax.lax.stop_gradient(x) + f(Norm(self.config, name="norm")(x))


class OtherRow(nn.Module):
    config: ModelConfig

    @nn.compact
    def __call__(self, x: Array, f: Branch) -> Array:
        return x + f(Norm(self.config, name="norm")(x) - x.mean(axis=0, keepdims=True))


def rule(connection: Any, **fields: Any) -> Topology:
    return Topology(connection, "planted", "planted", **fields)


PRE_NORM = topology("pre_norm")
DECAYED_TABLE = dataclasses.replace(PRE_NORM, labels=(Label(".*table", decay=True),))
DECAYED = dataclasses.replace(PRE_NORM, labels=(Label("blocks/.*norm/scale", decay=True),))
RULES = {
    "norm on the skip path": ("wiring", rule(OnPath)),
    "second norm after the add": ("wiring", rule(SecondNorm)),
    "one skip missing": ("wiring", rule(NoAttentionSkip)),
    "missing final norm": ("final_norm", dataclasses.replace(PRE_NORM, final_norm=False)),
    "dead layer": ("dead_layers", rule(DeadBlock)),
    "zero-gradient leaf": ("idle_parameters", rule(UnreadScale)),
    "decay on norms": ("weight_decay", DECAYED),
    "decay on tables": ("weight_decay", DECAYED_TABLE),
    "a skip of the wrong sign": ("zero_branches", rule(Negated)),
    "a skip without gradient": ("zero_branches", rule(NoGradientSkip)),
    "a mean over rows": ("rows", rule(OtherRow)),
}


SLOW = (
    "a skip without gradient",
    "decay on tables",
    "second norm after the add",
    "one skip missing",
)
"""Caught by the line, and by the code, that catches another one by default."""


@pytest.mark.parametrize(
    "mistake", [pytest.param(m, marks=pytest.mark.full) if m in SLOW else m for m in RULES]
)
def test_s4_11_a_wrong_rule_is_caught(text: Path, mistake: str) -> None:
    check, planted = RULES[mistake]
    finding = ask(check, subject(text, rule=planted))
    assert finding.verdict == FAIL, finding
    assert finding.look
    if check == "wiring":
        words = {"one skip missing": "only the feed-forward sublayer has a skip"}.get(mistake, mistake)
        assert words in finding.found


def test_an_inverted_mask_is_caught(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given, pattern = subject(text), Trunk._pattern
    monkeypatch.setattr(
        Trunk,
        "_pattern",
        lambda self, *, valid_BT=None, segments_BT=None: pattern(
            self, valid_BT=None if valid_BT is None else ~valid_BT, segments_BT=segments_BT
        ),
    )
    assert ask("padding", given).verdict == FAIL


def test_unmasked_pooling_is_caught(labelled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = subject(labelled, run__task="classifier")
    assert ask("padding", given).verdict == PASS
    monkeypatch.setitem(POOLINGS, "mean", lambda x_BTD, valid_BT: x_BTD.mean(axis=1))
    assert ask("padding", given).verdict == FAIL


def test_one_norm_for_both_sublayers_is_caught(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[int, nn.Module] = {}

    def connect(
        self: Block, stream: Array, name: str, branch_name: str, branch: Branch, *, valid_BT: Any
    ) -> Array:
        if id(self.scope) not in made:
            made[id(self.scope)] = self.topology.connection(self.config, name="connection")
        return made[id(self.scope)](stream, branch)  # pyright: ignore[reportCallIssue]

    monkeypatch.setattr(Block, "_connect", connect)
    finding = ask("norms_apart", subject(text))
    assert finding.verdict == FAIL, finding
    assert "connection/norm/scale" in finding.found


def shifted(monkeypatch: pytest.MonkeyPatch, by: int) -> None:
    """Let the token at place i read keys and values of the places up to i + by."""
    plain = attention_module.attention

    def attend(q: Array, k: Array, v: Array, *args: Any, **kwargs: Any) -> Array:
        def move(x: Array) -> Array:
            none = jnp.zeros_like(x[:, :1])
            return jnp.concatenate([x[:, 1:], none] if by > 0 else [none, x[:, :-1]], axis=1)

        return plain(q, move(k), move(v), *args, **kwargs)

    monkeypatch.setattr(attention_module, "attention", attend)


def test_a_mask_one_place_too_late_is_caught(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = subject(text)
    shifted(monkeypatch, 1)
    assert ask("causality", given).verdict == FAIL
    assert ask("reach", given).verdict == FAIL


def test_a_mask_one_place_too_early_is_caught(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = subject(text)
    shifted(monkeypatch, -1)
    assert ask("causality", given).verdict == PASS  # nothing leaks; the first token does not see itself
    assert ask("reach", given).verdict == FAIL


@pytest.mark.parametrize(("by", "words"), [(-1, "the token itself"), (1, "the one after the next")])
def test_shifted_targets_are_caught(text: Path, by: int, words: str) -> None:
    given = subject(text)
    plain = given.task.loss

    def loss(params: Any, batch: Any, key: Any) -> Any:
        return plain(params, batch._replace(targets_BT=jnp.roll(batch.targets_BT, -by, axis=1)), key)

    finding = ask("targets", changed(given, loss=loss))
    assert finding.verdict == FAIL
    assert words in finding.look


@pytest.mark.parametrize("mistake", ["a mean over all places", "a scale"])
def test_another_objective_than_the_mean_over_targets_is_caught(text: Path, mistake: str) -> None:
    given = subject(text)
    plain = given.task.loss

    def loss(params: Any, batch: Any, key: Any) -> Any:
        found = plain(params, batch, key)
        wrong = {"a mean over all places": found.total / batch.valid_BT.size, "a scale": 1000 * found.loss}
        return found._replace(loss=wrong[mistake])

    finding = ask("targets", changed(given, loss=loss))
    assert finding.verdict == FAIL
    assert "divided by" in finding.look


@pytest.mark.full
def test_what_is_right_by_design_is_no_fault(text: Path) -> None:
    """A mixture of values has no gradient in block 0; stochastic depth may drop nothing of a few rows."""
    assert ask("idle_parameters", subject(text, model__value_residual="learned")).verdict == PASS
    rare = subject(text, model__stochastic_depth="constant(rate=0.01)")
    assert ask("evaluation", rare).verdict == PASS
    tiny = subject(text, model__context=2)
    assert [ask(name, tiny).verdict for name in ("padding", "reach")] == [SKIP, SKIP]


def test_targets_shifted_in_the_data_are_caught(text: Path) -> None:
    given = subject(text)
    batch = given.batch._replace(targets_BT=given.batch.inputs_BT)
    assert ask("targets", dataclasses.replace(given, batch=batch)).verdict == FAIL


def test_dropout_in_evaluation_is_caught(text: Path) -> None:
    given = subject(text, model__branch_dropout=0.1)
    assert ask("evaluation", given).verdict == PASS
    task = given.task

    def score(params: Any, batch: Any) -> Any:
        result = task.loss(params, batch, jax.random.key(3))
        return task.score(params, batch)._replace(nats=result.nats)

    assert ask("evaluation", changed(given, score=score)).verdict == FAIL


def test_dropout_that_never_acts_is_caught(text: Path) -> None:
    given = subject(text, model__branch_dropout=0.1)
    plain = given.task.loss
    loss = lambda params, batch, key: plain(params, batch, None)  # noqa: E731
    assert ask("evaluation", changed(given, loss=loss)).verdict == FAIL


def test_a_learning_rate_30_times_too_high_is_caught(text: Path, right: dict[str, Finding]) -> None:
    assert right["learning_rate"].verdict == PASS
    finding = ask(
        "learning_rate", subject(text, optimizer__learning_rate=30 * TINY["optimizer.learning_rate"])
    )
    assert finding.verdict == FAIL, finding


def test_b83_the_comparison_takes_full_precision_whatever_the_process_has_and_says_so(
    text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where products are rounded to bfloat16 or TF32, as on TPUs and GPUs by default."""
    traced: list[Any] = []

    def products(f: Any, x_BTD: Array) -> set[Any]:
        made = equations(jax.make_jaxpr(f)(x_BTD).jaxpr)
        return {one.params["precision"] for one in made if one.primitive.name == "dot_general"}

    def quick(f: Any) -> Any:
        def run(x_BTD: Array) -> Array:
            traced.append((f, x_BTD, products(f, x_BTD)))
            return jax.jit(f)(x_BTD)

        return run

    monkeypatch.setattr(official, "quick", quick)
    full = (jax.lax.Precision.HIGHEST,) * 2
    with jax.default_matmul_precision("bfloat16"):
        finding = ask("official_layers", subject(text))
        found = set().union(*(precisions for _, _, precisions in traced))
        # The control: traced outside of the comparison, the same functions take what the process has.
        other = set().union(*(products(f, x_BTD) for f, x_BTD, _ in traced))
    assert found == {full}
    assert full not in other
    assert other
    assert finding.verdict == PASS
    assert finding.number is not None
    assert finding.number < 1e-4
    assert "products in highest precision" in finding.found


def test_another_epsilon_than_the_official_layers_is_caught(
    text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = subject(text)
    plain = attention_module.attention
    monkeypatch.setattr(
        attention_module, "attention", lambda q, k, v, *a, **kw: plain(q * 2.0, k, v, *a, **kw)
    )
    finding = ask("official_layers", given)
    assert finding.verdict == FAIL
    assert "attention" in finding.look


@pytest.mark.full
def test_a_classifier_passes_and_says_what_has_no_meaning(labelled: Path) -> None:
    rows = run_checks(Measured(subject(labelled, run__task="classifier")))
    found = {row.name: row.finding for row in rows}
    skips = {name for name, finding in found.items() if finding.verdict == SKIP}
    assert skips == {"causality", "targets", "final_norm", "zero_branches"}
    # Four rows of two classes are learnt at any rate: the control of the rate is not caught, and that is said.
    assert found["learning_rate"].verdict == WARN
    assert "could not have failed" in found["learning_rate"].look
    others = {name: finding for name, finding in found.items() if name not in (*skips, "learning_rate")}
    assert not [(name, finding) for name, finding in others.items() if finding.verdict != PASS]
    assert all(found[name].found for name in skips)


def test_a_control_that_is_not_caught_is_no_pass() -> None:
    finding = Finding(PASS, "found", 1.0, "bound", Control("planted", 1.0, caught=True))
    assert settle(finding) == finding
    assert settle(finding._replace(control=Control("planted", 1.0, caught=False))).verdict == WARN
    assert settle(finding._replace(verdict=FAIL)).verdict == FAIL


def test_a_topology_of_ones_own_is_a_language_model(labelled: Path) -> None:
    with pytest.raises(ValueError, match="diagnosed as a language model"):
        subject(labelled, rule=PRE_NORM, run__task="classifier")


def test_s1_36_four_rows_are_learnt_by_heart_or_the_next_lines_are_named(
    text: Path, right: dict[str, Finding]
) -> None:
    assert right["overfit"].verdict == PASS
    given = subject(text)

    def blind(params: Any, batch: Any, key: Any) -> Any:
        return given.task.loss(params, batch._replace(inputs_BT=0 * batch.inputs_BT), key)

    finding = ask("overfit", changed(given, loss=blind))
    assert finding.verdict == FAIL
    for suspect in ("targets", "masks", "norm and addition"):
        assert suspect in finding.look


def test_s1_41_a_jump_of_the_ratio_raises_an_alarm(text: Path, right: dict[str, Finding]) -> None:
    assert right["relative_update"].verdict == PASS
    given = subject(text)
    measured = Measured(given)
    measured.params = gradients.planted(given, gradients.warmed(given), factor=100.0)
    (row,) = run_checks(measured, ["relative_update"])
    assert row.finding.verdict == WARN
    assert "block 0, feed forward" in row.finding.found


def test_s1_42_the_global_norm_hides_a_decay_over_depth() -> None:
    """Two stacks with one global gradient norm: one has a fading first block, which only the profile shows."""

    def measure(connection: Any) -> tuple[float, np.ndarray]:
        model, ids = small_model(connection), jnp.arange(8)[None]

        def loss(variables: Any) -> Array:
            logits: Any = model.apply(variables, ids)
            return jnp.sum(jnp.square(logits))

        found = jax.jit(lambda params: gradient_profile(model.config, loss, params))(drawn(model))
        return float(optax.tree.norm(found.gradient)), np.asarray(found.stream_S)

    healthy, fading = measure(PreNorm), measure(Faded)
    scaled = fading[1] * (
        healthy[0] / fading[0]
    )  # of a loss so many times as large: the global norms are equal
    assert scaled[0] < 1e-4 * healthy[1][0]
    verdicts = [gradients.stream_gradient(depth_of(norms)).verdict for norms in (healthy[1], scaled)]
    assert verdicts == [PASS, WARN]


def depth_of(norms: np.ndarray) -> gradients.Depth:
    return gradients.Depth({}, ("attention", "feed_forward"), norms, {})

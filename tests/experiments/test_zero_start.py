"""Zero starts: planted numbers give the planted verdicts, broken ones are named; two small models differ as stated."""

import functools

import jax
import numpy as np
import pytest

from experiments import zero_start as study
from experiments.trained_depth import AS, NOT, Windows
from experiments.zero_start import MOVES
from tests import small

STEPS, SEEDS = 20, 3


def planted() -> tuple[dict[str, dict[str, np.ndarray]], dict[str, np.ndarray]]:
    still = {name: np.zeros(SEEDS) for name in study.start_claims()} | {MOVES: np.array([0.1, 0.2, 0.3])}
    starts = {
        "plain": {name: np.ones(SEEDS) for name in still},
        "rezero": dict(still),
        "zero_output": dict(still),
    }
    noise = np.random.default_rng(0).normal(size=(STEPS, 1, SEEDS))
    slow = np.stack([np.full((STEPS, SEEDS), x) for x in (4.0, 5.0)], axis=1) + noise
    return starts, {"plain": slow, "rezero": slow - 0.5, "zero_output": slow - 1.0}


def verdicts(starts, losses) -> dict[tuple[str, str], str]:
    rows = study.identity_rows(starts, losses)
    return {(line["state"], line["quantity"]): line["verdict"] for line in rows if line["verdict"]}


def test_planted_starts_are_as_predicted_and_plain_is_only_shown():
    said = verdicts(*planted())
    assert set(said.values()) == {AS}
    assert {arm for arm, _ in said} == {"rezero", "zero_output"}


@pytest.mark.parametrize("name", list(study.start_claims()))
def test_one_seed_that_differs_is_named(name: str):
    starts, losses = planted()
    starts["rezero"][name] = np.array([0.1, 0.0, 0.1] if name == MOVES else [0.0, 1e-3, 0.0])
    said = verdicts(starts, losses)
    wanted = f"step 0: {name}, {'least' if name == MOVES else 'largest'} seed"
    assert {key for key, verdict in said.items() if verdict == NOT} == {("rezero", wanted)}


def test_each_arm_is_read_at_its_better_rate():
    _, losses = planted()
    assert study.better_rate(losses["plain"]) == 0
    assert study.better_rate(losses["plain"][:, ::-1]) == 1
    failed = losses["plain"].copy()
    failed[3, 0, 1] = np.nan
    assert study.better_rate(failed) == 1


def test_a_slower_start_says_so():
    starts, losses = planted()
    losses["rezero"] = losses["plain"] + 1.0
    assert verdicts(starts, losses)["rezero", f"loss of steps 1 to {STEPS} less plain's"] == NOT


def test_doublings_are_those_of_the_profile():
    rising = 2.0 ** np.linspace(0.0, 3.0, 12)
    np.testing.assert_allclose(
        study.doublings(np.stack([rising, rising[::-1], rising / rising])), [3, -3, 0], atol=1e-9
    )


def test_gradients_after_training_have_a_verdict_and_at_the_start_none():
    rising = 2.0 ** np.linspace(0.0, 3.0, 12) * np.array([[1.0], [1.1], [0.9]])
    rising[1] *= np.linspace(1.0, 1.05, 12)  # seeds that agree in all have no interval
    profiles = {arm: {0: {"stream": rising}, 200: {"stream": rising}} for arm in ("pre_norm", "post_norm")}
    said = {(line["state"], line["quantity"]): line["verdict"] for line in study.gradient_rows(profiles)}
    assert said["post_norm", "stream, doublings, after 200 steps"] == AS
    assert said["pre_norm", "stream, doublings, after 200 steps"] == NOT
    assert said["pre_norm", "stream, doublings, after 0 steps"] == ""


@pytest.mark.full
def test_a_small_rezero_is_its_embedding_and_a_plain_model_is_not():
    """The two compiled models; these parameters are drawn off their zeros, so that alphas are set to 0 here."""
    tokens_WT = np.asarray(small.tokens())
    windows = Windows(tokens_WT, np.roll(tokens_WT, -1, axis=1))
    found = {}
    for residual in ("rezero", "pre_norm"):
        model, params = small.built(small.config(residual=residual, norm="layer_norm"))
        blocks = dict(params["blocks"])
        for name in study.ALPHAS:
            if residual == "rezero":
                blocks[name] = {"alpha": 0.0 * blocks[name]["alpha"]}
        measured = jax.jit(functools.partial(study.start_numbers, model, windows))
        found[residual] = measured({**params, "blocks": blocks})
    claims = study.start_claims()
    shown = {name: claims[name].verdict(study.exact(float(found["rezero"][name]))) for name in claims}
    assert set(shown.values()) == {AS}
    shown = {name: claims[name].verdict(study.exact(float(found["pre_norm"][name]))) for name in claims}
    assert {name for name, verdict in shown.items() if verdict == NOT} == set(claims) - {MOVES}

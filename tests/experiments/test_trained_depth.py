"""One trained model: planted profiles give the planted verdicts, each broken one is named, one small model is read."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from experiments import trained_depth as study
from experiments.trained_depth import AS, NOT, OPEN, Claim, Windows, above, below, row
from jaxblock.sweeps.statistics.estimate import Estimate, Refusal
from tests import small

L, T, W, V = 16, 8, 40, 256
S = 2 * L
Planted = dict[str, dict[str, np.ndarray]]


@pytest.fixture(autouse=True)
def few_draws(monkeypatch):
    """Verdicts of planted profiles need no more, and each draw fits three laws four times."""
    monkeypatch.setattr(study, "DRAWS", 12)


def interval(low: float, high: float) -> Estimate:
    return Estimate(value=(low + high) / 2, low=low, high=high, n=W, interval="t")


def test_a_verdict_is_where_the_whole_interval_lies():
    found = [below(0.5, 1.0).verdict(interval(*x)) for x in ((0.1, 0.4), (0.4, 0.6), (0.6, 0.9))]
    assert found == [AS, OPEN, NOT]
    assert [above(0.0).verdict(interval(*x)) for x in ((0.1, 0.4), (-1.0, 1.0), (-2.0, -1.0))] == [
        AS,
        OPEN,
        NOT,
    ]
    zero = Claim(low=0.0, high=0.0)
    assert [zero.verdict(study.exact(x)) for x in (0.0, 1e-30)] == [AS, NOT]
    assert above(0.0).verdict(Refusal(rule="no_values", sentence="none")) == OPEN
    assert [above(0.0, 0.0).verdict(study.exact(x)) for x in (1e-9, 0.0, -1.0)] == [AS, NOT, NOT]
    with pytest.raises(ValueError, match="allows the alternative"):
        below(0.5, 0.4)


def test_a_number_without_a_claim_has_no_verdict():
    assert row(("R11", "start", "x"), study.exact(1.0))["verdict"] == ""


def test_the_bootstrap_covers_a_mean_as_its_standard_error_does(monkeypatch):
    monkeypatch.setattr(study, "DRAWS", 400)
    x_W = np.random.default_rng(0).normal(2.0, 1.0, size=400)
    found = study.resampled(lambda x: float(x), x_W)
    assert found.value == pytest.approx(x_W.mean())
    assert found.high - found.low == pytest.approx(2 * 1.96 * x_W.std() / 20, rel=0.2)
    other = study.resampled(lambda x: float(x), np.full(400, 3.0))
    assert (other.low, other.high) == (pytest.approx(3.0), pytest.approx(3.0))


def test_98_percent_of_the_paths_lie_between_the_central_lengths():
    for sublayers in (32, 54):
        low, high = study.central(sublayers)
        inside = sum(math.comb(sublayers, k) for k in range(low, high + 1)) / 2**sublayers
        without = sum(math.comb(sublayers, k) for k in range(low + 1, high)) / 2**sublayers
        assert without < 0.98 <= inside < 0.995
    assert study.central(32) == (9, 23)


def test_rows_of_m_are_means_over_what_comes_after():
    m_SS = np.triu(np.random.default_rng(1).uniform(size=(6, 6)), 1)
    early, late = study.halves(6)
    assert (list(early), list(late)) == ([0, 1, 2], [3, 4])
    wanted = np.mean([m_SS[s, s + 1 :].sum() / (5 - s) for s in early])
    assert study.mean_row(m_SS, early) == pytest.approx(wanted)
    near = np.mean([(m_SS[s, s + 1] + m_SS[s, s + 2]) / 2 for s in early])
    assert study.mean_row(m_SS, early, reach=2) == pytest.approx(near)
    assert study.mean_row(m_SS.T, early) == 0.0


def test_a_smooth_fall_has_no_rise_and_no_jump():
    line, jump = np.linspace(5.0, 2.0, 9), np.where(np.arange(9) < 4, 5.0, 2.0)
    up_and_down = np.array([5.0, 4.0, 4.5, 2.0])
    assert (study.rises(line), study.largest_step(line)) == (0.0, pytest.approx(1 / 8))
    assert (study.rises(jump), study.largest_step(jump)) == (0.0, pytest.approx(1.0))
    assert (study.rises(up_and_down), study.largest_step(up_and_down)) == (
        pytest.approx(0.5 / 3),
        pytest.approx(2.5 / 3),
    )
    assert study.inflation(np.full(9, 2.0), np.full(9, 3.0), most=4.0) == pytest.approx(0.5)


def planted() -> Planted:
    """Return profiles that follow every prediction."""
    draw, s = np.random.default_rng(0), np.arange(S + 1)
    noise = lambda *shape: np.exp(0.02 * draw.normal(size=shape))  # noqa: E731
    found: Planted = {}
    for state, squares in (("start", 0.02 + 0.5 * s), ("trained", np.exp(0.1 * s))):
        size_WST = squares[None, :, None] * noise(W, S + 1, 1) * np.ones(T)
        factor = 9.0 if state == "trained" else 1.0
        size_WST[..., 0] *= factor
        update_WST = np.diff(squares, prepend=0.02)[None, 1:, None] * np.ones((W, 1, T))
        if state == "trained":
            update_WST = update_WST * np.exp(-0.05 * s[1:])[None, :, None]
        share_K = stats.binom.pmf(s, S, 0.15)
        found[state] = {
            "size": size_WST,
            "peak": 3 * np.sqrt(size_WST),
            "update": update_WST,
            "gradient_share": share_K * np.ones((study.PATHS, 1)),
            "gradient_length": 0.15 * S * noise(study.PATHS),
            "change_length": 0.15 * S * noise(study.PATHS),
        }
    cost_L = np.r_[0.5, np.full(L - 2, 0.05), 0.3]
    cost_L[9] = 0.0
    loss_W = 1.5 * noise(W)
    fall_S = np.linspace(5.0, 1.5, S + 1)
    reach = np.triu(np.ones((S, S)), 1) * np.where(np.arange(S) < L, 0.4, 0.02)[:, None]
    found["trained"] |= {
        "loss": loss_W,
        "without_block": loss_W[:, None] + cost_L + 0.01 * draw.normal(size=(W, L)),
        "without_sublayer": loss_W[:, None] + np.where(np.arange(S) < L, 0.2, 0.05) * noise(W, S),
        "skips": reach * noise(study.GROUPS, 1, 1),
        "own_loss": fall_S * noise(W, 1),
        "own_entropy": fall_S * noise(W, 1),
        "frozen_entropy": (0.5 * fall_S + 0.5 * math.log(V)) * noise(W, 1),
    }
    return found


def verdicts(found: Planted) -> dict[tuple[str, str, str], str]:
    rows = study.all_rows(found, V)
    return {
        (line["item"], line["state"], line["quantity"]): line["verdict"] for line in rows if line["verdict"]
    }


def test_planted_profiles_are_as_predicted(tmp_path):
    found = planted()
    said = verdicts(found)
    assert {key for key, verdict in said.items() if verdict != AS} == set()
    assert {item for item, _, _ in said} == {"R11", "R12", "R13", "R14", "R23"}
    text = study.write(tmp_path, study.NAME, study.all_rows(found, V), paragraphs=["# One model"])
    assert f"{len(said)} predictions: {len(said)} as predicted, 0 not as predicted, 0 not resolved" in text


BREAKS = {
    "an additive trained stream": (
        "size",
        lambda x: x[:, :1] * np.r_[0.1, 1.0 + np.arange(S)][None, :, None],
        "AICc",
    ),
    "no first position": (
        "size",
        lambda x: np.broadcast_to(x.mean(-1, keepdims=True), x.shape),
        "position 0",
    ),
    "late updates": ("update", lambda x: x * np.exp(0.3 * np.arange(S))[None, :, None], "relative update"),
    "late lesions": ("without_sublayer", lambda x: x[:, ::-1], "lesions"),
    "late rows of M": ("skips", lambda x: np.triu(np.ones((S, S)), 1) * 0.4 * np.ones((len(x), 1, 1)), "M,"),
    "a first block for nothing": ("without_block", lambda x: np.c_[x[:, 9], x[:, 1:]], "worst other"),
    "a last block for nothing": ("without_block", lambda x: np.c_[x[:, :-1], x[:, 9]], "worst in between"),
    "no block for nothing": ("without_block", lambda x: x + 0.1, "standard errors"),
    "long paths": ("gradient_length", lambda x: 3 * x, "mean length of the gradient"),
    "a loss that jumps": (
        "own_loss",
        lambda x: np.where(np.arange(S + 1) < L, 5.0, 1.5) * x[:, :1],
        "largest fall",
    ),
    "a scale that does not matter": ("frozen_entropy", lambda x: 0.0 * x + 2.0, "frozen"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_profile_that_is_not_as_predicted_says_so(name: str):
    part, change, words = BREAKS[name]
    found = planted()
    found["trained"][part] = change(found["trained"][part])
    said = verdicts(found)
    assert NOT in {verdict for key, verdict in said.items() if key[1] == "trained" and words in key[2]}


def test_groups_are_spread_over_the_windows():
    tokens_WT = np.arange(W)[:, None] * np.ones((1, T), int)
    groups, _ = Windows(tokens_WT, tokens_WT).groups(study.GROUPS, 2)
    assert groups.shape == (study.GROUPS, 2, T)
    assert (groups[0, 0, 0], groups[-1, -1, -1]) == (0, W - 1)


def test_parts_that_are_not_the_whole_are_refused():
    study.check_paths({"gradient_error": np.array([1e-6]), "change_error": np.array([1e-6])})
    with pytest.raises(RuntimeError, match="gradient_error is"):
        study.check_paths({"gradient_error": np.array([1e-6, 0.2]), "change_error": np.array([1e-6])})


def test_the_lens_of_a_small_model_ends_in_its_loss():
    """The one compiled model: both scales agree where they are one, and only there; a block's cost is its gates'."""
    model, params = small.built(small.config(residual="pre_norm", norm="layer_norm", head="tied"))
    tokens_WT = jnp.asarray(small.tokens())
    targets_WT = jnp.roll(tokens_WT, -1, axis=1)

    def both(params):
        lens = study.lens_numbers(model, params, tokens_WT, targets_WT)
        return lens, study.removal_numbers(model, params, tokens_WT, targets_WT)

    lens, removed = jax.jit(both)(params)
    np.testing.assert_allclose(lens["own_loss"][:, -1], removed["loss"], rtol=1e-4)
    np.testing.assert_allclose(lens["frozen_loss"][:, -1], lens["own_loss"][:, -1], rtol=1e-4)
    assert not np.allclose(lens["frozen_loss"][:, 0], lens["own_loss"][:, 0], rtol=1e-3)
    assert removed["without_block"].shape == (len(tokens_WT), model.config.depth)
    assert not np.allclose(removed["without_block"][:, 0], removed["without_sublayer"][:, 0], rtol=1e-4)

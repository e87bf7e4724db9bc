"""Growth at the start: planted curves give the planted verdicts, each broken one is named, sizes match numpy's."""

import csv

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import residual_growth as study
from experiments.residual_growth import AS, COLUMNS, DEPTH, DEPTHS, NOT, OPEN, Claim, Sizes, near, row
from jaxblock.sweeps.statistics.estimate import Estimate, Refusal

SEEDS, SIGMA0, S = 6, 0.125, 0.9
Planted = dict[str, dict[int, dict[str, np.ndarray]]]


def interval(low: float, high: float) -> Estimate:
    return Estimate(value=(low + high) / 2, low=low, high=high, n=SEEDS, interval="95 % t")


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [
        (0.45, 0.55, AS),
        (0.41, 0.42, AS),
        (0.35, 0.55, OPEN),
        (-0.1, 0.7, OPEN),  # the prediction and the alternative
        (-0.1, 0.1, NOT),
        (0.61, 0.9, NOT),
    ],
)
def test_a_verdict_is_where_the_whole_interval_lies(low: float, high: float, wanted: str):
    assert near(0.5, 0.1, alternative=0.0).verdict(interval(low, high)) == wanted


def test_a_claim_may_be_one_sided_or_all_but_a_band():
    rises = Claim(low=1.0, high=np.inf, alternative=0.0)
    assert [rises.verdict(interval(*x)) for x in ((1.1, 9.0), (0.5, 2.0), (-2.0, 0.5))] == [AS, OPEN, NOT]
    moves = Claim(low=-1.0, high=1.0, alternative=0.0, outside=True)
    found = [
        moves.verdict(interval(*x)) for x in ((-3.0, -2.0), (2.0, 3.0), (0.5, 2.0), (-2.0, 2.0), (-0.5, 0.5))
    ]
    assert found == [AS, AS, OPEN, OPEN, NOT]
    assert [near(-0.5, 0.15).words, rises.words, moves.words] == [
        "-0.5 ± 0.15",
        "at least 1",
        "below -1 or above 1",
    ]


def test_a_refused_number_is_not_resolved():
    refused = Refusal(rule="no_values", sentence="none")
    assert near(0.0, 0.1).verdict(refused) == OPEN
    record = row((1, "pre_norm", "slope"), refused, claim=near(0.0, 0.1))
    assert (record["found"], record["verdict"]) == (None, OPEN)


def test_a_claim_that_its_alternative_fulfils_is_refused():
    with pytest.raises(ValueError, match="allows the alternative 0"):
        near(0.05, 0.1, alternative=0.0)
    with pytest.raises(ValueError, match="allows the alternative 2"):
        Claim(low=-1.0, high=1.0, alternative=2.0, outside=True)


def growth(arm: str, depth: int) -> np.ndarray:
    """Return g of an arm's law, [S], written out again."""
    blocks_S = np.array([1 + sublayer // 2 for sublayer in range(2 * depth)])
    special = {
        "gpt2": (2.0 * depth) ** -0.5,
        "layer_norm_scaling": blocks_S**-0.5,
        "complete_p": 2 / depth,
        "residual_multiplier": 2 / depth,
        "rezero": 0.0,
    }
    return special.get(arm, 1.0) * np.ones(2 * depth)


def planted_sizes(arm: str, depth: int, noise_R: np.ndarray) -> dict[str, np.ndarray]:
    """Return sizes that follow every law; in the multiplied arms s is so small that the stream is flat."""
    s = {"peri_norm": 1.0, "complete_p": 0.05, "residual_multiplier": 0.05}.get(arm, S)
    added_RS = s * noise_R[:, None] * growth(arm, depth)
    squares_RN = SIGMA0**2 + np.cumsum(np.column_stack([0 * noise_R, added_RS**2]), axis=1)
    sizes = {"stream": np.sqrt(squares_RN), "added": added_RS}
    if arm == "post_norm":
        sizes["stream"][:, 1:] = 1.0
    if arm == "attention_residual":
        sizes["stream"] /= np.arange(1, 2 * depth + 2)
        sizes["closed"] = sizes["stream"][:, -1].copy()
    if (
        arm == "complete_p" and depth != DEPTH
    ):  # at L = 24 the stream obeys its law; elsewhere only its end is read
        sizes["stream"][:, -1] = SIGMA0 * (depth / DEPTH) ** -0.42
    block_L = np.arange(1.0, depth + 1)
    profiles = {"pre_norm": block_L**-0.5, "post_norm": 1.1 ** (block_L - depth)}
    gradient_RL = noise_R[:, None] * profiles.get(arm, np.full(depth, 0.7**depth))
    return {**sizes, "down": gradient_RL, "feed_forward": gradient_RL, "block": gradient_RL}


def planted() -> Planted:
    draw = np.random.default_rng(0)
    return {
        arm: {depth: planted_sizes(arm, depth, np.exp(0.01 * draw.normal(size=SEEDS))) for depth in DEPTHS}
        for arm in study.ARMS
    }


def verdicts(measured: Planted) -> dict[tuple[int, str, str], str]:
    rows = study.stream_rows(measured) + study.gradient_rows(measured)
    return {(line["item"], line["arm"], line["quantity"]): line["verdict"] for line in rows}


FALLING_IS_NOT_FLAT = {(3, "pre_norm", f"{name}, doublings from first to last") for name in ("down", "block")}
"""What two claims about one profile cannot both have."""


def test_planted_curves_are_as_predicted():
    found = verdicts(planted())
    assert len(found) == 45
    assert {row for row, verdict in found.items() if verdict != AS} == FALLING_IS_NOT_FLAT
    assert {found[row] for row in FALLING_IS_NOT_FLAT} == {NOT}


def at(measured: Planted, arm: str, name: str, factor) -> None:
    """Multiply a quantity, at every L, by factor(L, place from 0)."""
    for depth, sizes in measured[arm].items():
        sizes[name] = sizes[name] * factor(depth, np.arange(sizes[name].shape[1]))


BREAKS = {
    "flat pre_norm": ("pre_norm", "stream", lambda depth, i: (i + 0.02) ** -0.5, (1, "slope")),
    "growing post_norm": ("post_norm", "stream", lambda depth, i: (1.0 + i) ** 0.5, (1, "slope")),
    "growing rezero": ("rezero", "stream", lambda depth, i: (1.0 + i) ** 0.5, (1, "slope")),
    "a read that does not fall": (
        "attention_residual",
        "stream",
        lambda depth, i: np.where(
            i < 2 * depth, (1.0 + i) ** 0.5, 1.0
        ),  # the last read is checked against the model's
        (1, "slope"),
    ),
    "s grows": (
        "layer_norm_scaling",
        "stream",
        lambda depth, i: (1.0 + i) ** 0.2,
        (1, "slope less the law's"),
    ),
    "correlated": (
        "peri_norm",
        "stream",
        lambda depth, i: 1.0 + 0.3 * (i == 2 * depth),
        (1, "end over the law's"),
    ),
    "gpt2 without its root": (
        "gpt2",
        "stream",
        lambda depth, i: (1.0 * depth) ** 0.5,
        (1, "end against L"),
    ),
    "pre_norm's last flat": (
        "pre_norm",
        "down",
        lambda depth, i: (1.0 * depth) ** 0.5,
        (2, "last down against L"),
    ),
    "post_norm's last falls": (
        "post_norm",
        "down",
        lambda depth, i: (1.0 * depth) ** -0.5,
        (2, "last down against L"),
    ),
    "post_norm level": (
        "post_norm",
        "down",
        lambda depth, i: 1.1**-i,
        (3, "down, doublings from first to last"),
    ),
    "pre_norm level": (
        "pre_norm",
        "down",
        lambda depth, i: (1.0 + i) ** 0.5,
        (3, "down, slope in log block"),
    ),
    "off stays": (
        "none",
        "block",
        lambda depth, i: 0.7**-depth,
        (4, f"first block, decades in {DEPTH} blocks"),
    ),
    "off is of order 1": (
        "none",
        "block",
        lambda depth, i: 0.7**-depth,
        (4, f"first block, log10 at L = {DEPTH}"),
    ),
    "on explodes": (
        "pre_norm",
        "block",
        lambda depth, i: 1.4**depth,
        (4, f"first block, decades in {DEPTH} blocks"),
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_curve_that_is_not_as_predicted_says_so(name: str):
    arm, quantity, factor, (item, label) = BREAKS[name]
    measured = planted()
    at(measured, arm, quantity, factor)
    found = verdicts(measured)
    assert found[item, arm, label] == NOT
    others = {key: verdict for key, verdict in found.items() if key[1] != arm}
    assert {key for key, verdict in others.items() if verdict != AS} == {
        x for x in FALLING_IS_NOT_FLAT if x in others
    }


def test_seeds_that_disagree_leave_it_open():
    measured = planted()
    at(measured, "pre_norm", "stream", lambda depth, i: (i + 1.0) ** np.linspace(-0.6, 0.6, SEEDS)[:, None])
    assert verdicts(measured)[1, "pre_norm", "slope"] == OPEN


def test_a_gradient_of_zero_has_no_logarithm_and_is_not_scored():
    measured = planted()
    measured["bare"][48]["block"][0, 0] = 0.0
    with np.errstate(divide="ignore"):
        assert verdicts(measured)[4, "bare", f"first block, decades in {DEPTH} blocks"] == OPEN


def test_stream_sizes_are_those_of_sums_and_of_means():
    draw = np.random.default_rng(1)
    embedded, *outputs = draw.normal(size=(7, 2, 3, 4))  # 3 blocks, 6 sublayers
    stacked = {"first": np.stack(outputs[::2]), "second": np.stack(outputs[1::2])}
    rows = np.stack([embedded, *outputs])
    size = lambda x: np.sqrt(np.square(x).mean(axis=(-3, -2, -1)))  # noqa: E731
    as_stream = {"blocks": {"resid_mid": stacked["first"], "resid_post": stacked["second"]}}
    found = study.stream_sizes(embedded, as_stream)
    np.testing.assert_allclose(found["stream"], size(rows), rtol=1e-5)
    np.testing.assert_allclose(found["added"], size(rows[1:] - rows[:-1]), rtol=1e-5)
    as_history = {"blocks": {"attention_out": stacked["first"], "feed_forward_out": stacked["second"]}}
    found = study.stream_sizes(embedded, {**as_history, "resid_final": jnp.asarray(rows.mean(0))})
    means = np.stack([rows[: n + 1].mean(0) for n in range(7)])
    np.testing.assert_allclose(found["stream"], size(means), rtol=1e-5)
    np.testing.assert_allclose(found["closed"], size(rows.mean(0)), rtol=1e-5)
    swapped = {"blocks": {"resid_mid": stacked["second"], "resid_post": stacked["first"]}}
    assert not np.allclose(study.stream_sizes(embedded, swapped)["stream"], size(rows), rtol=1e-3)


def test_gradient_sizes_are_norms_per_block():
    draw = np.random.default_rng(2)
    down, up, other = draw.normal(size=(3, 4, 5)), draw.normal(size=(3, 5)), draw.normal(size=(3, 2, 2, 2))
    blocks = {"feed_forward": {"down": {"kernel": down}, "up": up}, "attention": other}
    found = study.gradient_sizes(jax.tree.map(jnp.asarray, blocks))
    square = lambda x: np.square(x).reshape(3, -1).sum(1)  # noqa: E731
    wanted = {"down": square(down), "feed_forward": square(down) + square(up)}
    wanted["block"] = wanted["feed_forward"] + square(other)
    for name, squares_L in wanted.items():
        np.testing.assert_allclose(found[name], squares_L**0.5, rtol=1e-5)


def test_table_and_page_have_a_line_for_each_row(tmp_path):
    measured = planted()
    rows = study.stream_rows(measured) + study.gradient_rows(measured)
    text = study.write(tmp_path, rows, measured, run="a test")
    assert (tmp_path / "residual_growth.md").read_text() == text
    assert "45 predictions: 43 as predicted, 2 not as predicted, 0 not resolved" in text
    assert text.count("\n| ") == 2 + len(rows)
    with (tmp_path / "residual_growth.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [tuple(line) for line in table] == [COLUMNS] * len(rows)
    assert len({(line["item"], line["arm"], line["quantity"]) for line in table}) == len(rows)
    assert all(float(line["low"]) <= float(line["found"]) <= float(line["high"]) for line in table)


def test_a_small_model_reads_the_mean_of_its_history(monkeypatch):
    """The one compiled model: what the stack closes with is the mean of all its sublayers wrote, else it is refused."""
    small = {"vocab_size": 7, "context": 3, "width": 4, "heads": 2, "feed_forward": "relu"}
    for name, value in (("SIZES", small), ("LENGTH", 3), ("BATCH", 1)):
        monkeypatch.setattr(study, name, value)
    found: Sizes = study.measure("attention_residual", 2, 2)
    assert found["stream"].shape == (2, 5)
    assert found["added"].shape == (2, 4)
    study.law("attention_residual", 2, found)
    with pytest.raises(RuntimeError, match="another read"):
        study.law("attention_residual", 2, {**found, "closed": 1.01 * found["closed"]})

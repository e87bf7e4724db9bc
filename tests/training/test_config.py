"""The config: its defaults are the quickstart file, it is strict, it survives TOML, and every field explains itself."""

import dataclasses
import math
import re
import tomllib
from pathlib import Path

import pydantic
import pytest

from jaxblock import ExecutionConfig, ModelConfig
from jaxblock.cli import main
from jaxblock.training.config import (
    CheckpointConfig,
    DataConfig,
    GuardConfig,
    InitConfig,
    LossConfig,
    OptimizerConfig,
    ParallelConfig,
    ProbeConfig,
    RunConfig,
    SampleConfig,
    TrainConfig,
    WatchConfig,
)
from jaxblock.training.config_file import (
    build_config,
    differences,
    fields,
    parse_override,
    read_config_file,
    write_config,
)

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
FILES = sorted(CONFIGS.glob("*.toml"))
DEFAULT = TrainConfig()
# Every field away from its default, the optional ones set, the tuple filled.
CHANGED = TrainConfig(
    run=RunConfig(
        name="café",
        dir="a b",
        task='classifier(pooling="last")',
        steps=7,
        seed=2**32 - 1,
        log_every=1,
        evaluate_every=2,
        checkpoint_every=3,
    ),
    parallel=ParallelConfig(replica=2, data=3, fsdp=4, tensor=5),
    model=ModelConfig(
        vocab_size=300,
        context=9,
        depth=2,
        width=24,
        heads=6,
        kv_heads=3,
        hidden=20,
        feed_forward="relu",
        norm="layer_norm",
        norm_epsilon=1e-6,
        bias=True,
        positions='rope(base=500.0, convention="interleaved")',
        residual="post_norm",
        wiring="parallel",
        window=(4, 0),
        token_mixer="attention()",
        value_residual="learned(first=0.3)",
        experts="dropless(experts=4)",
        stochastic_depth="linear(rate=0.1)",
        soft_cap=30.0,
        head="untied",
        vocab_multiple=64,
        attention_dropout=0.1,
        hidden_dropout=0.2,
        branch_dropout=0.3,
        initialization="plain",
        parametrization="complete_p(base_depth=1, base_width=12, alpha=0.5)",
        param_dtype="bfloat16",
        dtype="bfloat16",
        stream_dtype="float16",
    ),
    execution=ExecutionConfig(
        scan_unroll=2, remat="full", history="plain", attention="blocked", loss="blocked"
    ),
    init=InitConfig(from_run="runs/before", weights="average"),
    data=DataConfig(
        path='quote".txt', batch=6, accumulation=3, seams="separate", separator=0, validation_tokens=99
    ),
    optimizer=OptimizerConfig(
        learning_rate=1e-4,
        algorithm="adamw(beta1=0.5)",
        schedule="linear(final=0.5)",
        warmup=0.25,
        weight_decay=0.0,
        clip=0.0,
        role_rates={"norm": 2.0},
        average=0.9,
    ),
    guard=GuardConfig(non_finite="skip", spike="rewind", deviations=5.0, window=64, limit=3),
    checkpoint=CheckpointConfig(keep_latest=1, keep_best=1, keep_every=10),
    watch=WatchConfig(
        figure_seconds=0.0, tensorboard=True, wandb="p", profile_start=3, profile_steps=1, hang_seconds=3.0
    ),
    probe=ProbeConfig(every=3, statistics=("branch", "gradient", "update")),
    loss=LossConfig(z_loss=1e-4, label_smoothing=0.1),
    sample=SampleConfig(prompt="line\nbreak 😀", length=5, temperature=0.0, top_k=3, top_p=0.5),
)

MIXED = CHANGED.model_copy(
    update={
        "data": DataConfig(mixture={"books": 0.5, "a b/café": 3.0}),
        "parallel": ParallelConfig(form="pmap", data=2),
    }
)
"""The fields that no config can have beside `data.path`, and beside a mesh of more than rows."""


def flat(config: TrainConfig) -> dict[str, object]:
    values = config.values()
    return {field.path: values[field.section][field.name] for field in fields()}


# Files -----------------------------------------------------------------------------------------------------


def test_the_defaults_are_the_quickstart_file():
    values = read_config_file(CONFIGS / "quickstart.toml")
    assert differences(build_config(values), DEFAULT) == []
    # Equal because the file says it, not because it is silent.
    said = {f"{section}.{name}" for section, entries in values.items() for name in entries}
    sizes = {f"model.{name}" for name in ("vocab_size", "context", "depth", "width", "heads")}
    assert said >= sizes | {"run.steps", "data.batch", "optimizer.learning_rate", "optimizer.schedule"}


def test_a_default_that_the_file_does_not_share_is_named():
    values = read_config_file(CONFIGS / "quickstart.toml")
    values["run"] = {**values.get("run", {}), "steps": DEFAULT.run.steps + 1}
    assert differences(build_config(values), DEFAULT) == [
        f"run.steps: {DEFAULT.run.steps + 1}, {DEFAULT.run.steps}"
    ]


@pytest.mark.parametrize("path", FILES, ids=[path.name for path in FILES])
def test_every_config_file_builds_and_says_what_to_expect(path):
    build_config(read_config_file(path))
    comment = re.match(r"(#.*\n)+", path.read_text(encoding="utf-8"))
    assert comment is not None
    for line in ("command", "device", "time", "expect"):
        assert re.search(rf"^#\s*[a-z ]*{line}[a-z ]*:", comment[0], re.MULTILINE), f"no line on the {line}"
    assert re.search(r"train\.py|jaxblock train", comment[0])
    assert re.search(r"expect[a-z]*:[^:]*\d\.\d", comment[0])


@pytest.mark.parametrize("config", [DEFAULT, CHANGED, MIXED], ids=["default", "changed", "mixed"])
def test_a_config_survives_toml(tmp_path, config):
    write_config(config, tmp_path / "config.toml")
    again = build_config(read_config_file(tmp_path / "config.toml"))
    assert again == config
    assert flat(again) == flat(config)
    assert isinstance(again.model.window, tuple)
    assert isinstance(again.probe.statistics, tuple)


def test_the_changed_config_differs_in_every_field():
    """Else the round trip of a field could lose its value and be given the default."""
    same = [path for path, value in flat(CHANGED).items() if value == flat(DEFAULT)[path]]
    assert sorted(same) == ["data.mixture", "parallel.form"]
    assert all(flat(MIXED)[path] != flat(DEFAULT)[path] for path in same)


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path):
    (tmp_path / "x.toml").write_bytes(b"\xef\xbb\xbf[run]\nsteps = 3\n")
    assert build_config(read_config_file(tmp_path / "x.toml")).run.steps == 3


# Strictness ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("run.steps", 3.0),
        ("run.steps", True),
        ("run.steps", "3"),
        ("run.steps", None),
        ("run.steps", [3]),
        ("run.steps", {"a": 3}),
        ("run.steps", 0),
        ("run.seed", -1),
        ("run.seed", 2**32),
        ("run.name", 3),
        ("run.name", "a/b"),
        ("run.name", ".."),
        ("model.depth", 3.0),
        ("model.depth", True),
        ("model.depth", "3"),
        ("model.kv_heads", 2.0),
        ("model.window", 3),
        ("model.window", [3, 1.5]),
        ("model.window", [-1]),
        ("model.bias", 1),
        ("model.bias", "true"),
        ("model.norm_epsilon", 0.0),
        ("model.soft_cap", True),
        ("model.branch_dropout", 1.0),
        ("model.initialization", "gpt2(std=-0.1)"),
        ("model.parametrization", "mup"),
        ("model.parametrization", "depth_mup"),
        ("model.parametrization", "depth_mup(base_depth=0)"),
        ("model.parametrization", "depth_mup(base_depth=2.0)"),
        ("model.parametrization", "complete_p(base_depth=2)"),
        ("model.parametrization", "complete_p(base_depth=2, base_width=True)"),
        ("model.parametrization", "complete_p(base_depth=2, base_width=8, alpha=1.5)"),
        ("model.parametrization", "complete_p(base_depth=2, base_width=8, scale_epsilon=1)"),
        ("execution.scan_unroll", 1.0),
        ("execution.remat", "som"),
        ("execution.loss", "chunked"),
        ("data.batch", 0),
        ("data.seams", "apart"),
        ("data.mixture", {"a": 0.0, "b": 1.0}),
        ("data.mixture", {"a": -1.0}),
        ("data.mixture", {"a": math.nan}),
        ("data.mixture", {"a": math.inf}),
        ("data.mixture", {"a": True}),
        ("data.mixture", {"a": "1"}),
        ("data.mixture", {"": 1.0}),
        ("data.mixture", {"a": 0.5, "./a": 0.5}),
        ("data.mixture", ["a", "b"]),
        ("data.mixture", "a"),
        ("optimizer.learning_rate", "3e-3"),
        ("optimizer.learning_rate", math.nan),
        ("optimizer.learning_rate", math.inf),
        ("optimizer.schedule", "linear(final=2)"),
        ("optimizer.algorithm", "adamw(beta2=1.0)"),
        ("optimizer.algorithm", "adamw(epsilon=0.0)"),
        ("optimizer.algorithm", "muon(iterations=0)"),
        ("optimizer.role_rates", {"norms": 1.0}),
        ("optimizer.role_rates", {"norm": -1.0}),
        ("optimizer.role_rates", 2.0),
        ("optimizer.average", 1.0),
        ("run.task", "classify"),
        ("run.task", 'classifier(pooling="max")'),
        ("init.from", ""),
        ("init.weights", "best"),
        ("data.accumulation", 3),
        ("checkpoint.keep_latest", 0),
        ("guard.spike", "retry"),
        ("guard.window", 2),
        ("watch.profile_steps", 0),
        ("probe.every", -1),
        ("probe.every", 1.0),
        ("probe.statistics", "sizes"),
        ("probe.statistics", []),
        ("probe.statistics", ["size"]),
        ("probe.statistics", ["sizes", "sizes"]),
        ("probe.statistics", ["sizes"]),  # every is 0: nothing would be measured
        ("loss.label_smoothing", 1.0),
        ("sample.prompt", ""),
        ("sample.top_p", 0.0),
        ("sample.temperature", -1.0),
    ],
)
def test_a_wrong_type_or_value_is_refused_by_name(path, value):
    section, name = path.split(".")
    with pytest.raises(ValueError) as caught:
        build_config({section: {**DEFAULT.as_dict()[section], name: value}})
    words = str(caught.value)
    assert not isinstance(caught.value, pydantic.ValidationError)
    assert words.startswith(path)
    assert "must" in words
    assert "\n" not in words
    with pytest.raises(ValueError) as as_flag:
        build_config({}, {path: value})
    assert words == str(as_flag.value)


@pytest.mark.parametrize("value", ["1979-05-27", "07:32:00", "1979-05-27T07:32:00Z"])
def test_a_date_is_not_taken_for_text(value):
    with pytest.raises(ValueError, match=r"the config holds .*, a date or time"):
        build_config(tomllib.loads(f"[run]\nname = {value}\n"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"optimizer": {"learning_rte": 1e-3}}, "'optimizer.learning_rte' (did you mean 'optimizer.learning_rate'?)"),
        ({"optimizer": {"weigth_decay": 0.1}}, "'optimizer.weigth_decay' (did you mean 'optimizer.weight_decay'?)"),
        ({"run": {"learning_rate": 1e-3}}, "'run.learning_rate' (did you mean 'optimizer.learning_rate'?)"),
        ({"model": {"batch": 3}}, "'model.batch' (did you mean 'data.batch'?)"),
        ({"learning_rte": 1e-3}, "'learning_rte' (did you mean 'optimizer.learning_rate'?)"),
        ({"depth": 3}, "'depth' (did you mean 'model.depth'?)"),
        ({"modle": {"depth": 3}}, "unknown config section 'modle'; sections: run, model"),
        ({"modle": {"depth": 3}}, "(did you mean 'model'?)"),
        ({"run": 3}, "config key 'run' is 3; it must be a section, [run]"),
        ({"run": [{"steps": 3}]}, "it must be a section, [run]"),
        ({"model": {"depth": 3}}, "model.vocab_size is missing; it has no default"),
    ],
)  # fmt: skip
def test_b111_a_misspelt_or_misplaced_key_is_refused_with_the_right_one(values, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build_config(values)


def test_b111_control_the_same_keys_spelt_right_are_taken():
    config = build_config({"optimizer": {"learning_rate": 1e-3, "weight_decay": 0.2}, "data": {"batch": 3}})
    assert (config.optimizer.learning_rate, config.optimizer.weight_decay, config.data.batch) == (
        1e-3,
        0.2,
        3,
    )


def test_sections_refuse_unknown_keys_without_the_file_too():
    with pytest.raises(pydantic.ValidationError):
        RunConfig(stpes=3)  # pyright: ignore[reportCallIssue]
    with pytest.raises(pydantic.ValidationError):
        DEFAULT.run.steps = 3  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(dataclasses.FrozenInstanceError):
        DEFAULT.model.depth = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_a_section_that_a_file_opens_is_complete_in_itself():
    config = build_config({"sample": {"length": 3}, "model": dataclasses.asdict(CHANGED.model)})
    assert config.model == CHANGED.model
    assert config.sample == SampleConfig(length=3)
    assert config.run == DEFAULT.run


def test_a_misspelt_statistic_is_refused_with_the_nearest_one():
    with pytest.raises(ValueError, match=r"probe\.statistics has 'gradeint'; .*did you mean 'gradient'"):
        ProbeConfig(every=1, statistics=("gradeint",))


def test_the_first_step_and_every_multiple_are_measured():
    assert [step for step in range(1, 11) if ProbeConfig(every=4).is_due(step)] == [1, 4, 8]
    assert all(ProbeConfig(every=1).is_due(step) for step in range(1, 11))
    assert not any(ProbeConfig().is_due(step) for step in range(1, 11))  # control: off


# Flags -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "text", "value"),
    [
        ("run.steps", "12", 12),
        ("run.steps", "1_000", 1000),
        ("run.steps", "-1", -1),
        ("run.steps", "3.0", 3.0),
        ("run.steps", "twelve", "twelve"),
        ("run.steps", "", ""),
        ("run.steps", "3\nseed = 4", "3\nseed = 4"),
        ("run.steps", "9" * 5000, "9" * 5000),
        ("run.dir", "none", None),
        ("run.name", "none", "none"),
        ("model.positions", "none", "none"),
        ("model.residual", "none", "none"),
        ("execution.remat", "none", "none"),
        ("run.steps", "none", "none"),
        ("run.dir", "3", "3"),
        ("run.name", "true", "true"),
        ("model.bias", "false", False),
        ("model.bias", "True", True),
        ("model.kv_heads", "none", None),
        ("model.kv_heads", "2", 2),
        ("model.window", "[4, 0]", [4, 0]),
        ("model.window", "[]", []),
        ("model.residual", "pre_norm()", "pre_norm()"),
        ("optimizer.learning_rate", "3e-3", 3e-3),
        ("optimizer.clip", "1", 1),
        ("sample.prompt", "[1]", "[1]"),
        ("data.mixture", '{ books = 0.5, "data/code" = 3 }', {"books": 0.5, "data/code": 3}),
    ],
)  # fmt: skip
def test_a_flags_text_is_a_toml_value_or_text(path, text, value):
    parsed = parse_override(path, text)
    assert parsed == value
    assert type(parsed) is type(value)


def test_flags_stand_above_the_file():
    config = build_config({"run": {"steps": 3, "seed": 4}}, {"run.steps": 5, "model.window": [2]})
    assert (config.run.steps, config.run.seed, config.model.window) == (5, 4, (2,))
    assert config.model.depth == DEFAULT.model.depth


def test_differences_name_every_field_that_differs_and_no_other():
    assert differences(DEFAULT, TrainConfig()) == []
    other = build_config({}, {"model.depth": 6, "run.dir": "x", "model.window": [3]})
    assert differences(other, DEFAULT) == [
        "run.dir: 'x', None",
        f"model.depth: 6, {DEFAULT.model.depth}",
        "model.window: (3,), ()",
    ]
    assert len(differences(CHANGED, DEFAULT)) == len(fields()) - 2  # all but MIXED's
    assert "data.mixture: {'books': 0.5, 'a b/café': 3.0}, {}" in differences(MIXED, CHANGED)


# Help ------------------------------------------------------------------------------------------------------


def test_every_field_is_explained_by_help(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")  # wider pages have two columns
    with pytest.raises(SystemExit) as caught:
        main(["train", "--help"])
    assert caught.value.code == 0
    page = " ".join(re.sub(r"[│╭╮╰╯─]", " ", capsys.readouterr().out).split())
    every = fields()
    assert len(every) >= 50
    assert {field.section for field in every} == set(TrainConfig.model_fields)
    for field in every:
        assert len(field.description) > 10
        flag, words = f"--{field.path}".replace("_", "-"), " ".join(field.description.split())
        start = page.index(f" {flag} ")
        explained = page.index(words, start)
        assert "--" not in page[start + len(flag) : explained], f"{flag} is explained by another's words"
        default = "none" if field.default is None else str(field.default)
        assert f"(default: {default})" in page[explained:][: len(words) + len(default) + 60]

"""Configs to try: those of `configs/`, made tiny, with one or two things done to them; and random valid ones."""

import inspect
import random
import tomllib
from collections.abc import Callable, Mapping
from typing import Any

import tomli_w

from experiments.fuzz.cases import CONFIG, ROOT, Case, Entry
from jaxblock import config as model_config
from jaxblock.residual.registry import REGISTRY
from jaxblock.training.config import ALGORITHMS, SCHEDULES, TASKS
from jaxblock.training.config_file import fields

Config = dict[str, dict[str, Any]]
CODE = "__import__('os').system('touch executed')"
RAW = "@@raw@@"
"""Stands in a TOML text where `_Raw.text` will stand: what a TOML writer would not write."""
RAW_TEXTS = [
    *(
        "nan",
        "-inf",
        "1e999",
        "0x" + "f" * 5000,
        "9" * 5000,
        "1979-05-27T07:32:00Z",
        "07:32:00",
        "'''\na\n'''",
    ),
    *('"\\ud800"', "[" * 3000 + "]" * 3000, "[" * 90 + "]" * 90, "{a={a={a={a=1}}}}", "1__0", "True", "0o17"),
]
WRONG: list[Any] = [
    *(True, False, 3.0, -1, 0, 1, 2, 7, 1000, 2**31 - 1, 2**31, 2**63, -(2**63), 10**30, 10**400),
    *(1e308, -1e308, float("nan"), float("inf"), float("-inf"), 1e-320, 1e-40, -0.0, 0.5, 1.0, 1e6),
    *(
        "",
        " ",
        "\x00",
        "\n",
        "é😀",
        "\u202e",
        "a" * 5000,
        "1",
        "none",
        "nan",
        "null",
        "../x",
        "/",
        ".",
        "~",
        "\\",
    ),
    *([], [[1, [2]]], [1] * 2000, ["a", "a"], [0], [-1], [2**40], {}, {"a": {"b": 1}}, {"": 1}),
    *(CODE, "hyper_connections(streams=0)", "pre_norm(**{})", "f(*[1])", "lambda: 0", "a.b(c=1)", "f(x=[1,"),
]
LITERALS = [
    *(
        "0",
        "-1",
        "1",
        "2",
        "3",
        "1000",
        "2147483647",
        "2147483648",
        "10**3",
        "1e999",
        "-1e999",
        "1e-320",
        "0.5",
    ),
    *(
        "1.5",
        "True",
        "None",
        "'x'",
        "b'x'",
        "[]",
        "[1]",
        "(1, 2)",
        "{}",
        "{1}",
        "1j",
        "...",
        "x",
        "'a' 'b'",
        "-1.0",
    ),
    *(
        "9" * 400,
        "9" * 5000,
        "0x" + "f" * 5000,
        "(" * 300 + ")" * 300,
        "-" * 3000 + "1",
        "'\\d'",
        "1if 1else 2",
    ),
    *("1e-40", "1e38", "1e300", "'" + "a" * 3000 + "'", CODE, "f(x=1)", "'\\x00'", "'é😀\\n'", "[" * 4000),
]
TEXTS = ["naïve 😀", "\ud800", "a b", "1 2 3", "1 99999999999999999999", "\n", "x" * 3000]
TABLES: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "run.task": TASKS,
    "model.positions": model_config.POSITIONS,
    "model.token_mixer": model_config.TOKEN_MIXERS,
    "model.value_residual": model_config.VALUE_RESIDUALS,
    "model.experts": model_config.EXPERTS,
    "model.stochastic_depth": model_config.STOCHASTIC_DEPTHS,
    "model.initialization": model_config.INITIALIZATIONS,
    "model.parametrization": model_config.PARAMETRIZATIONS,
    "model.residual": {
        name: {option: value.default for option, value in inspect.signature(factory).parameters.items()}
        for name, factory in REGISTRY.items()
    },
    "optimizer.algorithm": ALGORITHMS,
    "optimizer.schedule": SCHEDULES,
}
SWITCHES: Mapping[str, list[Any]] = {
    "model.feed_forward": [*model_config.PLAIN_FEED_FORWARDS, *model_config.GATED_FEED_FORWARDS],
    "model.norm": [*model_config.NORMS],
    "model.bias": [True, False],
    "model.positions": [
        "none",
        "learned",
        "sinusoidal",
        "rope",
        "rope(base=500.0, convention='interleaved')",
        "alibi",
    ],
    "model.residual": [*REGISTRY],
    "model.wiring": ["serial", "parallel"],
    "model.window": [[], [4], [0, 3], [1]],
    "model.kv_heads": [1, 2],
    "model.depth": [1, 2, 4],
    "model.token_mixer": [
        "attention",
        "attention",
        "attention",
        "mlp(hidden=8)",
        "convolution",
        "convolution(rows=4)",
    ],
    "model.value_residual": ["none", "fixed", "learned(first=0.1)"],
    "model.experts": ["none", "none", "dropless(experts=3)", "capacity(experts=2, active=1)"],
    "model.soft_cap": [5.0],
    "model.head": ["tied", "untied"],
    "model.vocab_multiple": [1, 64, 100],
    "model.attention_dropout": [0.0, 0.1],
    "model.hidden_dropout": [0.0, 0.9],
    "model.branch_dropout": [0.0, 0.1],
    "model.stochastic_depth": ["none", "constant(rate=0.5)", "linear(rate=0.1)"],
    "model.initialization": ["plain", "gpt2", "zero_output"],
    "model.parametrization": [
        "standard",
        "standard",
        "depth_mup(base_depth=1)",
        "complete_p(base_depth=1, base_width=8)",
    ],
    "model.dtype": [*model_config.DTYPES],
    "model.param_dtype": ["float32", "bfloat16"],
    "model.stream_dtype": [*model_config.DTYPES],
    "execution.scan_unroll": [1, 2, 3, 100],
    "execution.remat": [*model_config.REMAT_POLICIES],
    "execution.history": ["reverse", "plain"],
    "execution.attention": ["xla", "blocked", "blocked", "cudnn"],
    "execution.loss": ["whole", "blocked"],
    "data.accumulation": [1, 2, 4],
    "data.seams": ["joined", "separate"],
    "data.validation_tokens": [64, 500],
    "optimizer.algorithm": ["adamw", "lion", "adafactor", "muon(iterations=2)", "muon(scale='spectral')"],
    "optimizer.schedule": ["cosine", "linear(final=0.1)", "constant", "wsd(decay=1.0)", "inverse_sqrt"],
    "optimizer.warmup": [0.0, 0.5, 1.0],
    "optimizer.clip": [0.0, 1.0],
    "optimizer.average": [0.0, 0.9],
    "optimizer.role_rates": [{}, {"embedding": 0.3, "norm": 0.0}],
    "loss.z_loss": [0.0, 1e-4],
    "loss.label_smoothing": [0.0, 0.1],
    "guard.non_finite": ["stop", "skip", "rewind"],
    "guard.spike": ["ignore", "skip"],
    "checkpoint.keep_best": [0, 1],
    "watch.tensorboard": [False, False, True],
    "watch.figure_seconds": [0.0],
    "watch.profile_start": [5],
    "probe.every": [0, 0, 1],
    "sample.temperature": [0.0, 1.0],
    "sample.top_k": [1, 5, 100_000],
    "sample.top_p": [0.5, 1.0],
    "sample.prompt": ["ab", "naïve 😀"],
    "sample.length": [1, 4, 40],
    "run.steps": [1, 2],
    "run.evaluate_every": [1],
    "run.name": ["a b", "naïve", "CON"],
}
TINY: Config = {
    "run": {"name": "tiny", "steps": 1},
    "model": {"context": 16, "depth": 2, "width": 16, "heads": 2},
    "data": {"batch": 4, "validation_tokens": 64},
    "sample": {"length": 4},
}


class _Raw:
    """TOML text as it is."""

    def __init__(self, text: str):
        self.text = text


def bases(files: Mapping[str, Entry]) -> list[Config]:
    """Return every config of `configs/`, small enough to run in a second; `files` has the data they read."""
    found = []
    for path in sorted((ROOT / "configs").glob("*.toml")):
        config = tomllib.loads(path.read_text(encoding="utf-8"))
        data = "shards" if "path" in config["data"] else "text.txt"
        data = "labelled.jsonl" if config["run"].get("task", "").startswith("classifier") else data
        is_image = config["data"].get("path") == "digits"
        for section, values in TINY.items():
            config.setdefault(section, {}).update(values)
        config["model"].pop("hidden", None)
        if "kv_heads" in config["model"]:
            config["model"]["kv_heads"] = 1
        if is_image:
            config["model"]["context"], data = 64, "digits"
        config["model"]["vocab_size"] = min(config["model"]["vocab_size"], 300)
        config["data"]["path"] = data
        if "separator" in config["data"]:
            config["data"]["separator"] = 10
        config["data"].pop("accumulation", None)
        if config.get("execution", {}).get("attention") == "cudnn":
            config["execution"]["attention"] = "xla"
        found.append(config)
    return found


def config_cases(count: int, *, seed: int, files: Mapping[str, Entry]) -> list[Case]:
    """Return `count` cases of a seed."""
    draw = random.Random(f"configs {seed}")
    ways = [(_wrong_value, 7), (_option, 6), (_unknown, 2), (_damaged, 3), (_switches, 4), (_flags, 2)]
    chosen = draw.choices([way for way, _ in ways], [weight for _, weight in ways], k=count)
    start = bases(files)
    return [way(draw, _copy(draw.choice(start)), files) for way in chosen]


def _wrong_value(draw: random.Random, config: Config, files: Mapping[str, Entry]) -> Case:
    """One or two fields get a value of another kind or size."""
    said = []
    for _ in range(draw.choice([1, 1, 1, 2])):
        chosen = draw.choice(fields())
        value = _Raw(draw.choice(RAW_TEXTS)) if draw.random() < 0.2 else draw.choice(WRONG)
        config.setdefault(chosen.section, {})[chosen.name] = value
        said.append(f"{chosen.path} = {value.text if isinstance(value, _Raw) else value!r}"[:200])
    return _case(draw, config, files, "; ".join(said), runs=draw.random() < 0.05)


def _option(draw: random.Random, config: Config, files: Mapping[str, Entry]) -> Case:
    """A one-string choice gets a strange option, or its text is damaged."""
    path = draw.choice([*TABLES, "model.residual", "model.residual"])
    member = draw.choice([*TABLES[path]])
    options = TABLES[path][member]
    known = {name: 2 if value is int else 0.5 if value is float else value for name, value in options.items()}
    texts = {
        name: repr(value)
        for name, value in known.items()
        if draw.random() < 0.5 or isinstance(options[name], type)
    }
    if options and draw.random() < 0.9:
        texts[draw.choice([*options])] = draw.choice(LITERALS)
    else:
        texts[draw.choice(["x", "streams", "rate", "None", "class", "é"])] = draw.choice(LITERALS)
    text = f"{member}({', '.join(f'{name}={value}' for name, value in texts.items())})"
    if draw.random() < 0.2:
        text = _cut(draw, text)
    section, name = path.split(".")
    if draw.random() < 0.3 and "\0" not in text:
        return _case(
            draw, config, files, f"--{path}={text}"[:200], (f"--{path}={text}",), runs=draw.random() < 0.1
        )
    config.setdefault(section, {})[name] = text
    return _case(draw, config, files, f"{path} = {text!r}"[:200], runs=draw.random() < 0.1)


def _unknown(draw: random.Random, config: Config, files: Mapping[str, Entry]) -> Case:
    """A key or a section is misspelt, moved, or not there."""
    section = draw.choice([*config])
    name = draw.choice([*config[section]])
    strange = draw.choice(
        [_cut(draw, name), name.upper(), f"{name}.x", "", "é", " ", "\n", "a" * 3000, "__class__"]
    )
    way = draw.randrange(5)
    if way == 0:
        config[section][strange] = config[section].pop(name)
    elif way == 1:
        config[strange] = config.pop(section)
    elif way == 2:
        config[draw.choice([*config])][name] = config[section].pop(name)
    elif way == 3:
        config[strange or "x"] = draw.choice([1, "x", [], [{"a": 1}], {}])  # type: ignore[assignment]
    else:
        config[section] = draw.choice([1, "x", [], [{"depth": 1}], {}, float("nan")])  # type: ignore[assignment]
    return _case(draw, config, files, f"keys: {section}.{name}, {strange!r}"[:200])


def _damaged(draw: random.Random, config: Config, files: Mapping[str, Entry]) -> Case:
    """The text of the file is damaged."""
    text = tomli_w.dumps(config).encode()
    lines = text.splitlines(keepends=True)
    place = draw.randrange(len(text))
    ways: list[Callable[[], bytes]] = [
        lambda: text[:place],
        lambda: text[:place] + text[place + 1 :],
        lambda: text[:place] + bytes([draw.randrange(256)]) + text[place:],
        lambda: (
            text[:place]
            + draw.choice([b"\xff", b"\xed\xa0\x80", b"\0", b"\r", b"[[", b"'''", b"\\u0000"])
            + text[place:]
        ),
        lambda: text + draw.choice(lines),
        lambda: b"".join(draw.sample(lines, len(lines))),
        lambda: b"\xef\xbb\xbf" + text.replace(b"\n", b"\r\n"),
        lambda: text.decode().encode("utf-16"),
        lambda: b"x = " + b"[" * 5000 + b"\n" + text,
        lambda: b"a." * 3000 + b"b = 1\n" + text,
        lambda: text.replace(
            b"[model]", draw.choice([b"[[model]]", b"[model.x]", b"[ model ]", b"['model']", b"[]"])
        ),
        lambda: b"",
        lambda: text + b"[model.depth]\nx = 1\n",
        lambda: text + b"run.x.y = 1\nrun.x.y.z = 2\n",
    ]
    number = draw.randrange(len(ways))
    found = _case(draw, config, files, f"text damaged, way {number}, at {place}")
    return Case(found.kind, found.words, found.arguments, {**found.files, CONFIG: ways[number]()})


def _switches(draw: random.Random, config: Config, files: Mapping[str, Entry]) -> Case:
    """Independent switches at random values that are allowed one by one."""
    said = []
    for path in draw.sample([*SWITCHES], draw.randrange(2, 9)):
        section, name = path.split(".")
        config.setdefault(section, {})[name] = draw.choice(SWITCHES[path])
        said.append(f"{path} = {config[section][name]!r}")
    return _case(draw, config, files, "; ".join(said), runs=draw.random() < 0.2)


def _flags(draw: random.Random, config: Config, files: Mapping[str, Entry]) -> Case:
    """Flags of the command are strange."""
    chosen = draw.choice(fields())
    value = draw.choice([*map(str, WRONG), *RAW_TEXTS, *LITERALS, *TEXTS]).replace("\0", "0")
    given = draw.choice(
        [
            [f"--{chosen.path}={value}"],
            [f"--{chosen.path}", value],
            [f"--{_cut(draw, chosen.path)}={value}"],
            [f"--{chosen.path}"],
            [value],
            [f"--{chosen.path}={value}", f"--{chosen.path}={value}"],
            [f"--{chosen.path.replace('_', '-')}={value}"],
            ["--json=1"],
            [f"--resume={value}"],
        ]
    )
    return _case(draw, config, files, " ".join(given)[:200], tuple(given))


def _case(
    draw: random.Random,
    config: Config,
    files: Mapping[str, Entry],
    words: str,
    flags: tuple[str, ...] = (),
    *,
    runs: bool = False,
) -> Case:
    """Return the case of a config; most of them name the run's folder."""
    is_named = "dir" in str(config.get("run")) or any(
        flag.startswith(("--run.dir", "--resume")) for flag in flags
    )
    named = ("--run.dir=run",) if draw.random() < 0.7 and not is_named else ()
    text = _toml(config).encode("utf-8", "surrogatepass")
    return Case("config", words, ("train", CONFIG, *named, *flags), {**files, CONFIG: text}, runs)


def _toml(config: Mapping[str, Any]) -> str:
    raw: list[str] = []

    def plain(value: Any) -> Any:
        if isinstance(value, _Raw):
            raw.append(value.text)
            return RAW
        return {name: plain(inner) for name, inner in value.items()} if isinstance(value, dict) else value

    text = tomli_w.dumps(plain(config))
    for value in raw:
        text = text.replace(f'"{RAW}"', value, 1)
    return text


def _cut(draw: random.Random, text: str) -> str:
    place = draw.randrange(len(text)) if text else 0
    return text[:place] + draw.choice(["", "", draw.choice("(),='\"x1é \n")]) + text[place + 1 :]


def _copy(config: Config) -> Config:
    return {section: dict(values) for section, values in config.items()}

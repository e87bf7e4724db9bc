"""Decoding beside Hugging Face generate, cache and all: `python -m experiments.benchmarks.decode --batch 1 16`.

Both draw from GPT-2 models of the same sizes with random parameters, from the same prompts: 6 blocks of width 256
(4 heads, feed-forward 1024), 256 tokens, context 512, a prompt of 16 and 256 new tokens, float32, temperature 1.

Each contender has a process of its own, since the thread pools of torch and jax slow each other down, and is told over
its standard input to decode once. They take turns, and every second round begins with the other one, so that a noisy
machine is noisy for both; a round gives one ratio. What compiles does so before the first round. Printed, and with
--json as one line, are the medians of seconds and of ratios, and quartiles over rounds; above 1, ours is the faster.

The aim on two CPU cores: a ratio of at least 2 with a batch of 1 and of 16. Run it on a machine that does nothing else:
where cores are busy, torch's threads wait for each other, and its seconds say little. Without transformers, ours runs
alone.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.benchmarks.arguments import Help, figure_path, positive

CONTENDERS = ("jaxblock", "hugging_face")
VOCAB = 256


class Sizes(NamedTuple):
    """What is decoded with what."""

    depth: int
    width: int
    heads: int
    context: int
    prompt: int
    length: int


def main() -> None:
    """Print a table or one line of JSON; draw a figure where a path is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("--batch", type=positive, nargs="+", default=[1, 16], help="rows decoded at once")
    parser.add_argument("--rounds", type=positive, default=9, help="turns")
    for name, value in (("depth", 6), ("width", 256), ("heads", 4)):
        parser.add_argument(f"--{name}", type=positive, default=value, help="of both models")
    for name, value in (("context", 512), ("prompt", 16), ("length", 256)):
        parser.add_argument(f"--{name}", type=positive, default=value, help="in tokens")
    parser.add_argument("--json", action="store_true", help="one line of JSON in place of the table")
    parser.add_argument("--figure", type=figure_path, help="where a figure is written")
    parser.add_argument("--worker", choices=CONTENDERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sizes = Sizes(*(getattr(arguments, name) for name in Sizes._fields))
    if sizes.prompt + sizes.length > sizes.context:
        parser.error(
            f"--prompt {sizes.prompt} and --length {sizes.length} do not fit in --context {sizes.context}"
        )
    if arguments.worker is not None:
        work(arguments.worker, sizes, arguments.batch[0])
        return
    names = CONTENDERS
    if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("torch") is None:
        print("transformers or torch is not installed, so jaxblock runs alone.", file=sys.stderr)
        names = CONTENDERS[:1]
    seconds = {batch: compete(names, sizes, batch, arguments.rounds) for batch in arguments.batch}
    found = [summary(names, batch, seconds_RC, sizes.length) for batch, seconds_RC in seconds.items()]
    print(json.dumps({**sizes._asdict(), "results": found}) if arguments.json else table(found))
    if arguments.figure is not None:
        draw(names, seconds, sizes, arguments.figure)


# The contenders -------------------------------------------------------------------------------------------


def work(name: str, sizes: Sizes, batch: int) -> None:
    """Decode once for each line of standard input, and answer it with seconds."""
    prompt_BT = np.random.default_rng(0).integers(0, VOCAB, (batch, sizes.prompt))
    decode = {"jaxblock": jaxblock, "hugging_face": hugging_face}[name](sizes, prompt_BT)
    for _ in range(2):
        shape = decode().shape
        if shape != (batch, sizes.length):
            raise ValueError(f"{name} returned tokens of shape {shape}")
    print("ready", flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        decode()
        print(time.perf_counter() - start, flush=True)


def jaxblock(sizes: Sizes, prompt_BT: np.ndarray) -> Callable[[], np.ndarray]:
    """Return what decodes once with this library."""
    import jax
    import jax.numpy as jnp

    from jaxblock import Decoder, ModelConfig, generate
    from jaxblock.functional import SamplingRule

    config = ModelConfig(
        vocab_size=VOCAB, context=sizes.context, depth=sizes.depth, width=sizes.width, heads=sizes.heads
    )
    model, tokens_BT = Decoder(config), jnp.asarray(prompt_BT, jnp.int32)
    params = jax.jit(model.init)(jax.random.key(0), tokens_BT)["params"]
    rule = SamplingRule(temperature=1.0)
    return lambda: np.asarray(
        generate(model, params, tokens_BT, jax.random.key(1), length=sizes.length, rule=rule)
    )


def hugging_face(sizes: Sizes, prompt_BT: np.ndarray) -> Callable[[], np.ndarray]:
    """Return what decodes once with transformers."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=sizes.context,
        n_embd=sizes.width,
        n_layer=sizes.depth,
        n_head=sizes.heads,
        bos_token_id=0,
        eos_token_id=None,
    )
    model: Any = GPT2LMHeadModel(config).eval()
    tokens_BT = torch.from_numpy(prompt_BT)

    def decode() -> np.ndarray:
        with torch.inference_mode():
            made_BT = model.generate(
                tokens_BT,
                attention_mask=torch.ones_like(tokens_BT),
                max_new_tokens=sizes.length,
                min_new_tokens=sizes.length,
                do_sample=True,
                top_k=0,
                use_cache=True,
                pad_token_id=0,
            )
        return made_BT[:, sizes.prompt :].numpy()

    return decode


# Turns ----------------------------------------------------------------------------------------------------


def compete(names: tuple[str, ...], sizes: Sizes, batch: int, rounds: int) -> np.ndarray:
    """Return seconds of each round and contender, [R, C]."""
    workers = [open_worker(name, sizes, batch) for name in names]
    try:
        for worker in workers:
            answer(worker)
        seconds_RC = np.zeros((rounds, len(names)))
        for number in range(rounds):
            order = range(len(names)) if number % 2 == 0 else reversed(range(len(names)))
            for place in order:
                seconds_RC[number, place] = float(ask(workers[place]))
        return seconds_RC
    finally:
        for worker in workers:
            worker.communicate()  # its input ends, and so does it


def open_worker(name: str, sizes: Sizes, batch: int) -> subprocess.Popen:
    """Start the process of a contender."""
    options = [part for field, value in sizes._asdict().items() for part in (f"--{field}", str(value))]
    command = [sys.executable, "-m", "experiments.benchmarks.decode", "--worker", name, "--batch", str(batch)]
    return subprocess.Popen([*command, *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ask(worker: subprocess.Popen) -> str:
    """Have a contender decode once; return its answer."""
    if worker.stdin is None:
        raise ValueError("the contender was started without an input")
    worker.stdin.write("decode\n")
    worker.stdin.flush()
    return answer(worker)


def answer(worker: subprocess.Popen) -> str:
    """Return a contender's next line."""
    line = "" if worker.stdout is None else worker.stdout.readline()
    if not line:
        raise RuntimeError(f"a contender ended before it answered: {worker.args}")
    return line


# What is said ---------------------------------------------------------------------------------------------


def summary(names: tuple[str, ...], batch: int, seconds_RC: np.ndarray, length: int) -> dict[str, Any]:
    """Return medians and quartiles over rounds; the ratio is Hugging Face's seconds by ours, round by round."""
    found: dict[str, Any] = {"batch": batch, "rounds": len(seconds_RC)}
    for name, seconds_R in zip(names, seconds_RC.T, strict=True):
        found[name] = spread(seconds_R)
        found[f"{name}_tokens_per_second"] = round(batch * length / float(np.median(seconds_R)), 1)
    found["ratio"] = spread(seconds_RC[:, 1] / seconds_RC[:, 0]) if len(names) == 2 else None
    return found


def spread(x_R: np.ndarray) -> dict[str, float]:
    """Return the median and the quartiles."""
    values = np.quantile(x_R, [0.5, 0.25, 0.75])
    return {name: round(float(x), 4) for name, x in zip(("median", "low", "high"), values, strict=True)}


def table(found: list[dict[str, Any]]) -> str:
    """Return a Markdown table: medians, quartiles in brackets."""
    lines = ["| batch | jaxblock, s | Hugging Face, s | ratio |", "|---|---|---|---|"]

    def cell(x: dict[str, float] | None) -> str:
        return "-" if x is None else f"{x['median']:.3f} [{x['low']:.3f}, {x['high']:.3f}]"

    for row in found:
        cells = (cell(row.get(name)) for name in (*CONTENDERS, "ratio"))
        lines.append(f"| {row['batch']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(names: tuple[str, ...], seconds: dict[int, np.ndarray], sizes: Sizes, path: Path) -> None:
    """Draw tokens per second by batch size: medians, with quartiles as bars."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5.5, 3.6), layout="constrained")
    places = np.arange(len(seconds))
    for number, name in enumerate(names):
        speeds = [batch * sizes.length / x_RC[:, number] for batch, x_RC in seconds.items()]
        low, middle, high = np.quantile(np.array(speeds), [0.25, 0.5, 0.75], axis=1)
        label = {"jaxblock": "jaxblock", "hugging_face": "Hugging Face generate"}[name]
        at = places + 0.4 * (number - (len(names) - 1) / 2)
        axes.bar(at, middle, 0.38, yerr=(middle - low, high - middle), capsize=3, label=label)
    axes.set_xticks(places, [str(batch) for batch in seconds])
    axes.set(xlabel="rows decoded at once", ylabel="new tokens per second")
    axes.set_title(
        f"prompt {sizes.prompt}, {sizes.length} new tokens, depth {sizes.depth}, width {sizes.width}, "
        f"{sizes.heads} heads, float32",
        fontsize=9,
    )
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


if __name__ == "__main__":
    main()

"""What every sublayer reads of what was written before it: the depth-mixing matrix of every residual topology.

    XLA_FLAGS=--xla_backend_optimization_level=0 python -m experiments.depth_mixing [--blocks 6]

Sources v_0 = embedding, v_i = output of sublayer i; A[l, i] is the weight of v_i in what sublayer l reads, the last
row what is closed. Norms are left out and all coefficients that depend on the input are frozen (the view of arXiv
2603.15031), so that h_l = sum_i A[l, i] v_i. Measured, not declared: sources are random vectors with a few channels of
zeros, A[l, i] = d h_l / d v_i there. A coefficient's own derivative is multiplied by what a source holds in that
channel, which is 0: what is left is the coefficient. The mean over those channels is drawn. Of a sublayer that reads
query, key and value separately, the value is taken.

Every name of the registry at its start with its default options, some with others, and some off their start: all
parameters moved by seeded noise whose size stands beside the name below.

Expected:

    declared tables     equal what is measured at the start, to 1e-4 of the table's largest weight in that row
    pre_norm            1 everywhere up to the diagonal; so are all that start as pre-norm, but for attention residuals,
                        whose rows are means (1 / l), which a norm cannot tell from sums, and the closed row of several
                        streams, which is their sum
    none                1 on the diagonal alone
    highway             rows sum to 1 (every weight of the stream is 1 - gate, of the branch gate)
    attention residuals rows sum to 1, off their start too; block sums make steps of equal weights
    dense_former        off its start alpha times the cumulative sum: columns change only at a block's end
    deep_norm, keel     earlier sources gain alpha per sublayer, 1.9 and 12 here: a norm left out is what bounds them

The exit code is 1 unless the first line holds for every topology that declares a table; the others are tests
(tests/experiments/test_depth_mixing.py). Writes experiments/results/depth_mixing.csv, one row per weight, and
experiments/figures/depth_mixing.png. About 70 seconds of processor time with the flag, which only saves compiling.
"""

import argparse
import csv
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from jaxblock import ExecutionConfig, ModelConfig
from jaxblock.models import LayerInputs, StackInputs, init_blocks, layer_inputs, run_blocks
from jaxblock.modules import Norm
from jaxblock.residual import REGISTRY, Topology, place, residual, topology
from jaxblock.types import Array, Params, Stream

HERE = Path(__file__).parent
WIDTH, COLUMNS, TOLERANCE = 64, 8, 1e-4
# Spaced by a quarter of the width: a rule that mixes halves or quarters of it sends zeros to zeros.
PROBES = tuple(WIDTH // 8 + k * WIDTH // 4 for k in range(4))
READS = "reads"
OPTIONS = (
    "branch_scale(value=0.5)",
    "attention_residual(window=3)",
    "lime(weights='dynamic')",
    "input_injection(decay=0.9)",
    "unet(start=1.0)",
)
OFF_START: Mapping[str, float] = {
    "learned_scale": 0.5,
    "highway": 1.0,
    "laurel": 0.3,
    "unet": 1.0,
    "dense_former": 0.3,
    "attention_residual": 0.2,
    "attention_residual(key='layer')": 1.5,
    "block_attention_residual(sublayers=4)": 0.2,
    "muddformer": 0.15,
    "lime": 0.5,
    "lime(weights='dynamic')": 0.3,
    "hyper_connections": 0.2,
    "manifold_hyper_connections": 0.3,
}


class ReadBlock(nn.Module):
    """A block's connections around branches that are given: what each reads goes to the collection "reads"."""

    config: ModelConfig
    topology: Topology

    @nn.compact
    def __call__(self, stream: Stream, outputs_SD: Array, layer: LayerInputs) -> Stream:
        """Return the stream after the block."""
        for j, name in enumerate(("attention_connection", "feed_forward_connection")):

            def branch(h: Any, j: int = j) -> Array:
                h = jax.tree.leaves(h)[-1]  # of views, the value
                self.sow(READS, f"read_{j}", h)
                return jnp.broadcast_to(outputs_SD[place(self).sublayer + j], h.shape)

            connection = self.topology.connection(self.config, name=name)
            stream = residual(connection, stream, branch, dtype="float32")
        after = self.topology.after_block
        return stream if after is None else after(self.config, name="after_block")(stream)


class Stack(NamedTuple):
    """A topology in a model's sizes, and the parameters of its connections."""

    config: ModelConfig
    topology: Topology
    params: Params
    """"blocks", and where the topology has them "shared" and "close"."""


def model(blocks: int) -> ModelConfig:
    """Return sizes with nothing in them that a connection does not read; forward derivatives need a plain loop."""
    return ModelConfig(vocab_size=2, context=1, depth=blocks, width=WIDTH, heads=1, norm="rms_norm")


def run(stack: Stack, sources_SD: Array) -> tuple[Params, Array]:
    """Return the parameters (made, where the stack has none) and what is read, [S + 1, D], the closed stream last."""
    config, made, given = stack.config, stack.topology, dict(stack.params)
    keys = jax.random.split(jax.random.key(0), 3)

    def of(module: Any, name: str, key: Array, *arguments: Any) -> Any:
        if name not in given:
            given[name] = module.init(key, *arguments).get("params", {})
        return module.apply({"params": given[name]}, *arguments)

    shared = None if made.shared is None else of(made.shared(config, name="shared"), "shared", keys[0])
    groups = None if made.groups is None else made.groups(config)
    inputs = StackInputs(sources_SD[1:], layer_inputs(config), shared, groups)  # pyright: ignore[reportArgumentType]
    block = ReadBlock(config, made, parent=None)
    stream = made.open(config, sources_SD[:1][None])
    if "blocks" not in given:
        given["blocks"] = init_blocks(block, keys[1], stream, inputs, depth=config.depth)
    stream, collected = run_blocks(
        block,
        given["blocks"],
        stream,
        inputs,
        dropout_key=None,
        execution=ExecutionConfig(history="plain"),
        collect=(READS,),
    )
    if made.close is not None:
        stream = of(made.close(config, name="close"), "close", keys[2], stream, shared)
    reads = collected[READS]
    rows = jnp.stack([*reads["read_0"], *reads["read_1"]], axis=1).reshape(config.sublayers, -1)
    return given, jnp.concatenate([rows, stream.reshape(1, -1)])


def start(made: Topology, config: ModelConfig) -> Stack:
    """Return the topology at its initial values."""
    params = jax.jit(lambda x: run(Stack(config, made, {}), x)[0])(sources(config))
    return Stack(config, made, params)


def moved(stack: Stack, scale: float, seed: int = 0) -> Stack:
    """Return the stack with noise on every parameter; a matrix's noise is divided by the root of its last axis."""
    rng = np.random.default_rng(seed)

    def leaf(path: tuple, x: Array) -> Array:
        per_layer = x.ndim - (path[0].key == "blocks")
        size = scale / x.shape[-1] ** 0.5 if per_layer > 1 else scale
        return x + jnp.asarray(rng.normal(scale=size, size=x.shape), x.dtype)

    return stack._replace(params=jax.tree_util.tree_map_with_path(leaf, stack.params))


def sources(config: ModelConfig, seed: int = 0) -> Array:
    """Return random sources [S + 1, D], 0 in the channels where weights are read off."""
    drawn = np.random.default_rng(seed).normal(size=(config.sublayers + 1, WIDTH))
    drawn[:, PROBES] = 0.0
    return jnp.asarray(drawn, jnp.float32)


def without_norms(call: Any, args: tuple, kwargs: dict, context: nn.module.InterceptorContext) -> Any:
    """Call a module, a norm as the identity."""
    if isinstance(context.module, Norm) and context.method_name == "__call__":
        return args[0]
    return call(*args, **kwargs)


def mixing_matrix(stack: Stack, sources_SD: Array | np.ndarray) -> np.ndarray:
    """Return A, [S + 1, S + 1]: row l - 1 is what sublayer l reads, the last row what is closed; a mean over probes."""
    count = len(sources_SD)

    def reads(sources_SD: Array) -> Array:
        with nn.intercept_methods(without_norms):
            return run(stack, sources_SD)[1]

    def weight(source: Array, channel: Array) -> Array:
        tangent = jnp.zeros_like(sources_SD).at[source, channel].set(1.0)
        return jax.jvp(reads, (sources_SD,), (tangent,))[1][:, channel]

    over_sources = jax.vmap(weight, in_axes=(0, None), out_axes=1)
    over_probes = jax.vmap(over_sources, in_axes=(None, 0))
    table = jax.jit(over_probes)(jnp.arange(count), jnp.asarray(PROBES))
    return np.asarray(table.mean(0), np.float64)


class Picture(NamedTuple):
    """One measured matrix."""

    name: str
    at: str
    """start, or "off N": parameters moved by noise of size N."""
    weights: np.ndarray
    deviation: float | None
    """Largest distance from the declared table, in parts of the row's largest weight; None without one."""


def measure(text: str, config: ModelConfig, *, noise: float | None = None) -> Picture:
    """Return the matrix of the topology a config string names, at its start or moved."""
    made = topology(text)
    stack = start(made, config)
    if noise is not None:
        return Picture(text, f"off {noise:g}", mixing_matrix(moved(stack, noise), sources(config)), None)
    weights = mixing_matrix(stack, sources(config))
    if made.mixing is None:
        return Picture(text, "start", weights, None)
    declared = made.mixing(config)
    largest = np.maximum(np.abs(declared).max(1, keepdims=True), 1e-9)
    return Picture(text, "start", weights, float((np.abs(weights - declared) / largest).max()))


def report(pictures: Sequence[Picture]) -> tuple[list[str], bool]:
    """Return a line per picture and whether every declared table is what was measured."""
    lines, good = [], True
    for name, at, weights, deviation in pictures:
        rows = weights.sum(1)
        facts = f"rows sum to {rows.min():.3g} .. {rows.max():.3g}"
        if deviation is not None:
            good = good and deviation <= TOLERANCE
            verdict = "as declared" if deviation <= TOLERANCE else "NOT as declared"
            facts += f"; {verdict}, off by {deviation:.1e}"
        elif at == "start":
            facts += "; declares no table"
        lines.append(f"{name:42} {at:9} {facts}")
    return lines, good


def write_table(path: Path, pictures: Sequence[Picture]) -> None:
    """Write one row per weight up to the diagonal; reads and sources as numbered in the equation."""
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("topology", "at", "read", "source", "weight"))
        for picture in pictures:
            for read, row in enumerate(picture.weights):
                for source in range(read + 1):
                    table.writerow((picture.name, picture.at, read + 1, source, f"{row[source]:.6g}"))


def draw(path: Path, pictures: Sequence[Picture]) -> None:
    """Draw each matrix in a scale of its own: white = 0, red above, blue below, the largest weight in the title.

    The largest is that of what sublayers read: of several streams the closed row is a sum. Colour goes with a weight's
    square root, so that what decays with depth is still seen.
    """
    rows = -(-len(pictures) // COLUMNS)
    figure = Figure(figsize=(1.85 * COLUMNS, 2.2 * rows + 0.6), layout="constrained")
    panels = figure.subplots(rows, COLUMNS, squeeze=False).flat
    for picture, panel in zip(pictures, panels, strict=False):
        largest = float(np.abs(picture.weights[:-1]).max())
        shade = np.sign(picture.weights) * np.sqrt(np.abs(picture.weights) / largest)
        panel.imshow(shade, cmap="RdBu_r", vmin=-1.0, vmax=1.0, interpolation="nearest")
        name = picture.name.replace("(", "\n(", 1) if "(" in picture.name else picture.name
        panel.set_title(f"{name}\n{picture.at}, max {largest:.3g}", fontsize=7)
        panel.set(xticks=[], yticks=[])
    for panel in list(figure.axes)[len(pictures) :]:
        panel.axis("off")
    figure.supxlabel("source: embedding, then the output of each sublayer", fontsize=9)
    figure.supylabel("read by: each sublayer, then the final norm", fontsize=9)
    figure.suptitle(
        "What is read of what was written before; colour: square root of weight / largest that a sublayer reads",
        fontsize=10,
    )
    figure.savefig(path, dpi=130)


def main() -> int:
    """Measure, write, draw, and return 1 where a declared table is not what is measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=6)
    config, begun, pictures = model(parser.parse_args().blocks), time.perf_counter(), []
    wanted: list[tuple[str, float | None]] = [(name, None) for name in (*REGISTRY, *OPTIONS)]
    for text, noise in [*wanted, *OFF_START.items()]:
        pictures.append(measure(text, config, noise=noise))
        print(f"{text}: {time.perf_counter() - begun:.0f} s", file=sys.stderr)
    lines, good = report(pictures)
    write_table(HERE / "results" / "depth_mixing.csv", pictures)
    draw(HERE / "figures" / "depth_mixing.png", pictures)
    print("\n".join(lines))
    print(f"{'as expected' if good else 'NOT as expected'}; {time.perf_counter() - begun:.0f} s")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

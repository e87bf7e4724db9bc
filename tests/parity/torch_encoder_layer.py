"""PyTorch's `TransformerEncoderLayer` as a reference: its values at four points, its gradients, and a golden file.

    python -m tests.parity.torch_encoder_layer

writes the golden file beside this one (needs the extra `parity`). `reference()` gives live values where torch is
installed and the golden ones elsewhere. Layout [B, T, D], dropout 0, and always `train()`: in `eval()` torch may
take a fused path that replaces padded positions by zeros (fault B109).
"""

import importlib.util
import itertools
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

GOLDEN = Path(__file__).with_suffix(".npz")
BATCH, LENGTH, WIDTH, HEADS, HIDDEN = 2, 5, 16, 4, 32
POINTS: tuple[str, ...] = ("attention_out", "resid_mid", "feed_forward_out", "resid_post")
SHAPES = {
    "self_attn.in_proj_weight": (3 * WIDTH, WIDTH),
    "self_attn.in_proj_bias": (3 * WIDTH,),
    "self_attn.out_proj.weight": (WIDTH, WIDTH),
    "self_attn.out_proj.bias": (WIDTH,),
    "linear1.weight": (HIDDEN, WIDTH),
    "linear1.bias": (HIDDEN,),
    "linear2.weight": (WIDTH, HIDDEN),
    "linear2.bias": (WIDTH,),
    "norm1.weight": (WIDTH,),
    "norm1.bias": (WIDTH,),
    "norm2.weight": (WIDTH,),
    "norm2.bias": (WIDTH,),
}
"""The layer's parameters, by torch's names."""
GRADIENT_SHAPES = {**SHAPES, "input": (BATCH, LENGTH, WIDTH)}


class Case(NamedTuple):
    """One way to build and call the layer."""

    norm_first: bool
    padded: bool
    activation: str

    def __str__(self) -> str:
        """Return the id of the case in a test's name."""
        placement = "pre_norm" if self.norm_first else "post_norm"
        return f"{placement}-{self.activation}-{'padded' if self.padded else 'unpadded'}"


CASES = tuple(itertools.starmap(Case, itertools.product((True, False), (True, False), ("relu", "gelu"))))
# Each pair of settings occurs once: eight sets of gradients would double the golden file.
GRADIENT_CASES = (
    Case(norm_first=True, padded=True, activation="relu"),
    Case(norm_first=True, padded=False, activation="gelu"),
    Case(norm_first=False, padded=False, activation="relu"),
    Case(norm_first=False, padded=True, activation="gelu"),
)
EVALUATED = Case(norm_first=False, padded=True, activation="relu")


class Inputs(NamedTuple):
    """What the layer is given; `ignore_BT` is torch's key padding mask, True = padding."""

    weights: Mapping[str, np.ndarray]
    x_BTD: np.ndarray
    cotangent_BTD: np.ndarray
    ignore_BT: np.ndarray


class Reference(NamedTuple):
    """What torch makes of it."""

    inputs: Inputs
    points: Mapping[Case, Mapping[str, np.ndarray]]
    """Values at `POINTS`, each [B, T, D]."""
    gradients: Mapping[Case, Mapping[str, np.ndarray]]
    """Of sum(output * cotangent), for every weight and "input"."""
    evaluated_BTD: np.ndarray
    """Output of a one-layer `TransformerEncoder` in eval mode, for `EVALUATED`."""


def torch_installed() -> bool:
    """Return whether torch can be imported."""
    spec = importlib.util.find_spec("torch")
    return spec is not None and spec.origin is not None  # a stray folder of that name has no origin


def reference() -> Reference:
    """Return torch's values: live, or from the golden file where torch is not installed."""
    return live() if torch_installed() else read_golden()


def draw_inputs() -> Inputs:
    """Return inputs off every zero and one of torch's own start, on a grid of 1/128, which compresses well."""
    draw = np.random.default_rng(0)

    def grid(shape: tuple[int, ...], limit: int) -> np.ndarray:
        return (draw.integers(-limit, limit + 1, shape) / 128).astype(np.float32)

    centre = {"norm1.weight": 1, "norm2.weight": 1}
    weights = {name: grid(shape, 64) + np.float32(centre.get(name, 0)) for name, shape in SHAPES.items()}
    ignore_BT = np.array([[False, False, False, True, True], [False, False, False, False, True]])
    shape = (BATCH, LENGTH, WIDTH)
    return Inputs(weights, grid(shape, 256), grid(shape, 256), ignore_BT)


def live() -> Reference:
    """Run the layer in every case."""
    inputs = draw_inputs()
    runs = {case: _run(case, inputs) for case in CASES}
    points = {case: values for case, (values, _) in runs.items()}
    return Reference(inputs, points, {case: runs[case][1] for case in GRADIENT_CASES}, _evaluate(inputs))


def pack(values: Reference) -> dict[str, np.ndarray]:
    """Return the few arrays of the golden file."""
    inputs = values.inputs
    return {
        "weights": _flatten(inputs.weights, SHAPES),
        "x_BTD": inputs.x_BTD,
        "cotangent_BTD": inputs.cotangent_BTD,
        "ignore_BT": inputs.ignore_BT,
        "points": np.stack([np.stack([values.points[case][point] for point in POINTS]) for case in CASES]),
        "gradients": np.stack([_flatten(values.gradients[case], GRADIENT_SHAPES) for case in GRADIENT_CASES]),
        "evaluated_BTD": values.evaluated_BTD,
    }


def read_golden() -> Reference:
    """Return what `write_golden` wrote."""
    with np.load(GOLDEN) as file:
        arrays = dict(file)
    weights = _unflatten(arrays["weights"], SHAPES)
    inputs = Inputs(weights, arrays["x_BTD"], arrays["cotangent_BTD"], arrays["ignore_BT"])
    points = {
        case: dict(zip(POINTS, x, strict=True)) for case, x in zip(CASES, arrays["points"], strict=True)
    }
    gradients = {
        case: _unflatten(flat, GRADIENT_SHAPES)
        for case, flat in zip(GRADIENT_CASES, arrays["gradients"], strict=True)
    }
    return Reference(inputs, points, gradients, arrays["evaluated_BTD"])


def write_golden(path: Path = GOLDEN) -> None:
    """Write the live values; the same values give the same bytes."""
    arrays: dict[str, Any] = pack(live())
    np.savez_compressed(path, **arrays)


def _layer(case: Case, weights: Mapping[str, np.ndarray], *, trace: dict[str, Any] | None = None) -> Any:
    """Return the torch layer with these weights; it writes what it passes on the way to `trace`."""
    import torch
    from torch import nn

    # relu is left to torch's default: that it differs from the default here is claim S1-31.
    activation: dict[str, Any] = {} if case.activation == "relu" else {"activation": case.activation}
    layer = nn.TransformerEncoderLayer(
        WIDTH, HEADS, HIDDEN, dropout=0.0, batch_first=True, norm_first=case.norm_first, **activation
    )
    layer.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()}, strict=True)
    if trace is None:
        return layer

    def keep(name: str) -> Any:
        return lambda module, arguments, output: trace.update({name: output})

    layer.dropout1.register_forward_hook(keep("attention_out"))
    layer.dropout2.register_forward_hook(keep("feed_forward_out"))
    if case.norm_first:  # the stream between the sublayers is what the second norm reads ...
        layer.norm2.register_forward_pre_hook(lambda module, read: trace.update({"resid_mid": read[0]}))
    else:  # ... or what the first norm writes
        layer.norm1.register_forward_hook(keep("resid_mid"))
    return layer


def _run(case: Case, inputs: Inputs) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the values at the four points and the gradients of sum(output * cotangent)."""
    import torch

    trace: dict[str, Any] = {}
    layer = _layer(case, inputs.weights, trace=trace).train()
    x: Any = torch.from_numpy(inputs.x_BTD).requires_grad_()
    ignore = torch.from_numpy(inputs.ignore_BT) if case.padded else None
    trace["resid_post"] = layer(x, src_key_padding_mask=ignore)
    (trace["resid_post"] * torch.from_numpy(inputs.cotangent_BTD)).sum().backward()
    gradients = {name: weight.grad.numpy() for name, weight in layer.named_parameters()}
    return {name: trace[name].detach().numpy() for name in POINTS}, {**gradients, "input": x.grad.numpy()}


def _evaluate(inputs: Inputs) -> np.ndarray:
    """Return the output of the encoder's fused path."""
    import torch
    from torch import nn

    encoder = nn.TransformerEncoder(_layer(EVALUATED, inputs.weights), num_layers=1).eval()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors is in prototype")
        y = encoder(torch.from_numpy(inputs.x_BTD), src_key_padding_mask=torch.from_numpy(inputs.ignore_BT))
    return y.numpy()


def _flatten(values: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]]) -> np.ndarray:
    return np.concatenate([values[name].ravel() for name in shapes])


def _unflatten(flat: np.ndarray, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    ends = np.cumsum([np.prod(shape) for shape in shapes.values()])
    parts = np.split(flat, ends[:-1])
    return {name: part.reshape(shapes[name]) for name, part in zip(shapes, parts, strict=True)}


if __name__ == "__main__":
    write_golden()

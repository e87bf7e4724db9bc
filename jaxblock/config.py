"""What a model is (`ModelConfig`), how it is run (`ExecutionConfig`), and the one-string choice "name(option=1)".

Both are frozen standard dataclasses, checked when they are made, so that a config that exists is valid.
"""

import ast
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from jaxblock.contracts import check_choice, check_integer, check_number, nearest

DTYPES = ("float32", "bfloat16", "float16")
NORMS = ("layer_norm", "rms_norm")
PLAIN_FEED_FORWARDS = ("relu", "gelu", "gelu_tanh", "silu")
GATED_FEED_FORWARDS = ("glu", "geglu", "swiglu")
POSITIONS: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "learned": {},
    "sinusoidal": {},
    "rope": {"base": 10000.0, "convention": "half"},
    "alibi": {},
}
INITIALIZATIONS: Mapping[str, Mapping[str, Any]] = {"plain": {}, "gpt2": {"std": 0.02}, "zero_output": {}}
PARAMETRIZATIONS: Mapping[str, Mapping[str, Any]] = {
    "standard": {},
    "depth_mup": {"base_depth": int, "scale_epsilon": True},
    "complete_p": {"base_depth": int, "base_width": int, "alpha": 1.0, "scale_epsilon": True},
}
REMAT_POLICIES = ("none", "full", "dots", "branch_out")


class Choice(NamedTuple):
    """A parsed "name(option=1)"."""

    name: str
    options: dict[str, Any]


def parse_choice(field: str, text: str) -> Choice:
    """Parse `"name"` or `"name(option=1)"`; options are keyword literals, nothing is evaluated.

    Raises:
      ValueError: the text is not of that form.
    """
    wanted = f'{field} is {text!r}; it must read "name" or "name(option=1)" with literal options'
    if not isinstance(text, str):
        raise ValueError(wanted)
    try:
        node = ast.parse(text.strip(), mode="eval").body
        if isinstance(node, ast.Name):
            return Choice(node.id, {})
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.args:
            raise ValueError(wanted)
        options = {str(word.arg): ast.literal_eval(word.value) for word in node.keywords}
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(wanted) from error
    if "None" in options or len(options) < len(node.keywords):
        raise ValueError(wanted)  # f(**x) has a keyword without a name, f(x=1, x=2) one name twice
    return Choice(node.func.id, options)


def check_options(field: str, choice: Choice, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return `defaults` overridden by the choice's options; a default that is a type has to be overridden.

    Raises:
      ValueError: an option the member does not have, of another type than its default, or left out without one.
    """
    for option, value in choice.options.items():
        if option not in defaults:
            known = ", ".join(defaults) or "none"
            raise ValueError(
                f"{field}: {choice.name!r} has no option {option!r}; its options: {known}{nearest(option, defaults)}"
            )
        default = defaults[option]
        wanted = default if isinstance(default, type) else type(default)
        fits = isinstance(value, wanted) or (wanted is float and isinstance(value, int))
        if not fits or (isinstance(value, bool) and wanted is not bool):
            raise ValueError(
                f"{field}: option {option!r} of {choice.name!r} is {value!r}; it must be of type {wanted.__name__}"
            )
    found = {**defaults, **choice.options}
    missing = [f"{option} ({kind.__name__})" for option, kind in found.items() if isinstance(kind, type)]
    if missing:
        raise ValueError(
            f"{field}: {choice.name!r} must be given {' and '.join(missing)}; there is no default"
        )
    return found


def resolve(field: str, text: str, members: Mapping[str, Mapping[str, Any]]) -> Choice:
    """Parse a choice, check name and options against `members`, and fill in the defaults."""
    choice = parse_choice(field, text)
    check_choice(field, choice.name, members)
    return Choice(choice.name, check_options(field, choice, members[choice.name]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder: sizes first, then what stands in each place of the block.

    Raises:
      ValueError: at construction, one sentence per broken rule, naming field, value and what is allowed.
    """

    vocab_size: int
    """V, number of token ids; 256 for bytes."""
    context: int
    """Longest sequence the model is trained on and, with learned positions, can read."""
    depth: int
    """L, number of blocks; each has two sublayers (one with wiring = "parallel")."""
    width: int
    """D, width of the residual stream."""
    heads: int
    """H, number of query heads; divides width."""
    kv_heads: int | None = None
    """G, number of key/value heads; divides heads. Left out: as many as heads."""
    hidden: int | None = None
    """F, feed-forward width. Left out: 4 * width, or 8/3 * width rounded up to a multiple of 32 when gated."""
    feed_forward: str = "gelu"
    """relu, gelu, gelu_tanh, silu, or gated: glu, geglu, swiglu."""
    norm: str = "layer_norm"
    """layer_norm or rms_norm."""
    norm_epsilon: float = 1e-5
    """Epsilon inside the norm's square root."""
    bias: bool = True
    """Whether dense products and layer norms have a bias."""
    positions: str = "learned"
    """none, learned, sinusoidal, rope(base=10000.0, convention="half" or "interleaved"), or alibi."""
    residual: str = "pre_norm"
    """The residual connection, "name(option=1)"; see jaxblock.residual.REGISTRY."""
    wiring: str = "serial"
    """serial: attention, then feed-forward; parallel: one sublayer whose branch is their sum."""
    window: tuple[int, ...] = ()
    """Sliding windows, in tokens, the token itself counted; repeated over the blocks; 0 = unlimited; () = none."""
    soft_cap: float | None = None
    """Bound on attention scores, cap * tanh(score / cap). Left out: none."""
    head: str = "tied"
    """tied: the head is the embedding table; untied: a kernel of its own."""
    vocab_multiple: int = 1
    """Rows of the embedding table are padded up to a multiple of this; padded ids are never scored or sampled."""
    attention_dropout: float = 0.0
    """Dropout rate of attention weights."""
    hidden_dropout: float = 0.0
    """Dropout rate of the feed-forward's hidden activations."""
    branch_dropout: float = 0.0
    """Dropout rate of each branch's output, before it is added."""
    initialization: str = "plain"
    """plain (1/sqrt(fan_in)), gpt2(std=0.02) with outputs divided by sqrt(2 depth), or zero_output."""
    parametrization: str = "standard"
    """standard; or complete_p(base_depth=8, base_width=256, alpha=1.0) or depth_mup(base_depth=8): branches, logits,
    learning rates, decay and, unless scale_epsilon=False, AdamW's epsilon are scaled by depth / base_depth and
    width / base_width, so that the learning rate tuned for the base serves this model. To keep as width grows:
    width / heads, the size of a head, and hidden / width."""
    param_dtype: str = "float32"
    """Type of the parameters."""
    dtype: str = "float32"
    """Type of the branches' arithmetic."""
    stream_dtype: str = "float32"
    """Type of the residual stream."""

    # Read by pydantic where a TrainConfig holds this; unknown keys and 3.0 for 3 are refused.
    __pydantic_config__: ClassVar[dict] = {
        "extra": "forbid",
        "strict": True,
        "use_attribute_docstrings": True,
    }

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_choices()

    def _check_sizes(self) -> None:
        for name in ("vocab_size", "context", "depth", "width", "heads", "vocab_multiple"):
            check_integer(f"model.{name}", getattr(self, name), least=1)
        for name in ("kv_heads", "hidden"):
            if getattr(self, name) is not None:
                check_integer(f"model.{name}", getattr(self, name), least=1)
        if self.width % self.heads:
            raise ValueError(
                f"model.width is {self.width} and model.heads is {self.heads}; heads must divide width"
            )
        if self.heads % self.num_kv_heads:
            raise ValueError(
                f"model.heads is {self.heads} and model.kv_heads is {self.kv_heads}; kv_heads must divide heads"
            )
        if not isinstance(self.window, tuple | list):
            raise ValueError(f"model.window is {self.window!r}; it must be a list of whole numbers")
        object.__setattr__(self, "window", tuple(self.window))
        for size in self.window:
            check_integer("model.window", size, least=0)
        check_number("model.norm_epsilon", self.norm_epsilon, above=0.0)
        if self.soft_cap is not None:
            check_number("model.soft_cap", self.soft_cap, above=0.0)
        for name in ("attention_dropout", "hidden_dropout", "branch_dropout"):
            check_number(f"model.{name}", getattr(self, name), least=0.0, below=1.0)

    def _check_choices(self) -> None:
        check_choice("model.feed_forward", self.feed_forward, PLAIN_FEED_FORWARDS + GATED_FEED_FORWARDS)
        check_choice("model.norm", self.norm, NORMS)
        check_choice("model.wiring", self.wiring, ("serial", "parallel"))
        check_choice("model.head", self.head, ("tied", "untied"))
        if not isinstance(self.bias, bool):
            raise ValueError(f"model.bias is {self.bias!r}; it must be true or false")
        for name in ("param_dtype", "dtype", "stream_dtype"):
            check_choice(f"model.{name}", getattr(self, name), DTYPES)
        parse_choice("model.residual", self.residual)
        initialization = resolve("model.initialization", self.initialization, INITIALIZATIONS)
        if initialization.name == "gpt2":
            check_number("model.initialization: std", initialization.options["std"], above=0.0)
        self._check_parametrization()
        positions = resolve("model.positions", self.positions, POSITIONS)
        if positions.name == "rope":
            check_choice(
                "model.positions: convention", positions.options["convention"], ("half", "interleaved")
            )
            check_number("model.positions: base", positions.options["base"], above=0.0)
            if self.head_dim % 2:
                raise ValueError(
                    f"model.positions is rope, which needs an even head size; width / heads is {self.head_dim}"
                )
        if positions.name == "sinusoidal" and self.width % 2:
            raise ValueError(
                f"model.positions is sinusoidal, which needs an even width; model.width is {self.width}"
            )

    def _check_parametrization(self) -> None:
        name, options = self.parametrization_choice
        for base in ("base_depth", "base_width"):
            if base in options:
                check_integer(f"model.parametrization: {base}", options[base], least=1)
        if "alpha" in options:
            check_number("model.parametrization: alpha", options["alpha"], least=0.0, most=1.0)
        if name != "standard" and self.initialization_choice.name == "gpt2":
            raise ValueError(
                f"model.parametrization is {self.parametrization!r} and model.initialization is "
                f"{self.initialization!r}, which divides what is written to the stream by sqrt(2 depth) already: depth "
                "would count twice; the initialization must be plain or zero_output"
            )

    @property
    def num_kv_heads(self) -> int:
        """G: `kv_heads`, or `heads` where it is left out."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def head_dim(self) -> int:
        """K, width of one head."""
        return self.width // self.heads

    @property
    def gated(self) -> bool:
        """Whether the feed-forward has a gate."""
        return self.feed_forward in GATED_FEED_FORWARDS

    @property
    def num_hidden(self) -> int:
        """F: `hidden`, or its default."""
        if self.hidden is not None:
            return self.hidden
        return -(-8 * self.width // 96) * 32 if self.gated else 4 * self.width

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding table: `vocab_size` rounded up to a multiple of `vocab_multiple`."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def sublayers(self) -> int:
        """S, number of times the stack writes to the stream."""
        return self.depth * (1 if self.wiring == "parallel" else 2)

    @property
    def position_choice(self) -> Choice:
        """`positions`, parsed, with its defaults filled in."""
        return resolve("model.positions", self.positions, POSITIONS)

    @property
    def initialization_choice(self) -> Choice:
        """`initialization`, parsed, with its defaults filled in."""
        return resolve("model.initialization", self.initialization, INITIALIZATIONS)

    @property
    def parametrization_choice(self) -> Choice:
        """`parametrization`, parsed, with its defaults filled in."""
        return resolve("model.parametrization", self.parametrization, PARAMETRIZATIONS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExecutionConfig:
    """How a stack is run. Nothing here changes a value, beyond round-off, or the parameter tree.

    One exception: with attention dropout, another `attention` drops other entries, at the same rate.
    """

    scan_unroll: int = 1
    """Blocks compiled into one step of the scan over depth: 1 = one compiled block, depth = a plain loop."""
    remat: str = "none"
    """What the backward pass recomputes: none, full, or all but: dots (dense products), branch_out (branch outputs)."""
    history: str = "reverse"
    """Derivative of the loop of topologies that read earlier layers (others have none): reverse (memory linear in
    depth) or plain (also forward mode and higher orders, memory quadratic in depth)."""
    attention: str = "xla"
    """xla, blocked (never makes a [T, T] array), or cudnn (GPU, half precision)."""

    __pydantic_config__: ClassVar[dict] = {
        "extra": "forbid",
        "strict": True,
        "use_attribute_docstrings": True,
    }

    def __post_init__(self) -> None:
        check_integer("execution.scan_unroll", self.scan_unroll, least=1)
        check_choice("execution.remat", self.remat, REMAT_POLICIES)
        check_choice("execution.history", self.history, ("reverse", "plain"))
        check_choice("execution.attention", self.attention, ("xla", "blocked", "cudnn"))

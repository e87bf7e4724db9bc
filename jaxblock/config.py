"""What a model is (`ModelConfig`) and how it is run (`ExecutionConfig`).

Both are frozen standard dataclasses, checked when they are made, so that a config that exists is valid.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxblock.choices import Choice, parse_choice, resolve
from jaxblock.contracts import check_choice, check_integer, check_number

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
TOKEN_MIXERS: Mapping[str, Mapping[str, Any]] = {
    "attention": {},
    "mlp": {"hidden": int},
    "convolution": {"size": 3, "rows": 1},
}
EXPERTS: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "dropless": {"experts": int, "active": 2, "balance": 0.01},
    "capacity": {"experts": int, "active": 2, "factor": 1.25, "balance": 0.01},
}
VALUE_RESIDUALS: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "fixed": {"first": 0.5, "own": 0.5},
    "learned": {"first": 0.5, "own": 0.5},
}
STOCHASTIC_DEPTHS: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "linear": {"rate": float},
    "constant": {"rate": float},
}
REMAT_POLICIES = ("none", "full", "dots", "branch_out")


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
    """H, number of query heads; divides width. Another token mixer than attention has none, and does not read it."""
    kv_heads: int | None = None
    """G, number of key/value heads; divides heads; none: as many as heads."""
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
    """The residual connection, "name(option=1)"; `jaxblock topologies` lists them."""
    wiring: str = "serial"
    """serial: attention, then feed-forward; parallel: one sublayer whose branch is their sum."""
    window: tuple[int, ...] = ()
    """Sliding windows, in tokens, the token itself counted; repeated over the blocks; 0 = unlimited; () = none."""
    token_mixer: str = "attention"
    """What mixes positions: attention, mlp(hidden=32), an MLP over positions (arXiv 2105.01601), or
    convolution(size=3, rows=1), two convolutions over positions, which stand in so many rows of a grid."""
    value_residual: str = "none"
    """Values of blocks after the first are mixed with the first one's, first * V_1 + own * V: none,
    fixed(first=0.5, own=0.5), or learned(first=0.5, own=0.5), two numbers per block (arXiv 2410.17897)."""
    experts: str = "none"
    """none, or the feed-forward as a mixture of experts, each token sent to its `active` most probable:
    dropless(experts=8, active=2, balance=0.01), or capacity(experts=8, active=2, factor=1.25, balance=0.01), where an
    expert takes at most factor * active / experts of a sequence; balance weighs the load-balance loss."""
    soft_cap: float | None = None
    """Bound on attention scores, cap * tanh(score / cap). Left out: none."""
    head: str = "tied"
    """tied: the head is the embedding table; untied: a kernel of its own."""
    vocab_multiple: int = 1
    """Rows of the embedding table are padded up to a multiple of this; padded ids are never scored or sampled."""
    attention_dropout: float = 0.0
    """Dropout rate of attention weights."""
    hidden_dropout: float = 0.0
    """Dropout rate of hidden activations: of the feed-forward, of each expert, of a token mixer."""
    branch_dropout: float = 0.0
    """Dropout rate of each branch's output, before it is added."""
    stochastic_depth: str = "none"
    """Whole branches dropped, row by row: none, constant(rate=0.1), or linear(rate=0.1), a rate that rises from
    rate / sublayers at the first sublayer to rate at the last (arXiv 1603.09382)."""
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
        self._check_branches()
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
        if self.token_mixer_choice.name == "mlp" and options.get("base_width", self.width) != self.width:
            raise ValueError(
                f"model.parametrization is {self.parametrization!r} and model.token_mixer is {self.token_mixer!r}, "
                "whose kernels sum over positions, not over the width, and have no rule to scale with it; base_width "
                f"must be model.width, {self.width}"
            )
        if name != "standard" and self.initialization_choice.name == "gpt2":
            raise ValueError(
                f"model.parametrization is {self.parametrization!r} and model.initialization is "
                f"{self.initialization!r}, which divides what is written to the stream by sqrt(2 depth) already: depth "
                "would count twice; the initialization must be plain or zero_output"
            )

    def _check_branches(self) -> None:
        mixer, experts = self.token_mixer_choice, self.experts_choice
        for name in ("hidden", "size", "rows"):
            if name in mixer.options:
                most = self.context if name == "size" else 2**31 - 1
                check_integer(f"model.token_mixer: {name}", mixer.options[name], least=1, most=most)
        if mixer.name == "convolution" and self.context % mixer.options["rows"]:
            raise ValueError(
                f"model.token_mixer: rows is {mixer.options['rows']} and model.context is {self.context}; rows must "
                "divide context"
            )
        if mixer.name != "attention":
            self._refuse_attention_options(mixer.name)
        if "experts" in experts.options:
            check_integer("model.experts: experts", experts.options["experts"], least=1)
            most = experts.options["experts"]
            check_integer("model.experts: active", experts.options["active"], least=1, most=most)
            check_number("model.experts: balance", experts.options["balance"], least=0.0)
        if "factor" in experts.options:
            check_number("model.experts: factor", experts.options["factor"], above=0.0)
        for weight, value in self.value_residual_choice.options.items():
            check_number(f"model.value_residual: {weight}", value)
        for value in self.stochastic_depth_choice.options.values():
            check_number("model.stochastic_depth: rate", value, least=0.0, below=1.0)

    def _refuse_attention_options(self, mixer: str) -> None:
        """Raise ValueError for a setting of attention that another token mixer would not read."""
        idle = {
            "kv_heads": None,
            "window": (),
            "soft_cap": None,
            "attention_dropout": 0.0,
            "value_residual": "none",
        }
        set_ones = [
            f"model.{name} is {getattr(self, name)!r} (it must be {off!r})"
            for name, off in idle.items()
            if getattr(self, name) != off
        ]
        if self.position_choice.name in ("rope", "alibi"):
            set_ones.append(f"model.positions is {self.positions!r} (it must be none, learned or sinusoidal)")
        if set_ones:
            raise ValueError(
                f"{' and '.join(set_ones)} while model.token_mixer is {mixer!r}; only attention reads them"
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
    def token_mixer_choice(self) -> Choice:
        """`token_mixer`, parsed, with its defaults filled in."""
        return resolve("model.token_mixer", self.token_mixer, TOKEN_MIXERS)

    @property
    def value_residual_choice(self) -> Choice:
        """`value_residual`, parsed, with its defaults filled in."""
        return resolve("model.value_residual", self.value_residual, VALUE_RESIDUALS)

    @property
    def experts_choice(self) -> Choice:
        """`experts`, parsed, with its defaults filled in."""
        return resolve("model.experts", self.experts, EXPERTS)

    @property
    def stochastic_depth_choice(self) -> Choice:
        """`stochastic_depth`, parsed, with its defaults filled in."""
        return resolve("model.stochastic_depth", self.stochastic_depth, STOCHASTIC_DEPTHS)

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
    loss: str = "whole"
    """Next-token loss of whole logits, or blocked: it never makes a [B, T, V] array (float32, and again as gradient),
    but the gradient of the head along with the loss, block by block; reverse mode only. What it saves is those
    2 B T V numbers less 64 MiB blocks and one float32 copy of the head: it pays from about a hundred MiB of logits on,
    as with V = 50257; with V = 256 the whole is smaller than a block."""

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
        check_choice("execution.loss", self.loss, ("whole", "blocked"))

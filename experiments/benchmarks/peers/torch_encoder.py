"""PyTorch's own nn.TransformerEncoder with norms first and a causal mask; the option "compile" wraps it."""

from collections.abc import Mapping
from typing import Any

from experiments.benchmarks.contest import Job, need
from experiments.benchmarks.peers.torch_step import torch_device, torch_job
from experiments.benchmarks.sizes import Sizes, sizes_of


def prepare(options: Mapping[str, Any]) -> Job:
    """Return the step of the sizes in `options`."""
    torch, sizes, device = need("torch"), sizes_of(options), torch_device(options["platform"])
    torch.manual_seed(0)
    model = _model(sizes).to(device)
    return torch_job(sizes, model, device, torch.compile(model) if options["compile"] else None)


def _model(sizes: Sizes) -> Any:
    torch = need("torch")
    nn = torch.nn

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Embedding(sizes.vocab, sizes.width)
            self.place = nn.Embedding(sizes.seq, sizes.width)
            block = nn.TransformerEncoderLayer(
                d_model=sizes.width,
                nhead=sizes.heads,
                dim_feedforward=4 * sizes.width,
                dropout=0.0,
                activation="gelu",
                batch_first=True,
                norm_first=True,
            )
            norm = nn.LayerNorm(sizes.width)
            self.blocks = nn.TransformerEncoder(block, sizes.depth, norm=norm, enable_nested_tensor=False)
            self.head = nn.Linear(sizes.width, sizes.vocab, bias=False)
            mask = nn.Transformer.generate_square_subsequent_mask(sizes.seq)
            self.register_buffer("mask", mask, persistent=False)

        def forward(self, tokens_BT):
            x_BTD = self.token(tokens_BT) + self.place.weight
            return self.head(self.blocks(x_BTD, mask=self.mask, is_causal=True))

    return Model()

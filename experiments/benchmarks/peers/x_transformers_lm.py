"""x-transformers' TransformerWrapper around its Decoder, with the attention it calls flash; all else its defaults."""

from collections.abc import Mapping
from typing import Any

from experiments.benchmarks.contest import Job, need
from experiments.benchmarks.peers.torch_step import torch_device, torch_job
from experiments.benchmarks.sizes import sizes_of


def prepare(options: Mapping[str, Any]) -> Job:
    """Return the step of the sizes in `options`."""
    sizes, device = sizes_of(options), torch_device(options["platform"])
    library, torch = need("x_transformers"), need("torch")
    torch.manual_seed(0)
    layers = library.Decoder(
        dim=sizes.width,
        depth=sizes.depth,
        heads=sizes.heads,
        attn_dim_head=sizes.width // sizes.heads,  # its default is 64, whatever the width
        attn_flash=True,
    )
    model = library.TransformerWrapper(num_tokens=sizes.vocab, max_seq_len=sizes.seq, attn_layers=layers)
    return torch_job(sizes, model, device)

"""Blocks, stacks of blocks, and the models made of them."""

from jaxblock.models.block import Block, LayerInputs
from jaxblock.models.decoder import Decoder
from jaxblock.models.generation import generate
from jaxblock.models.stack import init_blocks, run_blocks

__all__ = ["Block", "Decoder", "LayerInputs", "generate", "init_blocks", "run_blocks"]

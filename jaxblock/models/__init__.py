"""Blocks, stacks of blocks, and the models made of them."""

from jaxblock.models.block import Block, LayerInputs, layer_inputs
from jaxblock.models.decoder import Decoder
from jaxblock.models.generation import generate
from jaxblock.models.stack import StackInputs, init_blocks, run_blocks

__all__ = [
    "Block",
    "Decoder",
    "LayerInputs",
    "StackInputs",
    "generate",
    "init_blocks",
    "layer_inputs",
    "run_blocks",
]

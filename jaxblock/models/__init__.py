"""Blocks, stacks of blocks, and the models made of them."""

from jaxblock.models.block import Block, LayerInputs, layer_inputs
from jaxblock.models.cache import Cache, cache_limit, init_cache
from jaxblock.models.classifier import Classifier, Prediction, predict
from jaxblock.models.decoder import Decoder
from jaxblock.models.encoder import Encoder
from jaxblock.models.generation import generate, prefill, stream
from jaxblock.models.stack import StackInputs, init_blocks, run_blocks

__all__ = [
    "Block",
    "Cache",
    "Classifier",
    "Decoder",
    "Encoder",
    "LayerInputs",
    "Prediction",
    "StackInputs",
    "cache_limit",
    "generate",
    "init_blocks",
    "init_cache",
    "layer_inputs",
    "predict",
    "prefill",
    "run_blocks",
    "stream",
]

"""Exact numbers of parameters, from abstract evaluation alone: no array is made, whatever the size of the model.

Two ways that must agree: `count_parameters` walks the tree that `init` declares, by role and by place;
`decoder_parameters` is a formula of the config. Three N's, because the literature means three different things.
"""

from collections import Counter
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxblock import axes
from jaxblock.accounting.feed_forward import feed_forward_parameters
from jaxblock.accounting.token_mixing import mixing_parameters
from jaxblock.config import ModelConfig
from jaxblock.models.decoder import Decoder
from jaxblock.residual import Topology, topology
from jaxblock.types import Params

# On the data's way through the model.
_PLACES = ("embedding", "positions", "shared", "blocks", "close", "final_norm", "head")


class ParameterCount(NamedTuple):
    """Numbers of parameters of a model."""

    by_role: dict[str, int]
    """By the roles of `jaxblock.axes`: embedding, query, ..., bias, norm, connection, head."""
    by_place: dict[str, int]
    """By place in the model: embedding, positions, blocks (all of them), shared, close, final_norm, head."""
    per_block: dict[str, int]
    """One block, by part: attention, feed_forward, connections (their norms included), after_block."""

    @property
    def total(self) -> int:
        """N of the whole model."""
        return sum(self.by_place.values())

    @property
    def blocks(self) -> int:
        """N of the blocks alone."""
        return self.by_place["blocks"]

    @property
    def non_embedding(self) -> int:
        """N without what vocabulary and positions cost: token table, position table and an untied head.

        The count of arXiv 2001.08361, section 2.1; the same whether the head is tied or not.
        """
        return self.total - sum(self.by_place.get(name, 0) for name in ("embedding", "positions", "head"))


def abstract_parameters(config: ModelConfig, topology: Topology | None = None) -> Params:
    """Return the shapes and dtypes of all parameters of a decoder, as `jax.eval_shape` gives them.

    Args:
      config: the model.
      topology: a residual topology of your own; left out, the one the config names.
    """
    tokens_BT = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    return jax.eval_shape(Decoder(config, topology=topology).init, jax.random.key(0), tokens_BT)["params"]


def count_parameters(params: Params) -> ParameterCount:
    """Count a tree of parameters, abstract or real.

    Raises:
      ValueError: a parameter that `jaxblock.axes.PARAMETERS` does not know.
    """
    roles, places, parts = Counter(), Counter(blocks=0), Counter()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = axes.path_name(path)
        place, part = name.split("/")[:2]
        roles[axes.parameter_rule(name).role] += leaf.size
        places[place] += leaf.size
        if place == "blocks":
            parts["connections" if part.endswith("connection") else part] += leaf.size // leaf.shape[0]
    known_roles = dict.fromkeys(rule.role for rule in axes.PARAMETERS)
    return ParameterCount(
        {role: roles[role] for role in known_roles if roles[role]},
        {place: places.pop(place) for place in _PLACES if place in places} | dict(places),
        dict(parts),
    )


def decoder_parameters(config: ModelConfig) -> int:
    """Return what `count_parameters` must find: branches and tables by formula, the rest as its topology declares.

    Raises:
      ValueError: the topology declares no number of parameters.
    """
    declared = topology(config.residual).parameters
    if declared is None:
        raise ValueError(f"model.residual is {config.residual!r}, which declares no number of parameters")
    return branch_parameters(config) + table_parameters(config) + declared(config)


def pre_norm_parameters(config: ModelConfig) -> int:
    """Return the number of parameters of a pre-norm decoder: one norm a sublayer, one at the end.

    L (D H K + 2 D G K + H K D + (2 or 3) D F) + V D (1 or 2) + context D + (S + 1) D, and what the biases add.
    """
    per_norm = config.width * (2 if config.norm == "layer_norm" and config.bias else 1)
    return branch_parameters(config) + table_parameters(config) + (config.sublayers + 1) * per_norm


def branch_parameters(config: ModelConfig) -> int:
    """Return the parameters of all branches, without norms and connections."""
    return config.depth * (mixing_parameters(config) + feed_forward_parameters(config))


def table_parameters(config: ModelConfig) -> int:
    """Return the parameters of token table, learned position table and untied head."""
    tables = 2 if config.head == "untied" else 1
    positions = config.context if config.position_choice.name == "learned" else 0
    return config.width * (tables * config.padded_vocab_size + positions)

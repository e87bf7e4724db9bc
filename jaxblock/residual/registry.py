"""Every residual topology by its config name: one line each, options are the keyword arguments of its factory."""

import inspect
from collections.abc import Callable, Mapping

from jaxblock.choices import check_options, parse_choice
from jaxblock.contracts import check_choice
from jaxblock.residual.attention_residual import attention_residual
from jaxblock.residual.block_attention_residual import block_attention_residual
from jaxblock.residual.contract import Topology
from jaxblock.residual.dense_former import dense_former
from jaxblock.residual.frac_connections import frac_connections
from jaxblock.residual.highway import highway
from jaxblock.residual.hyper_connections import hyper_connections
from jaxblock.residual.input_injection import input_injection
from jaxblock.residual.laurel import laurel
from jaxblock.residual.layer_norm_scaling import layer_norm_scaling
from jaxblock.residual.lime import lime
from jaxblock.residual.manifold_hyper_connections import manifold_hyper_connections
from jaxblock.residual.mix_norm import mix_norm
from jaxblock.residual.muddformer import muddformer
from jaxblock.residual.ngpt import ngpt
from jaxblock.residual.orthogonal_update import orthogonal_update
from jaxblock.residual.placements import branch_norm, none, peri_norm, post_norm, pre_norm
from jaxblock.residual.post_scaled import deep_norm, keel
from jaxblock.residual.resi_dual import resi_dual
from jaxblock.residual.rezero import rezero
from jaxblock.residual.scaled import branch_scale, layer_scale, learned_scale, residual_multiplier
from jaxblock.residual.sub_norm import sub_norm
from jaxblock.residual.unet import unet

REGISTRY: Mapping[str, Callable[..., Topology]] = {
    "none": none,
    "pre_norm": pre_norm,
    "post_norm": post_norm,
    "peri_norm": peri_norm,
    "branch_norm": branch_norm,
    "branch_scale": branch_scale,
    "learned_scale": learned_scale,
    "layer_scale": layer_scale,
    "rezero": rezero,
    "residual_multiplier": residual_multiplier,
    "layer_norm_scaling": layer_norm_scaling,
    "deep_norm": deep_norm,
    "keel": keel,
    "mix_norm": mix_norm,
    "sub_norm": sub_norm,
    "dense_former": dense_former,
    "attention_residual": attention_residual,
    "block_attention_residual": block_attention_residual,
    "muddformer": muddformer,
    "lime": lime,
    "highway": highway,
    "orthogonal_update": orthogonal_update,
    "laurel": laurel,
    "resi_dual": resi_dual,
    "input_injection": input_injection,
    "unet": unet,
    "ngpt": ngpt,
    "hyper_connections": hyper_connections,
    "frac_connections": frac_connections,
    "manifold_hyper_connections": manifold_hyper_connections,
}


def topology(text: str, registry: Mapping[str, Callable[..., Topology]] = REGISTRY) -> Topology:
    """Return the topology that "name(option=1)" names.

    Args:
      text: a config's `residual`.
      registry: where names are looked up; pass your own mapping to try a connection without touching this file.

    Raises:
      ValueError: an unknown name or option, with the nearest valid one.
    """
    choice = parse_choice("model.residual", text)
    check_choice("model.residual", choice.name, registry)
    factory = registry[choice.name]
    options = inspect.signature(factory).parameters.values()
    unset = [str(option) for option in options if option.default is inspect.Parameter.empty]
    if unset:
        raise ValueError(
            f"the factory of {choice.name!r} has {', '.join(unset)} without a default; an option is a keyword with one"
        )
    defaults = {option.name: option.default for option in options}
    return factory(**check_options("model.residual", choice, defaults))

"""nGPT: the stream stays on the unit sphere, and each sublayer moves it a step towards its normalized output.

x <- N(x + |a| (N(u) - N(x))),  u = f(norm(x)),  N(v) = v / |v|_2;  opened as N(embedding)        (arXiv 2410.01131)
a = p (start / p_start),  p [D] per sublayer starts at p_start = 1 / sqrt(D)

After every optimizer step each dense kernel of the blocks, the embedding table and the head have unit vectors along
the stream's width again.

Changed against the paper, so that this is a connection and branches stay what they are elsewhere:
- A branch reads the config's norm of x. As |x| = 1 that multiplies by sqrt(D) and a learned scale per channel, which
  stands for the scales s_qk, s_u, s_v and their factors sqrt(D) inside the paper's branches; with queries and keys of
  that size attention's 1 / sqrt(K) is right, and the paper's sqrt(K) for unit queries is not. Queries and keys are not
  normalized themselves. "rms_norm" is the paper's choice ("layer_norm" also takes out the mean), its epsilon is to be
  small beside 1 / D.
- The final norm stands in the same way for s_z, a scale per token id there: logits are sqrt(D) cosines at first, not
  cosines.
- Biases, where the config has them, and the router of experts are not normalized.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxblock.axes import Label, parameter_rule, path_name
from jaxblock.config import ModelConfig
from jaxblock.contracts import check_number
from jaxblock.functional.residual_updates import sphere_step, unit
from jaxblock.modules import Norm
from jaxblock.residual.contract import Topology
from jaxblock.residual.declarations import no_flops, norm_parameters, passes
from jaxblock.residual.depth_rules import BLOCK_KERNELS
from jaxblock.types import Array, Branch, Params

UNIT_ROLES = frozenset({*BLOCK_KERNELS, "embedding", "head"} - {"router"})
"""Roles of the parameters that are projected, along their axis "width"; an MLP over positions has none."""
UNDECAYED = r"embedding/table|(head|classifier|blocks/(?!token_mixer/mlp_|experts/router/).*)/kernel"
"""Paths of the same parameters: what has its length prescribed is not decayed."""


class SphereConnection(nn.Module):
    """N(x + |a| (N(f(norm(x))) - N(x)))."""

    config: ModelConfig
    start: float

    @nn.compact
    def __call__(self, x: Array, f: Branch) -> Array:
        """Return the stream a step further, on the sphere."""
        width, dtype = self.config.width, jnp.dtype(self.config.param_dtype)
        norm = Norm(self.config, name="norm")
        # Stored small: Adam's step, the same for every parameter, then is a larger part of it.
        stored_start = width**-0.5
        stored = self.param("step_size", nn.initializers.constant(stored_start), (width,), dtype)
        rate = stored.astype(jnp.float32) * (self.start / stored_start)
        return sphere_step(x, f(norm(x)), rate)


def unit_vectors(config: ModelConfig, params: Params) -> Params:
    """Return the parameters with dense kernels, embedding and head of length 1 along their axis "width"."""

    def projected(path: tuple, x: Array) -> Array:
        rule = parameter_rule(path_name(path))
        if rule.role not in UNIT_ROLES or rule.axes is None or "width" not in rule.axes:
            return x
        return unit(x, axis=rule.axes.index("width")).astype(x.dtype)

    return jax.tree_util.tree_map_with_path(projected, params)


def ngpt(start: float = 0.05) -> Topology:
    """Return the normalized transformer's connection.

    Args:
      start: where a, the size of a step, starts: above 0, at most 1; the paper has 0.05, of the order of 1 / blocks.
    """
    check_number("model.residual: start", start, above=0.0, most=1.0)

    def connection(config: ModelConfig, *, name: str) -> nn.Module:
        return SphereConnection(config, start, name=name)

    def on_sphere(config: ModelConfig, x: Array) -> Array:
        return unit(x).astype(x.dtype)

    def parameters(config: ModelConfig) -> int:
        return norm_parameters(config, config.sublayers + 1) + config.width * config.sublayers

    return Topology(
        connection,
        "N(x + |a| (N(f(norm(x))) - N(x))), N(v) = v / |v|",
        "arXiv 2410.01131",
        open=on_sphere,
        labels=(Label(UNDECAYED, decay=False),),
        project=unit_vectors,
        parameters=parameters,
        zero_branch=on_sphere,
        scale_free=True,
        refuses_zero_output="an output of 0 has no direction to step along",
        flops=no_flops,
        traffic=passes(4),
        advice="no weight decay and no warm-up (optimizer.warmup = 0); the direction of an output that is 0 would have "
        "a gradient of 1e6",
    )

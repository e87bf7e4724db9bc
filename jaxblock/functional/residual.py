"""The residual equation in its published placements of the norm: pure functions of a stream and a branch.

Each takes the stream x [B, T, D], the branch f and norms with their parameters bound, and returns the stream.
This file is the one place where these sums are written; `jaxblock.residual` gives them parameters.
"""

from jaxblock.types import Array, Branch, Norm


def no_residual(x: Array, f: Branch, norm: Norm) -> Array:
    """Replace the stream by the branch: the control without a skip. A zero branch gives 0."""
    return f(norm(x))


def pre_norm(x: Array, f: Branch, norm: Norm) -> Array:
    """Add the branch of the normalized stream: the identity path is never touched (arXiv 2002.04745)."""
    return x + f(norm(x))


def post_norm(x: Array, f: Branch, norm: Norm) -> Array:
    """Normalize the sum, identity path included: the first Transformer (arXiv 1706.03762)."""
    return norm(x + f(x))


def peri_norm(x: Array, f: Branch, norm_in: Norm, norm_out: Norm) -> Array:
    """Normalize the branch at both ends: Sandwich-LN, Peri-LN (arXiv 2105.13290, 2502.02732)."""
    return x + norm_out(f(norm_in(x)))


def branch_norm(x: Array, f: Branch, norm: Norm) -> Array:
    """Normalize the branch's output only: OLMo 2's placement (arXiv 2501.00656)."""
    return x + norm(f(x))

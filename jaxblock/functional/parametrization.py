"""What a model scales when it is deeper or wider than a base model whose learning rate was tuned: CompleteP's table.

With m_L = L / L_base, m_N = D / D_base and an exponent alpha (arXiv 2505.01618, table 1):

    x + branch * f(norm(x)), both sublayers          branch         m_L^-alpha
    logits * (states W)                              logits         m_N^-1
    initial values of tables and head, / sqrt(D)     table_gain     m_N^(1/2), so that their variance keeps its size
    initial values of hidden kernels                 nothing: 1 / sqrt(fan_in) shrinks as m_N^(-1/2) by itself
    learning rate of the blocks' kernels             hidden_rate    m_N^-1 m_L^(alpha - 1)
    ... of all else in the blocks: biases, norms     vector_rate    m_L^(alpha - 1)
    weight decay of the blocks' kernels              hidden_decay   m_N, so that rate * decay does not depend on D
    Adam's epsilon in the blocks                     block_epsilon  m_N^-1 m_L^-alpha, the size of their gradients

Everything outside the blocks (tables, final norm, head) keeps its learning rate. The table presumes heads of one size
and a feed-forward width in one proportion to D. branch * learning rate is m_L^-1 for every alpha: 1 is CompleteP, 1/2
Depth-muP (arXiv 2310.02244), under which learning rates transfer less well. At the base, all factors are 1.
"""

from typing import NamedTuple

from jaxblock.contracts import check_number
from jaxblock.types import Array

DEPTH_MUP_ALPHA = 0.5
"""x + a f(norm(x)) / sqrt(L), Adam's rate / sqrt(L): arXiv 2310.02244."""


class Scaling(NamedTuple):
    """Factors on what a config says, all 1 at the base; see the table above."""

    branch: float = 1.0
    """On the output of each branch."""
    logits: float = 1.0
    """On the product of the last states and the head's kernel."""
    table_gain: float = 1.0
    """On the initial values of embedding, position table and head."""
    hidden_rate: float = 1.0
    """On the learning rate of the blocks' kernels."""
    vector_rate: float = 1.0
    """On the learning rate of the blocks' other parameters: biases, norms, what a connection declares."""
    hidden_decay: float = 1.0
    """On the weight decay of the blocks' kernels."""
    block_epsilon: float = 1.0
    """On Adam's epsilon for all parameters of the blocks."""


def complete_p(
    depth_ratio: float, width_ratio: float, *, alpha: float = 1.0, scale_epsilon: bool = True
) -> Scaling:
    """Return the factors of a model `depth_ratio` times as deep and `width_ratio` times as wide as its base.

    Args:
      depth_ratio: m_L.
      width_ratio: m_N.
      alpha: from 0 to 1; 1/2 and 1 are the published ones.
      scale_epsilon: False leaves Adam's epsilon as it is.

    Raises:
      ValueError: a ratio that is not above 0, or an alpha out of its range.
    """
    check_number("depth_ratio", depth_ratio, above=0.0)
    check_number("width_ratio", width_ratio, above=0.0)
    check_number("alpha", alpha, least=0.0, most=1.0)
    branch = depth_ratio**-alpha
    vector_rate = depth_ratio ** (alpha - 1.0)
    return Scaling(
        branch=branch,
        logits=1.0 / width_ratio,
        table_gain=width_ratio**0.5,
        hidden_rate=vector_rate / width_ratio,
        vector_rate=vector_rate,
        hidden_decay=width_ratio,
        block_epsilon=branch / width_ratio if scale_epsilon else 1.0,
    )


def scaled(x: Array, factor: float) -> Array:
    """Return factor * x in x's dtype; x itself where the factor is 1, so that a base model's program has no product."""
    return x if factor == 1.0 else factor * x

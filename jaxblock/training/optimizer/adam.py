"""AdamW's and Lion's directions: one moment or two per parameter, elementwise, so stacked layers never meet."""

import jax
import optax

from jaxblock.training.optimizer.roles import depth_axes
from jaxblock.types import Params


def adamw(
    *, beta1: float, beta2: float, epsilon: float, block_epsilon: float | None = None
) -> optax.GradientTransformation:
    """Return Adam's direction (arXiv 1412.6980; decoupled decay makes it AdamW, arXiv 1711.05101).

    m <- beta1 m + (1 - beta1) g          m' = m / (1 - beta1^t)
    v <- beta2 v + (1 - beta2) g^2        v' = v / (1 - beta2^t)
    d = m' / (sqrt(v') + epsilon)

    Parameters of the blocks have `block_epsilon` for epsilon, where it is given; the state is the same.
    """
    plain = optax.scale_by_adam(b1=beta1, b2=beta2, eps=epsilon)
    if block_epsilon is None or block_epsilon == epsilon:
        return plain
    of_blocks = optax.scale_by_adam(b1=beta1, b2=beta2, eps=block_epsilon)

    def update(
        updates: Params, state: optax.OptState, params: Params | None = None
    ) -> tuple[Params, optax.OptState]:
        # Moments do not depend on epsilon: jitted, they are computed once, and only directions that are used.
        outside, new = plain.update(updates, state, params)
        inside, _ = of_blocks.update(updates, state, params)
        return jax.tree.map(lambda b, x, y: x if b else y, depth_axes(updates), inside, outside), new

    return optax.GradientTransformation(plain.init, update)


def lion(*, beta1: float, beta2: float) -> optax.GradientTransformation:
    """Return Lion's direction (arXiv 2302.06675, algorithm 2): one moment, and every entry moves by the rate.

        d = sign(beta1 m + (1 - beta1) g)
        m <- beta2 m + (1 - beta2) g

    The direction's rms is 1, several times Adam's: the paper takes a learning rate 3 to 10 times smaller than
    AdamW's, and a weight decay as many times larger.
    """
    return optax.scale_by_lion(b1=beta1, b2=beta2)

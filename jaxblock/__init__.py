"""Transformer blocks as pure functions of JAX arrays: residual topologies, training, depth scaling.

Importing this loads nothing yet: a public name brings its room, and with it jax, flax and chex, when it is first asked
for (PEP 562); `jaxblock.training` brings the rest when it is imported. So a config or the command's help does not wait
for the models.
"""

import importlib
import sys
from typing import TYPE_CHECKING

from jaxblock.version import __version__

if TYPE_CHECKING:
    from jaxblock import functional, residual
    from jaxblock.config import ExecutionConfig, ModelConfig
    from jaxblock.models import (
        Block,
        Cache,
        Classifier,
        Decoder,
        Encoder,
        generate,
        init_cache,
        predict,
        prefill,
        stream,
    )
else:  # a checker sees the names above instead, and so still reports a misspelt one

    def __getattr__(name: str):
        """Return the room or the public name, and keep it, so that the next look-up is an ordinary one."""
        if name in _ROOMS:
            return importlib.import_module(f"jaxblock.{name}")
        if name not in _ROOM_OF:
            raise AttributeError(
                f"module 'jaxblock' has no attribute {name!r}", name=name, obj=sys.modules[__name__]
            )
        found = getattr(importlib.import_module(f"jaxblock.{_ROOM_OF[name]}"), name)
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        """Return what is here already and what can be asked for."""
        return sorted({*globals(), *_ROOMS, *_ROOM_OF})


_ROOMS = ("config", "functional", "models", "modules", "residual")
_ROOM_OF = {
    "ExecutionConfig": "config",
    "ModelConfig": "config",
    "Block": "models",
    "Cache": "models",
    "Classifier": "models",
    "Decoder": "models",
    "Encoder": "models",
    "generate": "models",
    "init_cache": "models",
    "predict": "models",
    "prefill": "models",
    "stream": "models",
}

__all__ = [
    "Block",
    "Cache",
    "Classifier",
    "Decoder",
    "Encoder",
    "ExecutionConfig",
    "ModelConfig",
    "__version__",
    "functional",
    "generate",
    "init_cache",
    "predict",
    "prefill",
    "residual",
    "stream",
]

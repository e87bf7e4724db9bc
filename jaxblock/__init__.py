"""Transformer blocks as pure functions of JAX arrays."""

from jaxblock.version import __version__

__all__ = ["__version__"]

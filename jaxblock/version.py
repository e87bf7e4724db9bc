"""The version, alone in its file so that building a wheel does not import jax."""

__version__ = "0.1.0"

"""The library `tokenizers` (extra `hf`): found when it is needed, its failures turned into sentences."""

import contextlib
from collections.abc import Iterator
from typing import Any


def find_library(what: str) -> Any:
    """Return the module; ValueError with words for what needs it where it is not installed."""
    try:
        import tokenizers
    except ImportError as error:
        raise ValueError(f'{what} needs the library tokenizers: pip install "jaxblock[hf]"') from error
    return tokenizers


def has_library() -> bool:
    """Return whether tokenizers with a file can be used here."""
    try:
        find_library("")
    except ValueError:
        return False
    return True


@contextlib.contextmanager
def reported(what: str) -> Iterator[None]:
    """Raise whatever goes wrong in the library as a ValueError of one sentence."""
    try:
        yield
    except ValueError:
        raise
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{what}: {error}") from error
    except BaseException as error:  # a panic of its Rust part is no Exception
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{what}: {error}") from error

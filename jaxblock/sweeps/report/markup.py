"""Pieces of HTML that cannot be injected into: a plain string is escaped, only `Markup` is not."""

from collections.abc import Iterable, Mapping
from html import escape


class Markup(str):
    """Text that is HTML already; made by the functions here."""

    __slots__ = ()


EMPTY = ("br", "col", "img", "meta")
"""Elements without an end tag."""
Child = str | None
NONE: Mapping[str, object] = {}


def text(value: object) -> Markup:
    """Return a value as escaped text; `Markup` stays as it is."""
    return value if isinstance(value, Markup) else Markup(escape(str(value), quote=True))


def tag(name: str, children: Child | Iterable[Child] = (), attributes: Mapping[str, object] = NONE) -> Markup:
    """Return an element. Children that are None are left out; an attribute that is True has no value.

    Args:
      name: of the element, an HTML or SVG name written in our own source.
      children: one or several; plain strings are escaped.
      attributes: name -> value; values are escaped, and those that are None or False are left out.
    """
    written = "".join(
        f" {key}" if value is True else f' {key}="{escape(str(value), quote=True)}"'
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in EMPTY:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{join(children)}</{name}>")


def join(children: Child | Iterable[Child], separator: str = "") -> Markup:
    """Return several pieces as one."""
    pieces = [children] if isinstance(children, str) else children or ()
    return Markup(separator.join(text(piece) for piece in pieces if piece is not None))


def identifier(words: str) -> str:
    """Return an id attribute: "Loss against depth" -> "loss-against-depth"."""
    return "-".join("".join(letter if letter.isalnum() else " " for letter in words.lower()).split())

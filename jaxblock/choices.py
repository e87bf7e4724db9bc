"""The one-string choice of a config, "name(option=1)": parsed, checked against its table, defaults filled in."""

import ast
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxblock.contracts import check_choice, nearest


class Choice(NamedTuple):
    """A parsed "name(option=1)"."""

    name: str
    options: dict[str, Any]


def parse_choice(field: str, text: str) -> Choice:
    """Parse `"name"` or `"name(option=1)"`; options are keyword literals, nothing is evaluated.

    Raises:
      ValueError: the text is not of that form.
    """
    wanted = f'{field} is {text!r}; it must read "name" or "name(option=1)" with literal options'
    if not isinstance(text, str):
        raise ValueError(wanted)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "error"
            )  # what Python has doubts about ('\d', 1if 1else 2) is a SyntaxError
            node = ast.parse(text.strip(), mode="eval").body
        if isinstance(node, ast.Name):
            return Choice(node.id, {})
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.args:
            raise ValueError(wanted)
        options = {str(word.arg): ast.literal_eval(word.value) for word in node.keywords}
        repr(options)  # a number of thousands of digits has no text, and no sentence could show it
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(wanted) from error
    if "None" in options or len(options) < len(node.keywords):
        raise ValueError(wanted)  # f(**x) has a keyword without a name, f(x=1, x=2) one name twice
    return Choice(node.func.id, options)


def check_options(field: str, choice: Choice, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return `defaults` overridden by the choice's options; a default that is a type has to be overridden.

    Raises:
      ValueError: an option the member does not have, of another type than its default, or left out without one.
    """
    for option, value in choice.options.items():
        if option not in defaults:
            known = ", ".join(defaults) or "none"
            raise ValueError(
                f"{field}: {choice.name!r} has no option {option!r}; its options: {known}{nearest(option, defaults)}"
            )
        default = defaults[option]
        wanted = default if isinstance(default, type) else type(default)
        fits = isinstance(value, wanted) or (wanted is float and isinstance(value, int))
        if not fits or (isinstance(value, bool) and wanted is not bool):
            raise ValueError(
                f"{field}: option {option!r} of {choice.name!r} is {value!r}; it must be of type {wanted.__name__}"
            )
    found = {**defaults, **choice.options}
    missing = [f"{option} ({kind.__name__})" for option, kind in found.items() if isinstance(kind, type)]
    if missing:
        raise ValueError(
            f"{field}: {choice.name!r} must be given {' and '.join(missing)}; there is no default"
        )
    return found


def resolve(field: str, text: str, members: Mapping[str, Mapping[str, Any]]) -> Choice:
    """Parse a choice, check name and options against `members`, and fill in the defaults."""
    choice = parse_choice(field, text)
    check_choice(field, choice.name, members)
    return Choice(choice.name, check_options(field, choice, members[choice.name]))

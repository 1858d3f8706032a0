"""Types and values in the words of somebody who writes YAML."""

import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

TYPES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "null",
    Any: "any value",
}
VALUES = {bool: "true or false", int: "a whole number", float: "a number", str: "text", list: "a list"}


def describe(hint: Any) -> str:
    """Returns a type in words: `a whole number`, `a list of text`, `one of none, dots, full`."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return f"{describe(arguments[0])}, at least {arguments[1].minimum}"
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin in (Union, types.UnionType):
        return " or ".join(describe(argument) for argument in arguments)
    if origin is tuple:
        repeated = len(arguments) == 2 and arguments[1] is Ellipsis
        return f"a list of {describe(arguments[0]) if repeated else f'{len(arguments)} values'}"
    return TYPES.get(hint, "a mapping (key: value)")


def shown(value: Any) -> str:
    """Returns a value as given, with its type in words: `'ten' (text)`."""
    if value is None:
        return "null (nothing)"
    text = repr(value)
    kind = VALUES.get(type(value)) or ("a mapping" if isinstance(value, dict) else type(value).__name__)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({kind})"


def listed(words: list[str], conjunction: str) -> str:
    """Returns `a`, `a or b`, `a, b or c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {conjunction} {words[-1]}"

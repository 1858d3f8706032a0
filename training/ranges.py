"""Checks of the ranges in annotations, such as `Annotated[int, Ge(1)]`, for options that are set from Python.

In YAML, pydantic checks the same annotations.
"""

import math
import operator
from collections.abc import Iterator
from typing import Annotated, Any, get_args, get_origin, get_type_hints

RULES = {
    "ge": (operator.ge, "at least"),
    "gt": (operator.gt, "greater than"),
    "le": (operator.le, "at most"),
    "lt": (operator.lt, "less than"),
}


def range_problems(instance: Any, section: str = "") -> list[str]:
    """Returns a message for every field of a dataclass that is out of the range in its annotation, or not finite.

    Args:
        instance: The dataclass.
        section: The beginning of the keys in messages, such as "optimizer.".
    """
    hints = get_type_hints(type(instance), include_extras=True)
    values = {name: getattr(instance, name) for name in hints if hasattr(instance, name)}
    return [
        f"{section}{name} must be {rule}, got {value!r}."
        for name, value in values.items()
        for rule in _violations(hints[name], value)
    ]


def _violations(hint: Any, value: Any) -> Iterator[str]:
    """Yields the rules of a type that a value breaks."""
    if get_origin(hint) is Annotated and isinstance(value, float) and not math.isfinite(value):
        yield "a finite number"
    elif get_origin(hint) is Annotated and isinstance(value, int | float):
        for rule in hint.__metadata__:
            for name, (holds, words) in RULES.items():
                if hasattr(rule, name) and not holds(value, getattr(rule, name)):
                    yield f"{words} {getattr(rule, name)}"
    elif isinstance(value, tuple):
        for part in get_args(hint):
            for inner, item in zip(get_args(part), value, strict=False):
                yield from _violations(inner, item)
    elif value is not None:
        for part in get_args(hint):
            yield from _violations(part, value)

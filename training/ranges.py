"""Checks of the ranges in annotations, such as `Annotated[int, Ge(1)]`, for options that are set from Python.

In YAML, pydantic checks the same annotations.
"""

import math
import numbers
import operator
from collections.abc import Iterator
from dataclasses import fields
from typing import Annotated, Any, get_args, get_origin, get_type_hints

RULES = {
    "ge": (operator.ge, "at least"),
    "gt": (operator.gt, "greater than"),
    "le": (operator.le, "at most"),
    "lt": (operator.lt, "less than"),
}


def range_problems(instance: Any, section: str = "") -> list[str]:
    """Returns a message for every field of a dataclass that is not a number in the range of its annotation.

    Args:
        instance: The dataclass.
        section: The beginning of the keys in messages, such as "optimizer.".
    """
    hints = get_type_hints(type(instance), include_extras=True)
    values = {each.name: getattr(instance, each.name) for each in fields(instance)}
    return [
        f"{section}{name} must be {rule}, got {value!r}."
        for name, value in values.items()
        for rule in violated_rules(hints[name], value)
    ]


def violated_rules(hint: Any, value: Any) -> Iterator[str]:
    """Yields the rules of a type that a value violates, such as "at least 1"; types without a range have none."""
    if get_origin(hint) is Annotated:
        kind, *ranges = get_args(hint)
        if isinstance(value, bool) or not isinstance(value, numbers.Integral if kind is int else numbers.Real):
            yield "an integer" if kind is int else "a number"
        elif not isinstance(value, numbers.Integral) and not math.isfinite(value):
            yield "a finite number"
        else:
            for name, (holds, words) in RULES.items():
                limits = [getattr(each, name) for each in ranges if hasattr(each, name)]
                yield from (f"{words} {limit:.10g}" for limit in limits if not holds(value, limit))
    elif isinstance(value, tuple):
        for part in get_args(hint):
            for inner, item in zip(get_args(part), value, strict=False):
                yield from violated_rules(inner, item)
    elif value is not None:
        for part in get_args(hint):
            yield from violated_rules(part, value)

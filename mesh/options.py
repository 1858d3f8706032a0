"""What the options of every strategy may be, by the types of their fields, whoever makes them: YAML, or Python."""

from collections.abc import Iterable, Sequence
from dataclasses import fields
from math import isfinite
from numbers import Integral, Real
from typing import Any, Literal, get_args, get_origin

from .errors import UserError
from .near_miss import did_you_mean

REST = -1
"""The size of an axis that takes the devices which others leave."""


def check_options(strategy: str, config: Any, problems: Iterable[str] = ()) -> None:
    """Checks a strategy's options; in `__post_init__`. Whole numbers become ints, and lists of them tuples.

    Args:
        strategy: Its name, which is that of its mesh axis.
        config: Its options dataclass; the annotations of the fields are the types.
        problems: What else is wrong; it is only looked at where all types are right.

    Raises:
        UserError: All options of a wrong type, words that are no choice, numbers that are not finite, sizes that are
            neither over 0 nor -1; each message begins with `strategy.<strategy>.<option>`.
    """
    found = []
    for field in fields(config):
        value = getattr(config, field.name)
        wanted = _wanted(field.type, value)
        if wanted:
            found.append(f"strategy.{strategy}.{field.name}={_shown(value)}{wanted}")
        elif field.type is int:
            object.__setattr__(config, field.name, int(value))
        elif get_origin(field.type) is tuple:
            object.__setattr__(config, field.name, tuple(map(int, value)))
    if not found and config.size < 1 and config.size != REST:
        found.append(f"strategy.{strategy}={config.size} must be at least 1, or {REST} for the rest of the devices.")
    found = found or list(problems)
    if found:
        raise UserError("\n".join(found))


def _wanted(hint: Any, value: Any) -> str:
    """The rule that a value breaks, as the end of a sentence; "" where it breaks none."""
    if get_origin(hint) is Literal:
        return _choice(get_args(hint), value)
    if get_origin(hint) is tuple:
        fits = isinstance(value, Sequence) and not isinstance(value, str) and all(map(_is_whole, value))
        return "" if fits else " must be a list of whole numbers."
    fits, words = {
        int: (_is_whole(value), "a whole number"),
        float: (isinstance(value, Real) and not isinstance(value, bool) and isfinite(value), "a finite number"),
        bool: (isinstance(value, bool), "true or false"),
        str: (isinstance(value, str), "text"),
    }[hint]
    return "" if fits else f" must be {words}."


def _choice(choices: tuple[str, ...], value: Any) -> str:
    if isinstance(value, str) and value in choices:
        return ""
    return f": the choices are {', '.join(choices)}.{did_you_mean(value, choices, cutoff=0.3)}"


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

"""Regular expressions over parameter paths outside of layouts: which of them meets which path."""

import re
from collections.abc import Iterable, Sequence

from ..mesh.errors import UserError
from ..mesh.near_miss import did_you_mean

MOST_NAMED = 3
"""Paths named in one message."""


def pattern_problem(pattern: object) -> str | None:
    """What is wrong with an expression that is to meet paths, or None.

    Args:
        pattern: What was given.
    """
    if not isinstance(pattern, str):
        return f"{pattern!r} is a {type(pattern).__name__}; a pattern of parameter paths is text."
    try:
        re.compile(pattern)
    except re.error as error:
        return f"{pattern!r} is not a regular expression: {error}."
    return None


def meets(pattern: str, path: str) -> bool:
    """Whether an expression meets a path: it is the path itself, or matches all of it."""
    return pattern == path or re.fullmatch(pattern, path) is not None


def paths_met(patterns: Sequence[str], paths: Sequence[str], key: str) -> dict[str, list[str]]:
    """Finds the paths that each expression meets.

    Args:
        patterns: Regular expressions.
        paths: The paths of all parameters.
        key: The config key of the expressions, for messages.

    Returns:
        Expression -> the paths it meets, at least one, in their order.

    Raises:
        UserError: Every expression that meets no path, with the nearest one.
    """
    met = {pattern: [path for path in paths if meets(pattern, path)] for pattern in patterns}
    unmet = [pattern for pattern, found in met.items() if not found]
    if unmet:
        raise UserError(
            "\n".join(f"{key}: {pattern!r} matches no parameter.{_near(pattern, paths)}" for pattern in unmet)
        )
    return met


def _near(pattern: str, paths: Sequence[str]) -> str:
    """What may be meant; where nothing is near, the first paths there are."""
    return did_you_mean(pattern, paths, cutoff=0.4) or f" There are {some(paths) or 'none'}."


def some(paths: Iterable[str]) -> str:
    """The first of some paths, and how many there are besides."""
    named = list(paths)
    more = f" and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
    return ", ".join(named[:MOST_NAMED]) + more

"""Where a problem of a config comes from: a line of its file, or a key=value argument that was laid over it."""

import re
from collections.abc import Mapping, Sequence

from ..errors import ConfigError, Problem
from .overrides import split_key

SUGGESTION = re.compile(r"\. | Did you mean ")
"""Where the cause that a message tells ends, and its remedy begins."""


def config_error(
    problems: Sequence[Problem],
    file: str,
    lines: Mapping[tuple[str, ...], int],
    given_by: Mapping[str, str],
    said: str,
) -> ConfigError:
    """Makes one error of all problems, each after the line or the argument that it comes from.

    Args:
        problems: At least one.
        file: The file, for people.
        lines: The line of each key of the file, by its parts.
        given_by: Key -> the argument that gives it.
        said: Where the arguments stand, such as "on the command line".
    """
    arguments = [argument_of(problem, given_by) for problem in problems]
    if all(arguments):
        told = [f"{words}: {problem.message}" for words, problem in zip(arguments, problems, strict=True)]
        return ConfigError(told, where=said)
    place = said.partition(" ")[2]
    told = [
        f"{place}: {words}: {problem.message}" if words else _with_line(problem, lines)
        for words, problem in zip(arguments, problems, strict=True)
    ]
    return ConfigError(told, where=f"in {file} and {said}" if any(arguments) else f"in {file}")


def argument_of(problem: Problem, given_by: Mapping[str, str]) -> str:
    """The argument that a problem comes from; "" where it comes from the file.

    What an argument gives, the file no longer does: neither the key, nor those below it. A problem of a section comes
    from the argument that changed a key in it, and one of several keys from the argument whose key its message names.

    Args:
        problem: With its key, or "" for the file as a whole.
        given_by: Key -> the argument that gives it.
    """
    path = _parts(problem.path)
    if not path:
        return ""
    given = {_parts(key): words for key, words in given_by.items()}
    above = [path[:depth] for depth in range(len(path), 0, -1) if path[:depth] in given]
    below = [key for key in given if key[: len(path)] == path]
    named = [key for key, words in given.items() if _names(problem.message, words)]
    return given[[*above[:1], *below[-1:], *named[-1:]][0]] if above or below or named else ""


def _names(message: str, words: str) -> bool:
    """Whether what a message tells of the cause names the key of an argument."""
    key = re.escape(words.partition("=")[0].strip())
    return bool(re.search(rf"(?<![\w.]){key}(?!\.?\w)", SUGGESTION.split(message)[0]))


def _with_line(problem: Problem, lines: Mapping[tuple[str, ...], int]) -> str:
    path = _parts(problem.path)
    found = next((lines[path[:depth]] for depth in range(len(path), 0, -1) if path[:depth] in lines), None)
    return problem.message if found is None else f"line {found}: {problem.message}"


def _parts(key: str) -> tuple[str, ...]:
    return tuple(split_key(key)) if key else ()

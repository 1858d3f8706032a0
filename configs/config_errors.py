"""Config errors: all problems of a config in one exception, each with the line or the argument that causes it."""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..mesh.errors import UserError, counted
from ..training.optimizing.groups import GroupConfig

PATTERNS = "layouts.rules"
"""A mapping with patterns as keys: everything after its name is one key, including dots."""
GROUPS = "optimizer.groups"
"""A mapping from patterns to options: the part after the last dot is an option, the rest is one key."""
SUGGESTION = re.compile(r"\. | Did you mean ")
"""The end of the cause and the start of the remedy in a message."""


Lines = Mapping[tuple[str, ...], int]
"""Key of a YAML file, in parts -> its line."""


class Problem(NamedTuple):
    """One problem of a config.

    Attributes:
        path: The dotted key, such as `train.steps`; empty for the file as a whole.
        message: The value, the rule and the fix.
    """

    path: str
    message: str


class ConfigError(UserError):
    """An invalid config.

    Attributes:
        problems: One line per problem, with the line of the file or the key=value argument that causes it.
    """

    def __init__(self, problems: Sequence[str], source: str = "the config", *, where: str = "") -> None:
        self.problems = tuple(problems)
        head = f"{counted(len(self.problems), 'problem')} {where or f'in {source}'}:"
        super().__init__("\n".join([head, *(f"  {problem}" for problem in self.problems)]))


def config_error(
    problems: Sequence[Problem], file: str, lines: Lines, given_by: Mapping[str, str], place: str
) -> ConfigError:
    """Combines all problems in one error and prefixes each with the line or the argument that causes it.

    Args:
        problems: At least one problem.
        file: The file name for messages.
        lines: The line of each key of the file.
        given_by: Key -> the argument that sets it.
        place: The origin of the arguments, such as "on the command line".
    """
    arguments = [find_argument(problem, given_by) for problem in problems]
    origin = "" if all(arguments) else f"{place.partition(' ')[2]}: "
    messages = [
        f"{origin}{argument}: {problem.message}" if argument else _add_line(problem, lines)
        for argument, problem in zip(arguments, problems, strict=True)
    ]
    if all(arguments):
        return ConfigError(messages, where=place)
    return ConfigError(messages, where=f"in {file} and {place}" if any(arguments) else f"in {file}")


def split_key(key: str) -> list[str]:
    """Returns the parts of a dotted key; a pattern is one part, including its dots."""
    for section in (PATTERNS, GROUPS):
        if key.startswith(f"{section}."):
            rest = key.removeprefix(f"{section}.")
            pattern, _, option = rest.rpartition(".")
            has_option = section == GROUPS and pattern and option in GroupConfig.__dataclass_fields__
            return [*section.split("."), *((pattern, option) if has_option else (rest,))]
    return key.strip().split(".")


def find_argument(problem: Problem, given_by: Mapping[str, str]) -> str:
    """Returns the argument that causes a problem, or "" if the file causes it.

    An argument replaces a key of the file and all keys below it. A problem of a section comes from the argument that
    changed a key in it. A problem of several keys comes from the argument that the message names.
    """
    path = _parts(problem.path)
    if not path:
        return ""
    given = {_parts(key): argument for key, argument in given_by.items()}
    above = [path[:depth] for depth in range(len(path), 0, -1) if path[:depth] in given]
    below = [key for key in given if key[: len(path)] == path]
    named = [key for key, argument in given.items() if _names(problem.message, argument)]
    candidates = [*above[:1], *below[-1:], *named[-1:]]
    return given[candidates[0]] if candidates else ""


def _names(message: str, argument: str) -> bool:
    """Returns whether the cause in a message names the key of an argument."""
    key = re.escape(argument.partition("=")[0].strip())
    return bool(re.search(rf"(?<![\w.]){key}(?!\.?\w)", SUGGESTION.split(message)[0]))


def _add_line(problem: Problem, lines: Lines) -> str:
    path = _parts(problem.path)
    found = next((lines[path[:depth]] for depth in range(len(path), 0, -1) if path[:depth] in lines), None)
    return problem.message if found is None else f"line {found}: {problem.message}"


def _parts(key: str) -> tuple[str, ...]:
    return tuple(split_key(key)) if key else ()

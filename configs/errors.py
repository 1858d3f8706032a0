"""The one error of this package: everything wrong with a config, told at once."""

import difflib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..mesh.errors import UserError


class Problem(NamedTuple):
    """One thing wrong with a config.

    Attributes:
        path: Dotted key it is about, such as `train.steps`; empty for the file as a whole.
        message: What was given, the rule, the remedy.
    """

    path: str
    message: str


class ConfigError(UserError):
    """A config that cannot be used.

    Attributes:
        problems: One line for each thing wrong, with the line of the file or the override it comes from.
    """

    def __init__(self, problems: Sequence[str], source: str = "the config") -> None:
        self.problems = tuple(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n".join([f"{count} in {source}:", *(f"  {problem}" for problem in self.problems)]))


def did_you_mean(name: str, valid: Iterable[str], count: int = 1, parent: str = "") -> str:
    """Returns ` Did you mean parent.x?` for the names nearest to `name`, or an empty string where none is near."""
    near = [f"{parent}.{key}" if parent else key for key in difflib.get_close_matches(name, list(valid), n=count)]
    return f" Did you mean {' or '.join(near)}?" if near else ""

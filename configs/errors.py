"""The one error of this package: everything wrong with a config, told at once."""

from collections.abc import Sequence
from typing import NamedTuple

from ..mesh.errors import UserError
from ..mesh.text import counted


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
        problems: One line for each thing wrong, with the line of the file or the key=value argument it comes from.
    """

    def __init__(self, problems: Sequence[str], source: str = "the config", *, where: str = "") -> None:
        self.problems = tuple(problems)
        head = f"{counted(len(self.problems), 'problem')} {where or f'in {source}'}:"
        super().__init__("\n".join([head, *(f"  {problem}" for problem in self.problems)]))

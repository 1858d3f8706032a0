"""The error of all problems of layout rules, and messages that parameters and activations have in common."""

import re
from collections.abc import Iterable, Sequence

from ..mesh.errors import UserError, nearest
from .sizes import counted
from .tensor_layout import TensorLayout


class LayoutError(UserError):
    """All problems with the layouts of a tree."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        lines = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(self.problems, 1))
        super().__init__(f"{counted(len(self.problems), 'problem')} with the layouts:\n{lines}")


def ambiguous(keys: Sequence[str]) -> str:
    """Reports that several rules match one path."""
    return (
        f"is matched by {len(keys)} rules, {' and '.join(map(repr, keys))}. Make the rules more specific, or set "
        "layouts.match to first."
    )


def rank_mismatch(num_dims: int, layout: TensorLayout, rule: str) -> str:
    """Reports that a layout has another number of entries than the parameter has dims."""
    return (
        f"has {counted(num_dims, 'dim')}, but rule {rule!r} gives the layout {layout} with "
        f"{counted(len(layout.axes), 'entry', 'entries')}. Give one entry per dim (null for a whole dim), or none at "
        "all for an array that stays whole."
    )


def nearest_path(key: str, paths: Iterable[str]) -> str | None:
    """Returns the path whose end, from some "/" on, is most similar to the literal text of a regular expression."""
    path_of_end: dict[str, str] = {}
    for path in paths:
        for start in range(path.count("/") + 1):
            end = path.split("/", start)[-1]
            path_of_end.setdefault(end, path)
    literal = re.sub(r"\.[*+?]|[\\^$*+?()\[\]{}|]", "", key).strip("/")
    ends = nearest(literal, path_of_end, cutoff=0.0)
    return path_of_end[ends[0]] if ends else None

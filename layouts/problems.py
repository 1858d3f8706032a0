"""What can be wrong with rules for a tree of parameters, each said in one sentence with its remedy."""

import difflib
import re
from collections.abc import Iterable, Sequence

from ..mesh.errors import UserError
from .sizes import counted, format_bytes
from .tensor_layout import TensorLayout


class LayoutError(UserError):
    """Everything that is wrong with the layouts of a tree, found at once."""

    def __init__(self, problems: Sequence[str]) -> None:
        """Collects the problems.

        Args:
            problems: One or two sentences each.
        """
        self.problems = tuple(problems)
        lines = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(self.problems, 1))
        super().__init__(f"{counted(len(self.problems), 'problem')} with the layouts:\n{lines}")


def unmatched(num_bytes: int, floor_bytes: int) -> str:
    """Says that no rule matches a large parameter."""
    return (
        f"matches no rule, so every device would hold all of its {format_bytes(num_bytes)} (layouts.unmatched_floor = "
        f"{format_bytes(floor_bytes)}). Add a rule to layouts.rules, or set layouts.unmatched to warn or replicate."
    )


def ambiguous(keys: Sequence[str]) -> str:
    """Says that several rules match one path."""
    return (
        f"is matched by {len(keys)} rules, {' and '.join(map(repr, keys))}. Make the rules more specific, or set "
        "layouts.match to first."
    )


def rank_mismatch(num_dims: int, layout: TensorLayout, rule: str) -> str:
    """Says that a layout has another number of entries than the parameter has dims."""
    return (
        f"has {counted(num_dims, 'dim')}, but rule {rule!r} gives the layout {layout} with "
        f"{counted(len(layout.axes), 'entry', 'entries')}. Give one entry per dim (null for a whole dim), or none at "
        "all for an array that stays whole."
    )


def repeated_axis(layout: TensorLayout, rule: str) -> str:
    """Says that a layout names an axis twice."""
    axes = ", ".join(map(repr, layout.repeated_axes))
    return f"gets the layout {layout} from rule {rule!r}, which uses {axes} twice. An axis can split one dim only."


def indivisible(layout: TensorLayout, rule: str, reason: str) -> str:
    """Says that a dim cannot be split evenly."""
    axes = " or ".join(f"strategy.{name}" for name in layout.used_axes)
    return (
        f"gets the layout {layout} from rule {rule!r}, but {reason}. Change the dim or {axes}, give the parameter its "
        "own rule, or set layouts.indivisible to replicate or next_dim."
    )


def unused_rule(key: str, paths: Sequence[str]) -> str:
    """Says that a rule matches nothing, with the path nearest to it."""
    near = nearest_path(key, paths)
    hint = "There are no parameters." if near is None else f"The nearest path is {near!r}."
    hint += " The key of a rule for activations ends in /output." if "output" in key else ""
    return f"Rule {key!r} matches no parameter. {hint} Correct the rule or remove it from layouts.rules."


def unused_output_rule(key: str, named: Sequence[str]) -> str:
    """Says that a rule for activations meets none, with the name nearest to it."""
    near = nearest_path(key, named)
    if near is None:
        name = _literal(key)
        return (
            f"Rule {key!r} is for an activation, as its key ends in /output, but the model names none. Name it in the "
            f'model: y = spmdkit.name_output(y, "{name}"), or remove the rule from layouts.rules.'
        )
    return (
        f"Rule {key!r} matches no activation that the model names. The nearest name is {near!r}. Correct the rule or "
        "remove it from layouts.rules."
    )


def repeated_axis_of_output(layout: TensorLayout) -> str:
    """Says that the layout of an activation names an axis twice."""
    axes = ", ".join(map(repr, layout.repeated_axes))
    return f"gives activations the layout {layout}, which uses {axes} twice. An axis can split one dim only."


def rows_of_output(layout: TensorLayout, row_axes: Sequence[str]) -> str:
    """Says that an activation's rows are split otherwise than those of the batch."""
    rows = row_axes[0] if len(row_axes) == 1 else f"[{', '.join(row_axes)}]"
    return (
        f"gives activations the layout {layout}, but their dim 0 are the rows of the batch, which lie over {rows}. "
        f"Begin dim 0 with {rows}, or write null there, which leaves rows as they lie."
    )


def row_axis_of_output(layout: TensorLayout, axis: str, dim: int) -> str:
    """Says that an axis of the rows is to split another dim of an activation."""
    return (
        f"gives activations the layout {layout}, but {axis!r} splits the rows of the batch, which are dim 0, and "
        f"cannot split dim {dim} too. Leave it out of dim {dim} in this rule of layouts.rules."
    )


def manual_axis_of_output(layout: TensorLayout, axis: str) -> str:
    """Says that the step has split its work along an axis already."""
    leave = " (strategy.tensor.explicit=false leaves it to XLA)" if axis == "tensor" else ""
    return (
        f"gives activations the layout {layout}, but the step itself splits its work over {axis!r}, so its activations "
        f"lie as the strategy has them. Leave {axis} out of this rule in layouts.rules{leave}."
    )


def indivisible_output(layout: TensorLayout, rule: str, reason: str) -> str:
    """Says that a dim of an activation cannot be split evenly."""
    axes = " or ".join(f"strategy.{name}" for name in layout.used_axes)
    return (
        f"gets the layout {layout} from rule {rule!r}, but {reason}. Change the dim or {axes}, or write null for this "
        "dim in the rule."
    )


def unused_axis(name: str, size: int) -> str:
    """Says that a mesh axis splits nothing."""
    return (
        f"Mesh axis {name!r} of size {size} splits no parameter, so groups of {size} devices would hold the same. Name "
        f"it in a rule of layouts.rules, or set strategy.{name} to 1."
    )


def nearest_path(key: str, paths: Iterable[str]) -> str | None:
    """Finds the path that most resembles a rule.

    Args:
        key: A regular expression.
        paths: The paths that exist.

    Returns:
        The path whose end, from some "/" on, is most like the expression's literal text; None if there are no paths.
    """
    text = _literal(key)

    def likeness(path: str) -> float:
        parts = path.split("/")
        tails = ("/".join(parts[start:]) for start in range(len(parts)))
        return max(difflib.SequenceMatcher(None, text, tail).ratio() for tail in tails)

    return max(paths, key=likeness, default=None)


def _literal(key: str) -> str:
    """The text of a regular expression without its special characters."""
    return re.sub(r"\.[*+?]|[\\^$*+?()\[\]{}|]", "", key).strip("/")

"""Rules for activations: those whose key ends in "/output", as Keras lays out the outputs of layers."""

from collections.abc import Sequence

from . import problems
from .layout_map import LayoutMap
from .tensor_layout import TensorLayout

OUTPUT = "/output"
"""How the name of an activation ends, and the key of a rule for activations."""


def output_rules(rules: LayoutMap | None) -> LayoutMap | None:
    """Takes the rules for activations out of a map.

    Args:
        rules: All rules of a run.

    Returns:
        A map of the same mesh that matches in the same way; None where there is no such rule.
    """
    if rules is None or not any(key.endswith(OUTPUT) for key in rules):
        return None
    chosen = LayoutMap(rules.device_mesh, match=rules.match)
    for key, layout in rules.items():
        if key.endswith(OUTPUT):
            chosen[key] = layout
    return chosen


def output_rule_problems(rules: LayoutMap, row_axes: Sequence[str], manual_axes: Sequence[str]) -> list[str]:
    """Finds what is wrong with rules for activations before a model names any.

    Args:
        rules: From `output_rules`.
        row_axes: Mesh axes that split the rows of a batch, so dim 0 of an activation.
        manual_axes: Those and the other axes that the step splits its work over by itself.

    Returns:
        One message for each axis named twice, each axis of the rows outside dim 0, rows split over only some of their
        axes, and each axis along which the step has split the work already.
    """
    return [
        f"Rule {key!r} {problem}"
        for key, layout in rules.items()
        for problem in _problems(layout, tuple(row_axes), tuple(manual_axes))
    ]


def _problems(layout: TensorLayout, row_axes: tuple[str, ...], manual_axes: tuple[str, ...]) -> list[str]:
    if layout.repeated_axes:
        return [problems.repeated_axis_of_output(layout)]
    found = []
    rows = tuple(axis for axis in layout.axes_of_dim(0) if axis in row_axes)
    if rows and layout.axes_of_dim(0)[: len(row_axes)] != row_axes:
        found.append(problems.rows_of_output(layout, row_axes))
    for dim in range(len(layout.axes)):
        for axis in layout.axes_of_dim(dim):
            if axis in row_axes and dim:
                found.append(problems.row_axis_of_output(layout, axis, dim))
            elif axis in manual_axes and axis not in row_axes:
                found.append(problems.manual_axis_of_output(layout, axis))
    return found


def unused_output_rules(rules: LayoutMap, named: Sequence[str], paths: Sequence[str]) -> list[str]:
    """Finds the rules for activations that nothing meets.

    Args:
        rules: From `output_rules`.
        named: The names of the model's activations.
        paths: The paths of its parameters; a rule that matches one of them is in use.

    Returns:
        One message for each, with the nearest name.
    """
    matching = {key for path in (*named, *paths) for key in rules.keys_matching(path)}
    return [problems.unused_output_rule(key, named) for key in rules if key not in matching]

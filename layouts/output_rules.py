"""Rules for activations: keys that end in "/output", as in Keras."""

from collections.abc import Iterator, Sequence

from .layout_map import LayoutMap
from .tensor_layout import TensorLayout

OUTPUT = "/output"
"""The end of the name of an activation and of the key of its rule."""


def output_rules(rules: LayoutMap | None) -> LayoutMap | None:
    """Returns a map of only the rules for activations, or None if there are none."""
    if rules is None or not any(key.endswith(OUTPUT) for key in rules):
        return None
    chosen = LayoutMap(rules.device_mesh, match=rules.match)
    for key, layout in rules.items():
        if key.endswith(OUTPUT):
            chosen[key] = layout
    return chosen


def output_rule_problems(rules: LayoutMap, row_axes: Sequence[str], manual_axes: Sequence[str]) -> list[str]:
    """Returns the problems of rules for activations, before a model names any.

    Args:
        rules: The result of `output_rules`.
        row_axes: The mesh axes that split the rows of a batch, which are dim 0 of an activation.
        manual_axes: These and the other axes over which the step itself splits its work.

    Returns:
        One message for each axis named twice, each axis of the rows outside dim 0, rows split over only some of their
        axes, and each axis along which the step has split the work already.
    """
    lines = []
    for key, layout in rules.items():
        for problem in _problems(layout, tuple(row_axes), tuple(manual_axes)):
            lines.append(f"Rule {key!r} {problem}")
    return lines


def _problems(layout: TensorLayout, row_axes: tuple[str, ...], manual_axes: tuple[str, ...]) -> Iterator[str]:
    gives = f"gives activations the layout {layout}"
    if layout.repeated_axes:
        axes = ", ".join(map(repr, layout.repeated_axes))
        yield f"{gives}, which uses {axes} twice. An axis can split one dim only."
        return
    first_dim = layout.axes_of_dim(0)
    if set(first_dim) & set(row_axes) and first_dim[: len(row_axes)] != row_axes:
        rows = row_axes[0] if len(row_axes) == 1 else f"[{', '.join(row_axes)}]"
        yield (
            f"{gives}, but their dim 0 are the rows of the batch, which are split over {rows}. Begin dim 0 with "
            f"{rows}, or write null there, which keeps the layout of the rows."
        )
    for dim in range(len(layout.axes)):
        for axis in layout.axes_of_dim(dim):
            if axis in row_axes and dim:
                yield (
                    f"{gives}, but {axis!r} splits the rows of the batch, which are dim 0, and cannot split dim {dim} "
                    f"too. Leave it out of dim {dim} in this rule of layouts.rules."
                )
            elif axis in manual_axes and axis not in row_axes:
                leave = " (strategy.tensor.explicit=false leaves it to XLA)" if axis == "tensor" else ""
                yield (
                    f"{gives}, but the step itself splits its work over {axis!r}, so its activations have the "
                    f"strategy's layout. Leave {axis} out of this rule in layouts.rules{leave}."
                )


def unused_output_rules(rules: LayoutMap, named: Sequence[str], paths: Sequence[str]) -> list[str]:
    """Returns one message for each rule for activations that matches nothing.

    Args:
        rules: The result of `output_rules`.
        named: The names of the model's activations.
        paths: The paths of its parameters; a rule that matches one of them is in use.
    """
    matching = rules.keys_in_use([*named, *paths])
    listed = ", ".join(named) or "it names none"
    unused = []
    for key in rules:
        if key not in matching:
            unused.append(
                f"Rule {key!r} matches no activation that the model names: {listed}. Correct the rule, remove it from "
                f'layouts.rules, or name the activation: y = spmdkit.name_output(y, "a_name{OUTPUT}").'
            )
    return unused

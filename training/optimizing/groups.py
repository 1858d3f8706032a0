"""Parameters whose optimizer differs, by regular expression: each group has a transformation and a state of its own.

    optimizer:
      name: adamw
      learning_rate: 1e-3
      groups:
        head/.*: {learning_rate: 1e-4}
        blocks/(attention|mlp)/.*: {name: muon}

`optax.partition` takes the tree of parameters apart by label and puts the updates together again. A group's state holds
`optax.MaskedNode`, which has no leaves, in place of the others' parameters: it takes no memory, and what is left keeps
its path, so it is laid out like its parameter. Labels stand in paths of checkpoints; they are made of the expressions.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import jax
import optax

from ...layouts.path_patterns import paths_met, some
from ...layouts.paths import leaves_with_paths, map_with_path
from ...mesh.errors import UserError

KEY = "optimizer.groups"
REST = "rest"
FROZEN = "frozen"


@dataclass(frozen=True, kw_only=True)
class GroupConfig:
    """What differs for the parameters of a group; what is null is as in `optimizer`."""

    name: str | None = None
    """Another optimizer. What it reads besides the learning rate and its schedule then starts from its own defaults. A
    group that names muon gives it all its matrices."""
    learning_rate: float | None = None
    """The highest learning rate of the group."""
    learning_rate_factor: float | None = None
    """In place of it: that of `optimizer`, times this."""
    schedule: Mapping[str, Any] | None = None
    """A schedule of its own."""
    weight_decay: float | None = None
    """As in `optimizer`; 0 = none."""
    betas: tuple[float, float] | None = None
    """As in `optimizer`."""
    momentum: float | None = None
    """As in `optimizer`."""
    epsilon: float | None = None
    """As in `optimizer`."""
    options: Mapping[str, Any] | None = None
    """Keyword arguments for your own optimizer."""

    def given(self) -> dict[str, Any]:
        """The options that are not null."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


def assign(patterns: Sequence[str], abstract_params: Any, frozen: Collection[str]) -> dict[str, str | None]:
    """Finds the group of each parameter.

    Args:
        patterns: The expressions of the groups; one that is a path itself goes before others that match it.
        abstract_params: Shapes of the parameters.
        frozen: Paths of parameters that do not train, whatever group they are in.

    Returns:
        Path -> the expression of its group, or None where it is in none; without the frozen ones.

    Raises:
        UserError: An expression matches no parameter, or none that trains; two match one parameter; all at once.
    """
    paths = [path for path, _ in leaves_with_paths(abstract_params)]
    met = paths_met(patterns, paths, KEY)
    problems = [
        f"{KEY}: {pattern!r} matches {some(found)} alone, and optimizer.freeze (or model.lora) freezes that. Take "
        "the group out."
        for pattern, found in met.items()
        if frozen.issuperset(found)  # pyright: ignore[reportAttributeAccessIssue]
    ]
    groups: dict[str, str | None] = {}
    for path in paths:
        if path in frozen:
            continue
        contending = [path] if path in met else [pattern for pattern, found in met.items() if path in found]
        groups[path] = contending[0] if contending else None
        if len(contending) > 1:
            listed = " and ".join(map(repr, contending))
            problems.append(
                f"{KEY}: {listed} match {path}. A parameter is in one group: make the expressions more specific, or "
                "give the path itself a group, which goes before them."
            )
    if problems:
        raise UserError("\n".join(dict.fromkeys(problems)))
    return groups


def labels(groups: Mapping[str, str | None]) -> dict[str | None, str]:
    """A label for each group: letters and digits of its expression, as they stand in paths of the state.

    Args:
        groups: Path -> expression or None.
    """
    found: dict[str | None, str] = {None: REST}
    for pattern in dict.fromkeys(each for each in groups.values() if each is not None):
        plain = re.sub(r"\W+", "_", pattern).strip("_") or "all"
        label, number = f"group_{plain}", 2
        while label in found.values():
            label, number = f"group_{plain}_{number}", number + 1
        found[pattern] = label
    return found


def only(abstract_params: Any, paths: Collection[str]) -> Any:
    """The parameters at some paths; in place of each other one a node without leaves, as `optax.masked` puts there."""
    return map_with_path(lambda path, leaf: leaf if path in paths else optax.MaskedNode(), abstract_params)


def by_group(
    transformations: Mapping[str, optax.GradientTransformation], label_of: Mapping[str, str], abstract_params: Any
) -> optax.GradientTransformation:
    """Joins the transformations of all groups.

    Args:
        transformations: Label -> the transformation of that group's parameters.
        label_of: Path -> label; a path that is missing is frozen: its update is zero, and it has no state.
        abstract_params: Shapes of the parameters.

    Returns:
        A transformation of all parameters; what else its update is given (`value`, `grad`) each of them gets.
    """
    tree = map_with_path(lambda path, _: label_of.get(path, FROZEN), abstract_params)
    used = set(jax.tree.leaves(tree))
    every = {**transformations, FROZEN: optax.set_to_zero()}
    return optax.partition(
        {label: each for label, each in every.items() if label in used}, tree, mask_compatible_extra_args=True
    )

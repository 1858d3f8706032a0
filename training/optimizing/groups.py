"""Groups of parameters, by regular expression, each with its own transformation and state.

    optimizer:
      name: adamw
      learning_rate: 1e-3
      groups:
        head/.*: {learning_rate: 1e-4}
        blocks/(attention|mlp)/.*: {name: muon}

`optax.partition` splits the tree of parameters by label and merges the updates. In place of the parameters of other
groups, a group's state has `optax.MaskedNode`, which has no leaves: it takes no memory, and the other leaves keep their
paths, so they are laid out like their parameters. The labels are derived from the expressions and are part of the paths
in checkpoints.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any

import jax
import optax
from annotated_types import Gt

from ...layouts.paths import leaves_with_paths, map_with_path, match_paths, some
from ...mesh.errors import raise_problems

KEY = "optimizer.groups"
REST = "rest"
FROZEN = "frozen"


@dataclass(frozen=True, kw_only=True)
class GroupConfig:
    """Options of a group of parameters; null = as in `optimizer`."""

    name: str | None = None
    """Another optimizer. Its options then have their own defaults, except the learning rate and its schedule. In a
    group with muon, it updates all matrices."""
    learning_rate: float | None = None
    """Maximum learning rate of the group."""
    learning_rate_factor: Annotated[float, Gt(0)] | None = None
    """Factor on the learning rate of `optimizer`, instead of `learning_rate`. To stop training, use
    optimizer.freeze."""
    schedule: Mapping[str, Any] | None = None
    """Learning rate schedule of the group."""
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
        """Returns the options that are not null."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


def assign(patterns: Sequence[str], abstract_params: Any, frozen: Collection[str]) -> dict[str, str | None]:
    """Finds the group of each parameter.

    Args:
        patterns: The expressions of the groups; one that equals a path goes before others that match it.
        abstract_params: Shapes of the parameters.
        frozen: Paths of parameters that do not train, whatever group they are in.

    Returns:
        Path -> the expression of its group, or None; without the frozen parameters.

    Raises:
        UserError: An expression matches no parameter, or only frozen ones; two match one parameter. Lists all.
    """
    paths = [path for path, _ in leaves_with_paths(abstract_params)]
    met = match_paths(patterns, paths, KEY)
    problems = [
        f"{KEY}: {pattern!r} matches only {some(found)}, which optimizer.freeze or model.lora freezes. Remove the "
        "group."
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
                "use the path itself as an expression, which goes before them."
            )
    raise_problems(dict.fromkeys(problems))
    return groups


def labels(groups: Mapping[str, str | None]) -> dict[str | None, str]:
    """Returns a label for each group: the letters and digits of its expression, for paths of the state.

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
    """Returns the parameters at some paths, with an `optax.MaskedNode` in place of the others."""
    return map_with_path(lambda path, leaf: leaf if path in paths else optax.MaskedNode(), abstract_params)


def by_group(
    transformations: Mapping[str, optax.GradientTransformation], label_of: Mapping[str, str], abstract_params: Any
) -> optax.GradientTransformation:
    """Joins the transformations of all groups.

    Args:
        transformations: Label -> the transformation of the parameters of that group.
        label_of: Path -> label; other paths are frozen: zero update and no state.
        abstract_params: Shapes of the parameters.

    Returns:
        A transformation of all parameters; it passes further arguments of its update (`value`, `grad`) to each.
    """
    tree = map_with_path(lambda path, _: label_of.get(path, FROZEN), abstract_params)
    used = set(jax.tree.leaves(tree))
    every = {**transformations, FROZEN: optax.set_to_zero()}
    return optax.partition(
        {label: each for label, each in every.items() if label in used}, tree, mask_compatible_extra_args=True
    )

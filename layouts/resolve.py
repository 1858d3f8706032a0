"""Resolving rules against an abstract tree of parameters, once, into the table that everything else uses."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
from jax.tree_util import tree_structure

from ..mesh.device_mesh import DeviceMesh
from ..mesh.errors import UserError
from ..mesh.near_miss import unknown_name
from . import problems
from .layout_map import LayoutMap
from .output_rules import OUTPUT
from .paths import joined_path, leaves_with_paths, numberless
from .problems import LayoutError as LayoutError
from .sizes import array_bytes, counted, format_bytes
from .table import LayoutTable, make_row
from .tensor_layout import TensorLayout

Default = Callable[[str, jax.ShapeDtypeStruct], tuple[TensorLayout, str]]
Unmatched = Literal["error", "warn", "replicate"]
Indivisible = Literal["error", "replicate", "next_dim"]
UNMATCHED: tuple[Unmatched, ...] = ("error", "warn", "replicate")
INDIVISIBLE: tuple[Indivisible, ...] = ("error", "replicate", "next_dim")
NO_RULE = "replicated: no rule"


def resolve(
    abstract_params: Any,
    mesh: DeviceMesh,
    *,
    rules: LayoutMap | None = None,
    default: Default | None = None,
    unmatched: Unmatched = "error",
    unmatched_floor_bytes: int = 1 << 20,
    indivisible: Indivisible = "error",
    required_axes: Sequence[str] = (),
    fixed_dims: Callable[[str], int] = lambda path: 0,
) -> LayoutTable:
    """Gives every parameter its layout: by its rule, else by the default, else by the policy for unmatched ones.

    Args:
        abstract_params: Pytree of ShapeDtypeStructs (or arrays) with global shapes.
        mesh: The mesh of all layouts.
        rules: Rules on that mesh. Keys that end in "/output" are for activations and need not match.
        default: Called as `default(path, leaf)` for parameters no rule matches; returns the layout and, for the
            table, the reason.
        unmatched: Without a default, what to do with unmatched parameters of at least `unmatched_floor_bytes`:
            "error", "warn" (and replicate) or "replicate". Smaller ones are replicated.
        unmatched_floor_bytes: Bytes of the whole array.
        indivisible: What to do with a dim that its axes do not divide: "error", "replicate" (keep that dim whole) or
            "next_dim" (move its axes to the largest whole dim that they divide; an error where there is none).
        required_axes: Axes that must split some parameter if their size is over 1.
        fixed_dims: Path -> how many leading dims of this parameter "next_dim" leaves alone: they count copies of one
            array (the blocks of a stack), and are no dims of it.

    Returns:
        The table.

    Raises:
        UserError: If a policy is unknown or the rules are for another mesh.
        LayoutError: Listing every problem: unmatched parameters, rules that match nothing, two rules for one path,
            a wrong number of entries, indivisible dims, an axis twice in one layout, required axes left unused.
    """
    _check_arguments(mesh, rules, unmatched, indivisible)
    leaves = leaves_with_paths(abstract_params)
    policy = _Policy(
        mesh=mesh,
        unmatched=unmatched,
        floor_bytes=unmatched_floor_bytes,
        indivisible=indivisible,
        fixed_dims=fixed_dims,
    )
    choices = [_choose(path, leaf, rules, default, policy) for path, leaf in leaves]
    found = _problems_of(leaves, choices)
    if rules is not None:
        found += _unused_rules(rules, [path for path, _ in leaves])
    found += _unused_axes(mesh, required_axes, [choice.layout for choice in choices])
    if found:
        raise LayoutError(found)
    _warn(leaves, choices, rules, policy)
    rows = [make_row(*leaf, choice.rule, choice.layout) for leaf, choice in zip(leaves, choices, strict=True)]
    return LayoutTable(rows=tuple(rows), treedef=tree_structure(abstract_params), mesh=mesh)


@dataclass(frozen=True, kw_only=True)
class _Policy:
    """What to do where the rules leave something open."""

    mesh: DeviceMesh
    unmatched: Unmatched
    floor_bytes: int
    indivisible: Indivisible
    fixed_dims: Callable[[str], int]


class _Choice(NamedTuple):
    """The layout of one parameter and its origin; with what is wrong, if anything is."""

    layout: TensorLayout
    rule: str
    problem: str | None = None
    key: str | None = None


def _check_arguments(mesh: DeviceMesh, rules: LayoutMap | None, unmatched: str, indivisible: str) -> None:
    if unmatched not in UNMATCHED:
        raise UserError(unknown_name("layouts.unmatched", unmatched, UNMATCHED))
    if indivisible not in INDIVISIBLE:
        raise UserError(unknown_name("layouts.indivisible", indivisible, INDIVISIBLE))
    if rules is not None and rules.device_mesh != mesh:
        raise UserError(f"The rules are for mesh {rules.device_mesh!r}, the parameters for {mesh!r}; use one mesh.")


def _choose(path: str, leaf: Any, rules: LayoutMap | None, default: Default | None, policy: _Policy) -> _Choice:
    whole = TensorLayout((None,) * len(leaf.shape), policy.mesh)
    keys = () if rules is None else rules.deciding_keys(path)
    if len(keys) > 1:
        return _Choice(whole, "", problems.ambiguous(keys))
    if rules is not None and keys:
        return _divided(path, leaf, _Choice(rules[keys[0]] or whole, keys[0], key=keys[0]), policy)
    if default is not None:
        return _divided(path, leaf, _Choice(*default(path, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))), policy)
    return _unmatched(leaf, whole, policy)


def _unmatched(leaf: Any, whole: TensorLayout, policy: _Policy) -> _Choice:
    num_bytes = array_bytes(leaf.shape, leaf.dtype)
    if num_bytes < policy.floor_bytes:
        return _Choice(whole, f"replicated: no rule, under {format_bytes(policy.floor_bytes)}")
    problem = problems.unmatched(num_bytes, policy.floor_bytes) if policy.unmatched == "error" else None
    return _Choice(whole, NO_RULE, problem)


def _divided(path: str, leaf: Any, choice: _Choice, policy: _Policy) -> _Choice:
    """Checks a layout against its array, and settles dims that do not divide."""
    layout, rule, shape = choice.layout, choice.rule, tuple(leaf.shape)
    if layout.axes and len(layout.axes) != len(shape):
        return choice._replace(problem=problems.rank_mismatch(len(shape), layout, rule))
    if layout.repeated_axes:
        return choice._replace(problem=problems.repeated_axis(layout, rule))
    for dim, size in enumerate(shape):
        reason = layout.indivisible(dim, size)
        if reason is None:
            continue
        target = _next_dim(layout, shape, dim, policy.fixed_dims(path)) if policy.indivisible == "next_dim" else None
        if target is None and policy.indivisible != "replicate":
            return choice._replace(problem=problems.indivisible(choice.layout, choice.rule, reason))
        parts = layout.parts_of_dim(dim)
        layout = _moved(layout, dim, target)
        rule += f"; dim {dim} {'whole' if target is None else f'-> dim {target}'} ({size} % {parts} = {size % parts})"
    return choice._replace(layout=layout, rule=rule)


def _next_dim(layout: TensorLayout, shape: Sequence[int], dim: int, first: int) -> int | None:
    """Finds the largest whole dim, from `first` on, that the axes of `dim` divide."""
    parts = layout.parts_of_dim(dim)
    whole = [other for other in range(first, len(shape)) if not layout.axes_of_dim(other)]
    fits = [other for other in whole if shape[other] and shape[other] % parts == 0]
    return max(fits, key=lambda other: shape[other], default=None)


def _moved(layout: TensorLayout, dim: int, target: int | None) -> TensorLayout:
    axes = list(layout.axes)
    if target is not None:
        axes[target] = axes[dim]
    axes[dim] = None
    return TensorLayout(axes, layout.device_mesh)


def _problems_of(leaves: Sequence[tuple[str, Any]], choices: Sequence[_Choice]) -> list[str]:
    """Lists the problems of parameters; the same problem in many layers once."""
    stacks: dict[tuple[str, ...], list[str]] = {}
    for (path, leaf), choice in zip(leaves, choices, strict=True):
        if choice.problem is not None:
            shape = f"of shape {tuple(leaf.shape)}"
            stacks.setdefault((numberless(path), shape, choice.problem), []).append(path)
    return [f"{joined_path(paths)!r} {shape} {problem}" for (_, shape, problem), paths in stacks.items()]


def _unused_rules(rules: LayoutMap, paths: Sequence[str]) -> list[str]:
    matching = {key for path in paths for key in rules.keys_matching(path)}
    unused = [key for key in rules if key not in matching and not key.endswith(OUTPUT)]
    return [problems.unused_rule(key, paths) for key in unused]


def _unused_axes(mesh: DeviceMesh, required_axes: Sequence[str], layouts: Sequence[TensorLayout]) -> list[str]:
    used = {name for layout in layouts for name in layout.used_axes}
    sizes = {name: mesh.axis_size(name) for name in required_axes}
    return [problems.unused_axis(name, size) for name, size in sizes.items() if size > 1 and name not in used]


def _warn(
    leaves: Sequence[tuple[str, Any]], choices: Sequence[_Choice], rules: LayoutMap | None, policy: _Policy
) -> None:
    """Warns of large parameters that no rule matches, if asked to, and of rules that other rules keep from deciding."""
    large = [path for (path, _), choice in zip(leaves, choices, strict=True) if choice.rule == NO_RULE]
    if large and policy.unmatched == "warn":
        warnings.warn(
            f"No rule matches {counted(len(large), 'large parameter')}, so every device holds all of "
            f"{', '.join(large)}. Add rules to layouts.rules, or set layouts.unmatched to replicate.",
            stacklevel=3,
        )
    deciding = {choice.key for choice in choices}
    shadowed = [key for key in rules or () if key not in deciding and not key.endswith(OUTPUT)]
    if shadowed:
        one = len(shadowed) == 1
        warnings.warn(
            f"layouts.rules: {', '.join(map(repr, shadowed))} decide{'s' if one else ''} nothing: every path "
            f"{'it matches' if one else 'they match'} has a rule that comes first. Take out what is not needed, or "
            "move it up.",
            stacklevel=3,
        )

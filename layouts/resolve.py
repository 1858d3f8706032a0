"""Resolves rules for an abstract tree of parameters, and for optimizer state, into layout tables."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
from jax.tree_util import tree_structure

from ..mesh.device_mesh import DeviceMesh
from ..mesh.errors import UserError, unknown_name
from . import problems
from .layout_map import LayoutMap
from .output_rules import OUTPUT
from .paths import joined_path, leaves_with_paths, numberless
from .problems import LayoutError as LayoutError
from .sizes import array_bytes, counted, format_bytes
from .table import LayoutRow, LayoutTable, make_row
from .tensor_layout import TensorLayout

Default = Callable[[str, jax.ShapeDtypeStruct], tuple[TensorLayout, str]]
Unmatched = Literal["error", "warn", "replicate"]
Indivisible = Literal["error", "replicate", "next_dim"]
UNMATCHED = get_args(Unmatched)
INDIVISIBLE = get_args(Indivisible)
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
    """Resolves the layout of every parameter: by its rule, else by the default, else by the policy `unmatched`.

    Args:
        abstract_params: Pytree of ShapeDtypeStructs (or arrays) with global shapes.
        mesh: The mesh of all layouts.
        rules: Rules on that mesh. Keys that end in "/output" are for activations and need not match.
        default: Called as `default(path, leaf)` for parameters without a rule; returns the layout and the reason for
            the table.
        unmatched: The policy for unmatched parameters of at least `unmatched_floor_bytes`, without a default: "error",
            "warn" (and replicate) or "replicate". Smaller ones are replicated.
        unmatched_floor_bytes: The minimum number of bytes of the whole array for `unmatched`.
        indivisible: The policy for a dim that its axes do not divide: "error", "replicate" (keep that dim whole) or
            "next_dim" (move its axes to the largest whole dim that they divide; an error if there is none).
        required_axes: Axes that must split some parameter if their size is over 1.
        fixed_dims: Path -> the number of leading dims that "next_dim" does not use, because they count copies of one
            array (the blocks of a stack).

    Returns:
        The table.

    Raises:
        UserError: A policy is unknown or the rules are for another mesh.
        LayoutError: Lists every problem: unmatched parameters, rules that match nothing, two rules for one path,
            a wrong number of entries, indivisible dims, an axis twice in one layout, required axes left unused.
    """
    if unmatched not in UNMATCHED:
        raise UserError(unknown_name("layouts.unmatched", unmatched, UNMATCHED))
    if indivisible not in INDIVISIBLE:
        raise UserError(unknown_name("layouts.indivisible", indivisible, INDIVISIBLE))
    if rules is not None and rules.device_mesh != mesh:
        raise UserError(f"The rules are for mesh {rules.device_mesh!r}, the parameters for {mesh!r}; use one mesh.")
    leaves = leaves_with_paths(abstract_params)
    policy = _Policy(mesh, unmatched, unmatched_floor_bytes, indivisible, fixed_dims)
    choices = [_choose(path, leaf, rules, default, policy) for path, leaf in leaves]
    all_problems = _problems_of(leaves, choices)
    if rules is not None:
        all_problems += _unused_rules(rules, [path for path, _ in leaves])
    all_problems += _unused_axes(mesh, required_axes, [choice.layout for choice in choices])
    if all_problems:
        raise LayoutError(all_problems)
    _warn(leaves, choices, rules, policy)
    rows = []
    for (path, leaf), choice in zip(leaves, choices, strict=True):
        rows.append(make_row(path, leaf, choice.rule, choice.layout))
    return LayoutTable(rows=tuple(rows), treedef=tree_structure(abstract_params), mesh=mesh)


def resolve_optimizer_state(abstract_opt_state: Any, params_table: LayoutTable) -> LayoutTable:
    """Resolves the layouts of an optimizer's state.

    A leaf whose path ends with a parameter's path and whose shape is the parameter's is a slot of that parameter
    (momentum, second moment, ...), wherever it is nested in chained, masked or partitioned optimizers. If several
    parameters fit ("a/w" and "w"), the one with the most slots under its prefix is used.

    Args:
        abstract_opt_state: `jax.eval_shape(optimizer.init, abstract_params)`.
        params_table: The parameters' table.

    Returns:
        The table: slots have the layout of their parameter; everything else (counts, factored moments) is replicated.
    """
    leaves = leaves_with_paths(abstract_opt_state)
    params = {row.path: row for row in params_table.rows}
    slots_below: Counter[str] = Counter()
    for path, leaf in leaves:
        slots_below.update(prefix for prefix, _ in _candidates(path, leaf, params))
    rows = []
    for path, leaf in leaves:
        candidates = list(_candidates(path, leaf, params))
        if candidates:
            _, parameter = max(candidates, key=lambda candidate: slots_below[candidate[0]])
            rows.append(make_row(path, leaf, "like its parameter", parameter.layout))
            continue
        layout = TensorLayout((None,) * len(leaf.shape), params_table.mesh)
        reason = "no parameter of this path and shape" if leaf.shape else "scalar"
        rows.append(make_row(path, leaf, f"replicated: {reason}", layout))
    return LayoutTable(rows=tuple(rows), treedef=tree_structure(abstract_opt_state), mesh=params_table.mesh)


def _candidates(path: str, leaf: Any, params: dict[str, LayoutRow]) -> Iterator[tuple[str, LayoutRow]]:
    """Yields (prefix, parameter) for each parameter whose path ends the leaf's and whose shape is the leaf's."""
    parts = path.split("/")
    for start in range(len(parts) + 1):
        row = params.get("/".join(parts[start:]))
        if row is not None and row.shape == tuple(leaf.shape):
            yield "/".join(parts[:start]), row


class _Policy(NamedTuple):
    """The policies for parameters without a rule and for indivisible dims."""

    mesh: DeviceMesh
    unmatched: Unmatched
    floor_bytes: int
    indivisible: Indivisible
    fixed_dims: Callable[[str], int]


class _Choice(NamedTuple):
    """The layout of one parameter, its origin, and its problem, if any."""

    layout: TensorLayout
    rule: str
    problem: str | None = None
    key: str | None = None


def _choose(path: str, leaf: Any, rules: LayoutMap | None, default: Default | None, policy: _Policy) -> _Choice:
    whole = TensorLayout((None,) * len(leaf.shape), policy.mesh)
    keys = () if rules is None else rules.deciding_keys(path)
    if len(keys) > 1:
        return _Choice(whole, "", problems.ambiguous(keys))
    if rules is not None and keys:
        key = keys[0]
        return _divided(path, leaf, _Choice(rules[key] or whole, key, key=key), policy)
    if default is not None:
        layout, reason = default(path, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        return _divided(path, leaf, _Choice(layout, reason), policy)
    num_bytes = array_bytes(leaf.shape, leaf.dtype)
    if num_bytes < policy.floor_bytes:
        return _Choice(whole, f"replicated: no rule, under {format_bytes(policy.floor_bytes)}")
    problem = (
        f"matches no rule, so every device would hold all of its {format_bytes(num_bytes)} (layouts.unmatched_floor = "
        f"{format_bytes(policy.floor_bytes)}). Add a rule to layouts.rules, or set layouts.unmatched to warn or "
        "replicate."
    )
    return _Choice(whole, NO_RULE, problem if policy.unmatched == "error" else None)


def _divided(path: str, leaf: Any, choice: _Choice, policy: _Policy) -> _Choice:
    """Checks a layout against its array, and applies the policy to indivisible dims."""
    layout = choice.layout
    rule = choice.rule
    shape = tuple(leaf.shape)
    if layout.axes and len(layout.axes) != len(shape):
        return choice._replace(problem=problems.rank_mismatch(len(shape), layout, rule))
    if layout.repeated_axes:
        axes = ", ".join(map(repr, layout.repeated_axes))
        twice = f"gets the layout {layout} from rule {rule!r}, which uses {axes} twice. An axis can split one dim only."
        return choice._replace(problem=twice)
    for dim, size in enumerate(shape):
        reason = layout.indivisible(dim, size)
        if reason is None:
            continue
        target = None
        if policy.indivisible == "next_dim":
            target = _next_dim(layout, shape, dim, policy.fixed_dims(path))
        if target is None and policy.indivisible != "replicate":
            axes = " or ".join(f"strategy.{name}" for name in choice.layout.used_axes)
            problem = (
                f"gets the layout {choice.layout} from rule {choice.rule!r}, but {reason}. Change the dim or {axes}, "
                "give the parameter its own rule, or set layouts.indivisible to replicate or next_dim."
            )
            return choice._replace(problem=problem)
        parts = layout.parts_of_dim(dim)
        layout = _moved(layout, dim, target)
        change = "whole" if target is None else f"-> dim {target}"
        rule += f"; dim {dim} {change} ({size} % {parts} = {size % parts})"
    return choice._replace(layout=layout, rule=rule)


def _next_dim(layout: TensorLayout, shape: Sequence[int], dim: int, first: int) -> int | None:
    """Returns the largest whole dim, from `first` on, that the axes of `dim` divide."""
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
    """Returns the problems of parameters; a problem of many layers once."""
    stacks: dict[tuple[str, ...], list[str]] = {}
    for (path, leaf), choice in zip(leaves, choices, strict=True):
        if choice.problem is not None:
            shape = f"of shape {tuple(leaf.shape)}"
            stacks.setdefault((numberless(path), shape, choice.problem), []).append(path)
    return [f"{joined_path(paths)!r} {shape} {problem}" for (_, shape, problem), paths in stacks.items()]


def _unused_rules(rules: LayoutMap, paths: Sequence[str]) -> Iterator[str]:
    matching = rules.keys_in_use(paths)
    for key in rules:
        if key in matching or key.endswith(OUTPUT):
            continue
        nearest = problems.nearest_path(key, paths)
        hint = "The model lacks parameters." if nearest is None else f"The nearest path is {nearest!r}."
        if "output" in key:
            hint += " The key of a rule for activations ends in /output."
        yield f"Rule {key!r} matches no parameter. {hint} Correct the rule or remove it from layouts.rules."


def _unused_axes(mesh: DeviceMesh, required_axes: Sequence[str], layouts: Sequence[TensorLayout]) -> list[str]:
    used: set[str] = set()
    for layout in layouts:
        used.update(layout.used_axes)
    unused = []
    for name in required_axes:
        size = mesh.axis_size(name)
        if name in used or size == 1:
            continue
        unused.append(
            f"Mesh axis {name!r} of size {size} splits no parameter, so groups of {size} devices would hold the same. "
            f"Name it in a rule of layouts.rules, or set strategy.{name} to 1."
        )
    return unused


def _warn(
    leaves: Sequence[tuple[str, Any]], choices: Sequence[_Choice], rules: LayoutMap | None, policy: _Policy
) -> None:
    """Warns of large parameters without a rule, under "warn", and of rules that earlier rules hide."""
    large = []
    for (path, _), choice in zip(leaves, choices, strict=True):
        if choice.rule == NO_RULE:
            large.append(path)
    if large and policy.unmatched == "warn":
        warnings.warn(
            f"No rule matches {counted(len(large), 'large parameter')}, so every device holds all of "
            f"{', '.join(large)}. Add rules to layouts.rules, or set layouts.unmatched to replicate.",
            stacklevel=3,
        )
    deciding = {choice.key for choice in choices}
    shadowed = [key for key in rules or () if key not in deciding and not key.endswith(OUTPUT)]
    if shadowed:
        warnings.warn(
            f"layouts.rules: {counted(len(shadowed), 'rule')} without effect, {', '.join(map(repr, shadowed))}: every "
            "path that matches has an earlier rule. Remove unneeded rules, or move them up.",
            stacklevel=3,
        )

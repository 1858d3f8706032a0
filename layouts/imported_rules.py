"""Layout rules of other libraries as a `LayoutMap`: Flax's logical axes, Keras's LayoutMap, Hugging Face's `tp_plan`.

The libraries need not be installed: their objects are read by their attributes. Rules that a layout cannot express are
errors. `from_flax_rules` and `from_tp_plan` return one rule for each parameter, whose key is its path.
"""

import re
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeAlias

from jax.sharding import PartitionSpec

from ..mesh.device_mesh import DeviceMesh
from ..mesh.errors import UserError, did_you_mean, raise_problems
from . import problems
from .layout_map import LayoutMap, MatchMode
from .paths import leaves_with_paths
from .tensor_layout import AxisEntry, TensorLayout, make_entry, names_of

Entries: TypeAlias = tuple[AxisEntry, ...]
"""One entry for each dim: None, a mesh axis, or several."""
Renaming: TypeAlias = Mapping[str, str | None]
"""Mesh axis in the rules -> its name in the mesh, or None if the mesh lacks it."""

NAMES_OF = ("names", "sharding_names", "out_sharding", "sharding")
"""Attributes of Flax's metadata with the names of dims: Linen's boxes, NNX's variables."""

HOOKS = ("gather", "all_reduce", "mla_kv_a_proj", "moe_tp_experts", "moe_identity_expert", "ep_router")
HOOKS += ("ep_dispatch_experts", "local", "local_params")
TP_STYLES = {
    **dict.fromkeys(("colwise", "colwise_rep", "colwise_gather_output", "local_colwise"), "columns"),
    **dict.fromkeys(("rowwise", "rowwise_rep", "rowwise_split_input", "local_rowwise"), "rows"),
    **dict.fromkeys(("embedding_rowwise", "vocab_parallel_rowwise", "grouped_gemm"), "first"),
    "embedding_colwise": "last",
    **dict.fromkeys(("replicate", "replicated_with_grad_allreduce", "sequence_parallel", *HOOKS), "whole"),
}
"""Style -> the split dim of a matrix."""
IN_OUT = ("kernel", "w")
"""Names of matrices that are stored (in, out), as in JAX libraries; all others are (out, in)."""


def from_flax_rules(
    rules: Iterable[tuple[str, Any]] | Mapping[str, Any], names: Any, mesh: DeviceMesh, *, axes: Renaming | None = None
) -> LayoutMap:
    """Converts rules for logical axes, as `flax.linen.logical_to_mesh` applies them.

    Rules are in order of priority. A rule assigns its mesh axes to the dim of its name, unless that dim has axes
    already or another dim of the array uses one of them; None keeps the dim whole, whatever rules follow. A dim without
    a rule is whole. Mesh axes that the mesh does not have are ignored with a warning.

    Args:
        rules: Pairs (logical axis, mesh axis); a mesh axis is a name, a tuple of names, or None.
        names: A tree like the parameters, with the names of each parameter's dims: a tuple of strings and None, a
            PartitionSpec of them (the result of `flax.linen.get_partition_spec`), or metadata with an attribute
            `names`, `sharding_names`, `out_sharding` or `sharding`. None leaves a parameter to the strategy.
        mesh: The mesh of the map.
        axes: New names of mesh axes, such as {"model": "tensor"}; None for an axis to ignore.

    Returns:
        One rule for each parameter that has names.

    Raises:
        UserError: A rule or the tree is invalid; an array uses a name twice; an axis is renamed to a missing one.
    """
    what = "from_flax_rules"
    named = _dim_names(names, what)
    used = {name for own in named.values() for name in own}
    pairs: list[tuple[Any, AxisEntry]] = []
    ignored: dict[str, None] = {}
    for pair in rules.items() if isinstance(rules, Mapping) else rules:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise UserError(f"{what}: a rule must be a pair (logical axis, mesh axis), got {pair!r}.")
        logical, given = pair[0], names_of(_parse_entries((pair[1],), f"{what}: rule {pair[0]!r}")[0])
        known = [name for name in given if name in (axes or {}) or name in mesh.axis_names]
        if logical in used:
            ignored |= dict.fromkeys(name for name in given if name not in known)
        if known or not given:
            pairs.append((logical, make_entry(known)))
    if ignored:
        warnings.warn(
            f"{what} ignored mesh axes of the rules that the mesh does not have: {', '.join(ignored)}. The mesh has "
            f"{', '.join(mesh.axis_names)}. To rename one: axes={{{next(iter(ignored))!r}: {mesh.axis_names[-1]!r}}}.",
            stacklevel=2,
        )
    return _exact_map({path: _assign_axes(own, pairs) for path, own in named.items()}, mesh, axes, what)


def from_keras(
    layout_map: Any, mesh: DeviceMesh | None = None, *, axes: Renaming | None = None, match: MatchMode = "fullmatch"
) -> LayoutMap:
    """Converts a `keras.distribution.LayoutMap`: the same keys in the same order.

    Lookup follows Keras 3.14 and later: the key that equals the path, or else the one key that matches the whole path.
    Keys of Keras begin with the name of the model ("sequential/dense/kernel"), or with ".*".

    Args:
        layout_map: The map.
        mesh: The mesh of the result; None converts Keras's mesh.
        axes: New names of mesh axes, such as {"model": "tensor"}; None for an axis to ignore.
        match: "search" for rules written for Keras before 3.14.

    Raises:
        UserError: The map, a key or a layout is invalid, or the mesh does not have an axis.
    """
    if not hasattr(layout_map, "items"):
        raise UserError(
            f"from_keras takes a keras.distribution.LayoutMap, got {layout_map!r} ({type(layout_map).__name__})."
        )
    given = {
        key: _parse_entries(layout if isinstance(layout, tuple) else layout.axes, f"from_keras: rule {key!r}")
        for key, layout in layout_map.items()
    }
    own = layout_map.device_mesh if mesh is None else mesh
    if not isinstance(own, DeviceMesh):
        own = DeviceMesh(tuple(own.shape), tuple(own.axis_names), own.devices)
    rules = LayoutMap(own, match)
    for key, entries in _rename_axes(given, own, axes, "from_keras").items():
        rules[key] = TensorLayout(entries)
    return rules


def from_tp_plan(
    plan: Mapping[str, str],
    params: Any,
    mesh: DeviceMesh,
    *,
    axis: str = "tensor",
    prefix: str = "model",
    unused: Literal["error", "ignore"] = "error",
) -> LayoutMap:
    """Converts a `tp_plan` of `transformers`.

        style                                                  a matrix, as in torch (out, in)         its bias
        colwise, colwise_rep, colwise_gather_output            out is split                            split
        rowwise, rowwise_rep, rowwise_split_input              in is split                             whole
        local_colwise, local_rowwise                           as without "local_"
        embedding_rowwise, vocab_parallel_rowwise              the vocabulary is split (dim 0)
        embedding_colwise                                      the width is split (dim 1)
        grouped_gemm                                           experts are split (dim 0)
        replicate, sequence_parallel, and module hooks:        whole                                   whole
        gather, all_reduce, ...

    The styles of one line differ only in where activations are gathered. Here XLA decides that from the layouts of the
    parameters (`strategy.tensor.explicit: false`, or `ModelParallel`); the numbers are the same.

    Args:
        plan: Name of a module or parameter, with `*` for each number -> style, such as
            `{"layers.*.self_attn.q_proj": "colwise"}`; from `config.base_model_tp_plan` or a model's `_tp_plan`.
        params: The parameters, or their shapes, with the names of `transformers`, joined by "/" or ".". A matrix named
            `kernel` or `w` is (in, out); any other is (out, in), as in torch. Leading dims may count blocks.
        mesh: The mesh of the map.
        axis: The mesh axis that splits.
        prefix: An optional prefix of names, which plans of a base model omit.
        unused: "ignore" accepts names without a parameter, for plans that serve several models.

    Returns:
        One rule for each parameter in the plan; the others are left to the strategy.

    Raises:
        UserError: A style is unknown, or splits several matrices packed into one array, which a layout cannot express;
            a name matches no parameter; the mesh does not have the axis.
    """
    what = "from_tp_plan"
    wrong = [f"{what}: {problem}" for key, style in plan.items() if (problem := _style_problem(key, style))]
    leaves = leaves_with_paths(params)
    patterns = {key: _plan_pattern(key, prefix) for key in plan}
    found: dict[str, Entries] = {}
    used: set[str] = set()
    for path, leaf in leaves:
        words = path.replace("/", ".").split(".")
        modules = [".".join(words[:count]) for count in range(len(words), 0, -1)]  # the parameter, then its modules
        keys = [[key for key, pattern in patterns.items() if pattern.fullmatch(name)] for name in modules]
        used.update(key for each in keys for key in each)
        own = [key for each in keys[:2] for key in each]
        if own:
            found[path] = _split_dim(TP_STYLES.get(plan[own[0]], "whole"), words[-1], len(leaf.shape), axis)
    for key in plan if unused == "error" else ():
        if key not in used:
            near = problems.nearest_path(key.replace(".", "/"), [path for path, _ in leaves])
            wrong.append(
                f"{what}: {key!r} in the plan matches no parameter. The nearest path is {near!r}. Correct or remove "
                f"it, or set the prefix of names (prefix={prefix!r}); unused='ignore' accepts such names."
            )
    raise_problems(wrong)
    return _exact_map(found, mesh, None, what)


def _exact_map(found: Mapping[str, Entries], mesh: DeviceMesh, axes: Renaming | None, what: str) -> LayoutMap:
    """Returns a map with one rule for each path, which matches only that path."""
    rules = LayoutMap(mesh)
    for path, entries in _rename_axes(found, mesh, axes, what).items():
        rules[re.escape(path)] = TensorLayout(entries)
    return rules


def _rename_axes(
    found: Mapping[str, Entries], mesh: DeviceMesh, axes: Renaming | None, what: str
) -> dict[str, Entries]:
    """Returns the entries with the axis names of the mesh; an axis that is renamed to None is dropped.

    Raises:
        UserError: The mesh does not have an axis, or `axes` has a name without a rule; all of them at once.
    """
    axes = axes or {}
    used = dict.fromkeys(name for entries in found.values() for entry in entries for name in names_of(entry))
    wrong = [
        f"{what}: unknown mesh axis {axes.get(name, name)!r} in the rules; the mesh has {', '.join(mesh.axis_names)}. "
        f"Rename it, axes={{{name!r}: {mesh.axis_names[-1]!r}}}, or keep its dims whole, axes={{{name!r}: None}}."
        for name in used
        if axes.get(name, name) not in (None, *mesh.axis_names)
    ]
    wrong += [
        f"{what}: axes renames {name!r}, but the applied rules only have {', '.join(map(repr, used))}."
        for name in axes
        if used and name not in used
    ]
    raise_problems(wrong)

    def rename(entry: AxisEntry) -> AxisEntry:
        return make_entry([name for each in names_of(entry) if (name := axes.get(each, each)) is not None])

    return {path: tuple(map(rename, entries)) for path, entries in found.items()}


def _parse_entries(spec: Any, what: str) -> Entries:
    """Returns the entries of a PartitionSpec or of a tuple; `what` is its origin, for messages."""
    try:
        return TensorLayout(spec).axes
    except UserError as error:
        raise UserError(f"{what}: {error}") from None


def _dim_names(tree: Any, what: str) -> dict[str, tuple[str | None, ...]]:
    """Returns path -> names of the dims, for the parameters that have names."""
    found = {}
    for path, leaf in leaves_with_paths(tree, is_leaf=lambda node: node is None or _names_of(node) is not None):
        names = _names_of(leaf)
        if names is None and leaf is not None:
            raise UserError(
                f"{what}: {path!r} in the tree of names must be the names of its dims, such as ('embed', 'mlp'), or "
                f"None to leave it to the strategy, got {leaf!r} ({type(leaf).__name__})."
            )
        twice = [name for name in names or () if name is not None and (names or ()).count(name) > 1]
        if twice:
            raise UserError(f"{what}: {path!r} has dims {names}, two of them {twice[0]!r}. Give each its own name.")
        if names is not None:
            found[path] = names
    return found


def _names_of(node: Any) -> tuple[str | None, ...] | None:
    if type(node) is tuple or isinstance(node, PartitionSpec):
        names = tuple(node)
        return names if all(name is None or isinstance(name, str) for name in names) else None
    if isinstance(node, Mapping | list | tuple):
        return None
    given = [getattr(node, attribute, None) for attribute in NAMES_OF]
    return next((_names_of(tuple(names)) for names in given if isinstance(names, tuple | PartitionSpec)), None)


def _assign_axes(names: tuple[str | None, ...], rules: Iterable[tuple[str, AxisEntry]]) -> Entries:
    """Returns the mesh axes of each dim: rules in order, each axis once in an array."""
    entries: dict[int, AxisEntry] = {}
    for logical, entry in rules:
        if logical in names:
            dim, taken = names.index(logical), {axis for each in entries.values() for axis in names_of(each)}
            if dim not in entries and not taken.intersection(names_of(entry)):
                entries[dim] = entry
    return tuple(entries.get(dim) for dim in range(len(names)))


def _style_problem(key: str, style: str) -> str | None:
    if style in TP_STYLES:
        return None
    if "packed" in style:
        return (
            f"{key!r} is {style!r}: several matrices in one array, each split by itself, so that a device holds "
            "several ranges of a dim. A layout can only give it one. Store the matrices as separate "
            "parameters, or remove this entry."
        )
    return f"{key!r}: unknown style {style!r}.{did_you_mean(style, TP_STYLES, otherwise='Known styles:')}"


def _plan_pattern(key: str, prefix: str) -> re.Pattern[str]:
    """Returns the pattern of a name: `*` is a number, and the prefix is optional."""
    words = [r"\d+" if word == "*" else re.escape(word) for word in key.split(".")]
    if prefix and words[0] == re.escape(prefix):
        words = words[1:]
    return re.compile((f"(?:{re.escape(prefix)}\\.)?" if prefix else "") + r"\.".join(words))


def _split_dim(split: str, leaf: str, num_dims: int, axis: str) -> Entries:
    """Returns the entries of one array of a module."""
    is_vector, in_out = leaf == "bias" or num_dims == 1, leaf in IN_OUT
    dim = {
        "first": 0,
        "last": -1,
        "columns": -1 if is_vector or in_out else -2,
        "rows": -2 if in_out and num_dims > 1 else -1,
    }.get(split)
    if dim is None or not num_dims or (split == "rows" and leaf == "bias"):
        return (None,) * num_dims
    return tuple(axis if each == dim % num_dims else None for each in range(num_dims))

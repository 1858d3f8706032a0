"""Layouts of optimizer state: what has a parameter's path and shape lies as the parameter does, the rest is whole."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from jax.tree_util import tree_structure

from .paths import leaves_with_paths
from .table import LayoutRow, LayoutTable, make_row
from .tensor_layout import TensorLayout


def resolve_optimizer_state(abstract_opt_state: Any, params_table: LayoutTable) -> LayoutTable:
    """Gives every array of an optimizer's state its layout.

    A leaf whose path ends with a parameter's path and whose shape is the parameter's is a slot of that parameter
    (momentum, second moment, ...), wherever it is nested in chained, masked or partitioned optimizers. Where several
    parameters fit ("a/w" and "w"), the one decides under whose prefix most slots are found.

    Args:
        abstract_opt_state: `jax.eval_shape(optimizer.init, abstract_params)`.
        params_table: The parameters' table.

    Returns:
        The table of the state: slots follow their parameter; counts, factored moments and all else are replicated on
        the mesh.
    """
    leaves = leaves_with_paths(abstract_opt_state)
    params = {row.path: row for row in params_table.rows}
    prefixes = Counter(prefix for path, leaf in leaves for prefix, _ in _candidates(path, leaf, params))
    rows = []
    for path, leaf in leaves:
        best = max(_candidates(path, leaf, params), key=lambda found: prefixes[found[0]], default=None)
        if best is not None:
            rows.append(make_row(path, leaf, "like its parameter", best[1].layout))
        else:
            layout = TensorLayout((None,) * len(leaf.shape), params_table.mesh)
            reason = "replicated: scalar" if not leaf.shape else "replicated: no parameter of this path and shape"
            rows.append(make_row(path, leaf, reason, layout))
    return LayoutTable(rows=tuple(rows), treedef=tree_structure(abstract_opt_state), mesh=params_table.mesh)


def _candidates(path: str, leaf: Any, params: dict[str, LayoutRow]) -> Iterator[tuple[str, LayoutRow]]:
    """Yields (prefix, parameter) for each parameter whose path ends the leaf's and whose shape is the leaf's."""
    parts = path.split("/")
    for start in range(len(parts) + 1):
        row = params.get("/".join(parts[start:]))
        if row is not None and row.shape == tuple(leaf.shape):
            yield "/".join(parts[:start]), row

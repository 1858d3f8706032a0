"""Train states with the blocks in the model's order, as checkpoints contain them.

    saved   = in_model_order(state)               blocks in the model's order, without the empty slots of stages
    state   = in_stored_order(saved, like)        as the step stores them

A state knows its own order (`TrainState.order`), so that neither needs a plan: `Checkpoints` calls both, and its
callers save and restore states as they are. A state in the model's order is returned unchanged. The functions take any
tree that contains states, such as a dict of two.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding

from ...layouts.paths import leaves_with_paths, map_with_path
from ...mesh.errors import UserError
from .. import diloco
from ..pipeline import AXIS
from .state import TrainState

Change = Callable[..., Any]
"""(path in the state, leaves at this path) -> a leaf."""


def in_model_order(tree: Any) -> Any:
    """Returns a tree whose train states have their blocks in the model's order, leaf by leaf.

    Args:
        tree: Global arrays, or arrays of the host.

    Raises:
        UserError: Blocks that a pipeline stores are not part of a train state, so that their order is unknown.
    """

    def convert(state: TrainState) -> TrainState:
        order = state.order
        return _converted(state, lambda path, leaf: order.leaf_to_model(leaf, _block_dims(path, state)))

    return _convert_states(tree, convert)


def abstract_in_model_order(tree: Any) -> Any:
    """Returns the shapes and shardings of the result of `in_model_order`.

    Args:
        tree: Arrays or ShapeDtypeStructs.

    Raises:
        UserError: As `in_model_order`.
    """

    def convert(state: TrainState) -> TrainState:
        order = state.order
        return _converted(state, lambda path, leaf: order.abstract_leaf(leaf, _block_dims(path, state)))

    return _convert_states(tree, convert)


def in_stored_order(tree: Any, like: Any) -> Any:
    """Reverses `in_model_order`.

    Args:
        tree: Global arrays; train states have their blocks in the model's order.
        like: The same tree as a step stores it, or its abstract values, with the layouts of the result.
    """

    def store(stored: Any, saved: Any) -> Any:
        if not isinstance(stored, TrainState):
            return saved
        order = stored.order

        def change(path: str, leaf: Any, stored_leaf: Any) -> Any:
            return order.leaf_to_stored(leaf, _block_dims(path, stored), stored_leaf)

        natural = stored._replace(order=saved.order)
        return map_with_path(change, saved, natural)._replace(order=order)

    return jax.tree.map(store, like, tree, is_leaf=_is_state)


def packing_of(tree: Any) -> str:
    """Returns the packing of the errors of compression in a tree, see `compression.packing`; "" if it has none."""
    states = [node for node in jax.tree.leaves(tree, is_leaf=_is_state) if _is_state(node)]
    return " ".join(state.order.packing for state in states if state.order.packing)


def _is_state(node: Any) -> bool:
    return isinstance(node, TrainState)


def _convert_states(tree: Any, convert: Callable[[TrainState], TrainState]) -> Any:
    for path, node in leaves_with_paths(tree, is_leaf=_is_state):
        if not _is_state(node):
            _check_order_is_known(path, node)
    return jax.tree.map(lambda node: convert(node) if _is_state(node) else node, tree, is_leaf=_is_state)


def _converted(state: TrainState, change: Change) -> TrainState:
    if state.order.stages is None:
        return state
    return map_with_path(change, state)._replace(order=state.order.of_model)


def _block_dims(path: str, state: TrainState) -> tuple[int, ...]:
    """Returns the dims of an array of a state that count slots of blocks."""
    field, _, rest = path.partition("/")
    if field == "opt_state":
        return dict(state.order.moments).get(rest, ())
    if field == "extra" and isinstance(state.extra, diloco.Copies):
        copied, _, rest = rest.partition("/")
        first = 1 if copied == "copies" else 0  # dim 0 of a copy counts the groups
        return (first,) if rest.startswith("blocks/") else ()
    return (0,) if path.startswith("params/blocks/") else ()


def _check_order_is_known(path: str, leaf: Any) -> None:
    """Rejects blocks of a pipeline outside of a train state: nothing records their order.

    Raises:
        UserError: See above.
    """
    sharding = getattr(leaf, "sharding", None)
    if "blocks" not in path.split("/") or not isinstance(sharding, NamedSharding):
        return
    axes = [axis for entry in sharding.spec for axis in (entry if isinstance(entry, tuple) else (entry,))]
    if AXIS in axes and sharding.mesh.shape[AXIS] > 1:
        raise UserError(
            f"{path} is split over the stages of a pipeline (the mesh axis {AXIS!r}), which may store blocks in "
            "another order than the model, and only a TrainState records this order. Save and restore the state of the "
            "step, or a part of it: state._replace(opt_state=())."
        )

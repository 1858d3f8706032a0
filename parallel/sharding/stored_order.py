"""Conversion between the order in which pipeline stages store blocks and the order of the model.

Checkpoints, samples and comparisons use the model's order, so that nothing outside the step depends on stages. If both
orders are the same (one chunk on each stage, with equal numbers of blocks), nothing is moved.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from ...layouts.paths import map_with_path
from ..model import BlockModel, Model, Params
from ..pipeline import AXIS
from ..plan import MeshPlan
from ..schedule.stages import Stages


@dataclass(frozen=True)
class StoredOrder:
    """Converts parameters, gradients, or a whole train state between the two orders.

    Attributes:
        stages: The positions of the blocks; None without a pipeline.
    """

    stages: Stages | None

    @property
    def reordered(self) -> Stages | None:
        """The stages if the two orders differ, otherwise None."""
        return None if self.stages is None or self.stages.is_natural else self.stages

    def to_model(self, tree: Any) -> Any:
        """Reorders the blocks of stored global arrays to the model's order, leaf by leaf.

        A leaf has blocks if it is under "blocks" and has a dim split over `pipe`, or a dim 0 that counts slots (a
        factored moment of an optimizer).
        """

        def change(leaf: Array, dim: int, stages: Stages, _: Any) -> Array:
            return _move(leaf, dim, partial(unstore_blocks, stages=stages), _model_sharding(leaf, dim, stages))

        return self._change_blocks(change, tree, tree)

    def abstract_model(self, tree: Any) -> Any:
        """Returns the shapes and shardings of the result of `to_model`."""

        def change(leaf: Any, dim: int, stages: Stages, _: Any) -> Any:
            shape = (*leaf.shape[:dim], stages.num_blocks, *leaf.shape[dim + 1 :])
            return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=_model_sharding(leaf, dim, stages))

        return self._change_blocks(change, tree, tree)

    def to_stored(self, tree: Any, like: Any) -> Any:
        """Reverses `to_model`.

        Args:
            tree: Global arrays with blocks in the model's order.
            like: Stored arrays or their abstract values, with the layouts of the result.
        """

        def change(leaf: Array, dim: int, stages: Stages, stored: Any) -> Array:
            return _move(leaf, dim, partial(store_blocks, stages=stages), stored.sharding)

        return self._change_blocks(change, tree, like)

    def _change_blocks(self, change: Callable[..., Any], tree: Any, stored: Any) -> Any:
        """Replaces each leaf with blocks by `change(leaf, dim that counts blocks, stages, stored leaf)`."""
        stages = self.reordered
        if stages is None:
            return tree

        def move(path: str, stored_leaf: Any, leaf: Any) -> Any:
            dim = _block_dim(path, stored_leaf, stages)
            return leaf if dim is None else change(leaf, dim, stages, stored_leaf)

        return map_with_path(move, stored, tree)


def store_blocks(blocks: Any, stages: Stages) -> Any:
    """Reorders blocks to the order in which stages store them.

    Args:
        blocks: A tree of global arrays; dim 0 counts the blocks of the model.
        stages: The positions of the blocks.

    Returns:
        The tree with dim 0 in the order of `stages.order`, and zeros in empty slots.
    """
    if stages.is_natural:
        return blocks
    order = stages.order

    def store(leaf: Array) -> Array:
        stored = jnp.take(leaf, np.maximum(order, 0), axis=0)
        filled = (order < 0).reshape(-1, *[1] * (leaf.ndim - 1))
        return jnp.where(filled, jnp.zeros((), leaf.dtype), stored) if filled.any() else stored

    return jax.tree.map(store, blocks)


def unstore_blocks(stored: Any, stages: Stages) -> Any:
    """Reverses `store_blocks`: dim 0 counts the blocks of the model again."""
    if stages.is_natural:
        return stored
    slots = np.argsort(stages.order, kind="stable")[np.count_nonzero(stages.order < 0) :]
    return jax.tree.map(lambda leaf: jnp.take(leaf, slots, axis=0), stored)


def in_stage_order(model: Model | BlockModel, stages: Stages | None) -> Model | BlockModel:
    """Returns the model with an `init` that creates blocks in the order in which stages store them."""
    if stages is None or stages.is_natural or not isinstance(model, BlockModel):
        return model
    init = model.init

    def stored(key: Array) -> dict[str, Params]:
        params = init(key)
        return {**params, "blocks": store_blocks(params["blocks"], stages)}

    return replace(model, init=stored)


def stored_order(plan: MeshPlan) -> StoredOrder:
    """Returns the order in which a plan stores blocks."""
    return StoredOrder(plan.pipeline.stages if plan.pipeline else None)


def _block_dim(path: str, leaf: Any, stages: Stages) -> int | None:
    """Returns the dim of a stored array that counts slots of blocks, or None."""
    if "blocks" not in path.split("/"):
        return None
    spec = leaf.sharding.spec
    over_pipe = [dim for dim in range(len(spec)) if AXIS in _axes(spec[dim])]
    if over_pipe:
        return over_pipe[0]
    return 0 if leaf.shape[:1] == (len(stages.order),) else None


def _axes(entry: Any) -> tuple[str, ...]:
    return entry if isinstance(entry, tuple) else (entry,)


def _model_sharding(leaf: Any, dim: int, stages: Stages) -> NamedSharding:
    """Returns the leaf's sharding, without `pipe` if it does not divide the model's number of blocks."""
    sharding = leaf.sharding
    if stages.num_blocks % stages.stages == 0:
        return sharding
    spec = list(sharding.spec)
    if dim < len(spec):
        spec[dim] = tuple(axis for axis in _axes(spec[dim]) if axis not in (AXIS, None)) or None
    return NamedSharding(sharding.mesh, PartitionSpec(*spec))


def _move(leaf: Array, dim: int, reorder: Callable[[Array], Array], sharding: NamedSharding) -> Array:
    """Reorders one dim of one array. Callers convert one array at a time, so that at most one is whole on a device."""

    def moved(array: Array) -> Array:
        return jnp.moveaxis(reorder(jnp.moveaxis(array, dim, 0)), 0, dim)

    return jax.jit(moved, out_shardings=sharding)(leaf)

"""Conversion between the order in which pipeline stages store blocks and the order of the model.

Checkpoints, samples and comparisons use the model's order, so that nothing outside the step depends on stages. If both
orders are the same (one chunk on each stage, with equal numbers of blocks), nothing is moved.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from ...layouts.paths import in_blocks, map_with_path
from ..model import BlockModel, Model, Params
from ..pipeline import AXIS
from ..plan import MeshPlan
from ..schedule.stages import Stages


@jax.tree_util.register_static
@dataclass(frozen=True)
class StoredOrder:
    """Converts trees of parameters, such as gradients and averages, between the two orders.

    It is part of the structure of a train state (`TrainState.order`); `step/model_order.py` converts whole states.

    Attributes:
        stages: The positions of the blocks; None without a pipeline, or if both orders are the same.
        moments: The paths of arrays of the optimizer's state -> the dims that count slots of blocks.
        packing: The elements that the errors of compression belong to, see `compression.packing`.
    """

    stages: Stages | None = None
    moments: tuple[tuple[str, tuple[int, ...]], ...] = ()
    packing: str = ""

    @property
    def of_model(self) -> "StoredOrder":
        """The model's order, for a state whose errors of compression stay as they are."""
        return StoredOrder(packing=self.packing)

    def to_model(self, params: Any) -> Any:
        """Reorders the blocks of stored arrays to the model's order, leaf by leaf.

        Args:
            params: A tree structured like the parameters: global arrays, or arrays of the host.
        """
        if self.stages is None:
            return params
        return map_with_path(lambda path, leaf: self.leaf_to_model(leaf, _block_dims(path)), params)

    def abstract_model(self, params: Any) -> Any:
        """Returns the shapes and shardings of the result of `to_model`."""
        if self.stages is None:
            return params
        return map_with_path(lambda path, leaf: self.abstract_leaf(leaf, _block_dims(path)), params)

    def to_stored(self, params: Any, like: Any) -> Any:
        """Reverses `to_model`.

        Args:
            params: Global arrays with blocks in the model's order.
            like: Stored arrays or their abstract values, with the layouts of the result.
        """
        if self.stages is None:
            return params

        def store(path: str, stored: Any, leaf: Any) -> Any:
            return self.leaf_to_stored(leaf, _block_dims(path), stored)

        return map_with_path(store, like, params)

    def leaf_to_model(self, leaf: Any, dims: Sequence[int]) -> Any:
        """Reorders some dims of one stored array, which count slots, to the model's order."""
        stages = self.stages
        if stages is None:
            return leaf
        for dim in dims:
            leaf = _move(leaf, dim, partial(unstore_blocks, stages=stages), _model_sharding(leaf, dim, stages))
        return leaf

    def abstract_leaf(self, leaf: Any, dims: Sequence[int]) -> Any:
        """Returns the shape and the sharding of the result of `leaf_to_model`."""
        stages = self.stages
        if stages is None:
            return leaf
        for dim in dims:
            shape = (*leaf.shape[:dim], stages.num_blocks, *leaf.shape[dim + 1 :])
            leaf = jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=_model_sharding(leaf, dim, stages))
        return leaf

    def leaf_to_stored(self, leaf: Any, dims: Sequence[int], stored: Any) -> Any:
        """Reverses `leaf_to_model`; the result has the layout of `stored`."""
        stages = self.stages
        if stages is None:
            return leaf
        for dim in dims:
            leaf = _move(leaf, dim, partial(store_blocks, stages=stages), _sharding(stored))
        return leaf


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
    """Returns the order in which a plan stores the blocks of parameters."""
    stages = plan.pipeline.stages if plan.pipeline else None
    if stages is None or stages.is_natural:
        return StoredOrder()
    return StoredOrder(stages)


def _block_dims(path: str) -> tuple[int, ...]:
    """Returns the dims of a parameter that count slots of blocks."""
    return (0,) if in_blocks(path) else ()


def _axes(entry: Any) -> tuple[str, ...]:
    return entry if isinstance(entry, tuple) else (entry,)


def _sharding(leaf: Any) -> Any:
    """Returns the sharding of an array; None for an array of the host."""
    return getattr(leaf, "sharding", None)


def _model_sharding(leaf: Any, dim: int, stages: Stages) -> Any:
    """Returns the leaf's sharding, without `pipe` if it does not divide the model's number of blocks."""
    sharding = _sharding(leaf)
    if stages.num_blocks % stages.stages == 0 or not isinstance(sharding, NamedSharding):
        return sharding
    spec = list(sharding.spec)
    if dim < len(spec):
        spec[dim] = tuple(axis for axis in _axes(spec[dim]) if axis not in (AXIS, None)) or None
    return NamedSharding(sharding.mesh, PartitionSpec(*spec))


def _move(leaf: Any, dim: int, reorder: Callable[[Array], Array], sharding: Any) -> Any:
    """Reorders one dim of one array. Callers convert one array at a time, so that at most one is whole on a device."""

    def moved(array: Array) -> Array:
        return jnp.moveaxis(reorder(jnp.moveaxis(array, dim, 0)), 0, dim)

    if sharding is None:
        return np.asarray(moved(leaf))
    return jax.jit(moved, out_shardings=sharding)(leaf)

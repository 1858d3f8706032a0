"""The input and output of a step: the state, a snapshot of everything that changes, and the metrics."""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import NamedSharding

from ...layouts.table import LayoutTable
from ...mesh.compat import varying_axes
from ...mesh.keys import WORDS, key_of
from ..model import Params, has_state
from ..options import cast_floats
from ..plan import ShardingPlan


class TrainState(NamedTuple):
    """Everything that changes from step to step.

    Attributes:
        step: The number of completed optimizer steps, an int32 scalar on every device. It determines the position in
            the data: step s starts at sample s * global_batch.
        params: The parameters, in the layouts of the layout table and the stored dtype.
        opt_state: The optimizer's state; each moment has the layout of its parameter.
        key: The raw data of the run's random key, uint32 (2,), on every device. It does not change: the step is folded
            in. Always threefry2x32, independent of JAX's default generator (see `mesh/keys.py`).
        extra: The state of strategies for slow links: `diloco.Copies`, `compression.Errors`, or ().
        model_state: The model's state without gradients (`Model.init_state`), whole on every device, or ().
        loss_scale: The state of dynamic loss scaling (`loss_scaling.LossScale`), on every device, or ().
    """

    step: Array
    params: Params
    opt_state: Any
    key: Array
    extra: Any = ()
    model_state: Any = ()
    loss_scale: Any = ()


class StepMetrics(NamedTuple):
    """The metrics of one step; scalars, the same on every device.

    Attributes:
        loss: The weighted mean of the loss over the global batch, before the update.
        grad_norm: The global norm of the gradients, before clipping.
        weight: The weight of the global batch (for a language model, its tokens).
        model: The model's own metrics by name: weighted means over the global batch.
        loss_scale: The factor of the loss under dynamic loss scaling, otherwise ().
    """

    loss: Array
    grad_norm: Array
    weight: Array
    model: Mapping[str, Any] = {}
    loss_scale: Any = ()

    @property
    def further(self) -> dict[str, Any]:
        """The metrics other than loss, norm and weight, by name."""
        return dict(self.model) if isinstance(self.loss_scale, tuple) else {**self.model, "loss_scale": self.loss_scale}


def with_means(metrics: StepMetrics, loss_scale: Any = ()) -> StepMetrics:
    """Divides each pair of sums in the model's own metrics: a mean, or 0 if nothing has weight.

    Args:
        metrics: The metrics of one step.
        loss_scale: `TrainState.loss_scale` before the step.
    """
    means = {name: total / jnp.where(weight == 0, 1, weight) for name, (total, weight) in metrics.model.items()}
    return metrics._replace(model=means, loss_scale=loss_scale.scale if loss_scale else ())


def abstract_state(
    plan: ShardingPlan,
    optimizer_table: LayoutTable,
    extra_table: LayoutTable,
    model_state: Any = (),
    loss_scale: Any = (),
    *,
    abstract: bool,
) -> TrainState:
    """Returns the state as ShapeDtypeStructs with shardings, for initialization, the step and checkpoints.

    Args:
        plan: The plan.
        optimizer_table: The layouts of the optimizer's state.
        extra_table: The layouts of `TrainState.extra`.
        model_state: The shapes and dtypes of the model's state.
        loss_scale: The shapes and dtypes of the loss scale.
        abstract: Whether to use the shardings of a mesh without devices.
    """
    replicated: Any = plan.replicated(abstract=abstract)

    def whole(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=replicated), tree)

    return TrainState(
        step=jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated),  # pyright: ignore[reportArgumentType]
        params=_with_shardings(plan.table, abstract),
        opt_state=_with_shardings(optimizer_table, abstract),
        key=jax.ShapeDtypeStruct((WORDS,), jnp.uint32, sharding=replicated),  # pyright: ignore[reportArgumentType]
        extra=_with_shardings(extra_table, abstract),
        model_state=whole(model_state),
        loss_scale=whole(loss_scale),
    )


def _with_shardings(table: LayoutTable, abstract: bool) -> Any:
    def attach(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(attach, table.abstract_arrays, table.shardings(abstract=abstract))


MAX_SEED = 2**32 - 1
"""JAX uses only the lower 32 bits of a seed unless 64-bit types are enabled: larger seeds would repeat keys."""


def seed_problem(seed: int, name: str) -> str | None:
    """Returns the error message for a seed that is out of range, or None.

    Args:
        seed: The seed.
        name: The name of the seed in the message.
    """
    if 0 <= seed <= MAX_SEED:
        return None
    return f"{name}={seed} must be from 0 to 2**32 - 1 = {MAX_SEED}: random keys use 32 bits of a seed."


def abstract_model_state(model: Any, dtype: str) -> Any:
    """Returns the shapes and dtypes of a model's state as a run stores it; () if it does not have one.

    Args:
        model: Any model.
        dtype: The stored dtype of floating-point arrays, that of the parameters.
    """
    key_data = jax.ShapeDtypeStruct((WORDS,), jnp.uint32)
    return jax.eval_shape(partial(first_model_state, model, dtype), key_data) if has_state(model) else ()


def first_model_state(model: Any, dtype: str, key_data: Array) -> Any:
    """Returns the initial state of a model that has one. Traced; `key_data` is the raw data of the run's key."""
    state = cast_floats(model.init_state(key_of(key_data)), dtype)
    return jax.tree.map(lambda leaf: lax.convert_element_type(leaf, leaf.dtype), state)


def reduce_model_state(found: Any, state: Any, axes: tuple[str, ...], *, typed: bool) -> Any:
    """Returns the next state of a model, the same on every device. Runs inside `shard_map`.

    Floating-point arrays are averaged over the devices that sum gradients; of others, the maximum is used. An array
    that does not vary over the mesh, such as statistics that are already reduced over `batch_axes()`, is not moved.

    Args:
        found: The state returned by this device's loss.
        state: The previous state, which determines the dtypes.
        axes: The mesh axes over which devices have shares of the loss.
        typed: Whether JAX knows what varies over the mesh; if not, everything is assumed to vary.
    """

    def reduce_leaf(leaf: Any, before: Array) -> Array:
        leaf = jnp.asarray(leaf)
        over = tuple(axis for axis in axes if not typed or axis in varying_axes(leaf))
        if over and jnp.issubdtype(leaf.dtype, jnp.inexact):
            leaf = lax.pmean(leaf, over)
        elif over:
            leaf = lax.pmax(leaf.astype(jnp.promote_types(leaf.dtype, jnp.uint8)), over)
        return lax.convert_element_type(leaf, before.dtype)  # not a weak type, so that the next step reuses the program

    return jax.tree.map(reduce_leaf, found, state)

"""What goes into a step and comes out: the state, one snapshot of everything that changes, and the metrics."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding

from ...layouts.table import LayoutTable
from ...mesh.keys import WORDS
from ..model import Params
from ..plan import ShardingPlan


class TrainState(NamedTuple):
    """Everything that changes from step to step.

    Attributes:
        step: int32 scalar, the number of optimizer steps done, on every device. The position in the data follows from
            it: step s starts at sample s * global_batch.
        params: The parameters, laid out by the layout table, in the stored dtype.
        opt_state: The optimizer's state; each moment laid out as its parameter.
        key: uint32 (2,), raw data of the run's random key, on every device; it does not change, the step is folded in.
            Always of threefry2x32, whatever JAX's default generator is (see `mesh/keys.py`).
        extra: What strategies over slow links keep: `diloco.Copies`, `compression.Errors`, or () for nothing.
        model_state: What the model keeps that no gradient moves (`Model.init_state`), whole on every device; () for
            nothing.
        loss_scale: Of dynamic loss scaling (`loss_scaling.LossScale`), on every device; () where there is none.
    """

    step: Array
    params: Params
    opt_state: Any
    key: Array
    extra: Any = ()
    model_state: Any = ()
    loss_scale: Any = ()


class StepMetrics(NamedTuple):
    """What one step reports; scalars, the same on every device.

    Attributes:
        loss: weighted mean of the loss over the global batch, before the update.
        grad_norm: global norm of the gradients, before clipping.
        weight: the weight of the global batch (for a language model, its tokens).
        model: the model's own metrics by name: weighted means over the global batch; {} for none.
        loss_scale: what the loss was multiplied by, under dynamic loss scaling; () elsewhere.
    """

    loss: Array
    grad_norm: Array
    weight: Array
    model: Mapping[str, Any] = {}
    loss_scale: Any = ()

    @property
    def further(self) -> dict[str, Any]:
        """What is reported beside loss, norm and weight, by name."""
        return dict(self.model) if isinstance(self.loss_scale, tuple) else {**self.model, "loss_scale": self.loss_scale}


def with_means(metrics: StepMetrics, loss_scale: Any = ()) -> StepMetrics:
    """The metrics, each pair of sums of the model's own divided: a mean, 0 where nothing has weight.

    Args:
        metrics: Of one step.
        loss_scale: `TrainState.loss_scale` before it.
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
    """The state as ShapeDtypeStructs with shardings: what initialisation, the step and checkpoints agree on.

    Args:
        plan: Where the parameters live.
        optimizer_table: The layouts of the optimizer's state.
        extra_table: The layouts of `TrainState.extra`.
        model_state: Shapes and dtypes of the model's state.
        loss_scale: Those of the loss scale.
        abstract: Take the shardings of a mesh without devices.
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


MOST_SEED = 2**32 - 1
"""JAX makes a key of the lower 32 bits of a seed, unless 64-bit types are on: beyond, two seeds would draw the same."""


def seed_problem(seed: int, name: str) -> str | None:
    """What is wrong with a seed, or None.

    Args:
        seed: A seed.
        name: What the message calls it.
    """
    if 0 <= seed <= MOST_SEED:
        return None
    given = seed if seed.bit_length() <= 128 else f"a number of {seed.bit_length()} bits"
    return f"{name}={given} has to be from 0 to 2**32 - 1 = {MOST_SEED}: keys take 32 bits, others would be cut off."

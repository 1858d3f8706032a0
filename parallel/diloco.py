"""Local steps (DiLoCo): each group along `data` trains a copy of its own, and every H steps the copies are averaged.

Syntax, for a parameter W, its copy V on each of the N groups of `data`, an outer momentum M, and H = `local_steps`:

    inner      V[data; D, F] = optimizer(V[data; D, F], its own gradient)         no communication over data
    every H    A[D, F] = all-reduce over data of (W[D, F] - V[data; D, F]) / N    on the critical path, once in H steps
               M = mu M + A;  W = W - lr (A + mu M);  V[data; D, F] = W           no communication

1. A group sums gradients over all axes but `data`, divides by the weight of its own rows, clips by its own norm, and
   updates its copy with the config's optimizer. The state of that optimizer, too, is each group's own.
2. `TrainState.params` are the shared parameters W, which evaluation, samples and reports use. They move at every step
   whose number is a multiple of H, by SGD with Nesterov momentum on A, the mean distance that the copies went.
3. V and M are in `TrainState.extra`; everything is laid out as the parameter, V and its optimizer state with a leading
   dim over `data`. A device holds 2 more copies of its shard of the parameters than under data parallelism: V and M.
4. The loss, its weight and the norm cross `data` in every step, so that all groups report the same.

Bytes: the size of a shard of the parameters in the reduce dtype every H steps, which is 1 / H of data parallelism's,
and 12 a step. Compute-bound while the tokens of one device in H steps, H B / N, exceed C / W: a network H times slower
does. `cost` and the census speak of the steps that end a round; the others do without the large all-reduce.

With H = 1, lr = 1, mu = 0 and SGD inside, this is data parallelism for groups of equal weight. Otherwise losses differ
from one device's by design. It composes with fsdp, tensor, context, expert, pipe and accumulation; with ZeRO stages
and compression it does not.

Source: Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models", algorithm 1; Stich
2019, "Local SGD Converges Fast and Communicates Little", algorithm 1.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, ShapeDtypeStruct, lax
from jax.sharding import PartitionSpec

from ..layouts.table import LayoutRow, LayoutTable, make_row
from ..layouts.tensor_layout import TensorLayout
from .collectives import Collective, wire_bytes
from .data import AXIS, DataParallelConfig, scalar_width
from .model import Batch, Params
from .plan import Layouts
from .step.device_step import LocalStep
from .step.manual_axes import over_manual_axes
from .step.state import StepMetrics, TrainState
from .step.update import apply_optimizer

METRICS = 3
"""Scalars that cross `data` in every step: the sum of the loss, its weight, the norm."""


class Copies(NamedTuple):
    """What local steps keep in `TrainState.extra`.

    Attributes:
        copies: the parameters as each group has them, a leading dim of size N laid out over `data`.
        momentum: of the outer optimizer, shaped and laid out as the parameters.
    """

    copies: Params
    momentum: Params


def copies_table(table: LayoutTable) -> LayoutTable:
    """The layouts of arrays of which each group along `data` has its own: a leading dim over `data`."""
    groups = table.mesh.axis_size(AXIS)

    def copied(row: LayoutRow) -> LayoutRow:
        leaf = ShapeDtypeStruct((groups, *row.shape), row.dtype)
        return make_row(row.path, leaf, "local steps: each group its own", _copied(row.layout))

    return replace(table, rows=tuple(map(copied, table.rows)))


def _copied(layout: TensorLayout) -> TensorLayout:
    return TensorLayout((AXIS, *layout.axes), layout.device_mesh)


def extra_table(table: LayoutTable) -> LayoutTable:
    """The layouts of `Copies`."""
    copies = copies_table(table)
    treedef = jax.tree.structure(Copies(table.abstract_arrays, table.abstract_arrays))
    return LayoutTable(rows=(*copies.rows, *table.rows), treedef=treedef, mesh=table.mesh)


def start(state: TrainState, optimizer: optax.GradientTransformation, groups: int) -> TrainState:
    """The first state: every group begins at the shared parameters.

    Args:
        state: With global parameters; without the state of the optimizer.
        optimizer: The inner optimizer.
        groups: The size of `data`.
    """
    params = state.params
    copies = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (groups, *leaf.shape)), params)
    extra = Copies(copies, jax.tree.map(jnp.zeros_like, params))
    return state._replace(opt_state=jax.vmap(optimizer.init)(copies), extra=extra)


def make_step(
    local: LocalStep, optimizer: optax.GradientTransformation, *, abstract: bool
) -> Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]:
    """Builds the step (state, batch) -> (state, metrics) on global arrays.

    Args:
        local: The per-device half, which sums gradients over all axes but `data`.
        optimizer: The inner optimizer; it runs on each group's copy as if there were no other.
        abstract: Map over a mesh without devices, for lowering only.
    """
    layouts, reduce_dtype = local.layouts, local.precision.reduce
    shared, copied = layouts.manual_specs(layouts.table), layouts.manual_specs(copies_table(layouts.table))
    whole = PartitionSpec()
    metrics_specs: Any = StepMetrics(*[whole] * 3)  # pyright: ignore[reportArgumentType]

    def own_gradients(copies: Params, batch: Batch, key: Array, step: Array) -> tuple[Params, Array, StepMetrics]:
        found, metrics, _ = local.gradients(_own(copies), batch, key, step, ())
        return _stacked(found), metrics.loss[None], _shared_metrics(metrics, reduce_dtype)

    def end_round(params: Params, extra: Copies, step: Array) -> tuple[Params, Copies]:
        own = _own(extra.copies)
        moved, copies, momentum = outer_step(params, own, extra.momentum, step, layouts.data, reduce_dtype)
        return moved, Copies(_stacked(copies), momentum)

    in_specs, out_specs = (copied, layouts.batch_spec, whole, whole), (copied, PartitionSpec(AXIS), metrics_specs)
    differentiate = over_manual_axes(own_gradients, layouts, in_specs, out_specs, abstract=abstract)
    extra_specs = Copies(copied, shared)
    meet = over_manual_axes(end_round, layouts, (shared, extra_specs, whole), (shared, extra_specs), abstract=abstract)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        copies = state.extra.copies
        found, losses, metrics = differentiate(copies, batch, state.key, state.step)
        update = jax.vmap(partial(apply_optimizer, optimizer))  # each group's loss is that of its own rows
        copies, opt_state = update(found, state.opt_state, copies, losses)
        extra = state.extra._replace(copies=copies)
        params, extra = meet(state.params, extra, state.step + 1)
        return TrainState(state.step + 1, params, opt_state, state.key, extra), metrics

    return step


def _own(copies: Params) -> Params:
    """This group's copy, inside `shard_map`, where the leading dim has size 1."""
    return jax.tree.map(lambda leaf: leaf[0], copies)


def _stacked(own: Params) -> Params:
    return jax.tree.map(lambda leaf: leaf[None], own)


def _shared_metrics(metrics: StepMetrics, reduce_dtype: str) -> StepMetrics:
    """The loss of all rows, and the mean of the groups' norms."""
    wide = jnp.promote_types(reduce_dtype, jnp.float32)
    scalars = [metrics.loss * metrics.weight, metrics.weight, metrics.grad_norm]
    total, weight, norm = lax.psum([scalar.astype(wide) for scalar in scalars], AXIS)
    return StepMetrics(total / jnp.where(weight == 0, 1, weight), norm / lax.axis_size(AXIS), weight)


def outer_step(
    params: Params, copies: Params, momentum: Params, step: Array, config: DataParallelConfig, reduce_dtype: str
) -> tuple[Params, Params, Params]:
    """Ends a round where one is due: moves the shared parameters, and every group's copy to them.

    Args:
        params: This device's shards of the shared parameters.
        copies: Its shards of its group's copy, after the inner update.
        momentum: Its shards of the outer momentum.
        step: Number of steps done, this one included.
        config: The options of `data`.
        reduce_dtype: The dtype of the sums over the groups.

    Returns:
        The next shared parameters, copies and momentum, in dtypes and layouts of their own.
    """
    rate, decay = config.outer_learning_rate, config.outer_momentum

    def meet(params: Params, copies: Params, momentum: Params) -> tuple[Params, Params, Params]:
        away = jax.tree.map(lambda shared, own: (shared - own).astype(reduce_dtype), params, copies)
        away = jax.tree.map(lambda leaf, like: (leaf / lax.axis_size(AXIS)).astype(like.dtype), _psum(away), params)
        momentum = jax.tree.map(lambda old, new: decay * old + new, momentum, away)
        params = jax.tree.map(lambda leaf, a, m: leaf - rate * (a + decay * m), params, away, momentum)
        return params, jax.tree.map(lambda leaf: lax.pcast(leaf, AXIS, to="varying"), params), momentum

    def go_on(params: Params, copies: Params, momentum: Params) -> tuple[Params, Params, Params]:
        return params, copies, momentum

    return lax.cond(step % config.local_steps == 0, meet, go_on, params, copies, momentum)


def _psum(tree: Any) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    return jax.tree.unflatten(treedef, lax.psum(leaves, AXIS))


def cost(table: LayoutTable, reduce_dtype: str, *, platform: str) -> list[Collective]:
    """What crosses `data` in a step that ends a round: the metrics, as in every step, and the copies, once in H steps.

    Args:
        table: The parameters' layouts.
        reduce_dtype: The dtype of the sums.
        platform: Where the step runs, see `wire_bytes`.
    """
    elements = sum(prod(row.layout.shard_shape(row.shape)) for row in table.rows)
    return [
        Collective("all-reduce", (AXIS,), 1, METRICS * scalar_width(reduce_dtype)),
        Collective("all-reduce", (AXIS,), 1, elements * wire_bytes(reduce_dtype, platform)),
    ]


def check(layouts: Layouts) -> list[str]:
    """Says which parameters are split over `data` itself, so that groups have no copies of their own."""
    if not layouts.local_steps:
        return []
    return [
        f"{row.path} has the layout {row.layout} by rule {row.rule!r}, but with strategy.data.local_steps="
        f"{layouts.local_steps} every group along data holds a copy of its own. Name fsdp instead of data in this "
        "rule of layouts.rules."
        for row in layouts.table.rows
        if AXIS in row.layout.used_axes
    ]

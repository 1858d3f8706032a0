"""Local steps (DiLoCo): each group along `data` trains its own copy, and every H steps the copies are averaged.

Use it if the link between groups of devices, such as two buildings, is too slow for gradients in every step. It changes
the training: compare losses over a few hundred steps before you use it for a long run.

Syntax, for a parameter W, its copy V on each of the N groups of `data`, an outer momentum M, and H = `local_steps`:

    inner      V[data; D, F] = optimizer(V[data; D, F], its own gradient)         no communication over data
    every H    A[D, F] = all-reduce over data of (W[D, F] - V[data; D, F]) / N    on the critical path, once in H steps
               M = mu M + A;  W = W - lr (A + mu M);  V[data; D, F] = W           no communication

1. A group sums gradients over all axes except `data`, divides them by the weight of its own rows, clips them by their
   own norm, and updates its copy with the config's optimizer. Each group also has its own optimizer state.
2. `TrainState.params` are the shared parameters W, which evaluation, samples and reports use. They are updated after
   every H steps, by SGD with Nesterov momentum on A, the mean change of the copies.
3. V and M are in `TrainState.extra`. Both have the layout of the parameter; V and its optimizer state also have a
   leading dim split over `data`. A device holds two more copies of its shard of the parameters, V and M, than under
   data parallelism.
4. The loss, its weight and the norm are reduced over `data` in every step, so that all groups report the same values.

Bytes: the size of a shard of the parameters in the reduce dtype every H steps, 1 / H of the bytes of data parallelism,
and 12 bytes per step. The step is compute-bound if the tokens of one device in H steps, H B / N, exceed C / W, so a
network may be H times slower. `cost` and the census describe the steps that end a round; the others do not have the
large all-reduce.

If the step that would end a round is not finite, the round goes on, and ends with the next one.

With H = 1, lr = 1, mu = 0 and SGD as the inner optimizer, this is data parallelism for groups of equal weight.
Otherwise losses differ from those of one device by design. It composes with fsdp, tensor, context, expert, pipe and
accumulation, but not with ZeRO stages or compression.

Source: Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models", algorithm 1; Stich
2019, "Local SGD Converges Fast and Communicates Little", algorithm 1.
"""

from dataclasses import replace
from typing import NamedTuple

import jax
from jax import Array, ShapeDtypeStruct, lax

from ..layouts.table import LayoutRow, LayoutTable, make_row
from ..layouts.tensor_layout import TensorLayout
from .collectives import Collective, StepCounts, wire_bytes
from .data import scalar_width
from .model import Params
from .plan import ShardingPlan, as_stored, splits_nothing, summed_elsewhere, unchanged

AXIS = "data"
OPTIONS = None
SPLITS = ()
layout = update_layout = splits_nothing
used_layout = as_stored
begin = finish = unchanged
reduce = summed_elsewhere

METRICS = 3
"""Scalars reduced over `data` in every step: the sum of the loss, its weight, the norm; the model's metrics are
extra."""


class Copies(NamedTuple):
    """The state of local steps in `TrainState.extra`.

    Attributes:
        copies: The parameters of each group, with a leading dim of size N split over `data`.
        momentum: The momentum of the outer optimizer, in the shapes and layouts of the parameters.
    """

    copies: Params
    momentum: Params


def copies_table(table: LayoutTable) -> LayoutTable:
    """Returns the layouts of arrays with one copy per group: with a leading dim split over `data`."""
    groups = table.mesh.axis_size(AXIS)

    def copied(row: LayoutRow) -> LayoutRow:
        leaf = ShapeDtypeStruct((groups, *row.shape), row.dtype)
        layout = TensorLayout((AXIS, *row.layout.axes), table.mesh)
        return make_row(row.path, leaf, "local steps: each group its own", layout)

    return replace(table, rows=tuple(map(copied, table.rows)))


def extra_table(table: LayoutTable) -> LayoutTable:
    """Returns the layouts of `Copies`."""
    copies = copies_table(table)
    treedef = jax.tree.structure(Copies(table.abstract_arrays, table.abstract_arrays))
    return LayoutTable(rows=(*copies.rows, *table.rows), treedef=treedef, mesh=table.mesh)


def outer_step(
    params: Params, copies: Params, momentum: Params, step: Array, finite: Array, plan: ShardingPlan
) -> tuple[Params, Params, Params]:
    """At the end of a round, updates the shared parameters and sets every group's copy to them.

    Args:
        params: This device's shards of the shared parameters.
        copies: This device's shards of its group's copy, after the inner update.
        momentum: This device's shards of the outer momentum.
        step: The number of completed steps, including this one.
        finite: Whether this step is finite on all devices: a step that is skipped ends no round.
        plan: The resolved plan of the run.

    Returns:
        The next shared parameters, copies and momentum, in their own dtypes and layouts.
    """
    options, reduce_dtype = plan.configs[AXIS], plan.options.precision.reduce
    rate, decay = options.outer_learning_rate, options.outer_momentum

    def end_round(params: Params, copies: Params, momentum: Params) -> tuple[Params, Params, Params]:
        away = lax.psum(jax.tree.map(lambda shared, own: (shared - own).astype(reduce_dtype), params, copies), AXIS)
        away = jax.tree.map(lambda leaf, like: (leaf / lax.axis_size(AXIS)).astype(like.dtype), away, params)
        momentum = jax.tree.map(lambda old, new: decay * old + new, momentum, away)
        params = jax.tree.map(lambda leaf, a, m: leaf - rate * (a + decay * m), params, away, momentum)
        return params, jax.tree.map(lambda leaf: lax.pcast(leaf, AXIS, to="varying"), params), momentum

    is_due = (step % options.local_steps == 0) & finite
    return lax.cond(is_due, end_round, lambda *unchanged: unchanged, params, copies, momentum)


def cost(plan: ShardingPlan, counts: StepCounts, platform: str) -> list[Collective]:
    """Returns the collectives over `data` in a step that ends a round: the metrics, as in every step, and the
    copies."""
    if not plan.local_steps:
        return []
    rows, reduce_dtype = plan.trained.table.rows, plan.options.precision.reduce
    elements = sum(row.elements_per_device for row in rows)
    return [
        Collective("all-reduce", (AXIS,), 1, (METRICS + counts.metrics) * scalar_width(reduce_dtype)),
        Collective("all-reduce", (AXIS,), 1, elements * wire_bytes(reduce_dtype, platform)),
    ]


def check(plan: ShardingPlan) -> list[str]:
    """Rejects parameters that are split over `data`: a group would not have a whole copy of them."""
    return [
        f"{row.path} has the layout {row.layout} by rule {row.rule!r}, but with strategy.data.local_steps="
        f"{plan.local_steps} every group along data has its own copy. Use fsdp instead of data in this "
        "rule of layouts.rules."
        for row in plan.table.rows
        if plan.local_steps and AXIS in row.layout.used_axes
    ]

"""What each device runs in one step: from its shards and its rows to the reduced gradients of its shards.

params    = make_varying(params)                  gradients stay local until we reduce them
batch     = cast_inputs(batch)                    to the compute dtype, as parameters are cast where they are used
gradients = accumulate_gradients(local loss)      FSDP's gathers and reduce-scatters happen inside
gradients = scatter_gradients(gradients)          ZeRO-1's reduce-scatter
gradients = reduce_gradients(gradients)           data parallel's all-reduce, or the compressed one
gradients = gradients * (clip_factor / weight)    the one division by the weight of the global batch
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from ...layouts.table import LayoutTable
from ...mesh.errors import UserError
from ...mesh.keys import key_of
from .. import compression, data, fsdp, zero
from ..blocks.forward import local_loss
from ..blocks.pieces import computes_whole_again
from ..collectives import Collective
from ..data import make_varying, reduce_gradients
from ..executor import embed_and_head
from ..executor.loss import pipeline_cost, pipeline_loss
from ..model import Batch, BlockModel, Model, Params
from ..plan import Layouts
from ..precision import Precision, cast_inputs
from ..sharding.named_outputs import NamedOutputs
from ..sharding.parallel_context import Traffic
from ..xla.neighbours import as_sent
from ..zero import scatter_gradients
from .call_counts import Calls, pipeline_calls, plain_calls
from .gradients import accumulate_gradients, clip_factor, complete_squares, global_norm, norm_cost
from .manual_axes import over_manual_axes
from .state import StepMetrics


class LocalStep:
    """The per-device half of a step, to run inside `shard_map` over `layouts.manual_axes`."""

    def __init__(
        self,
        model: Model | BlockModel,
        layouts: Layouts,
        *,
        accumulate: int,
        clip_norm: float,
        remat: str,
        precision: Precision,
    ) -> None:
        """Composes the strategies; the arguments are those of `build_step`."""
        split = model.parallelize if isinstance(model, BlockModel) else None
        model = split(layouts.parallel) if split and layouts.parallel.splits_anything else model
        self.outputs = NamedOutputs(layouts)
        self.model = self.outputs.within(model)
        self.layouts, self.precision = layouts, precision
        self.accumulate, self.clip_norm, self.remat = accumulate, clip_norm, remat
        if isinstance(self.model, BlockModel) and layouts.pipeline:
            self._loss = pipeline_loss(self.model, layouts, remat=remat, precision=precision)
        else:
            self._loss = local_loss(self.model, layouts, remat=remat, precision=precision)

    def gradients(
        self, params: Params, batch: Batch, key_data: Array, step: Array, errors: Any
    ) -> tuple[Params, StepMetrics, Any]:
        """The reduced, averaged and clipped gradients, laid out as the update, the metrics, and the next `errors`.

        Args:
            params: This device's shards.
            batch: Its rows.
            key_data: Raw data of the run's key.
            step: The number of steps done.
            errors: What compression owes from the step before (`compressed.Errors`), or ().
        """
        layouts, axes = self.layouts, self.layouts.summed_axes
        stored, update = layouts.table.layouts, layouts.update_table.layouts
        key = jax.random.fold_in(key_of(key_data), step)
        batch = cast_inputs(batch, self.precision.compute)
        gradients, sums = self._gradients(self._whole(make_varying(params, stored, axes)), batch, key)
        if layouts.pipeline:
            gradients = embed_and_head.scatter_embed_and_head(gradients, stored, self.precision.reduce)
        if layouts.zero == 1:
            gradients = scatter_gradients(gradients, stored, update, self.precision.reduce)
        squares = complete_squares(gradients, update, axes)
        scalars, reduce = [*sums, *squares], self.precision.reduce
        if layouts.compressed:
            gradients, scalars, errors = compression.reduce_gradients(gradients, scalars, errors, update, axes)
        else:
            gradients, scalars = reduce_gradients(gradients, scalars, update, axes, reduce)
        total, weight, *squares = scalars
        divisor = jnp.where(weight == 0, 1, weight)
        norm = global_norm(gradients, update, axes, squares, divisor)
        scale = clip_factor(norm, self.clip_norm) / divisor
        gradients = jax.tree.map(lambda leaf: leaf * scale.astype(leaf.dtype), gradients)
        return gradients, StepMetrics(total / divisor, norm, weight), errors

    def mapped_gradients(self, extra_table: LayoutTable, *, abstract: bool) -> Callable[..., Any]:
        """`gradients` on global arrays: `extra_table` lays out `errors`; `abstract` needs no devices."""
        layouts, whole = self.layouts, PartitionSpec()
        errors = layouts.manual_specs(extra_table) if layouts.compressed else ()
        in_specs = (layouts.manual_specs(layouts.table), layouts.batch_spec, whole, whole, errors)
        metrics: Any = StepMetrics(*[whole] * 3)  # pyright: ignore[reportArgumentType]
        out_specs = (layouts.manual_specs(layouts.update_table), metrics, errors)
        return over_manual_axes(self.gradients, layouts, in_specs, out_specs, abstract=abstract)

    def mapped_sums(self) -> Callable[..., Any]:
        """`sums` on global arrays."""
        layouts, whole = self.layouts, PartitionSpec()
        in_specs = (layouts.manual_specs(layouts.table), layouts.batch_spec)
        return over_manual_axes(self.sums, layouts, in_specs, (whole, whole), abstract=False)

    def _gradients(self, params: Params, batch: Batch, key: Array) -> tuple[Params, tuple[Array, Array]]:
        """Local sums of gradients, and this device's share of (loss, weight)."""
        axes = self.layouts.manual_axes
        return accumulate_gradients(self._loss, params, batch, key, microbatches=self.accumulate, axes=axes)

    def _whole(self, params: Params) -> Params:
        """Parameters as a step begins with them: of a pipeline, those outside the blocks whole on every stage."""
        if self.layouts.pipeline is None:
            return params
        return embed_and_head.gather_embed_and_head(params, self.layouts.table.layouts)

    def sums(self, params: Params, batch: Batch) -> tuple[Array, Array]:
        """The sums (loss, weight) over the global batch, for evaluation."""
        axes = self.layouts.manual_axes
        varying = self._whole(make_varying(params, self.layouts.table.layouts, axes))
        batch = cast_inputs(batch, self.precision.compute)
        shares = self._loss.loss(self._loss.carriers(varying), self._loss.keep(varying), batch, None)
        total, weight = reduce_gradients((), shares, (), axes, self.precision.reduce)[1]
        return total, weight

    def cost(self, batch: dict[str, jax.ShapeDtypeStruct] | None, platform: str) -> list[Collective]:
        """Every collective of one step, unmerged, from the layouts and the model's own account.

        Args:
            batch: Global shapes of a batch; a model that splits its own work moves bytes in proportion to it.
            platform: Where the step runs.
        """
        layouts, precision, axes = self.layouts, self.precision, self.layouts.summed_axes
        reduce = precision.reduce
        keeps_blocks = layouts.zero == 2 or layouts.fsdp.keep == "step"
        lines = fsdp.cost(
            embed_and_head.whole_along_pipe(layouts.table),
            embed_and_head.whole_along_pipe(layouts.gradient_table),
            layouts.gather_axes,
            precision,
            calls=self._calls,
            keep_blocks=keeps_blocks,
            platform=platform,
        )
        lines += embed_and_head.cost(layouts.table, reduce, platform=platform)
        if layouts.zero:
            lines += zero.cost(layouts.table, layouts.update_table, layouts.zero, reduce, platform=platform)
        if layouts.compressed:
            lines += compression.cost(layouts.update_table, axes, reduce)
        else:
            lines += data.cost(layouts.update_table, axes, reduce, platform=platform)
        lines += norm_cost([row.layout for row in layouts.update_table.rows], axes, reduce)
        return lines + self._traffic(batch, platform)

    @property
    def _calls(self) -> Calls:
        pipeline = self.layouts.pipeline
        if pipeline is None or not isinstance(self.model, BlockModel):
            return plain_calls(self.model, self.accumulate)
        return pipeline_calls(self.model, pipeline.timetable, self.accumulate)

    def _traffic(self, batch: dict[str, jax.ShapeDtypeStruct] | None, platform: str) -> list[Collective]:
        """What the model itself moves: its parts' traffic, times blocks and microbatches."""
        model, pipeline, precision = self.model, self.layouts.pipeline, self.precision
        if not isinstance(model, BlockModel) or (model.traffic is None and pipeline is None):
            return []
        if batch is None:
            raise UserError("What a step moves depends on the batch here: give its shapes.")
        pieces = self.layouts.num_batch_shards * self.accumulate
        pieces *= pipeline.schedule.microbatches if pipeline else 1
        rows = jax.eval_shape(lambda batch: cast_inputs(batch, precision.compute), batch)
        shapes = {
            name: jax.ShapeDtypeStruct((leaf.shape[0] // pieces, *leaf.shape[1:]), leaf.dtype)
            for name, leaf in rows.items()
        }
        lines: list[Collective] = []
        if pipeline:
            lines += pipeline_cost(model, self.layouts, shapes, precision, self.accumulate, platform=platform)
        if model.traffic is None:
            return lines
        calls = self._calls
        own: list[Collective] = []
        for part, forward, backward in (
            ("embed", calls.embed, calls.embed_backward),
            ("block", calls.block, calls.block_backward),
            ("head", calls.head, calls.head),
        ):
            moved = model.traffic(part, shapes, precision.compute, platform)
            own += [line.times(forward) for line in moved.forward]
            own += [line.times(backward) for line in moved.backward]
            if part == "block":
                own += self._recomputed(moved, calls)
        sizes = self.layouts.mesh_size
        return lines + ([as_sent(line, sizes(line.axes[-1]), platform) for line in own] if pipeline else own)

    def _recomputed(self, moved: Traffic, calls: Calls) -> list[Collective]:
        """What blocks move once more: inside backward under `remat`, and in a pipeline's actions that recompute."""
        inside = moved.again if self.remat != "none" else ()
        before = moved.again if self.remat != "full" else ()
        pipeline = self.layouts.pipeline
        whole = computes_whole_again(self.layouts, self.remat)
        if pipeline and (pipeline.timetable.blocks_per_slot > 1 or whole):
            before = moved.forward
        again = [line.times(calls.block_backward) for line in inside]
        return again + [line.times(calls.block_again) for line in before]

"""Where everything of a step lives: the result of `lay_out`, and all that the rest of the runtime asks of it."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from ..layouts.layout_map import LayoutMap
from ..layouts.table import LayoutRow, LayoutTable
from ..layouts.tensor_layout import TensorLayout
from ..mesh.axes import AXES
from ..mesh.device_mesh import DeviceMesh
from ..mesh.errors import UserError
from . import data, expert, fsdp
from .data import DataParallelConfig
from .fsdp import FSDPConfig
from .pipeline import Pipeline
from .sharding.parallel_context import Parallel
from .sharding.stored_order import StoredOrder
from .sharding.strategies import StrategyConfigs


@dataclass(frozen=True, kw_only=True)
class Layouts:
    """The layouts of the parameters and of their update, and which mesh axes mean what.

    Attributes:
        table: One row a parameter: where it is stored.
        update_table: Where its gradient and the optimizer's state are: the same, or split further (`zero.py`).
        batch_axes: Mesh axes of size > 1 over which dim 0 of a batch is split.
        manual_axes: Mesh axes that the step's `shard_map` is manual over: those of the batch, and those that the model
            or the pipeline splits its work over. What rules lay out over other axes is left to XLA.
        parallel: What the model is told of the mesh.
        configs: Options of the strategies, sizes worked out.
        pipeline: Which blocks live on which stage, and who does what when; None without the axis `pipe`.
        output_rules: Rules for activations, see `sharding/named_outputs.py`; None where there are none.
    """

    table: LayoutTable
    update_table: LayoutTable
    batch_axes: tuple[str, ...]
    manual_axes: tuple[str, ...]
    parallel: Parallel
    configs: StrategyConfigs
    pipeline: Pipeline | None = None
    output_rules: LayoutMap | None = None

    @property
    def stored_order(self) -> StoredOrder:
        """The order that blocks are stored in."""
        return StoredOrder(self.pipeline.stages if self.pipeline else None)

    @property
    def num_parameters(self) -> int:
        """Elements of the model's parameters; rows of blocks that only fill up a stage do not count."""
        filling = self.pipeline.stages.num_filling if self.pipeline else 0
        blocks = [row for row in self.table.rows if filling and row.path.split("/")[0] == "blocks"]
        return self.table.num_elements - filling * sum(prod(row.shape[1:]) for row in blocks)

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of all layouts."""
        return self.table.mesh

    @property
    def gather_axes(self) -> tuple[str, ...]:
        """The axes that a parameter laid out over is gathered over before use: those of rows alone."""
        return tuple(axis for axis in self.batch_axes if axis != expert.AXIS)

    @property
    def data(self) -> DataParallelConfig:
        """Options of the strategy `data`."""
        return self.configs.get(data.AXIS, DataParallelConfig())

    @property
    def fsdp(self) -> FSDPConfig:
        """Options of the strategy `fsdp`."""
        return self.configs.get(fsdp.AXIS, FSDPConfig())

    @property
    def zero(self) -> int:
        """The ZeRO stage in force over `data`."""
        return self.data.zero if self.mesh_size(data.AXIS) > 1 else 0

    @property
    def local_steps(self) -> int:
        """The steps that groups along `data` train alone, in force; 0 where they train together."""
        return self.data.local_steps if self.mesh_size(data.AXIS) > 1 else 0

    @property
    def compressed(self) -> bool:
        """Whether gradients are compressed on their way over `data`."""
        return self.data.compress != "none" and self.mesh_size(data.AXIS) > 1

    @property
    def exact(self) -> "Layouts":
        """The same without local steps and compression: those of gradients as one device has them."""
        if not self.local_steps and not self.compressed:
            return self
        return replace(self, configs={**self.configs, data.AXIS: replace(self.data, local_steps=0, compress="none")})

    def without(self, paths: Collection[str]) -> "Layouts":
        """The same with some parameters as arrays without elements, which move nothing."""

        def emptied(row: LayoutRow) -> LayoutRow:
            shape, layout = (0,) * len(row.shape), TensorLayout((None,) * len(row.shape), row.layout.device_mesh)
            return replace(row, shape=shape, layout=layout) if row.path in paths else row

        tables = [replace(each, rows=tuple(map(emptied, each.rows))) for each in (self.table, self.update_table)]
        return replace(self, table=tables[0], update_table=tables[1])

    @property
    def summed_axes(self) -> tuple[str, ...]:
        """The axes that every step sums gradients over: the manual ones, but for `data` under local steps."""
        return tuple(axis for axis in self.manual_axes if not (self.local_steps and axis == data.AXIS))

    @property
    def gradient_table(self) -> LayoutTable:
        """The layouts of what backward returns: the update's where it scatters, else the parameters'."""
        return self.update_table if self.zero == 2 else self.table

    def mesh_size(self, axis: str) -> int:
        """Devices along an axis; 1 where the mesh has none of that name."""
        return self.mesh.axis_size(axis) if axis in self.mesh.axis_names or axis in AXES else 1

    @property
    def gathers_blocks(self) -> bool:
        """Whether blocks are run on parameters that are gathered for them."""
        blocks = jax.tree.leaves(self.table.layouts["blocks"])
        return any(axis in self.gather_axes for layout in blocks for axis in layout.used_axes)

    @property
    def loops_in_blocks(self) -> bool:
        """Whether a block holds loops of collectives: those of a ring of more than two devices."""
        return self.mesh_size("context") > 2

    @property
    def notes(self) -> tuple[str, ...]:
        """Where the program that runs on this mesh is not the one that other devices would run; one line each."""
        simulated = str(self.mesh.devices.flat[0]).startswith("cpu")
        rings = self.parallel.rings
        if self.pipeline is None or not simulated or not rings:
            return ()
        send = f"{' and '.join(rings)} send{'s' if len(rings) == 1 else ''}"
        return (
            f"On simulated devices beside strategy.pipe, {send} by all-to-all in the ring's group instead of "
            "collective-permute; GPUs run collective-permute. The rest of the program is the same.",
        )

    @property
    def num_batch_shards(self) -> int:
        """Into how many pieces the rows of a batch are split."""
        return prod(self.mesh.axis_size(axis) for axis in self.batch_axes)

    @property
    def batch_spec(self) -> PartitionSpec:
        """The spec of every array of a batch."""
        return PartitionSpec(self.batch_axes) if self.batch_axes else PartitionSpec()

    def batch_sharding(self, *, abstract: bool = False) -> NamedSharding:
        """The sharding of every array of a batch; `abstract` needs no devices."""
        return NamedSharding(self.mesh.abstract_mesh if abstract else self.mesh.backend_mesh, self.batch_spec)  # pyright: ignore[reportArgumentType]

    def replicated(self, *, abstract: bool = False) -> NamedSharding:
        """The sharding of a value that every device holds whole."""
        return NamedSharding(self.mesh.abstract_mesh if abstract else self.mesh.backend_mesh, PartitionSpec())  # pyright: ignore[reportArgumentType]

    def manual_specs(self, table: LayoutTable) -> Any:
        """The specs of a table's arrays with only the manual axes in them."""

        def manual(row: Any) -> PartitionSpec:
            dims = [row.layout.axes_of_dim(dim) for dim in range(len(row.layout.axes))]
            kept = [tuple(axis for axis in axes if axis in self.manual_axes) for axes in dims]
            return PartitionSpec(*(axes or None for axes in kept))

        return table.treedef.unflatten([manual(row) for row in table.rows])

    def check_eval_rows(self, rows: int) -> None:
        """Checks that a batch of an evaluation can be split.

        Raises:
            UserError: The number of rows is no multiple of the shards.
        """
        pieces = self.num_batch_shards
        if rows <= 0 or rows % pieces:
            split = " x ".join(f"{axis} {self.mesh.axis_size(axis)}" for axis in self.batch_axes) or "1 device"
            remainder = f": {rows} % {pieces} = {rows % pieces}" if rows > 0 else ""
            raise UserError(
                f"An evaluation's batch of {rows} rows cannot be split over {split}{remainder}. Pad it to a multiple "
                f"of {pieces} with rows of weight 0, as spmdkit.eval_batches does."
            )

    def check_rows(self, global_batch: int, microbatches: int = 1) -> None:
        """Checks that a batch can be split.

        Raises:
            UserError: The number of rows is no multiple of shards times microbatches.
        """
        piped = self.pipeline.schedule.microbatches if self.pipeline else 1
        pieces = self.num_batch_shards * microbatches * piped
        if global_batch <= 0 or global_batch % pieces:
            split = " x ".join(f"{axis} {self.mesh.axis_size(axis)}" for axis in self.batch_axes) or "1 device"
            split += f", strategy.pipe.microbatches {piped}" if self.pipeline else ""
            near = max(pieces, round(global_batch / pieces) * pieces)
            raise UserError(
                f"A batch of {global_batch} rows cannot be split over {split} and accumulate {microbatches}: "
                f"{global_batch} % {pieces} = {global_batch % pieces}. Set train.global_batch to a multiple of "
                f"{pieces} ({near} is the nearest), or change strategy or train.accumulate."
            )

"""The resolved plan of a run: the role of each mesh axis, the layout of every parameter, and the options of its step.

`MeshPlan` is the part that is known before the layouts of parameters. `lay_out` returns the full `ShardingPlan`.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from ..layouts.layout_map import LayoutMap
from ..layouts.paths import in_blocks, split_at_paths
from ..layouts.sizes import RowSplit, format_bytes
from ..layouts.table import LayoutRow, LayoutTable
from ..layouts.tensor_layout import TensorLayout, add_axis, without_axes
from ..mesh.device_mesh import DeviceMesh
from .options import FLOAT32, Precision
from .schedule.timetable import Pipeline


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """The options of a step, see `build_step`; before a step is built, a plan has these defaults."""

    accumulate: int = 1
    clip_norm: float = 0.0
    remat: str = "none"
    precision: Precision = FLOAT32
    xla: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, kw_only=True)
class MeshPlan:
    """The roles of the mesh axes for one model, which do not depend on the layouts of parameters.

    Attributes:
        mesh: The mesh.
        configs: The options of the strategies by name, with resolved sizes; empty for a `Distribution`.
        batch_axes: The mesh axes of size > 1 that split dim 0 of a batch.
        manual_axes: The mesh axes that are manual in the step's `shard_map`: those of the batch, and those over which
            the model or the pipeline splits its work. XLA handles layout rules for the other axes.
        gather_axes: The mesh axes over which sharded parameters are gathered before use: those that split only rows.
        pipeline: The pipeline; None without the axis `pipe`.
        model_name: The name of the model in messages.
        num_blocks: The number of blocks stacked on dim 0 of the leaves under "blocks"; None for a model without blocks.
    """

    mesh: DeviceMesh
    configs: Mapping[str, Any] = field(default_factory=dict)
    batch_axes: tuple[str, ...] = ()
    manual_axes: tuple[str, ...] = ()
    gather_axes: tuple[str, ...] = ()
    pipeline: Pipeline | None = None
    model_name: str = "model"
    num_blocks: int | None = None

    def mesh_size(self, axis: str) -> int:
        """Returns the number of devices along an axis; 1 if the mesh does not have the axis."""
        return self.mesh.axis_size(axis) if axis in self.mesh.axis_names else 1

    def in_force(self, axis: str, option: str, otherwise: Any) -> Any:
        """Returns an option of a strategy if its axis has more than one device, otherwise the value `otherwise`."""
        return getattr(self.configs.get(axis), option, otherwise) if self.mesh_size(axis) > 1 else otherwise

    @property
    def zero(self) -> int:
        """The ZeRO stage over `data`."""
        return self.in_force("data", "zero", 0)

    @property
    def local_steps(self) -> int:
        """The number of steps for which groups along `data` train separately; 0 if they train together."""
        return self.in_force("data", "local_steps", 0)

    @property
    def compressed(self) -> bool:
        """True if gradients are compressed over `data`."""
        return self.in_force("data", "compress", "none") != "none"

    @property
    def keeps_blocks(self) -> bool:
        """True if gathered blocks are kept for the entire step."""
        return self.zero == 2 or getattr(self.configs.get("fsdp"), "keep", "block") == "step"

    @property
    def scatters_once(self) -> bool:
        """True if a pipeline sums whole gradients over its microbatches, and FSDP scatters them once."""
        return self.zero != 2 and self.in_force("pipe", "scatter", "microbatch") == "step"

    @property
    def summed_axes(self) -> tuple[str, ...]:
        """The axes over which every step sums gradients: the manual ones, except `data` under local steps."""
        return tuple(axis for axis in self.manual_axes if not (self.local_steps and axis == "data"))

    @property
    def platform(self) -> str:
        """The platform of the mesh's devices: "cpu" (simulated devices), "cuda", "tpu", ..."""
        return str(self.mesh.devices.flat[0]).split(":")[0]

    @property
    def eval_rows(self) -> RowSplit:
        """The split of the rows of an evaluation batch, over devices only."""
        return RowSplit({axis: self.mesh.axis_size(axis) for axis in self.batch_axes})

    def rows(self, accumulate: int) -> RowSplit:
        """Returns the split of the rows of a batch into microbatches on devices."""
        piped = {"strategy.pipe.microbatches": self.pipeline.schedule.microbatches} if self.pipeline else {}
        return RowSplit({**self.eval_rows.parts, **piped, "accumulate": accumulate})

    @property
    def batch_spec(self) -> PartitionSpec:
        """The spec of every array of a batch."""
        return PartitionSpec(self.batch_axes) if self.batch_axes else PartitionSpec()

    def batch_sharding(self, *, abstract: bool = False) -> NamedSharding:
        """Returns the sharding of every array of a batch; `abstract` works without devices."""
        return NamedSharding(self.mesh.abstract_mesh if abstract else self.mesh.backend_mesh, self.batch_spec)  # pyright: ignore[reportArgumentType]

    def replicated(self, *, abstract: bool = False) -> NamedSharding:
        """Returns the sharding of a replicated value."""
        return NamedSharding(self.mesh.abstract_mesh if abstract else self.mesh.backend_mesh, PartitionSpec())  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True, kw_only=True, repr=False)
class ShardingPlan(MeshPlan):
    """The resolved plan of a run; `print` it for the layout table.

    Attributes:
        table: The layouts of the stored parameters, one row per parameter.
        used_table: Their layouts within a step, between the `begin` and `finish` of the strategies: parameters that are
            gathered for the entire step are whole here.
        gradient_table: The layouts of gradients after backward: as used, or as updated if backward scatters (ZeRO 2).
        update_table: The layouts of gradients and the optimizer's state in the update: as stored, or split further
            (`zero.py`).
        output_rules: Rules for activations, see `sharding/named_outputs.py`; None without rules.
        options: The options of the step that was built from the plan.
        notes: Differences between the program on this mesh and on other devices; one line each.
        frozen: The paths of parameters without a gradient.
    """

    table: LayoutTable
    used_table: LayoutTable
    gradient_table: LayoutTable
    update_table: LayoutTable
    output_rules: LayoutMap | None = None
    options: StepOptions = StepOptions()
    notes: tuple[str, ...] = ()
    frozen: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return str(self.table)

    def __repr__(self) -> str:
        return f"ShardingPlan({self.title}; {format_bytes(self.table.bytes_per_device)} per device)"

    def _repr_html_(self) -> str:
        return self.table._repr_html_()

    @property
    def title(self) -> str:
        """The model, its size and the mesh: "gpt, 1,234 parameters; mesh data 2 x fsdp 4"."""
        return f"{self.model_name}, {self.num_parameters:,} parameters; {self.mesh.summary}"

    @property
    def num_parameters(self) -> int:
        """The number of elements of the model's parameters, without the padding of pipeline stages."""
        stages = self.pipeline.stages if self.pipeline else None
        padding = len(stages.order) - stages.num_blocks if stages else 0
        blocks = [row for row in self.table.rows if padding and in_blocks(row.path)]
        return self.table.num_elements - padding * sum(prod(row.shape[1:]) for row in blocks)

    @cached_property
    def trained(self) -> "ShardingPlan":
        """The plan of the trained parameters: like gradients, its tables have None in place of frozen ones."""

        def trained_rows(table: LayoutTable) -> LayoutTable:
            rows = tuple(row for row in table.rows if row.path not in self.frozen)
            return replace(table, rows=rows, treedef=jax.tree.structure(self.split_frozen(table.layouts)[1]))

        return self._with_tables(trained_rows, frozen=frozenset()) if self.frozen else self

    def split_frozen(self, params: Any) -> tuple[Any, Any]:
        """Splits parameters into frozen and trained ones; see `split_at_paths`."""
        return split_at_paths(params, self.frozen)

    @property
    def gathers_blocks(self) -> bool:
        """True if the parameters of blocks are gathered."""
        blocks = jax.tree.leaves(self.used_table.layouts["blocks"])
        return any(axis in self.gather_axes for layout in blocks for axis in layout.used_axes)

    @property
    def exact(self) -> "ShardingPlan":
        """The plan without local steps and compression, so that its gradients equal those of one device."""
        if not self.local_steps and not self.compressed:
            return self
        data = replace(self.configs["data"], local_steps=0, compress="none")
        return replace(self, configs={**self.configs, "data": data})

    def without(self, paths: Collection[str]) -> "ShardingPlan":
        """Returns the plan with some parameters replaced by arrays without elements, in the same layouts."""

        def emptied(row: LayoutRow) -> LayoutRow:
            return replace(row, shape=(0,) * len(row.shape)) if row.path in paths else row

        return self._with_tables(lambda table: replace(table, rows=tuple(map(emptied, table.rows))))

    def _with_tables(self, change: Callable[[LayoutTable], LayoutTable], **changes: Any) -> "ShardingPlan":
        tables = ("table", "used_table", "gradient_table", "update_table")
        return replace(self, **{name: change(getattr(self, name)) for name in tables}, **changes)

    def manual_specs(self, table: LayoutTable) -> Any:
        """Returns the specs of a table's arrays, restricted to the manual axes."""
        others = [axis for axis in self.mesh.axis_names if axis not in self.manual_axes]
        return table.treedef.unflatten([without_axes(row.layout, others).spec for row in table.rows])


class Parameter(NamedTuple):
    """One parameter, the argument of a strategy's `layout`.

    Attributes:
        path: The path.
        shape: The global shape.
        dtype: The stored dtype.
        stacked: Whether dim 0 counts blocks.
        split_by_model: The axis over which the model splits each dim, or None; () if it needs the whole parameter.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    stacked: bool = False
    split_by_model: tuple[str | None, ...] = ()

    def bytes_on_device(self, layout: TensorLayout) -> int:
        """Returns the bytes of the parameter, or of one of its blocks, on a device."""
        first = int(self.stacked)
        parts = prod(layout.parts_of_dim(dim) for dim in range(first, len(self.shape)))
        return prod(self.shape[first:]) * jnp.dtype(self.dtype).itemsize // parts


class Reduced(NamedTuple):
    """The values that the strategies reduce, one after another, at the end of a backward pass.

    Attributes:
        gradients: The gradients after `finish`.
        scalars: Local sums: of the loss, of the weights, of the squares of complete gradients.
        errors: The errors of compression from the previous step (`compression.Errors`), or ().
        scale: The factor of the loss, and therefore of the gradients; None for no factor.
        summed: The groups of parameters for which backward has summed gradients over all axes.
    """

    gradients: Any
    scalars: Sequence[Array]
    errors: Any
    scale: Array | None = None
    summed: Sequence[str] = ()


def splits_nothing(parameter: Parameter, placed: TensorLayout, plan: MeshPlan) -> tuple[TensorLayout, str]:
    """Implements `layout` for a strategy that keeps parameters whole along its axis."""
    return placed, ""


def split_by_model(axis: str, parameter: Parameter, placed: TensorLayout, plan: MeshPlan) -> tuple[TensorLayout, str]:
    """Implements `layout`, as `partial(split_by_model, AXIS)`, for an axis over which the model splits its own work."""
    dims = [dim for dim, name in enumerate(parameter.split_by_model) if name == axis]
    for dim in dims:
        placed = add_axis(placed, dim, axis, plan.mesh)
    split = plan.mesh.axis_size(axis) > 1
    return placed, "; ".join(f"{axis}: dim {dim}" for dim in dims if split)


def as_stored(path: str, layout: TensorLayout) -> TensorLayout:
    """Implements `used_layout` for a strategy that does not change stored parameters, or gathers them block by
    block."""
    return layout


def no_problems(plan: ShardingPlan) -> list[str]:
    """Implements `check` for a strategy that combines with everything."""
    return []


def unchanged(tree: Any, plan: ShardingPlan) -> Any:
    """Implements `begin` or `finish` for a strategy that does nothing there."""
    return tree


def summed_elsewhere(found: Reduced, plan: ShardingPlan) -> Reduced:
    """Implements `reduce` for a strategy that leaves sums to `data.py` or `compression.py`."""
    return found

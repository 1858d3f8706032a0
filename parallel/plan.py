"""The resolved plan of a run: which mesh axis does what, where every parameter lives, and the options of its step.

`MeshPlan` is known before any parameter has a layout; `lay_out` gives a `ShardingPlan`. Strategies read it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from ..layouts.layout_map import LayoutMap
from ..layouts.paths import in_blocks, split_at_paths
from ..layouts.row_split import RowSplit
from ..layouts.split_dim import add_axis
from ..layouts.table import LayoutRow, LayoutTable
from ..layouts.tensor_layout import TensorLayout
from ..mesh.device_mesh import DeviceMesh
from .precision import FLOAT32, Precision
from .schedule.timetable import Pipeline


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """The options of a step, as `build_step` takes them; a plan that no step was built from has these defaults."""

    accumulate: int = 1
    clip_norm: float = 0.0
    remat: str = "none"
    precision: Precision = FLOAT32
    xla: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, kw_only=True)
class MeshPlan:
    """Which mesh axis does what, for one model: known before any parameter has a layout.

    Attributes:
        mesh: The mesh.
        configs: Options of the strategies by name, sizes worked out; none under a `Distribution`.
        batch_axes: Mesh axes of size > 1 over which dim 0 of a batch is split.
        manual_axes: Mesh axes that the step's `shard_map` is manual over: those of the batch, and those that the model
            or the pipeline splits its work over. What rules lay out over other axes is left to XLA.
        gather_axes: Mesh axes over which a parameter that is stored split is gathered before use: those of rows alone.
        pipeline: Which blocks live on which stage, and who does what when; None without the axis `pipe`.
        model_name: What messages call the model.
        num_blocks: How many blocks the model stacks on dim 0 of what is under "blocks"; None: it is one function.
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
        """Devices along an axis; 1 where the mesh has none of that name."""
        return self.mesh.axis_size(axis) if axis in self.mesh.axis_names else 1

    def in_force(self, axis: str, option: str, otherwise: Any) -> Any:
        """An option of a strategy where its axis has several devices; elsewhere `otherwise`."""
        return getattr(self.configs.get(axis), option, otherwise) if self.mesh_size(axis) > 1 else otherwise

    @property
    def zero(self) -> int:
        """The ZeRO stage in force over `data`."""
        return self.in_force("data", "zero", 0)

    @property
    def local_steps(self) -> int:
        """The steps that groups along `data` train alone, in force; 0 where they train together."""
        return self.in_force("data", "local_steps", 0)

    @property
    def compressed(self) -> bool:
        """Whether gradients are compressed on their way over `data`."""
        return self.in_force("data", "compress", "none") != "none"

    @property
    def keeps_blocks(self) -> bool:
        """Whether gathered blocks are kept for the whole step."""
        return self.zero == 2 or getattr(self.configs.get("fsdp"), "keep", "block") == "step"

    @property
    def summed_axes(self) -> tuple[str, ...]:
        """The axes that every step sums gradients over: the manual ones, but for `data` under local steps."""
        return tuple(axis for axis in self.manual_axes if not (self.local_steps and axis == "data"))

    @property
    def loops_in_blocks(self) -> bool:
        """Whether a block holds loops of collectives: those of a ring of more than two devices."""
        return self.mesh_size("context") > 2

    @property
    def platform(self) -> str:
        """Where the mesh's devices are: "cpu" (simulated ones), "cuda", "tpu", ..."""
        return str(self.mesh.devices.flat[0]).split(":")[0]

    @property
    def num_batch_shards(self) -> int:
        """Into how many pieces the rows of a batch are split."""
        return self.eval_rows.total

    @property
    def eval_rows(self) -> RowSplit:
        """How the rows of an evaluation's batch are split: over devices alone."""
        return RowSplit({axis: self.mesh.axis_size(axis) for axis in self.batch_axes})

    def rows(self, accumulate: int) -> RowSplit:
        """How the rows of a batch are cut down to those of one microbatch on one device."""
        piped = {"strategy.pipe.microbatches": self.pipeline.schedule.microbatches} if self.pipeline else {}
        return RowSplit({**self.eval_rows.parts, **piped, "accumulate": accumulate})

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


@dataclass(frozen=True, kw_only=True)
class ShardingPlan(MeshPlan):
    """The resolved plan of a run; `print` it for the layout table.

    Attributes:
        table: One row a parameter: where it is stored.
        used_table: Where it is within a step, between what strategies do at its start and at its end: what they make
            whole for a step is whole here.
        gradient_table: Where backward leaves its gradient: as used, or as updated where backward scatters it (ZeRO 2).
        update_table: Where its gradient and the optimizer's state are: as stored, or split further (`zero.py`).
        output_rules: Rules for activations, see `sharding/named_outputs.py`; None where there are none.
        options: The options of the step that was built from it.
        notes: Where the program that runs on this mesh is not the one that other devices would run; one line each.
        frozen: Paths of parameters without a gradient: a step never creates one.
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

    def _repr_html_(self) -> str | None:
        return getattr(self.table, "_repr_html_", lambda: None)()

    @property
    def num_parameters(self) -> int:
        """Elements of the model's parameters; rows of blocks that only fill up a stage do not count."""
        filling = self.pipeline.stages.num_filling if self.pipeline else 0
        blocks = [row for row in self.table.rows if filling and in_blocks(row.path)]
        return self.table.num_elements - filling * sum(prod(row.shape[1:]) for row in blocks)

    @cached_property
    def trained(self) -> "ShardingPlan":
        """The same for the parameters that train alone: its tables are like gradients, None in place of the others."""

        def of_trained(table: LayoutTable) -> LayoutTable:
            rows = tuple(row for row in table.rows if row.path not in self.frozen)
            return replace(table, rows=rows, treedef=jax.tree.structure(self.split_frozen(table.layouts)[1]))

        return self._with_tables(of_trained, frozen=frozenset()) if self.frozen else self

    def split_frozen(self, params: Any) -> tuple[Any, Any]:
        """Parameters in two trees, those that are frozen and those that train; see `split_at_paths`."""
        return split_at_paths(params, self.frozen)

    @property
    def gathers_blocks(self) -> bool:
        """Whether blocks are run on parameters that are gathered for them."""
        blocks = jax.tree.leaves(self.used_table.layouts["blocks"])
        return any(axis in self.gather_axes for layout in blocks for axis in layout.used_axes)

    @property
    def exact(self) -> "ShardingPlan":
        """The same without local steps and compression: those of gradients as one device has them."""
        if not self.local_steps and not self.compressed:
            return self
        data = replace(self.configs["data"], local_steps=0, compress="none")
        return replace(self, configs={**self.configs, "data": data})

    def without(self, paths: Collection[str]) -> "ShardingPlan":
        """The same with some parameters as arrays without elements, laid out as they are."""

        def emptied(row: LayoutRow) -> LayoutRow:
            return replace(row, shape=(0,) * len(row.shape)) if row.path in paths else row

        return self._with_tables(lambda table: replace(table, rows=tuple(map(emptied, table.rows))))

    def _with_tables(self, change: Callable[[LayoutTable], LayoutTable], **changes: Any) -> "ShardingPlan":
        tables = ("table", "used_table", "gradient_table", "update_table")
        return replace(self, **{name: change(getattr(self, name)) for name in tables}, **changes)

    def manual_specs(self, table: LayoutTable) -> Any:
        """The specs of a table's arrays with only the manual axes in them."""

        def manual(row: Any) -> PartitionSpec:
            dims = [row.layout.axes_of_dim(dim) for dim in range(len(row.layout.axes))]
            kept = [tuple(axis for axis in axes if axis in self.manual_axes) for axes in dims]
            return PartitionSpec(*(axes or None for axes in kept))

        return table.treedef.unflatten([manual(row) for row in table.rows])


class Parameter(NamedTuple):
    """One parameter, as a strategy lays it out.

    Attributes:
        path: Its path.
        shape: Its global shape.
        dtype: The dtype it is stored in.
        stacked: Whether dim 0 counts blocks.
        split_by_model: The axis that the model splits each dim over by itself, or None; () for a model that does not.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    stacked: bool = False
    split_by_model: tuple[str | None, ...] = ()


class Reduced(NamedTuple):
    """What the strategies reduce at the end of a backward pass, one after the other.

    Attributes:
        gradients: As `finish` left them.
        scalars: Local sums that go with them: of the loss, of the weights, of the squares of complete gradients.
        errors: What compression owes from the step before (`compression.Errors`), or ().
        scale: What the loss was multiplied by, and with it the gradients; None for nothing.
    """

    gradients: Any
    scalars: Sequence[Array]
    errors: Any
    scale: Array | None = None


def splits_nothing(parameter: Parameter, placed: TensorLayout, plan: MeshPlan) -> tuple[TensorLayout, str]:
    """The `layout` of a strategy that keeps parameters whole along its axis."""
    return placed, ""


def split_by_model(parameter: Parameter, placed: TensorLayout, axis: str) -> tuple[TensorLayout, str]:
    """The `layout` of a strategy whose axis the model splits its own work over."""
    dims = [dim for dim, name in enumerate(parameter.split_by_model) if name == axis]
    for dim in dims:
        placed = add_axis(placed, dim, axis, placed.mesh)
    split = placed.mesh.axis_size(axis) > 1
    return placed, "; ".join(f"{axis}: dim {dim}" for dim in dims if split)


def as_stored(path: str, layout: TensorLayout) -> TensorLayout:
    """The `used_layout` of a strategy that leaves parameters as they are stored, or gathers them block by block."""
    return layout


def no_problems(plan: ShardingPlan) -> list[str]:
    """The `check` of a strategy that combines with everything."""
    return []


def unchanged(tree: Any, plan: ShardingPlan) -> Any:
    """The `begin` or `finish` of a strategy with nothing to do then."""
    return tree


def summed_elsewhere(found: Reduced, plan: ShardingPlan) -> Reduced:
    """The `reduce` of a strategy that leaves sums to `data.py` or `compression.py`."""
    return found


Layouts = ShardingPlan  # its former name

"""From a strategy to the layout of every parameter: the first half of what a step is built from."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
from jax import ShapeDtypeStruct
from jax.sharding import NamedSharding, PartitionSpec

from ..layouts.distribution import Distribution, ModelParallel
from ..layouts.layout_map import LayoutMap, MatchMode
from ..layouts.resolve import Indivisible, Unmatched, resolve
from ..layouts.table import LayoutTable
from ..layouts.tensor_layout import TensorLayout
from ..mesh.axes import AXES, BATCH_AXES
from ..mesh.device_mesh import DeviceMesh
from . import fsdp
from .model import BlockModel, Model, Params
from .precision import FLOAT32, Precision, cast_floats
from .strategy import StrategyConfigs, read_strategy

StrategyLike: TypeAlias = Mapping[str, Any] | DeviceMesh | Distribution
"""What a strategy may be given as: YAML's mapping, a mesh of the runtime's axes, or a distribution object."""


@dataclass(frozen=True, kw_only=True)
class Layouts:
    """Where everything lives: the layout table of the parameters, and the axes that rows of a batch are split over.

    Attributes:
        table: One row a parameter.
        batch_axes: Mesh axes of size > 1 over which dim 0 of a batch is split. The step's `shard_map` is manual over
            them; a parameter laid out over one of them is gathered before use. What rules lay out over other axes is
            left to XLA.
    """

    table: LayoutTable
    batch_axes: tuple[str, ...]

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of all layouts."""
        return self.table.mesh

    @property
    def num_batch_shards(self) -> int:
        """Into how many pieces the rows of a batch are split."""
        total = 1
        for axis in self.batch_axes:
            total *= self.mesh.axis_size(axis)
        return total

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

    def check_rows(self, global_batch: int, microbatches: int = 1) -> None:
        """Checks that a batch can be split.

        Raises:
            ValueError: The number of rows is no multiple of shards times microbatches.
        """
        pieces = self.num_batch_shards * microbatches
        if global_batch <= 0 or global_batch % pieces:
            split = " x ".join(f"{axis} {self.mesh.axis_size(axis)}" for axis in self.batch_axes) or "1 device"
            near = max(pieces, round(global_batch / pieces) * pieces)
            raise ValueError(
                f"A batch of {global_batch} rows cannot be split over {split} and accumulate {microbatches}: "
                f"{global_batch} % {pieces} = {global_batch % pieces}. Set train.global_batch to a multiple of "
                f"{pieces} ({near} is the nearest), or change strategy or train.accumulate."
            )


def abstract_parameters(model: Model | BlockModel, precision: Precision) -> Params:
    """Shapes and dtypes of a model's parameters as they are stored; no array is made."""
    return jax.eval_shape(lambda key: cast_floats(model.init(key), precision.params), jax.random.key(0))


def lay_out(
    model: Model | BlockModel,
    strategy: StrategyLike,
    *,
    rules: LayoutMap | Mapping[str, Sequence[Any]] | None = None,
    match: MatchMode = "fullmatch",
    unmatched: Unmatched = "error",
    unmatched_floor_bytes: int = 1 << 20,
    indivisible: Indivisible = "error",
    precision: Precision = FLOAT32,
    devices: Sequence[str] | None = None,
) -> Layouts:
    """Decides the layout of every parameter of a model.

    Args:
        model: The model.
        strategy: A mapping of strategies to sizes or options, as in YAML (`{"fsdp": 4, "data": 2}`; -1 = the rest); a
            `DeviceMesh` with the runtime's axis names; or a `DataParallel` or `ModelParallel`.
        rules: Layouts by regex of the parameter's path; they win over the strategy's own choice.
        match: How a rule's regex meets a path: `fullmatch`, `search` or `first` (the first that fits).
        unmatched: What happens to a parameter that no rule matches and no strategy lays out: `error` (over the floor),
            `warn` or `replicate`.
        unmatched_floor_bytes: Global bytes under which an unmatched parameter is left whole without a word.
        indivisible: What happens where an axis does not divide a dim: `error`, `replicate` or `next_dim`.
        precision: The dtypes; `params` decides the bytes.
        devices: Devices of the mesh by name; all of them by default. They need not exist until a step runs.

    Returns:
        The resolved layouts.

    Raises:
        LayoutError: Everything that is wrong with the layouts, at once.
        ValueError: The strategy is not understood.
    """
    params = abstract_parameters(model, precision)
    mesh, batch_axes, default, own_rules = _understand(model, strategy, indivisible, devices)
    if rules is not None and own_rules is not None:
        raise ValueError("Layout rules were given twice: in ModelParallel's layout_map and as rules. Keep one of them.")
    layout_map = own_rules if rules is None else _as_layout_map(rules, mesh, match)
    used = tuple(axis for axis in mesh.axis_names if mesh.axis_size(axis) > 1)
    required = tuple(axis for axis in used if axis not in batch_axes or axis == fsdp.AXIS)
    table = resolve(
        params,
        mesh,
        rules=layout_map,
        default=default,
        unmatched=unmatched,
        unmatched_floor_bytes=unmatched_floor_bytes,
        indivisible=indivisible,
        required_axes=required,
    )
    layouts = Layouts(table=table, batch_axes=batch_axes)
    if isinstance(model, BlockModel):
        _check_block_dims(layouts)
    return layouts


_Default: TypeAlias = Callable[[str, ShapeDtypeStruct], tuple[TensorLayout, str]]


def _understand(
    model: Model | BlockModel, strategy: StrategyLike, indivisible: str, devices: Sequence[str] | None
) -> tuple[DeviceMesh, tuple[str, ...], _Default | None, LayoutMap | None]:
    """The mesh, the batch axes, the layout of what no rule matches, and rules the strategy brings along."""
    if isinstance(strategy, Distribution):
        mesh = strategy.device_mesh
        name = strategy.batch_dim_name
        batch_axes = (name,) if name is not None and mesh.axis_size(name) > 1 else ()
        if isinstance(strategy, ModelParallel):
            return mesh, batch_axes, None, strategy.layout_map
        return mesh, batch_axes, _whole(mesh, "data: whole"), None
    if isinstance(strategy, DeviceMesh):
        mesh, configs = strategy, read_strategy(_sizes(strategy))
    else:
        configs = read_strategy(strategy)
        mesh = DeviceMesh.of(devices, **{name: config.size for name, config in configs.items()})
    batch_axes = tuple(axis for axis in mesh.axis_names if axis in BATCH_AXES and mesh.axis_size(axis) > 1)
    return mesh, batch_axes, _default_layout(model, mesh, configs, indivisible), None


def _sizes(mesh: DeviceMesh) -> dict[str, int]:
    """The strategies that a mesh with the runtime's axis names stands for."""
    foreign = [name for name in mesh.axis_names if name not in AXES]
    if foreign:
        raise ValueError(
            f"The mesh has axes {foreign} that no strategy owns: the runtime's own are {', '.join(AXES)}. For other "
            "names, pass ModelParallel(layout_map=...) or DataParallel(device_mesh=...) instead of the mesh."
        )
    return {name: mesh.axis_size(name) for name in mesh.axis_names if mesh.axis_size(name) > 1}


def _default_layout(
    model: Model | BlockModel, mesh: DeviceMesh, configs: StrategyConfigs, indivisible: str
) -> _Default:
    config = configs.get(fsdp.AXIS)
    if not isinstance(config, fsdp.FSDPConfig) or mesh.axis_size(fsdp.AXIS) == 1:
        return _whole(mesh, "data: whole")

    def shard(path: str, leaf: ShapeDtypeStruct) -> tuple[TensorLayout, str]:
        stacked = isinstance(model, BlockModel) and path.split("/")[0] == "blocks"
        return fsdp.layout(config, mesh, leaf, stacked=stacked, on_indivisible=indivisible)

    return shard


def _whole(mesh: DeviceMesh, reason: str) -> _Default:
    return lambda path, leaf: (TensorLayout([None] * len(leaf.shape), mesh), reason)


def _as_layout_map(rules: LayoutMap | Mapping[str, Sequence[Any]], mesh: DeviceMesh, match: str) -> LayoutMap:
    if isinstance(rules, LayoutMap):
        return rules
    layout_map = LayoutMap(mesh, match=match)  # pyright: ignore[reportArgumentType]
    for pattern, axes in rules.items():
        layout_map[pattern] = tuple(tuple(entry) if isinstance(entry, list) else entry for entry in axes)
    return layout_map


def _check_block_dims(layouts: Layouts) -> None:
    """A loop over blocks cannot run over a dim that is split over devices."""
    wrong = [
        f"{row.path} {row.layout}"
        for row in layouts.table.rows
        if row.path.split("/")[0] == "blocks" and set(row.layout.axes_of_dim(0)) & set(layouts.batch_axes)
    ]
    if wrong:
        raise ValueError(
            f"Dim 0 of the leaves under blocks counts the blocks and cannot be split over {layouts.batch_axes}: "
            f"{', '.join(wrong)}. Start these rules in `layouts.rules` with null for dim 0."
        )

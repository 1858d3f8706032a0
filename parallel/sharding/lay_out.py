"""Determines the plan of a step: from a strategy to the layout of every parameter."""

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, TypeAlias

import jax

from ...layouts.distribution import Distribution, ModelParallel
from ...layouts.layout_map import LayoutMap, MatchMode
from ...layouts.output_rules import output_rules
from ...layouts.paths import in_blocks
from ...layouts.problems import LayoutError
from ...layouts.resolve import Indivisible, Unmatched, resolve
from ...layouts.table import LayoutRow, LayoutTable, make_row
from ...layouts.tensor_layout import TensorLayout
from ...mesh.device_mesh import DeviceMesh
from ...mesh.errors import UserError
from .. import fsdp, pipeline
from ..model import BlockModel, Model, Params, has_state
from ..model.arguments import require_model
from ..options import FLOAT32, Precision, cast_floats
from ..pipeline import PipelineConfig, make_pipeline
from ..plan import MeshPlan, Parameter, ShardingPlan, StepOptions
from ..schedule.timetable import Pipeline
from .conflicts import problems
from .default_layout import default_layout, settle_fsdp
from .model_errors import abstract_init, check_groups
from .parallel_context import parallel_context
from .stored_order import in_stage_order
from .strategies import STRATEGIES, StrategyConfigs, axes_that_split, axis_names, read_strategy

StrategyLike: TypeAlias = Mapping[str, Any] | DeviceMesh | Distribution
"""A strategy: YAML's mapping, a mesh with the runtime's axes, or a distribution object."""
MAX_SILENT_SHARE = 0.01
"""The share of the parameters' bytes that fsdp may leave whole without a warning."""


def abstract_parameters(model: Model | BlockModel, precision: Precision) -> Params:
    """Returns the shapes and dtypes of a model's stored parameters, without creating arrays.

    Raises:
        ModelError: The model's init cannot be called, raises an exception, or returns untrainable values.
    """
    return jax.eval_shape(lambda params: cast_floats(params, precision.params), abstract_init(model))


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
    frozen: Collection[str] = (),
) -> ShardingPlan:
    """Determines the layout of every parameter of a model.

    Args:
        model: The model.
        strategy: A mapping of strategies to sizes or options, as in YAML (`{"fsdp": 4, "data": 2}`; -1 = the rest); a
            `DeviceMesh` with the runtime's axis names; or a `DataParallel` or `ModelParallel`.
        rules: Layouts by regex of the parameter's path; they take precedence over the strategy's choice.
        match: The matching of a rule's regex: `fullmatch`, `search` or `first` (the first matching rule).
        unmatched: The handling of a parameter without a matching rule or strategy: `error` (above the floor), `warn` or
            `replicate`.
        unmatched_floor_bytes: The global bytes below which an unmatched parameter stays whole silently.
        indivisible: The handling of a rule that splits a dim that its axes do not divide: `error`, `replicate` or
            `next_dim`. A parameter without a rule that fsdp cannot split stays whole; `replicate` omits the warning.
        precision: The dtypes; `params` determines the bytes.
        devices: The names of the mesh devices; all devices by default. They have to exist only when a step runs.
        frozen: The paths of parameters that do not train: a step does not compute or send gradients for them.

    Returns:
        The resolved plan.

    Raises:
        LayoutError: All problems with the layouts.
        UserError: The strategy is invalid.
    """
    model = require_model(model, "lay_out")
    own, brought, plan = _resolve_strategy(model, strategy, devices)
    params = abstract_parameters(model, precision)
    check_groups(model, params)
    if plan.pipeline:
        params = abstract_parameters(in_stage_order(model, plan.pipeline.stages), precision)
    if rules is not None and brought is not None:
        raise UserError("Layout rules were given twice: in ModelParallel's layout_map and as rules. Keep one of them.")
    layout_map = brought if rules is None else _as_layout_map(rules, plan.mesh, match)
    plan, whole, notes = settle_fsdp(own, plan, params, layout_map)
    activation_rules = output_rules(layout_map)
    may_be_unused = {axis for layout in (activation_rules or {}).values() for axis in layout.used_axes}
    may_be_unused |= {fsdp.AXIS} if whole else set()
    table = resolve(
        params,
        plan.mesh,
        rules=layout_map,
        default=None if brought is not None else partial(default_layout, own, plan),
        unmatched=unmatched,
        unmatched_floor_bytes=unmatched_floor_bytes,
        indivisible=indivisible,
        required_axes=[axis for axis in _required_axes(plan) if axis not in may_be_unused],
        fixed_dims=lambda path: int(isinstance(model, BlockModel) and in_blocks(path)),
    )
    table = replace(table, notes=notes)
    if whole > MAX_SILENT_SHARE * table.bytes_global and indivisible != "replicate":
        remedy = "Pad a dim of each, change strategy.fsdp, or accept it with layouts.indivisible=replicate."
        warnings.warn(f"{notes[-1]}. They are {whole / table.bytes_global:.1%} of the state. {remedy}", stacklevel=2)
    used, update = _used_table(table), _update_table(table, plan)
    resolved = ShardingPlan(
        **{field.name: getattr(plan, field.name) for field in fields(MeshPlan)},
        table=table,
        used_table=used,
        gradient_table=_used_table(update) if plan.zero == 2 else used,
        update_table=update,
        output_rules=activation_rules,
        options=StepOptions(precision=precision),
        notes=_notes(plan),
        frozen=frozenset(frozen),
    )
    if found := list(problems(own, resolved)):
        raise LayoutError(found)
    return resolved


def _used_table(table: LayoutTable) -> LayoutTable:
    """Returns the layouts within a step: every strategy removes the axis that it gathers over at the start."""

    def used(row: LayoutRow) -> LayoutRow:
        layout = row.layout
        for strategy in STRATEGIES.values():
            layout = strategy.used_layout(row.path, layout)
        return row if layout is row.layout else _with_layout(row, row.rule, layout)

    return replace(table, rows=tuple(map(used, table.rows)))


def _update_table(table: LayoutTable, plan: MeshPlan) -> LayoutTable:
    """Returns the layouts of gradients and the optimizer's state: every strategy adds its axis to the stored layout."""

    def updated(row: LayoutRow) -> LayoutRow:
        parameter = Parameter(row.path, row.shape, row.dtype, plan.num_blocks is not None and in_blocks(row.path))
        layout, reasons = row.layout, []
        for strategy in reversed(STRATEGIES.values()):
            layout, reason = strategy.update_layout(parameter, layout, plan)
            reasons += [reason] if reason else []
        return _with_layout(row, "; ".join(reasons), layout) if reasons else row

    return replace(table, rows=tuple(map(updated, table.rows)))


def _with_layout(row: LayoutRow, rule: str, layout: TensorLayout) -> LayoutRow:
    return make_row(row.path, jax.ShapeDtypeStruct(row.shape, row.dtype), rule, layout)


def _required_axes(plan: MeshPlan) -> tuple[str, ...]:
    """Returns the axes over which at least one parameter must be split."""
    free = set(plan.batch_axes) | set(axes_that_split("work"))
    return tuple(axis for axis in plan.mesh.split_axes if axis not in free - set(axes_that_split("parameters")))


def _notes(plan: MeshPlan) -> tuple[str, ...]:
    """Returns notes on differences between the program on this mesh and on other devices."""
    rings = parallel_context(plan).rings
    if plan.pipeline is None or plan.platform != "cpu" or not rings:
        return ()
    send = f"{' and '.join(rings)} send{'s' if len(rings) == 1 else ''}"
    return (
        f"On simulated devices with strategy.pipe, {send} by all-to-all in the ring's group instead of "
        "collective-permute; GPUs run collective-permute. The rest of the program is the same.",
    )


def _resolve_strategy(
    model: Model | BlockModel, strategy: StrategyLike, devices: Sequence[str] | None
) -> tuple[Model | BlockModel, LayoutMap | None, MeshPlan]:
    """Returns the model, with its work split if it supports that, the rules of a `ModelParallel`, and the plan."""
    configs: StrategyConfigs = {}
    rules = None
    if isinstance(strategy, Distribution):
        mesh, name = strategy.device_mesh, strategy.batch_dim_name
        rules = strategy.layout_map if isinstance(strategy, ModelParallel) else None
        manual = rows = (name,) if name is not None and mesh.axis_size(name) > 1 else ()
    else:
        if not isinstance(strategy, DeviceMesh | Mapping):
            raise UserError(
                f"strategy={strategy!r} must be a mapping such as {{'fsdp': 8}}, a DeviceMesh, or a distribution."
            )
        if isinstance(strategy, DeviceMesh):
            mesh, configs = strategy, read_strategy(_sizes(strategy))
        else:
            configs = read_strategy(strategy)
            sizes = {name: config.size for name, config in configs.items()}
            mesh = DeviceMesh.of(devices, axes=axis_names(), **sizes)
            configs = {name: replace(config, size=mesh.axis_size(name)) for name, config in configs.items()}
        inside = set(configs) if isinstance(model, BlockModel) and model.parallelize is not None else set[str]()
        inside = {name for name in inside if getattr(configs[name], "explicit", True)}
        left = set(axes_that_split("work")) - inside  # to XLA
        manual = tuple(axis for axis in mesh.split_axes if axis not in left)
        rows = tuple(axis for axis in manual if axis in axes_that_split("rows"))
    plan = MeshPlan(
        mesh=mesh,
        configs=configs,
        batch_axes=rows,
        manual_axes=manual,
        gather_axes=tuple(axis for axis in rows if axis not in axes_that_split("work")),
        pipeline=_pipeline(model, configs),
        model_name=model.name,
        num_blocks=model.num_blocks if isinstance(model, BlockModel) else None,
    )
    context = parallel_context(plan)
    if isinstance(model, BlockModel) and model.parallelize is not None and context.splits_anything:
        model = model.parallelize(context)
    return model, rules, plan


def _pipeline(model: Model | BlockModel, configs: StrategyConfigs) -> Pipeline | None:
    config = configs.get(pipeline.AXIS, PipelineConfig())
    if config.size == 1:
        return None
    if not isinstance(model, BlockModel):
        reason = "is one function. Write it as a BlockModel, or give"
        if has_state(model):
            reason = "keeps a state (init_state), which a BlockModel cannot. Give"
        raise UserError(
            f"strategy.pipe={config.size}: a pipeline needs a BlockModel (embed, block, head), and model "
            f"{model.name!r} {reason} the devices to strategy.data or fsdp."
        )
    return make_pipeline(config, model.num_blocks)


def _sizes(mesh: DeviceMesh) -> dict[str, int]:
    """Returns the sizes of the strategies for a mesh with the runtime's axis names."""
    foreign = [name for name in mesh.axis_names if name not in axis_names()]
    if foreign:
        raise UserError(
            f"The mesh has axes {foreign} that do not belong to any strategy: the runtime's axes are "
            f"{', '.join(axis_names())}. For other names, pass ModelParallel(layout_map=...) or "
            f"DataParallel(device_mesh=...) instead of the mesh."
        )
    return mesh.split_axes


def _as_layout_map(rules: LayoutMap | Mapping[str, Sequence[Any]], mesh: DeviceMesh, match: str) -> LayoutMap:
    if isinstance(rules, LayoutMap):
        return rules
    layout_map = LayoutMap(mesh, match=match)  # pyright: ignore[reportArgumentType]
    for pattern, axes in rules.items():
        layout_map[pattern] = tuple(tuple(entry) if isinstance(entry, list) else entry for entry in axes)
    return layout_map

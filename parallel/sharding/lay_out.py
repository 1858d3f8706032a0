"""From a strategy to the layout of every parameter: the first half of what a step is built from."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import jax

from ...layouts.distribution import Distribution, ModelParallel
from ...layouts.layout_map import LayoutMap, MatchMode
from ...layouts.output_rules import output_rule_problems, output_rules
from ...layouts.problems import LayoutError
from ...layouts.resolve import Indivisible, Unmatched, resolve
from ...mesh.axes import AXES, BATCH_AXES
from ...mesh.device_mesh import DeviceMesh
from ...mesh.errors import UserError
from .. import compression, context, diloco, expert, fsdp, pipeline
from ..blocks import prefetch
from ..data import DataParallelConfig
from ..executor import embed_and_head
from ..model import BlockModel, Model, Params
from ..pipeline import Pipeline, PipelineConfig, make_pipeline
from ..plan import Layouts
from ..precision import FLOAT32, Precision, cast_floats
from ..zero import update_table
from .default_layout import check_layouts, default_layout
from .model_errors import abstract_init, check_groups
from .parallel_context import Parallel
from .stored_order import in_stage_order
from .strategies import StrategyConfigs, read_strategy

StrategyLike: TypeAlias = Mapping[str, Any] | DeviceMesh | Distribution
"""What a strategy may be given as: YAML's mapping, a mesh of the runtime's axes, or a distribution object."""


def abstract_parameters(model: Model | BlockModel, precision: Precision) -> Params:
    """Shapes and dtypes of a model's parameters as they are stored; no array is made.

    Raises:
        ModelError: The model's init cannot be called, raises, or returns what cannot be trained.
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
        UserError: The strategy is not understood.
    """
    meaning = _understand(model, strategy, devices)
    params = abstract_parameters(model, precision)
    check_groups(model, params)
    if meaning.pipeline:
        params = abstract_parameters(in_stage_order(model, meaning.pipeline.stages), precision)
    mesh = meaning.mesh
    if rules is not None and meaning.rules is not None:
        raise UserError("Layout rules were given twice: in ModelParallel's layout_map and as rules. Keep one of them.")
    layout_map = meaning.rules if rules is None else _as_layout_map(rules, mesh, match)
    stacked = isinstance(model, BlockModel)
    of_outputs = output_rules(layout_map)
    named = {axis for layout in (of_outputs or {}).values() for axis in layout.used_axes}
    table = resolve(
        params,
        mesh,
        rules=layout_map,
        default=None
        if meaning.rules is not None
        else default_layout(meaning.model, mesh, meaning.configs, indivisible),
        unmatched=unmatched,
        unmatched_floor_bytes=unmatched_floor_bytes,
        indivisible=indivisible,
        required_axes=[axis for axis in meaning.required_axes if axis not in named],
        fixed_dims=lambda path: int(stacked and path.split("/")[0] == "blocks"),
    )
    layouts = Layouts(
        table=table,
        update_table=update_table(meaning.configs.get("data", DataParallelConfig()), table, stacked=stacked),
        batch_axes=meaning.batch_axes,
        manual_axes=meaning.manual_axes,
        parallel=meaning.parallel,
        configs=meaning.configs,
        pipeline=meaning.pipeline,
        output_rules=of_outputs,
    )
    check_layouts(meaning.model, layouts)
    problems = diloco.check(layouts) + compression.check(layouts) + prefetch.check_place(model, layouts)
    problems += embed_and_head.check(layouts)
    if of_outputs is not None:
        problems += output_rule_problems(of_outputs, layouts.batch_axes, layouts.manual_axes)
    if problems:
        raise LayoutError(problems)
    return layouts


class _Meaning(NamedTuple):
    """What a strategy stands for, for one model.

    Attributes:
        model: the model, its work split where it can split it.
        mesh: the mesh.
        batch_axes: axes of size > 1 over which rows are split.
        manual_axes: axes of size > 1 that the step is manual over.
        parallel: what the model is told of the mesh.
        configs: options of the strategies, sizes worked out.
        rules: rules that the strategy brings along.
        pipeline: the pipeline, if there is one.
    """

    model: Model | BlockModel
    mesh: DeviceMesh
    batch_axes: tuple[str, ...]
    manual_axes: tuple[str, ...]
    parallel: Parallel
    configs: StrategyConfigs
    rules: LayoutMap | None = None
    pipeline: Pipeline | None = None

    @property
    def required_axes(self) -> tuple[str, ...]:
        """Axes that do nothing unless some parameter is laid out over them."""
        used = [axis for axis in self.mesh.axis_names if self.mesh.axis_size(axis) > 1]
        free = {context.AXIS, *(axis for axis in self.batch_axes if axis not in (fsdp.AXIS, expert.AXIS))}
        return tuple(axis for axis in used if axis not in free)


def _understand(model: Model | BlockModel, strategy: StrategyLike, devices: Sequence[str] | None) -> _Meaning:
    if isinstance(strategy, Distribution):
        mesh, name = strategy.device_mesh, strategy.batch_dim_name
        batch_axes = (name,) if name is not None and mesh.axis_size(name) > 1 else ()
        rules = strategy.layout_map if isinstance(strategy, ModelParallel) else None
        return _Meaning(model, mesh, batch_axes, batch_axes, Parallel(), {}, rules)
    if isinstance(strategy, DeviceMesh):
        mesh, configs = strategy, read_strategy(_sizes(strategy))
    else:
        configs = read_strategy(strategy)
        mesh = DeviceMesh.of(devices, **{name: config.size for name, config in configs.items()})
        configs = {name: replace(config, size=mesh.axis_size(name)) for name, config in configs.items()}
    pipe = _pipeline(model, configs)
    parallel = _inside_model(model, configs)
    if isinstance(model, BlockModel) and model.parallelize is not None and parallel.splits_anything:
        model = model.parallelize(parallel)
    inside = [name for name in ("expert", "context", "tensor") if getattr(parallel, name).size > 1]
    rows = (*BATCH_AXES, expert.AXIS) if expert.AXIS in inside else BATCH_AXES
    sizes = {axis: mesh.axis_size(axis) for axis in mesh.axis_names if mesh.axis_size(axis) > 1}
    batch_axes = tuple(axis for axis in sizes if axis in rows)
    manual_axes = tuple(axis for axis in sizes if axis in (pipeline.AXIS, *rows, *inside))
    return _Meaning(model, mesh, batch_axes, manual_axes, parallel, configs, pipeline=pipe)


def _pipeline(model: Model | BlockModel, configs: StrategyConfigs) -> Pipeline | None:
    config = configs.get(pipeline.AXIS, PipelineConfig())
    if config.size == 1:
        return None
    if not isinstance(model, BlockModel):
        raise UserError(
            f"strategy.pipe={config.size}: model {model.name!r} is one function, and a pipeline needs layers to deal "
            "out. Write it as a BlockModel (embed, block, head), or give the devices to strategy.data or fsdp."
        )
    return make_pipeline(config, model.num_blocks)


def _inside_model(model: Model | BlockModel, configs: StrategyConfigs) -> Parallel:
    """The axes that the model splits its own work over; one that cannot leaves them to XLA."""
    given = {name: configs[name] for name in ("tensor", "context", "expert") if name in configs}
    if isinstance(model, BlockModel) and model.parallelize is not None:
        return Parallel(**{name: config for name, config in given.items() if getattr(config, "explicit", True)})
    if "context" in given and given["context"].size > 1:
        raise UserError(
            f"strategy.context={given['context'].size}: model {model.name!r} cannot split the positions of a row. Use "
            "a model with `parallelize`, such as the transformer, or give the devices to strategy.data or fsdp."
        )
    return Parallel()


def _sizes(mesh: DeviceMesh) -> dict[str, int]:
    """The strategies that a mesh with the runtime's axis names stands for."""
    foreign = [name for name in mesh.axis_names if name not in AXES]
    if foreign:
        raise UserError(
            f"The mesh has axes {foreign} that no strategy owns: the runtime's own are {', '.join(AXES)}. For other "
            "names, pass ModelParallel(layout_map=...) or DataParallel(device_mesh=...) instead of the mesh."
        )
    return {name: mesh.axis_size(name) for name in mesh.axis_names if mesh.axis_size(name) > 1}


def _as_layout_map(rules: LayoutMap | Mapping[str, Sequence[Any]], mesh: DeviceMesh, match: str) -> LayoutMap:
    if isinstance(rules, LayoutMap):
        return rules
    layout_map = LayoutMap(mesh, match=match)  # pyright: ignore[reportArgumentType]
    for pattern, axes in rules.items():
        layout_map[pattern] = tuple(tuple(entry) if isinstance(entry, list) else entry for entry in axes)
    return layout_map

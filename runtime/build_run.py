"""Builds a run from its config: data, model, layouts, optimizer and step. No array of the run exists afterwards."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from ..configs.checks import check_devices
from ..configs.config_paths import is_schedule_file
from ..configs.config_text import as_plain
from ..configs.elastic import fit_to_devices
from ..configs.schema import Config, RunConfig
from ..data.batches import abstract_batch, check_enough, check_layout
from ..data.source import take
from ..data.splits import Splits, open_splits
from ..data.value_ranges import Limit, Limits, check_splits
from ..mesh.axes import physical_order
from ..mesh.devices import device_name, simulate
from ..mesh.errors import UserError
from ..mesh.files import below_root
from ..mesh.targets import has_compiler
from ..models.catalog import MODELS, load_model
from ..models.frozen import freeze, frozen_paths
from ..models.lora import frozen_by_lora
from ..parallel.model import BlockModel, Model
from ..parallel.options import Precision
from ..parallel.plan import ShardingPlan, StepOptions
from ..parallel.sharding.batch_rows import check_rows
from ..parallel.sharding.lay_out import abstract_parameters, lay_out
from ..parallel.step.build import build_step
from ..parallel.step.model_functions import check_functions
from ..parallel.step.train_step import Step
from ..training.callbacks.callback_catalog import make_callbacks
from ..training.callbacks.rate_factor import adjustable
from ..training.optimizing.optimizers import make_optimizer
from .compilation import XlaOptions, xla_options
from .model_check import check_contract


class Built(NamedTuple):
    """A run that is ready to start: its model is checked, and nothing is compiled for its mesh.

    Attributes:
        config: The configuration; the sizes of its strategy are those of the mesh (see configs/elastic.py).
        splits: The training and evaluation examples.
        model: The model.
        layouts: The layouts of its parameters.
        step: The training step.
        batch: Shapes and dtypes of a global batch.
        re_formed: The difference between the mesh and the configured one, as text, or "".
    """

    config: Config
    splits: Splits
    model: Model | BlockModel
    layouts: ShardingPlan
    step: Step
    batch: dict[str, jax.ShapeDtypeStruct]
    re_formed: str = ""

    @property
    def xla(self) -> XlaOptions:
        """XLA's options for the step."""
        return xla_options(self.config.run.xla, self.step.plan)

    @property
    def notes(self) -> tuple[str, ...]:
        """Differences between its program and that of other devices, one line each."""
        return (*filter(None, [self.re_formed]), *self.layouts.notes)

    @property
    def limits(self) -> Limits:
        """The token ids and classes that the model accepts."""
        return model_limits(self.config.model, self.splits.vocabulary)


def prepare_devices(run: RunConfig, precision: Precision, simulate_instead: int | None = None) -> None:
    """Configures what JAX reads only once, before it opens a device: simulated devices and 64-bit types.

    Args:
        run: The section `run`.
        precision: The section `precision`.
        simulate_instead: The number of CPU devices to simulate in place of `run.simulate`, if any.
    """
    if precision.needs_x64:
        jax.config.update("jax_enable_x64", True)
    if devices := simulate_instead or run.simulate:
        simulate(devices)


def build(config: Config, *, splits: Splits | None = None, devices: Sequence[str] | None = None) -> Built:
    """Builds a run from its config.

    Args:
        config: The run's configuration.
        splits: Examples that replace the configured ones.
        devices: Names of the devices of the mesh; all devices by default.

    Raises:
        ConfigError: The strategy or the batch does not fit the devices.
        ModelError: The model's functions cannot be called as a run calls them.
        ContractError: The user's own model violates the contract, and `model.check` is `error`.
        UserError: Something else does not fit (LayoutError for the layouts); nothing was started.
        BadDataError: Data in memory holds a value that the model does not accept.
    """
    splits = splits or open_splits(config.data, config.run.search_path, config.train.global_batch)
    model = freeze(configured_model(config, splits), config.optimizer.freeze)
    check_splits(splits, model_limits(config.model, splits.vocabulary))
    available = len(devices) if devices else jax.device_count()  # not earlier: errors above need no device
    config, used, re_formed = fit_to_devices(config, available, 1 if devices else jax.process_count())
    if used < available:
        devices = devices[:used] if devices else choose_evenly(used)
    train, can_simulate = config.train, devices is None and jax.process_count() == 1
    check_devices(config.strategy, train, config.layouts.rules, used, can_simulate=can_simulate)
    check_enough(splits.train, train.global_batch)
    layouts, step = plan_step(config, model, devices)
    without_devices = layouts.mesh.target is not None and not has_compiler(layouts.mesh.target)
    sharding, global_batch = layouts.batch_sharding(abstract=without_devices), train.global_batch
    batch = abstract_batch(splits.train, global_batch, sharding)
    if config.data.layout:
        for source in splits.by_name().values():
            check_layout(source, global_batch, sharding, config.data.layout)
    runs = check_functions(model, step, batch, evaluates=splits.evaluation is not None)
    if runs and layouts.mesh.target is None:
        check_contract(config.model, model, splits.train, seed=config.run.seed, shuffle=config.data.shuffle)
    return Built(config, splits, model, layouts, step, batch, re_formed)


def plan_step(
    config: Config, model: Model | BlockModel, devices: Sequence[str] | None = None
) -> tuple[ShardingPlan, Step]:
    """Lays out a model and composes its step from shapes; touches no device if they are named.

    Args:
        config: The run's configuration.
        model: The model.
        devices: Names of the devices of the mesh, which need not exist; all devices by default.

    Raises:
        UserError: The strategy, the layouts or the optimizer is invalid.
    """
    layouts = plan_layouts(config, model, devices)
    train, ema = config.train, config.optimizer.ema
    check_rows(layouts, train.global_batch, train.accumulate)
    if ema.decay and layouts.local_steps:
        raise UserError(
            f"optimizer.ema.decay={ema.decay} with strategy.data.local_steps={layouts.local_steps}: each group's "
            "optimizer would average its own copy, and the shared parameters, which are evaluated, are means over "
            "groups already. Set optimizer.ema.decay=0, or strategy.data.local_steps=0."
        )
    optimizer = make_optimizer(
        config.optimizer,
        train.steps,
        abstract_parameters(model, config.precision),
        max_skips=train.max_skips,
        stacked=isinstance(model, BlockModel),
        search_path=config.run.search_path,
        frozen=layouts.frozen,
        around=adjustable if changes_learning_rate(configured_callbacks(config)) else lambda optimizer: optimizer,
    )
    accumulates = replace(layouts, options=StepOptions(accumulate=train.accumulate))  # which decides on XLA's options
    step = build_step(
        model,
        optimizer,
        layouts,
        accumulate=train.accumulate,
        clip_norm=train.clip_norm,
        remat=train.remat,
        precision=config.precision,
        xla=xla_options(config.run.xla, accumulates).used,
    )
    return layouts, step


def plan_layouts(config: Config, model: Model | BlockModel, devices: Sequence[str] | None = None) -> ShardingPlan:
    """Lays out a model, as the first half of `plan_step`.

    Args:
        config: The run's configuration.
        model: The model.
        devices: Names of the devices of the mesh, which need not exist; all devices by default.

    Raises:
        UserError: The strategy or the layouts are invalid.
    """
    params = abstract_parameters(model, config.precision)
    return lay_out(
        model,
        strategy_from_root(config.strategy, config.run.root),
        rules=config.layouts.rules or None,
        match=config.layouts.match,
        unmatched=config.layouts.unmatched,
        unmatched_floor_bytes=config.layouts.unmatched_floor,
        indivisible=config.layouts.indivisible,
        precision=config.precision,
        devices=devices,
        frozen=frozen_paths(config.optimizer.freeze, params) | frozen_by_lora(config.model, params),
    )


def configured_model(config: Config, splits: Splits) -> Model | BlockModel:
    """Returns the model that a config names, with the sizes that follow from the data."""
    return load_model(
        config.model,
        **data_facts(splits, config.data.length),
        search_path=config.run.search_path,
        example=lambda: first_row(splits),
    )


def configured_callbacks(config: Config) -> dict[str, Any]:
    """Returns name -> new instance of the callbacks of a config; opens and writes nothing.

    Raises:
        UserError: The user's own function is missing, has other options, fails, or returns no callback.
    """
    offered = {"config": as_plain(config), "num_steps": config.train.steps}
    return make_callbacks(config.callbacks, offered, config.run.search_path)


def changes_learning_rate(callbacks: Mapping[str, Any]) -> bool:
    """Returns True if a callback changes the learning rate; the optimizer's state then holds a factor."""
    return any(getattr(callback, "changes_learning_rate", False) for callback in callbacks.values())


def model_limits(model: Mapping[str, Any], vocabulary: int | None) -> Limits:
    """Returns the token ids and classes that a model accepts.

    Integer inputs are token ids if there is a vocabulary. The meaning of targets is known only for the models of the
    catalog.

    Args:
        model: The section `model`.
        vocabulary: The number of token ids of the data, or None.
    """
    numbers = {f"model.{name}": model.get(name) for name in ("vocabulary", "classes")}
    known = {key: Limit(key, value) for key, value in numbers.items() if isinstance(value, int) and value > 0}
    tokens = Limit("vocabulary", vocabulary) if vocabulary else known.get("model.vocabulary")
    if model["name"] not in MODELS:
        return Limits(inputs=tokens)
    is_classifier = model["name"] == "mlp"
    return Limits(targets=known.get("model.classes")) if is_classifier else Limits(inputs=tokens, targets=tokens)


def data_facts(splits: Splits, length: int) -> dict[str, int]:
    """Returns the sizes of a model that follow from the data: `vocabulary`, `length` and `features`, if known."""
    inputs = splits.train[0].get("inputs")
    numbers = inputs is not None and inputs.ndim == 1 and inputs.dtype.kind == "f"
    features = inputs.shape[-1] if inputs is not None and numbers else None
    facts = {"vocabulary": splits.vocabulary, "length": length, "features": features}
    return {name: int(value) for name, value in facts.items() if value}


def first_row(splits: Splits) -> dict[str, Any]:
    """Returns a batch that contains only the first training example."""
    return {**take(splits.train, np.zeros(1, np.int64)), "example": np.zeros(1, np.int32)}


def strategy_from_root(strategy: Mapping[str, Any], root: str) -> dict[str, Any]:
    """Returns a strategy in which the CSV file of a schedule starts from `run.root`."""
    pipe = strategy.get("pipe")
    if pipe is None or not is_schedule_file(pipe.schedule):
        return dict(strategy)
    return {**strategy, "pipe": replace(pipe, schedule=below_root(pipe.schedule, root))}


def choose_evenly(number: int) -> list[str]:
    """Returns names of some of all devices, equally many of each process, in physical order.

    Args:
        number: A multiple of the number of processes.
    """
    each = number // jax.process_count()
    taken: dict[int, int] = {}
    names = []
    for device in physical_order(jax.devices()):
        taken[device.process_index] = taken.get(device.process_index, 0) + 1
        if taken[device.process_index] <= each:
            names.append(device_name(device))
    return names

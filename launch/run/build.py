"""From a config to everything a run is made of, each line a whole idea: data, model, layouts, optimizer, step."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from ...configs import paths
from ...configs.checks import check_devices
from ...configs.elastic import fit_to_devices
from ...configs.not_finite import optimizer_of
from ...configs.paths import below_root, is_schedule_file
from ...configs.schema import Config
from ...data.batches import abstract_batch, check_enough, check_layout
from ...data.ranges import check_splits
from ...data.source import take
from ...data.splits import Splits, open_splits
from ...mesh.compat import Device, backend_started
from ...mesh.devices import device_name
from ...mesh.errors import UserError
from ...mesh.ordering import physical_order
from ...mesh.processes import tell
from ...mesh.simulate import simulate
from ...models.catalog import load_model
from ...models.frozen import freeze, frozen_paths
from ...models.lora import frozen_by_lora
from ...parallel.model import BlockModel, Model
from ...parallel.plan import ShardingPlan
from ...parallel.sharding.batch_rows import check_rows
from ...parallel.sharding.lay_out import abstract_parameters, lay_out
from ...parallel.step.build import build_step
from ...parallel.step.train_step import Step
from ...training.callbacks.rate_factor import adjustable
from ...training.optimizing.optimizers import make_optimizer
from ...training.worker import simulated_by_job
from ..compiling.cache import Place, notes_folder, open_cache
from ..compiling.flags import check_flags
from ..compiling.options import XlaOptions, xla_options
from .callbacks import changes_learning_rate
from .guarding.limits import data_limits
from .guarding.model_check import check_contract, check_functions


class Built(NamedTuple):
    """A run that is ready to start: its model is checked, nothing has been compiled for its mesh, no array exists.

    Attributes:
        config: what it was built from; the sizes of its strategy are those of the mesh (see configs/elastic.py).
        splits: training and evaluation examples.
        model: the model.
        layouts: where its parameters live.
        step: the training step.
        batch: shapes and dtypes of a global batch.
        re_formed: how the mesh differs from the one configured, for people; "" where it does not.
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
        """What XLA is told of the step beside its program."""
        return xla_options(self.config.run.xla, self.layouts.platform)


def prepare_devices(config: Config) -> None:
    """Settles what JAX decides only once, before anything touches a device: simulated devices and 64-bit types.

    Raises:
        UserError: XLA_FLAGS name something that XLA does not know.
    """
    if config.precision.needs_x64:
        jax.config.update("jax_enable_x64", True)
    devices = simulated_by_job() or config.run.simulate
    if not backend_started():
        check_flags(os.environ, notes_folder(config.run.cache))
    if devices:
        simulate(devices)


def keep_compiled(config: Config) -> Place:
    """Lets JAX keep compiled programs where the config says; every process of a run calls it once they have met."""
    return open_cache(config, simulated_by_job() or config.run.simulate, tell)


def build(
    config: Config,
    *,
    splits: Splits | None = None,
    model: Model | BlockModel | None = None,
    devices: Sequence[str] | None = None,
) -> Built:
    """Builds a run from its config.

    Args:
        config: The config.
        splits: Examples in place of those that the config names.
        model: A model in place of the config's.
        devices: Names of the devices of the mesh; all by default.

    Raises:
        ConfigError: The strategy or the batch does not fit the devices that there are.
        ModelError: The model's functions cannot be called as a run calls them.
        ContractError: The user's own model breaks the contract, under `model.check: error`.
        UserError: Something else does not fit (LayoutError where it is the layouts); nothing was started.
        BadDataError: Data in memory holds a value that the model does not take.
    """
    splits = splits or open_splits(config.data, search_path(config))
    model = freeze(model or configured_model(config, splits), config.optimizer.freeze)
    check_splits(splits, data_limits(config, splits))
    there_are = len(devices) if devices else jax.device_count()  # not before: mistakes are told without a device
    config, used, re_formed = fit_to_devices(config, there_are, 1 if devices else jax.process_count())
    if used < there_are:
        devices = devices[:used] if devices else evenly_chosen(used)
    check_devices(config, used)
    check_enough(splits.train, config.train.global_batch)
    layouts, step = plan_step(config, model, devices)
    placed = config.train.global_batch, layouts.batch_sharding()
    batch = abstract_batch(splits.train, *placed)
    for source in (splits.train, splits.evaluation):
        if source is not None and config.data.layout:
            check_layout(source, *placed, config.data.layout)
    if check_functions(model, step, batch, evaluates=splits.evaluation is not None):
        check_contract(config, model, splits.train, own_device(layouts))
    return Built(config, splits, model, layouts, step, batch, re_formed)


def plan_step(
    config: Config, model: Model | BlockModel, devices: Sequence[str] | None = None
) -> tuple[ShardingPlan, Step]:
    """Lays a model out and composes its step, from shapes alone: no device is touched where they are named.

    Args:
        config: The config.
        model: The model.
        devices: Names of the devices of the mesh, which need not exist; all that there are by default.

    Raises:
        UserError: The strategy, the layouts or the optimizer do not work out.
    """
    layouts = plan_layouts(config, model, devices)
    params = abstract_parameters(model, config.precision)
    check_rows(layouts, config.train.global_batch, config.train.accumulate)
    check_averages(config, layouts)
    optimizer = make_optimizer(
        optimizer_of(config),
        config.train.steps,
        params,
        stacked=isinstance(model, BlockModel),
        search_path=search_path(config),
        frozen=frozen_of(config, params),
        around=adjustable if changes_learning_rate(config) else lambda optimizer: optimizer,
    )
    step = build_step(
        model,
        optimizer,
        layouts,
        accumulate=config.train.accumulate,
        clip_norm=config.train.clip_norm,
        remat=config.train.remat,
        precision=config.precision,
        xla=xla_options(config.run.xla, layouts.platform).used,
    )
    return layouts, step


def check_averages(config: Config, layouts: ShardingPlan) -> None:
    """Refuses averages of parameters of which each group has its own.

    Raises:
        UserError: There would be some.
    """
    if config.optimizer.ema.decay and layouts.local_steps:
        raise UserError(
            f"optimizer.ema.decay={config.optimizer.ema.decay} with strategy.data.local_steps={layouts.local_steps}: "
            "each group's optimizer would average a copy of its own, and the shared parameters, which are evaluated, "
            "are means over groups already. Set optimizer.ema.decay=0, or strategy.data.local_steps=0."
        )


def plan_layouts(config: Config, model: Model | BlockModel, devices: Sequence[str] | None = None) -> ShardingPlan:
    """Lays a model out as a config says; the first half of `plan_step`.

    Args:
        config: The config.
        model: The model.
        devices: Names of the devices of the mesh, which need not exist; all that there are by default.

    Raises:
        UserError: The strategy or the layouts do not work out.
    """
    return lay_out(
        model,
        strategy_from_root(config),
        rules=config.layouts.rules or None,
        match=config.layouts.match,
        unmatched=config.layouts.unmatched,
        unmatched_floor_bytes=config.layouts.unmatched_floor,
        indivisible=config.layouts.indivisible,
        precision=config.precision,
        devices=devices,
        frozen=frozen_of(config, abstract_parameters(model, config.precision)),
    )


def frozen_of(config: Config, params: Any) -> frozenset[str]:
    """The paths of the parameters that a config leaves as they are, of these shapes."""
    return frozen_paths(config.optimizer.freeze, params) | frozen_by_lora(config.model, params)


def evenly_chosen(number: int) -> list[str]:
    """Some of all devices by name, as many of each process, in physical order.

    Args:
        number: A multiple of the number of processes.
    """
    each, chosen = number // jax.process_count(), physical_order(jax.devices())
    taken: dict[int, int] = {}
    names = []
    for device in chosen:
        taken[device.process_index] = taken.get(device.process_index, 0) + 1
        if taken[device.process_index] <= each:
            names.append(device_name(device))
    return names


def own_device(layouts: ShardingPlan) -> Device:
    """The first device of a mesh that this process holds."""
    devices = layouts.mesh.backend_mesh.devices.flat
    return next(device for device in devices if device.process_index == jax.process_index())


def configured_model(config: Config, splits: Splits) -> Model | BlockModel:
    """The model that a config names, with what the data says about its sizes."""
    return load_model(
        config.model,
        **data_facts(config, splits),
        search_path=search_path(config),
        example=lambda: first_row(splits),
    )


def first_row(splits: Splits) -> dict[str, Any]:
    """A batch of the first training example alone."""
    return {**take(splits.train, np.zeros(1, np.int64)), "example": np.zeros(1, np.int32)}


def data_facts(config: Config, splits: Splits) -> dict[str, int]:
    """What the data says about the sizes of a model: those that it knows of `vocabulary`, `length` and `features`."""
    facts = {"vocabulary": splits.vocabulary, "length": config.data.length, "features": _features(splits)}
    return {name: int(value) for name, value in facts.items() if value}


def search_path(config: Config) -> tuple[Path, ...]:
    """Where files and the user's own modules are: below run.root; a module, then, in the working directory."""
    return paths.search_path(config.run.root)


def strategy_from_root(config: Config) -> dict[str, Any]:
    """The strategy of a config; the CSV file of a schedule starts from run.root."""
    strategy = dict(config.strategy)
    pipe = strategy.get("pipe")
    if pipe is not None and is_schedule_file(pipe.schedule):
        strategy["pipe"] = replace(pipe, schedule=below_root(pipe.schedule, config.run.root))
    return strategy


def _features(splits: Splits) -> int | None:
    """Values in the inputs of an example, where these are numbers and not tokens."""
    inputs = splits.train[0].get("inputs")
    return inputs.shape[-1] if inputs is not None and inputs.ndim == 1 and inputs.dtype.kind == "f" else None

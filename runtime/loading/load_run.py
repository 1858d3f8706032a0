"""`load_run`: the model of a run with its parameters, on any mesh, whatever mesh trained it.

    run = spmdkit.load_run("runs/one")
    run.evaluate()                      {"loss": 1.43}
    run.predict({"inputs": x})          a row for each row of x

    directory -> config.yaml -> model (with the sizes in the checkpoint) -> strategy fitted to the devices -> layouts
              -> checkpoint: its parameters, and nothing else of the state

The data is opened on first use: predictions and generation do not need it.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import jax

from ...checkpoints.damage import CheckpointError, DamagedCheckpoint
from ...checkpoints.restore import StoredCheckpoint
from ...configs.load import ON_COMMAND_LINE, load_config
from ...configs.schema import Config, RunConfig, Timeouts
from ...data.config import FILE_SOURCES
from ...mesh.compat import backend_started
from ...mesh.processes import broadcast_text
from ...parallel.options import Precision
from ..build_run import prepare_devices
from ..compilation import open_cache
from ..process_check import SEE_SECONDS, wait_until_visible
from ..provenance import changed_model
from .find_run import FoundRun, find_run
from .fitting import devices_of, fit_given, fit_own
from .loaded_run import LoadedRun as LoadedRun

AGREEMENTS = count(1)
"""Numbers of the agreements of processes, which all load equally often, in the same order."""
Join = Callable[[Timeouts, str], AbstractContextManager[None]]
"""Joins the other processes of a command, for a `with` block."""
IN_CHANGES = "in changes"
"""The place of the key=value arguments of `load_run`, for messages."""


def load_run(
    dir: str | Path,
    step: int | None = None,
    mesh: Mapping[str, Any] | None = None,
    *,
    changes: Sequence[str] = (),
    ema: bool = False,
) -> LoadedRun:
    """Loads a run: its model, and its parameters from a checkpoint. Only reads the run directory, which may be in use.

    Args:
        dir: The run directory (`run.dir`), the directory of one of its checkpoints, or the YAML file that trained it.
        step: The step of the checkpoint; the latest by default.
        mesh: Mesh axes and their sizes, like `strategy` in YAML: {"fsdp": 8}; may use fewer devices than available.
            None = the run's own strategy, fitted to all devices (see `fitting`).
        changes: `key=value` overrides of the config: "data.eval_files=[new/*.txt]".
        ema: Load the averages that the run kept (`optimizer.ema`) instead of the parameters.

    Returns:
        The loaded run. If the run was simulated and JAX has not opened devices yet, as many are simulated; for
        parameters in float64, 64-bit types are enabled.

    Raises:
        UserError: The run, the checkpoint or the mesh does not exist; the checkpoint is corrupt (the message names the
            others) or does not fit the config; or the model's own code is missing.
        CheckpointUnavailable: The machine or the file system prevents reading the checkpoint.
    """
    place = find_run(dir, step, changes, IN_CHANGES)
    config = read_config(place, changes, IN_CHANGES)
    open_devices(config.run, config.precision, mesh)
    return _load(place, config, mesh, changes, ema=ema)


@contextmanager
def loaded(
    given: str, step: int | None, changes: Sequence[str], *, ema: bool, join: Join, simulate: int | None = None
) -> Iterator[LoadedRun]:
    """Loads a run for a command, which may be one of several processes; `strategy` among the changes is its mesh.

    Args:
        given: The run, as `dir` of `load_run`.
        step: The step of the checkpoint; the latest by default.
        changes: `key=value` arguments.
        ema: See `load_run`.
        join: Joins the other processes, given the timeouts and the directory of the run.
        simulate: The number of CPU devices to simulate in place of `run.simulate`, if any.

    Raises:
        UserError: See `load_run`.
    """
    place = find_run(given, step, changes)
    config = read_config(place, changes)
    mesh = config.strategy if _names("strategy", changes) else None
    open_devices(config.run, config.precision, mesh, simulate)
    with join(config.timeouts, str(place.found.run)):
        open_cache(config.run, config.timeouts.rendezvous)
        yield _load(place, config, mesh, changes, ema=ema)


def read_config(place: FoundRun, changes: Sequence[str] = (), source: str = ON_COMMAND_LINE) -> Config:
    """Returns the config of a run with overrides; does not compare its sizes with devices.

    If `data.files` is overridden without an evaluation split, all of the new files are evaluated.

    Raises:
        ConfigError: The config or an override is invalid.
    """
    config = load_config(place.config, changes, sizes=False, place=source)
    data = config.data
    split_again = _names("data.eval_files", changes) or _names("data.eval_fraction", changes)
    if _names("data.files", changes) and data.source in FILE_SOURCES and not split_again:
        data = replace(data, eval_files=data.files)
    return replace(config, data=data, run=replace(config.run, dir=str(place.found.run)))


def open_devices(
    run: RunConfig, precision: Precision, mesh: Mapping[str, Any] | None, simulate: int | None = None
) -> None:
    """Prepares devices like those of the run, including simulated ones, unless JAX has already opened devices."""
    simulated = max(run.simulate, devices_of(mesh)) if mesh and run.simulate else run.simulate
    if backend_started():
        simulated, simulate = 0, None
    prepare_devices(replace(run, simulate=simulated), precision, simulate)


def agree_on_checkpoint(place: FoundRun, seconds: float) -> Path:
    """Returns the directory of the checkpoint to load; every process of the command calls this.

    Args:
        place: The run, as this process sees it.
        seconds: Seconds to wait for process 0.

    Returns:
        The requested checkpoint, or the latest one that process 0 sees.

    Raises:
        CheckpointError: There is none, or this process does not see that of process 0 within a minute.
        ProcessesMissing: Process 0 did not answer.
    """
    if place.found.chosen is not None or jax.process_count() == 1:
        return place.found.one
    steps = place.found.contents.steps
    latest = str(steps[-1]) if steps else ""
    name = broadcast_text(f"the checkpoint to load/{next(AGREEMENTS)}", latest, seconds=seconds)
    if not name:
        raise CheckpointError(f"No complete checkpoint in {place.found.checkpoints}, as rank 0 sees it.")
    folder = place.found.checkpoints / name
    if not wait_until_visible(folder.is_dir, folder.parent, SEE_SECONDS):
        raise CheckpointError(
            f"Rank 0 loads the checkpoint {folder}, and rank {jax.process_index()} sees none there. Give a path on a "
            "file system that all hosts mount, under the same name."
        )
    return folder


def _load(
    place: FoundRun, config: Config, mesh: Mapping[str, Any] | None, changes: Sequence[str], *, ema: bool
) -> LoadedRun:
    """Loads a checkpoint on a mesh; None = the run's own strategy, fitted to the devices."""
    folder = agree_on_checkpoint(place, config.timeouts.rendezvous)
    try:
        stored = StoredCheckpoint(folder)
        devices, processes = jax.device_count(), jax.process_count()
        if mesh is not None:
            fitted = fit_given(mesh, devices, processes)
        else:
            fitted = fit_own(config.strategy, stored.mesh, devices, processes)
        run = LoadedRun(place.found.run, stored, config, fitted, own_data=not _names("data", changes), ema=ema)
    except CheckpointError as error:
        if not folder.is_dir():
            raise CheckpointError(
                f"The checkpoint {folder} was removed while it was read: its run goes on, and keeps the latest "
                f"checkpoint.keep={config.checkpoint.keep}. Load the latest, or copy the one you want first."
            ) from error
        others = [str(step) for step in place.found.contents.steps if str(step) != folder.name]
        if not isinstance(error, DamagedCheckpoint) or not others:
            raise
        raise DamagedCheckpoint(
            f"{error} There are others, of the steps {', '.join(others)}: load one with step={others[-1]} (on the "
            f"command line --step {others[-1]})."
        ) from error
    if changed := changed_model(place.found.run, str(config.model["name"])):
        warnings.warn(changed, stacklevel=3)
    return run


def _names(key: str, changes: Sequence[str]) -> bool:
    """Returns True if an override names a key, a part of it, or a section that contains it."""
    given = [change.partition("=")[0].strip() for change in changes]
    return any(f"{each}.".startswith(f"{key}.") or f"{key}.".startswith(f"{each}.") for each in given)

"""`load_run`: the model of a run with its parameters, on any mesh, whatever mesh trained it.

    run = spmdkit.load_run("runs/one")
    run.evaluate()                      {"loss": 1.43}
    run.predict({"inputs": x})          a row for each row of x

    folder -> config.yaml -> model (sizes as the checkpoint says) -> strategy fitted to the devices -> layouts
           -> checkpoint: its parameters, and nothing else of the state

The data is opened when it is asked for: to predict or to generate, none has to be there.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from ...configs.load import ON_COMMAND_LINE, load_config
from ...configs.schema import Config
from ...data.config import FILE_SOURCES
from ...data.splits import open_splits
from ...mesh.compat import backend_started
from ...training.checkpointing.errors import CheckpointError, DamagedCheckpoint
from ...training.worker import multi_process
from ..inspection.stored import StoredCheckpoint
from ..run.build import data_facts, keep_compiled, prepare_devices, search_path
from ..run.directory.provenance import changed_model
from .agreed import agreed_checkpoint
from .fitting import devices_of, fit_given, fit_own
from .loaded_run import LoadedRun as LoadedRun
from .place import Place, find_run

TRIES = 3
"""How often the newest checkpoint is looked for, where the run goes on and removes it meanwhile."""
IN_CHANGES = "in changes"
"""Where the key=value of `load_run` stand, for messages."""


def load_run(
    dir: str | Path,
    step: int | None = None,
    mesh: Mapping[str, Any] | None = None,
    *,
    changes: Sequence[str] = (),
    ema: bool = False,
) -> LoadedRun:
    """Loads a run: its model, and its parameters from a checkpoint. The run's folder is only read, and may be in use.

    Args:
        dir: The folder of the run (`run.dir`) or of one of its checkpoints; or the YAML file it was trained with.
        step: Of the checkpoint; the newest by default.
        mesh: Mesh axes and their sizes, as `strategy` in YAML: {"fsdp": 8}, of as many devices as there are or fewer.
            None = the run's own strategy, fitted to all devices that there are (see `fitting`).
        changes: `key=value`, laid over the config as on the command line: "data.eval_files=[new/*.txt]".
        ema: Take the averages that the run kept (`optimizer.ema`) in place of the parameters.

    Returns:
        The loaded run. Where the run was simulated and JAX has opened no devices yet, as many are simulated again; for
        parameters in float64, 64-bit types are switched on.

    Raises:
        UserError: There is no such run, checkpoint or mesh; the checkpoint is damaged (the message names the others)
            or does not fit the config; or the model's own code is not found.
        CheckpointUnavailable: The machine or the file system does not let the checkpoint be read.
    """
    place = find_run(dir, step, changes, IN_CHANGES)
    config = read_config(place, changes, IN_CHANGES)
    open_devices(config, mesh)
    return _load(dir, step, mesh, changes, place, config, ema)


@contextmanager
def loaded(given: str, step: int | None, changes: Sequence[str], *, ema: bool = False) -> Iterator[LoadedRun]:
    """Loads a run for a command, which may be one of several processes; `strategy` among the changes is its mesh.

    Raises:
        UserError: As `load_run`.
    """
    place = find_run(given, step, changes)
    config = read_config(place, changes)
    mesh = config.strategy if _names("strategy", changes) else None
    open_devices(config, mesh)
    with multi_process(config.timeouts, str(place.found.run)):
        keep_compiled(config)
        yield _load(given, step, mesh, changes, place, config, ema)


def read_config(place: Place, changes: Sequence[str] = (), said: str = ON_COMMAND_LINE) -> Config:
    """The config of a run, with changes laid over it; no sizes are compared with devices.

    Data in other files is evaluated whole: where `data.files` changes and nothing is said of an evaluation split, all
    of it is that.

    Raises:
        ConfigError: The config or a change cannot be read.
    """
    config = load_config(place.config, changes, sizes=False, said=said)
    data = config.data
    split_again = _names("data.eval_files", changes) or _names("data.eval_fraction", changes)
    if _names("data.files", changes) and data.source in FILE_SOURCES and not split_again:
        data = replace(data, eval_files=data.files)
    return replace(config, data=data, run=replace(config.run, dir=str(place.found.run)))


def open_devices(config: Config, mesh: Mapping[str, Any] | None) -> None:
    """Opens devices as the run did, simulated ones too, unless JAX has opened some already."""
    if config.precision.needs_x64:
        jax.config.update("jax_enable_x64", True)
    if backend_started():
        return
    simulated = max(config.run.simulate, devices_of(mesh)) if mesh and config.run.simulate else config.run.simulate
    prepare_devices(replace(config, run=replace(config.run, simulate=simulated)))


def _load(
    given: str | Path,
    step: int | None,
    mesh: Mapping[str, Any] | None,
    changes: Sequence[str],
    place: Place,
    config: Config,
    ema: bool,
) -> LoadedRun:
    """Loads a checkpoint; where it is the newest that is wanted and a run removes it meanwhile, the next.

    Of several processes none tries again: the others may have read it before it was removed.
    """
    for last in (*[False] * (TRIES - 1), True):
        folder = agreed_checkpoint(place, config.timeouts.rendezvous)
        try:
            stored = StoredCheckpoint(folder)
            return _built(place, stored, config, mesh, own_data=not _names("data", changes), ema=ema)
        except CheckpointError as error:
            if folder.is_dir():
                told = _with_others(error, place, folder)
                if told is error:
                    raise
                raise told from error
            if last or step is not None or jax.process_count() > 1:
                raise CheckpointError(
                    f"The checkpoint {folder} was removed while it was read: its run goes on, and keeps the newest "
                    f"checkpoint.keep={config.checkpoint.keep}. Load the newest, or copy the one you want first."
                ) from error
            place = find_run(given, step, changes)
    raise AssertionError("the last try returns or raises")


def _built(
    place: Place, stored: StoredCheckpoint, config: Config, mesh: Mapping[str, Any] | None, **options: bool
) -> LoadedRun:
    devices, processes = jax.device_count(), jax.process_count()
    if mesh is not None:
        fitted = fit_given(mesh, devices, processes)
    else:
        fitted = fit_own(config.strategy, devices, processes, stored.about.get("mesh", stored.mesh))
    run = LoadedRun(place, stored, config, fitted, _facts(place, stored), **options)
    changed = changed_model(place.found.run, str(config.model["name"]))
    if changed:
        warnings.warn(changed, stacklevel=4)
    return run


def _facts(place: Place, stored: StoredCheckpoint) -> dict[str, int]:
    """What the run's data said about the sizes of its model; checkpoints of earlier versions did not note it."""
    noted = stored.about.get("data")
    if isinstance(noted, dict):
        return {name: int(value) for name, value in noted.items()}
    own = read_config(place)
    return data_facts(own, open_splits(own.data, search_path(own)))


def _with_others(error: CheckpointError, place: Place, folder: Path) -> CheckpointError:
    """The error of a damaged checkpoint, with the steps that there are besides."""
    others = [str(step) for step in place.found.contents.steps if str(step) != folder.name]
    if not isinstance(error, DamagedCheckpoint) or not others:
        return error
    return DamagedCheckpoint(
        f"{error} There are others, of the steps {', '.join(others)}: load one with step={others[-1]} (on the command "
        f"line --step {others[-1]})."
    )


def _names(key: str, changes: Sequence[str]) -> bool:
    """Whether changes say something of a key, of one below it or of all that it is below."""
    given = [change.partition("=")[0].strip() for change in changes]
    return any(f"{each}.".startswith(f"{key}.") or f"{key}.".startswith(f"{each}.") for each in given)

"""`spmdkit checkpoint fits`: could a config go on from a checkpoint? Asked of shapes alone, on no accelerator.

The same comparison is made by a run that resumes, before it compiles anything.
"""

from math import prod
from typing import Any

import jax

from ...configs.checks import REST, axis_sizes
from ...configs.schema import Config
from ...data.splits import open_splits
from ...layouts.paths import leaves_with_paths
from ...mesh.compat import backend_started
from ...parallel.sharding.stored_order import stored_order
from ...training.checkpointing.errors import differences, mismatch
from ..run.build import configured_model, plan_step, search_path
from .stored import StoredCheckpoint


def check_fits(stored: StoredCheckpoint, config: Config) -> dict[str, Any]:
    """Compares the arrays of a checkpoint with those that a run of a config would restore.

    Args:
        stored: The checkpoint.
        config: The config; its data is opened, as sizes of the model follow from it.

    Returns:
        Plain values: `arrays` and `bytes` of the checkpoint, `saved_on` and `restored_on` (mesh axis -> size, of those
        over 1).

    Raises:
        CheckpointError: They differ; every path that is missing, extra, or of another shape or dtype is named.
        UserError: The config does not work out.
    """
    wanted, mesh = abstract_arrays(config, stored.about.get("devices"))
    problems = differences(wanted, stored.arrays)
    if problems:
        raise mismatch(stored.folder, problems)
    return {
        "arrays": len(stored.arrays),
        "bytes": sum(array.nbytes for array in stored.arrays.values()),
        "saved_on": stored.about.get("mesh", stored.mesh),
        "restored_on": mesh,
    }


def abstract_arrays(config: Config, saved_devices: int | None = None) -> tuple[dict[str, Any], dict[str, int]]:
    """The arrays of a run as checkpoints hold them: path -> shape and dtype; and its mesh, of devices by name alone.

    Args:
        config: The config.
        saved_devices: Where the strategy takes the rest of the devices (-1), and `run.simulate` does not say how many
            there are: so many, if they divide.

    Raises:
        UserError: The config does not work out.
    """
    if not backend_started():
        jax.config.update(
            "jax_platforms", "cpu"
        )  # a model's own code may make arrays: no accelerator is taken for them
    if config.precision.needs_x64:
        jax.config.update("jax_enable_x64", True)
    splits = open_splits(config.data, search_path(config))
    model = configured_model(config, splits)
    names = [f"cpu:{number}" for number in range(_devices(config, saved_devices))]
    layouts, step = plan_step(config, model, names)
    state = stored_order(layouts).abstract_model(step.abstract_state(abstract=True))
    mesh = {name: layouts.mesh.axis_size(name) for name in layouts.mesh.axis_names if layouts.mesh.axis_size(name) > 1}
    return {path: leaf for path, leaf in leaves_with_paths(state) if leaf.size}, mesh


def _devices(config: Config, saved: int | None) -> int:
    sizes = list(axis_sizes(config).values())
    given = prod(size for size in sizes if size != REST)
    if REST not in sizes:
        return given
    wanted = config.run.simulate or saved or given
    return wanted if wanted % given == 0 else given

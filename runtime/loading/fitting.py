"""Fits the strategy of a run to the available devices, for a model that is not trained.

If the sizes of the run's own strategy multiply to the number of devices, they stay. Otherwise

    1. pipe becomes fsdp: the parameters of stages are stored in shards, because there is no schedule;
    2. tensor, context and expert keep their sizes, or are 1: other sizes may not divide the dims that they split;
    3. fsdp gets as close to its size as possible, and data takes the rest of the devices;
    4. if the parameters cannot be laid out this way (`loaded_run`), all devices go to data.

One device fits every run.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

from ...configs.checks import REST, axis_sizes, resolved_sizes
from ...configs.elastic import refit
from ...mesh.errors import UserError, counted
from ...parallel.sharding.strategies import axes_that_split, option_types, read_strategy

TRAINING = {"zero": 0, "local_steps": 0, "compress": "none"}
"""Options of `data` that only concern gradients and the optimizer -> their neutral value."""


class Fitted(NamedTuple):
    """A strategy that fits the devices.

    Attributes:
        strategy: Axis -> options with resolved sizes.
        devices: The number of devices.
        as_given: Whether its sizes are the requested ones, or those that the run was trained on.
    """

    strategy: dict[str, Any]
    devices: int
    as_given: bool = True


def fit_own(
    strategy: Mapping[str, Any], trained_on: Mapping[str, int], num_devices: int, num_processes: int = 1
) -> Fitted:
    """Fits the strategy of a run, by the rules above.

    Args:
        strategy: Axis -> options.
        trained_on: The mesh of the run: axis -> size, if over 1.
        num_devices: The number of devices of all processes together.
        num_processes: The number of processes, with equally many devices each.
    """
    sizes = {axis: trained_on.get(axis, 1) for axis in strategy}
    if prod(sizes.values()) == num_devices:
        return Fitted(_with_sizes(strategy, sizes), num_devices)
    sizes = {"data": 1, **sizes, "fsdp": sizes.get("fsdp", 1) * sizes.get("pipe", 1)}
    sizes.pop("pipe", None)
    work = [axis for axis in axes_that_split("work") if axis in sizes]

    def fits(found: Mapping[str, int]) -> bool:
        return all(found[axis] in (1, sizes[axis]) for axis in work)

    elastic = ["data", *(axis for axis in sizes if axis not in ("data", *work)), *work]
    found = refit(sizes, elastic, num_devices, fits, multiple=num_processes)
    assert found is not None, "data takes any number of devices"
    return Fitted(_with_sizes(strategy, found), prod(found.values()), as_given=False)


def rows_alone(num_devices: int) -> Fitted:
    """Returns the strategy that fits every model: each device holds all of it, and takes its share of the rows."""
    return Fitted(_with_sizes({}, {"data": num_devices}), num_devices, as_given=False)


def fit_given(mesh: Mapping[str, Any], num_devices: int, num_processes: int = 1) -> Fitted:
    """Parses the strategy that a user gives for a run; it may use fewer devices than available.

    Args:
        mesh: Axis -> size or options, like `strategy` in YAML; -1 = the rest of the devices.
        num_devices: The number of devices of all processes together.
        num_processes: The number of processes, with equally many devices each.

    Raises:
        UserError: An axis or option does not exist, or the sizes do not fit the devices.
    """
    if not isinstance(mesh, Mapping):
        raise UserError(f'mesh={mesh!r}: give a mapping of mesh axes to sizes, such as {{"fsdp": 8}}, or None.')
    strategy = read_strategy(mesh)
    sizes = axis_sizes(strategy)
    rests = list(sizes.values()).count(REST)
    others = devices_of(mesh)
    used = num_devices if rests else others
    if rests > 1 or used > num_devices or used % others or used % num_processes:
        given = " x ".join(f"{axis} {size}" for axis, size in sizes.items()) or "of 1 device"
        raise UserError(
            f"The mesh {given} does not fit {counted(num_devices, 'device')} of "
            f"{counted(num_processes, 'process', 'processes')}: the product of its sizes ({others}) must be at most "
            "the number of devices and a multiple of the number of processes. One size can be -1, the rest, if the "
            "product of the others divides the number of devices. Change the sizes, or simulate more devices first "
            "thing in the program (spmdkit.DeviceMesh.simulated, run.simulate on the command line)."
        )
    return Fitted(_with_sizes(strategy, resolved_sizes(sizes, used)), used)


def devices_of(mesh: Mapping[str, Any]) -> int:
    """Returns the minimum number of devices of a strategy.

    Raises:
        UserError: An axis or option does not exist.
    """
    return prod(options.size for options in read_strategy(mesh).values() if options.size != REST)


def fitting_rows(rows: int, fitted: Fitted) -> int:
    """Returns the smallest number of rows, at least `rows`, that the strategy can split."""
    pipe = fitted.strategy.get("pipe")
    pieces = (pipe.microbatches or 2 * pipe.size) if pipe is not None and pipe.size > 1 else 1
    multiple = fitted.devices * pieces
    return -(-rows // multiple) * multiple


def _with_sizes(strategy: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    types = option_types()
    options = {axis: replace(strategy.get(axis) or types[axis](), size=size) for axis, size in sizes.items()}
    return {axis: replace(each, **TRAINING) if axis == "data" else each for axis, each in options.items()}

"""Resizes the mesh of a run that restarts on fewer or more devices.

`launch.elastic: [data, fsdp]` names the axes that may be resized; the other axes keep their sizes. Of the meshes that
fit, the choice is

    1. the one with the most devices: all of them, or the largest number that is equal in each process;
    2. of these, the one that keeps the size of the last axis named, or is nearest to it; then of the axis before it,
       and so on: the first axis is resized first.

A mesh fits if the rows of the global batch can be split over it. The global batch, and with it the order of the data,
and train.accumulate stay the same: with fewer devices, each of them has more rows at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import log2, prod
from typing import Any, NamedTuple

from ..mesh.axes import divisors
from ..mesh.errors import counted
from ..parallel.sharding.strategies import axes_that_split
from .checks import ELASTIC_KEY, REST, Sizes, axis_sizes, size_problems
from .config_errors import ConfigError
from .schema import Config, TrainConfig


class Fitted(NamedTuple):
    """A config with a mesh that fits the available devices.

    Attributes:
        config: The config with the new sizes.
        devices: The number of devices that the mesh uses.
        summary: The changes, for people; "" if nothing changed.
    """

    config: Config
    devices: int
    summary: str = ""


def refit(
    sizes: Sizes, elastic: Sequence[str], num_devices: int, fits: Callable[[Sizes], bool], *, multiple: int
) -> dict[str, int] | None:
    """Returns the sizes of a mesh for the available devices, or None if no mesh fits.

    Args:
        sizes: Axis -> configured size; at most one is -1, the rest, which may be resized too.
        elastic: The axes that may be resized, the first to be resized first.
        num_devices: The available devices.
        fits: Returns whether a mesh with some sizes can be used.
        multiple: The number of processes; the number of used devices is a multiple of it.
    """
    order = [*(axis for axis, size in sizes.items() if size == REST and axis not in elastic), *elastic]
    fixed = prod(size for axis, size in sizes.items() if axis not in order)
    for used in range(num_devices - num_devices % multiple, 0, -multiple):
        if used % fixed:
            continue
        found = [{**sizes, **each} for each in _assignments(order, used // fixed)]
        if found := [each for each in found if fits(each)]:
            return min(found, key=lambda each: _distance(each, sizes, order))
    return None


def fit_to_devices(config: Config, num_devices: int, num_processes: int = 1) -> Fitted:
    """Resizes the mesh of a config with `launch.elastic`; returns any other config as it is.

    Args:
        config: A config without problems of `elastic_problems`.
        num_devices: The devices of all processes.
        num_processes: The processes of the run.

    Raises:
        ConfigError: No mesh fits.
    """
    sizes, elastic = axis_sizes(config.strategy), tuple(dict.fromkeys(config.launch.elastic))
    if not elastic:
        return Fitted(config, num_devices)

    def resized(found: Sizes) -> dict[str, Any]:
        return {axis: replace(options, size=found[axis]) for axis, options in config.strategy.items()}

    def fits(found: Sizes) -> bool:
        return not size_problems(resized(found), config.train, config.layouts.rules, prod(found.values()))

    found = refit(sizes, elastic, num_devices, fits, multiple=num_processes)
    if found is None:
        raise ConfigError([_nothing_fits(sizes, elastic, config.train, num_devices, num_processes)], ELASTIC_KEY)
    used = prod(found.values())
    return Fitted(replace(config, strategy=resized(found)), used, _summarize(sizes, found, used, num_devices))


def _assignments(axes: Sequence[str], product: int) -> Iterator[dict[str, int]]:
    """Yields all sizes of some axes with a given product."""
    if not axes:
        if product == 1:
            yield {}
        return
    first, *others = axes
    for size in divisors(product):
        for rest in _assignments(others, product // size):
            yield {first: size, **rest}


def _distance(found: Sizes, sizes: Sizes, order: Sequence[str]) -> list[tuple[float, int]]:
    """Returns the distance of sizes from the configured ones, last axis first; if equal, the smaller size wins."""
    axes = [axis for axis in reversed(order) if sizes[axis] != REST]
    return [(round(abs(log2(found[axis] / sizes[axis])), 9), found[axis]) for axis in axes]


def _summarize(before: Sizes, found: Sizes, used: int, num_devices: int) -> str:
    changed = [axis for axis in found if before[axis] not in (REST, found[axis])]
    if not changed and used == num_devices:
        return ""
    sizes = ", ".join(f"{axis} {found[axis]} instead of {before[axis]}" for axis in changed) or "as configured"
    idle = f"; {num_devices - used} of them stay idle because no mesh fits all" if used < num_devices else ""
    return (
        f"Resized the mesh for {counted(num_devices, 'device')} ({ELASTIC_KEY}): {sizes}{idle}. "
        "The global batch and the order of the data stay the same."
    )


def _nothing_fits(
    sizes: Sizes, elastic: Sequence[str], train: TrainConfig, num_devices: int, num_processes: int
) -> str:
    fixed = {axis: size for axis, size in sizes.items() if axis not in elastic and size not in (1, REST)}
    given = " x ".join(f"{axis} {size}" for axis, size in fixed.items())
    needed = f"{prod(fixed.values())} ({given}, which cannot be resized) and of " if fixed else ""
    rows = " x ".join(axis for axis in axes_that_split("rows") if axis in sizes)
    return (
        f"{ELASTIC_KEY}={list(elastic)}: no mesh fits {counted(num_devices, 'device')} in "
        f"{counted(num_processes, 'process', 'processes')}. The number of used devices must be a multiple of "
        f"{needed}the number of processes, and train.global_batch={train.global_batch} a multiple of {rows} x "
        f"train.accumulate={train.accumulate}. Start with other numbers of devices or processes, reduce the fixed "
        "sizes, or set another train.global_batch in a new run."
    )

"""The mesh of a run that starts again on fewer or more devices: which axes give way, and to which sizes.

`launch.elastic: [data, fsdp]` names the axes whose sizes may change; those of the others stay. Of the meshes that fit,

    1. the one with the most devices: all that there are, or the most that are as many in each process;
    2. of these, the one that keeps the size of the last axis named, or comes nearest to it; then that of the axis
       before it, and so on: the axis named first gives way first.

A mesh fits where the rows of the global batch can be split over it. The global batch, and with it the order of the
data, stays; so does train.accumulate: with fewer devices each has more rows at a time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import log2, prod
from typing import NamedTuple

from ..mesh.axes import SYNONYMS
from ..mesh.near_miss import did_you_mean
from ..mesh.shapes import divisors
from ..mesh.text import counted
from ..parallel.sharding.strategies import axes_that_split
from .checks import REST, axis_sizes, size_problems
from .errors import ConfigError, Problem
from .reading.words import listed
from .schema import Config

ELASTIC = ("data", "fsdp")
"""Axes that may change: over these, devices differ in the rows they work on, and in the parts they store. The size of
any other is a property of the program: it has to divide heads, experts or layers."""
DEALT = {"tensor": "heads and widths", "context": "positions", "expert": "experts", "pipe": "layers"}
"""What is dealt out over each of the others, by the name of the axis."""
KEY = "launch.elastic"


class Fitted(NamedTuple):
    """A config whose mesh fits the devices there are.

    Attributes:
        config: with the sizes of the mesh.
        devices: how many of the devices it uses.
        said: what was changed, for people; "" where nothing was.
    """

    config: Config
    devices: int
    said: str = ""


def refit(
    sizes: Mapping[str, int],
    elastic: Sequence[str],
    num_devices: int,
    fits: Callable[[Mapping[str, int]], bool],
    *,
    multiple: int = 1,
) -> dict[str, int] | None:
    """The sizes of a mesh for the devices there are, by the rule above.

    Args:
        sizes: Axis -> size as configured; -1, the rest, for at most one axis, which may change too.
        elastic: Axes that may change, the first to give way first.
        num_devices: Devices there are.
        fits: Whether a mesh of such sizes can be used.
        multiple: The number of devices used is a multiple of this: the number of processes.

    Returns:
        Axis -> size, in the order of `sizes`; None where nothing fits.
    """
    rest = [axis for axis, size in sizes.items() if size == REST and axis not in elastic]
    order = [*rest, *elastic]
    fixed = prod(size for axis, size in sizes.items() if axis not in order)
    for used in range(num_devices - num_devices % multiple, 0, -multiple):
        if used % fixed:
            continue
        found = [{**sizes, **each} for each in _assignments(order, used // fixed)]
        found = sorted((each for each in found if fits(each)), key=lambda each: _distance(each, sizes, order))
        if found:
            return found[0]
    return None


def fit_to_devices(config: Config, num_devices: int, num_processes: int = 1) -> Fitted:
    """Re-forms the mesh of a config whose axes may change; gives every other config back as it is.

    Args:
        config: A config whose values have the right types.
        num_devices: Devices of all processes together.
        num_processes: Processes of the run.

    Raises:
        ConfigError: `launch.elastic` names what cannot change, or no mesh fits.
    """
    sizes, elastic = axis_sizes(config), config.launch.elastic
    if not elastic:
        return Fitted(config, num_devices)
    problems = elastic_problems(config)
    if problems:
        raise ConfigError([problem.message for problem in problems], KEY)

    def fits(found: Mapping[str, int]) -> bool:
        return not size_problems(_with_sizes(config, found), prod(found.values()))

    found = refit(sizes, elastic, num_devices, fits, multiple=num_processes)
    if found is None:
        raise ConfigError([_nothing_fits(config, num_devices, num_processes)], KEY)
    used = prod(found.values())
    said = _said(sizes, found, used, num_devices)
    return Fitted(_with_sizes(config, found), used, said)


def not_fitting(config: Config, num_devices: int, num_processes: int) -> list[Problem]:
    """Why no mesh fits, as `fit_to_devices` says it; nothing where one does."""
    try:
        fit_to_devices(config, num_devices, num_processes)
    except ConfigError as error:
        return [Problem(KEY, problem) for problem in error.problems]
    return []


def elastic_problems(config: Config) -> list[Problem]:
    """What is wrong with `launch.elastic`, whatever devices there are."""
    problems, data = [], config.strategy.get("data")
    for axis in config.launch.elastic:
        if axis not in ELASTIC:
            problems.append(_no_elastic_axis(axis, axis_sizes(config)))
        elif axis not in config.strategy:
            problems.append(f"{axis} is no axis of strategy. Set strategy.{axis}=1 to let it grow, or leave it out.")
        elif axis == "data" and data is not None and data.local_steps:
            problems.append(
                f"with strategy.data.local_steps={data.local_steps} each group along data trains a copy of its own, "
                "and their number is part of the result. Leave data out."
            )
    if config.launch.elastic and data is not None and data.compress != "none":
        problems.append(
            f"with strategy.data.compress={data.compress} each device keeps errors of its own between steps, which fit "
            "no other number of devices. Leave one of the two out."
        )
    if len(set(config.launch.elastic)) < len(config.launch.elastic):
        problems.append("an axis is named twice. Name each once.")
    return [Problem(KEY, f"{KEY}={list(config.launch.elastic)}: {problem}") for problem in problems]


def _no_elastic_axis(axis: str, sizes: Mapping[str, int]) -> str:
    """Why an axis cannot change, how many devices it takes as it is, and what to write instead."""
    instead = [each for each in ELASTIC if each in sizes] or [ELASTIC[0]]
    write = f"Write {KEY}: [{', '.join(instead)}]{'' if instead[0] in sizes else f' and strategy.{instead[0]}=1'}."
    only = f"the axes that can change are {listed(list(ELASTIC), 'and')}"
    if axis not in DEALT:
        meant = SYNONYMS.get(axis.lower(), "")
        near = f" Did you mean {meant}?" if meant in ELASTIC else did_you_mean(axis, ELASTIC)
        return f"{axis!r} cannot change its size: it is no axis of a mesh, and {only}.{near or f' {write}'}"
    fixed = {each: size for each, size in sizes.items() if each not in ELASTIC and size > 1}
    needed = prod(fixed.values())
    given = " x ".join(f"{each} {size}" for each, size in fixed.items())
    takes = f" With {given} a run takes a multiple of {needed} devices: {needed}, {2 * needed}, ..." if fixed else ""
    return f"{axis!r} cannot change its size: {DEALT[axis]} are dealt out over it, and {only}.{takes} {write}"


def _assignments(axes: Sequence[str], product: int) -> Iterator[dict[str, int]]:
    """All sizes of some axes that multiply to a number."""
    if not axes:
        if product == 1:
            yield {}
        return
    first, *others = axes
    for size in divisors(product):
        for rest in _assignments(others, product // size):
            yield {first: size, **rest}


def _distance(found: Mapping[str, int], sizes: Mapping[str, int], order: Sequence[str]) -> tuple[float, ...]:
    """How far sizes are from those configured, the last axis first; of two equally far the smaller one counts."""
    far = []
    for axis in reversed(order):
        if sizes[axis] != REST:
            far += [round(abs(log2(found[axis] / sizes[axis])), 9), found[axis]]
    return tuple(far)


def _with_sizes(config: Config, sizes: Mapping[str, int]) -> Config:
    strategy = {axis: replace(options, size=sizes[axis]) for axis, options in config.strategy.items()}
    return replace(config, strategy=strategy)


def _said(before: Mapping[str, int], found: Mapping[str, int], used: int, num_devices: int) -> str:
    changed = [axis for axis in found if before[axis] not in (REST, found[axis])]
    if not changed and used == num_devices:
        return ""
    sizes = ", ".join(f"{axis} {found[axis]} instead of {before[axis]}" for axis in changed) or "as configured"
    idle = f"; {num_devices - used} of them stay idle, since no mesh fits all" if used < num_devices else ""
    return (
        f"The mesh is re-formed for {counted(num_devices, 'device')} ({KEY}): {sizes}{idle}. "
        "Global batch and order of the data stay."
    )


def _nothing_fits(config: Config, num_devices: int, num_processes: int) -> str:
    sizes, elastic = axis_sizes(config), config.launch.elastic
    fixed = {axis: size for axis, size in sizes.items() if axis not in elastic and size != REST}
    needed = prod(fixed.values())
    given = " x ".join(f"{axis} {size}" for axis, size in fixed.items() if size != 1) or "no other axis"
    there = f"there are {counted(num_devices, 'device')} in {counted(num_processes, 'process', 'processes')}"
    if needed > num_devices or num_devices % num_processes:
        return (
            f"{KEY}={list(elastic)} lets only these axes change: {given} needs {counted(needed, 'device')}, and "
            f"{there}: {needed} > {num_devices}. Start with at least {counted(needed, 'device')}, or set these axes "
            "smaller."
        )
    rows = [axis for axis in axes_that_split("rows") if axis in sizes]
    return (
        f"{KEY}={list(elastic)}: {there}; {given} stay{'s' if len(fixed) == 1 else ''}, and train.global_batch="
        f"{config.train.global_batch} with train.accumulate={config.train.accumulate} can be split over no mesh of a "
        f"multiple of {num_processes} of them ({' x '.join(rows)} x accumulate has to divide the batch). Start with "
        "another number of processes, or choose a train.global_batch with more divisors in a new run."
    )

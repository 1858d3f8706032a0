"""Do the sizes multiply out? Arithmetic across the sections of a config."""

import re
from collections.abc import Iterable, Mapping
from math import prod

from ..layouts.row_split import RowSplit
from ..mesh.near_miss import did_you_mean
from ..mesh.shapes import divisors
from ..parallel.schedule.builders import too_few_microbatches
from ..parallel.sharding.strategies import axes_that_split, axis_names
from ..training.worker import one_of_several
from .errors import ConfigError, Problem
from .reading.limits import largest
from .reading.words import listed
from .schema import Config

REST = -1


def check_devices(config: Config, num_devices: int) -> dict[str, int]:
    """Checks a config against the number of devices that the run has, once that is known.

    Args:
        config: A loaded config.
        num_devices: Devices of all processes together.

    Returns:
        Mesh axis -> size, with the -1 worked out.

    Raises:
        ConfigError: If the sizes of the strategy do not make `num_devices`, or the batch cannot be split over them.
    """
    there_are = "there is 1 device" if num_devices == 1 else f"there are {num_devices} devices"
    problems = size_problems(config, num_devices, there_are)
    if problems:
        raise ConfigError([problem.message for problem in problems])
    return resolved_sizes(axis_sizes(config), num_devices)


def size_problems(config: Config, num_devices: int | None, known_from: str = "") -> list[Problem]:
    """Returns what is wrong with the sizes of the strategy and the batch.

    Args:
        config: A config whose values have the right types.
        num_devices: Devices of all processes together; None = not known yet.
        known_from: Where that number comes from, for messages: "run.simulate=4 gives 4 devices".
    """
    sizes = axis_sizes(config)
    problems = _bad_sizes(sizes)
    if problems:
        return problems
    if num_devices is not None:
        problem = _product_problem(sizes, num_devices, known_from)
        if problem:
            return [problem]
        sizes = resolved_sizes(sizes, num_devices)
    found = (_microbatches_problem(config, sizes), _batch_problem(config, sizes), _rounds_problem(config))
    return [problem for problem in found if problem]


def axis_sizes(config: Config) -> dict[str, int]:
    """Returns mesh axis -> size as the strategy gives it; -1 stays -1."""
    return {axis: options.size for axis, options in config.strategy.items()}


def resolved_sizes(sizes: Mapping[str, int], num_devices: int) -> dict[str, int]:
    """Returns the sizes with -1 replaced by what is left of the devices."""
    rest = num_devices // _product(sizes)
    return {axis: rest if size == REST else size for axis, size in sizes.items()}


def layout_problems(rules: Mapping[str, Iterable[str | tuple[str, ...] | None]]) -> list[Problem]:
    """Returns what is wrong with layout rules before there is a model: bad patterns, axes that do not exist."""
    problems, axes = [], axis_names()
    for pattern, entries in rules.items():
        path = f"layouts.rules.{pattern}"
        try:
            re.compile(pattern)
        except re.error as error:
            problems.append(Problem(path, f"layouts.rules: {pattern!r} is not a regular expression: {error}."))
        problems += [
            Problem(
                path,
                f"layouts.rules: {pattern!r} names {axis!r}, which is not a mesh axis; they are {', '.join(axes)}."
                f"{did_you_mean(axis, axes)}",
            )
            for axis in _named_axes(entries)
            if axis not in axes
        ]
    return problems


def _named_axes(entries: Iterable[str | tuple[str, ...] | None]) -> list[str]:
    """The axes that a rule names, over all dims."""
    return [axis for entry in entries for axis in ((entry,) if isinstance(entry, str) else entry or ())]


def _bad_sizes(sizes: Mapping[str, int]) -> list[Problem]:
    rests = [axis for axis, size in sizes.items() if size == REST]
    if len(rests) < 2:
        return []
    given = " and ".join(f"{axis}=-1" for axis in rests)
    return [Problem("strategy", f"strategy: {given}: only one axis can be the rest; size the others.")]


def _product(sizes: Mapping[str, int]) -> int:
    return prod(size for size in sizes.values() if size != REST)


def _product_problem(sizes: Mapping[str, int], num_devices: int, known_from: str) -> Problem | None:
    """Explains why the sizes do not make the number of devices, and what would."""
    product = _product(sizes)
    has_rest = REST in sizes.values()
    if num_devices == product or (has_rest and num_devices % product == 0):
        return None
    given = " x ".join(f"{axis} {size}" for axis, size in sizes.items()) or "no axes"
    arithmetic = f"{num_devices} % {product} = {num_devices % product}" if has_rest else f"{product} != {num_devices}"
    remedies = [
        f"strategy.{axis}={_fitting(sizes, axis, num_devices)}" for axis in sizes if _fitting(sizes, axis, num_devices)
    ]
    if "data" not in sizes and not has_rest and num_devices % product == 0:
        remedies.insert(0, f"strategy.data={num_devices // product}")
    remedies = remedies or [f"sizes whose product is {num_devices}"]
    enough = -(-num_devices // product) * product if has_rest else product
    if enough <= largest("run.simulate"):
        if known_from.startswith("run.simulate"):
            remedies.append(f"run.simulate={enough}")
        elif known_from.startswith("there ") and product > num_devices and not one_of_several():
            remedies.append(f"run.simulate={enough} to simulate that many on the CPU")
    remedy = listed(remedies, "or")
    return Problem("strategy", f"strategy: {given}, but {known_from}: {arithmetic}. Set {remedy}.")


def _fitting(sizes: Mapping[str, int], axis: str, num_devices: int) -> int | None:
    """Returns the size of one axis, nearest to the given one, that makes the product right; None where none does."""
    others = {other: size for other, size in sizes.items() if other != axis}
    if sizes[axis] == REST or num_devices % _product(others):
        return None
    quotient = num_devices // _product(others)
    return _nearest_divisor(quotient, sizes[axis]) if REST in others.values() else quotient


def _batch_problem(config: Config, sizes: Mapping[str, int]) -> Problem | None:
    """Explains why the rows of a batch cannot be split evenly, and which numbers would do."""
    split = _row_split(config, sizes)
    global_batch, accumulate = config.train.global_batch, config.train.accumulate
    if split is None or split.fits(global_batch):
        return None
    parts, left_over = split.total, global_batch % split.total
    fewer, shards = global_batch - left_over, parts // accumulate
    remedies = [f"train.global_batch={rows}" for rows in (fewer, fewer + parts) if rows]
    if global_batch % shards == 0:
        remedies.append(f"train.accumulate={_nearest_divisor(global_batch // shards, accumulate)}")
    return Problem(
        "train.global_batch",
        f"train.global_batch={global_batch} rows cannot be split evenly: {split} = {parts}, "
        f"and {global_batch} % {parts} = {left_over}. Set {listed(remedies, 'or')}.",
    )


def _row_split(config: Config, sizes: Mapping[str, int]) -> RowSplit | None:
    """What cuts the rows of a batch, by config key; None where that is not known yet, or wrong.

    Rows are split over an axis that the model splits its work over too (a mixture's `expert`), unless rules leave it to
    XLA.
    """
    ruled = {axis for entries in config.layouts.rules.values() for axis in _named_axes(entries)}
    left_to_xla = ruled & set(axes_that_split("work"))
    axes = [axis for axis in axes_that_split("rows") if axis in sizes and axis not in left_to_xla]
    split = {f"strategy.{axis}": sizes[axis] for axis in axes}
    if sizes.get("pipe", 1) != 1:
        given = config.strategy["pipe"].microbatches
        split["strategy.pipe.microbatches"] = given or (2 * sizes["pipe"] if sizes["pipe"] != REST else REST)
    known = min(split.values(), default=1) > 0
    return RowSplit({**split, "train.accumulate": config.train.accumulate}) if known else None


def _microbatches_problem(config: Config, sizes: Mapping[str, int]) -> Problem | None:
    """Explains why there are too few microbatches for a pipeline's stages."""
    pipe, stages = config.strategy.get("pipe"), sizes.get("pipe", 1)
    if pipe is None or not pipe.microbatches or stages in (1, REST):
        return None
    message = too_few_microbatches(stages, pipe.microbatches)
    return Problem("strategy.pipe.microbatches", message) if message else None


def _rounds_problem(config: Config) -> Problem | None:
    """Explains why a run of local steps would end before its groups meet, and what they learned be lost."""
    data = config.strategy.get("data")
    steps, every = config.train.steps, data.local_steps if data is not None and data.size != 1 else 0
    if not every or steps % every == 0:
        return None
    fewer = steps - steps % every
    remedies = [f"train.steps={number}" for number in (fewer, fewer + every) if number]
    return Problem(
        "train.steps",
        f"train.steps={steps} ends in the middle of a round of strategy.data.local_steps={every}: {steps} % {every} = "
        f"{steps % every}, and what groups learn after their last meeting is lost. Set {listed(remedies, 'or')}.",
    )


def _nearest_divisor(number: int, wanted: int) -> int:
    return min(divisors(number), key=lambda divisor: abs(divisor - wanted))

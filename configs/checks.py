"""Checks of keys against each other: sizes, batch, pipeline, layout rules, elastic axes, non-finite values."""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

from ..layouts.paths import pattern_problem
from ..layouts.sizes import RowSplit
from ..layouts.tensor_layout import names_of
from ..mesh.axes import divisors
from ..mesh.errors import did_you_mean
from ..parallel.options import Precision
from ..parallel.schedule.builders import too_few_microbatches
from ..parallel.sharding.strategies import axes_that_split, axis_names
from .config_errors import ConfigError, Problem
from .schema import CheckpointConfig, TrainConfig

Sizes = Mapping[str, int]
"""Mesh axis -> size, which may be -1 (REST)."""
Strategy = Mapping[str, Any]
"""Mesh axis -> options of its strategy."""
Rules = Mapping[str, Iterable[str | tuple[str, ...] | None]]
REST = -1
AUTO = "auto"
"""The strategy that stands for a search of the mesh, see planning/auto_strategy.py."""
ELASTIC_KEY = "launch.elastic"


def check_devices(
    strategy: Strategy, train: TrainConfig, rules: Rules, num_devices: int, *, can_simulate: bool = True
) -> dict[str, int]:
    """Checks the sizes of a config against the number of devices of the run.

    Args:
        strategy: The section `strategy`.
        train: The section `train`.
        rules: `layouts.rules`.
        num_devices: The devices of all processes.
        can_simulate: Whether simulating other devices is a remedy.

    Returns:
        Mesh axis -> size, with -1 resolved.

    Raises:
        ConfigError: The product of the sizes is not `num_devices`, or the batch cannot be split over them.
    """
    if AUTO in strategy:
        raise ConfigError(["strategy: auto is for train, launch, explain and plan. Set the sizes that explain prints."])
    there_are = "there is 1 device" if num_devices == 1 else f"there are {num_devices} devices"
    if problems := size_problems(strategy, train, rules, num_devices, there_are, can_simulate):
        raise ConfigError([problem.message for problem in problems])
    return resolved_sizes(axis_sizes(strategy), num_devices)


def size_problems(
    strategy: Strategy,
    train: TrainConfig,
    rules: Rules,
    num_devices: int | None,
    known_from: str = "",
    can_simulate: bool = False,
) -> list[Problem]:
    """Returns the problems of the sizes of the strategy and the batch.

    Args:
        strategy: The section `strategy`.
        train: The section `train`.
        rules: `layouts.rules`.
        num_devices: The devices of all processes; None = not known yet.
        known_from: The origin of that number for messages: "run.simulate=4 gives 4 devices".
        can_simulate: Proposes run.simulate if there are too few devices.
    """
    sizes = axis_sizes(strategy)
    rests = [f"{axis}=-1" for axis, size in sizes.items() if size == REST]
    if len(rests) > 1:
        message = f"strategy: {' and '.join(rests)}: only one axis can be -1. Set the sizes of the others."
        return [Problem("strategy", message)]
    if num_devices is not None:
        if problem := _product_problem(sizes, num_devices, known_from, can_simulate):
            return [problem]
        sizes = resolved_sizes(sizes, num_devices)
    ruled = {axis for entries in rules.values() for entry in entries for axis in names_of(entry)}
    split = _row_split(strategy, sizes, ruled, train.accumulate)
    found = (
        _microbatches_problem(strategy, sizes),
        _batch_problem(split, train.global_batch, train.accumulate),
        _rounds_problem(strategy, train.steps),
    )
    return [problem for problem in found if problem]


def axis_sizes(strategy: Strategy) -> dict[str, int]:
    """Returns mesh axis -> configured size, which may be -1."""
    return {axis: options.size for axis, options in strategy.items()}


def resolved_sizes(sizes: Sizes, num_devices: int) -> dict[str, int]:
    """Returns the sizes with -1 replaced by the remaining devices."""
    return {axis: num_devices // _product(sizes) if size == REST else size for axis, size in sizes.items()}


def layout_problems(rules: Rules) -> list[Problem]:
    """Returns the problems of layout rules that need no model: invalid patterns and unknown axes."""
    problems, axes = [], axis_names()
    for pattern, entries in rules.items():
        path = f"layouts.rules.{pattern}"
        if problem := pattern_problem(pattern):
            problems.append(Problem(path, f"layouts.rules: {problem}"))
        problems += [
            Problem(
                path,
                f"layouts.rules: {pattern!r} names {axis!r}, which is not a mesh axis. Mesh axes: {', '.join(axes)}."
                f"{did_you_mean(axis, axes)}",
            )
            for entry in entries
            for axis in names_of(entry)
            if axis not in axes
        ]
    return problems


def _product(sizes: Sizes) -> int:
    return prod(size for size in sizes.values() if size != REST)


def _product_problem(sizes: Sizes, num_devices: int, known_from: str, can_simulate: bool) -> Problem | None:
    """Returns the problem of sizes with the wrong product, with the sizes that fit."""
    product = _product(sizes)
    has_rest = REST in sizes.values()
    if num_devices == product or (has_rest and num_devices % product == 0):
        return None
    given = " x ".join(f"{axis} {size}" for axis, size in sizes.items()) or "no axes"
    arithmetic = f"{num_devices} % {product} = {num_devices % product}" if has_rest else f"{product} != {num_devices}"
    remedies = [f"strategy.{axis}={size}" for axis in sizes if (size := _fitting(sizes, axis, num_devices))]
    if "data" not in sizes and not has_rest and num_devices % product == 0:
        remedies.insert(0, f"strategy.data={num_devices // product}")
    remedies = remedies or [f"sizes whose product is {num_devices}"]
    enough = -(-num_devices // product) * product if has_rest else product
    if known_from.startswith("run.simulate"):
        remedies.append(f"run.simulate={enough}")
    elif can_simulate and product > num_devices:
        remedies.append(f"run.simulate={enough} to simulate that many on the CPU")
    return Problem("strategy", f"strategy: {given}, but {known_from}: {arithmetic}. Set {join_words(remedies)}.")


def _fitting(sizes: Sizes, axis: str, num_devices: int) -> int | None:
    """Returns the size of one axis, nearest to the given one, that makes the product right, or None."""
    others = {other: size for other, size in sizes.items() if other != axis}
    if sizes[axis] == REST or num_devices % _product(others):
        return None
    quotient = num_devices // _product(others)
    return _nearest_divisor(quotient, sizes[axis]) if REST in others.values() else quotient


def _batch_problem(split: RowSplit | None, global_batch: int, accumulate: int) -> Problem | None:
    """Returns the problem of a batch that cannot be split evenly, with the numbers that fit."""
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
        f"and {global_batch} % {parts} = {left_over}. Set {join_words(remedies)}.",
    )


def _row_split(strategy: Strategy, sizes: Sizes, ruled: set[str], accumulate: int) -> RowSplit | None:
    """Returns what splits the rows of a batch, by config key, or None if it is unknown or invalid.

    Rows are also split over an axis that splits the model's work (`expert`), unless layout rules (whose axes are
    `ruled`) leave it to XLA.
    """
    left_to_xla = ruled & set(axes_that_split("work"))
    axes = [axis for axis in axes_that_split("rows") if axis in sizes and axis not in left_to_xla]
    split = {f"strategy.{axis}": sizes[axis] for axis in axes}
    if sizes.get("pipe", 1) != 1:
        given = strategy["pipe"].microbatches
        split["strategy.pipe.microbatches"] = given or (2 * sizes["pipe"] if sizes["pipe"] != REST else REST)
    known = min(split.values(), default=1) > 0
    return RowSplit({**split, "train.accumulate": accumulate}) if known else None


def _microbatches_problem(strategy: Strategy, sizes: Sizes) -> Problem | None:
    """Returns the problem of fewer microbatches than pipeline stages."""
    pipe, stages = strategy.get("pipe"), sizes.get("pipe", 1)
    if pipe is None or not pipe.microbatches or stages in (1, REST):
        return None
    message = too_few_microbatches(stages, pipe.microbatches)
    return Problem("strategy.pipe.microbatches", message) if message else None


def _rounds_problem(strategy: Strategy, steps: int) -> Problem | None:
    """Returns the problem of a run with local steps that ends between two synchronizations."""
    data = strategy.get("data")
    every = data.local_steps if data is not None and data.size != 1 else 0
    if not every or steps % every == 0:
        return None
    fewer = steps - steps % every
    remedies = [f"train.steps={number}" for number in (fewer, fewer + every) if number]
    return Problem(
        "train.steps",
        f"train.steps={steps} is not a multiple of strategy.data.local_steps={every}: {steps} % {every} = "
        f"{steps % every}, and the steps after the last synchronization would be lost. Set {join_words(remedies)}.",
    )


def _nearest_divisor(number: int, wanted: int) -> int:
    return min(divisors(number), key=lambda divisor: abs(divisor - wanted))


def join_words(words: Sequence[str], conjunction: str = "or") -> str:
    """Returns `a`, `a or b`, `a, b or c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {conjunction} {words[-1]}"


def section_problems(train: TrainConfig, checkpoint: CheckpointConfig, precision: Precision) -> list[Problem]:
    """Returns the problems of keys against each other that do not depend on the devices."""
    problems = []
    if checkpoint.start_fresh and not checkpoint.start_from:
        message = (
            "checkpoint.start_fresh names parameters that are not read from another run, but checkpoint.start_from is "
            "empty. Set checkpoint.start_from to the directory of that run, or remove checkpoint.start_fresh."
        )
        problems.append(Problem("checkpoint.start_fresh", message))
    if train.not_finite == "roll_back" and precision.scaling == "dynamic":
        message = (
            f"train.not_finite=roll_back with precision.compute={precision.compute} and "
            f"precision.loss_scale={precision.loss_scale}: dynamic loss scaling skips every update that is not finite, "
            "so the run would never roll back. Set train.not_finite=stop, precision.loss_scale to a number, or "
            "precision.compute=bfloat16."
        )
        problems.append(Problem("train.not_finite", message))
    return problems


def elastic_axes() -> tuple[str, ...]:
    """Returns the axes that may be resized: those that split rows, but not the model's work."""
    return tuple(axis for axis in axes_that_split("rows") if axis not in axes_that_split("work"))


def elastic_problems(strategy: Strategy, elastic: Sequence[str]) -> list[Problem]:
    """Returns the problems of `launch.elastic` that do not depend on the devices."""
    problems, data = [], strategy.get("data")
    for axis in dict.fromkeys(elastic):
        if axis not in elastic_axes():
            only = f"only {join_words(elastic_axes(), 'and')} can, because other axes split the model"
            problems.append(f"{axis!r} cannot be resized; {only}.")
        elif axis not in strategy:
            problems.append(f"{axis} is not an axis of strategy. Set strategy.{axis}=1 to let it grow, or remove it.")
        elif axis == "data" and data is not None and data.local_steps:
            problems.append(
                f"with strategy.data.local_steps={data.local_steps} each group along data trains its own copy, and the "
                "number of groups affects the result. Remove data."
            )
    if elastic and data is not None and data.compress != "none":
        problems.append(
            f"with strategy.data.compress={data.compress} each device keeps its own rounding errors between steps, "
            "which fit only this number of devices. Remove one of the two."
        )
    return [Problem(ELASTIC_KEY, f"{ELASTIC_KEY}={list(elastic)}: {each}") for each in problems]

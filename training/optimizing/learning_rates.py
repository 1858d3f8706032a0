"""Learning rate schedules: functions of the step by name, and their values on the host.

With `optimizer.learning_rate` = peak, a run of n steps and step s = 0 .. n - 1:

    constant        peak
    cosine          from peak down half a cosine
    warmup_cosine   linear warm-up to peak, then as cosine
    linear          (linear warm-up, then) linear decay
    wsd             warm-up, stable, decay: linear warm-up, peak, linear decay at the end
    plateau         (linear warm-up, then) peak, which the optimizer scales by the loss

A warm-up starts at peak / (warmup_steps + 1), not at 0, and reaches peak in step `warmup_steps`. A linear or cosine
decay would reach peak * final_ratio in step n, the first one after the run.

`plateau` scales updates down if the loss stops falling. The step itself decides, so all devices agree:

    mean    = mean of the loss over the last `window_steps` steps
    better  = mean < (1 - tolerance) * best
    scale   = scale * factor after `patience` consecutive windows without improvement, at least final_ratio
    update  = scale * update

The loss is that of the batch before its update. Evaluations run between steps and do not count.

Sources: Loshchilov & Hutter 2017, "SGDR" (cosine); Hu et al. 2024, "MiniCPM" (wsd); optax.contrib.reduce_on_plateau.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Annotated, Any, get_type_hints

import jax
import numpy as np
import optax
import optax.contrib
from annotated_types import Ge, Le, Lt
from jax import Array

from ...mesh.errors import UserError, did_you_mean, unknown_options
from ...parallel.options import validated
from .groups import REST

KEY = "optimizer.schedule"
PLATEAU = "plateau"
TINY = float(np.finfo(np.float32).tiny)
"""The smallest positive number of float32 that devices do not round to 0."""
WINDOW = 2**16
"""Steps with rates that are computed together."""
Count = Annotated[int, Ge(0), Lt(2**31)]
Positive = Annotated[int, Ge(1), Lt(2**31)]
Ratio = Annotated[float, Ge(0), Le(1)]
Fraction = Annotated[float, Ge(TINY), Lt(1)]


def make_learning_rate(peak: float, schedule: Mapping[str, Any], num_steps: int) -> optax.Schedule:
    """Returns the learning rate of a run.

    Args:
        peak: `optimizer.learning_rate`.
        schedule: `optimizer.schedule`: a name and valid options of that schedule (see `learning_rate_problems`).
        num_steps: Optimizer steps of the whole run.

    Returns:
        A function from a step, or an array of steps, to the learning rate.

    Raises:
        UserError: The schedule is longer than the run.
    """
    options = dict(schedule)
    return SCHEDULES[options.pop("name", "constant")](peak, num_steps, **options)


def learning_rate_problems(schedule: Mapping[str, Any]) -> Iterator[str]:
    """Yields the problems of `optimizer.schedule` that do not depend on the run: name, options and values."""
    options = dict(schedule)
    name = options.pop("name", "constant")
    if not isinstance(name, str) or name not in SCHEDULES:
        yield f"{KEY}.name={name!r} is not a schedule.{did_you_mean(name, SCHEDULES, otherwise='Choose from')}"
        return
    schedule_function = SCHEDULES[name]
    _, _, *known = inspect.signature(schedule_function).parameters
    hints = get_type_hints(schedule_function, include_extras=True)
    yield from unknown_options([option for option in options if option not in known], known, KEY, of=name)
    for option, value in options.items():
        try:
            validated(hints.get(option, Any), value, f"{KEY}.{option}")
        except UserError as error:
            yield str(error)


def constant(peak: float, num_steps: int) -> optax.Schedule:
    """Returns the same rate for every step."""
    return optax.constant_schedule(peak)


def cosine(peak: float, num_steps: int, final_ratio: Ratio = 0.0) -> optax.Schedule:
    """Returns half a cosine from the first step to the last."""
    return optax.cosine_decay_schedule(peak, num_steps, alpha=final_ratio)


def warmup_cosine(
    peak: float, num_steps: int, warmup_steps: Count | None = None, final_ratio: Ratio = 0.0
) -> optax.Schedule:
    """Returns a warm-up (by default 5 % of the steps), then half a cosine."""
    warmup = int(num_steps * 0.05) if warmup_steps is None else warmup_steps
    _check_fits(num_steps, warmup_steps=warmup)
    down = optax.cosine_decay_schedule(peak, num_steps - warmup, alpha=final_ratio)
    return _after_warmup(peak, warmup, down)


def linear(peak: float, num_steps: int, warmup_steps: Count = 0, final_ratio: Ratio = 0.0) -> optax.Schedule:
    """Returns a warm-up (by default none), then a linear decay."""
    _check_fits(num_steps, warmup_steps=warmup_steps)
    down = optax.linear_schedule(peak, peak * final_ratio, num_steps - warmup_steps)
    return _after_warmup(peak, warmup_steps, down)


def wsd(
    peak: float,
    num_steps: int,
    warmup_steps: Count | None = None,
    decay_steps: Count | None = None,
    final_ratio: Ratio = 0.0,
) -> optax.Schedule:
    """Returns a warm-up (by default 5 % of the steps), the peak, and a linear decay (by default 20 % of the steps)."""
    warmup = int(num_steps * 0.05) if warmup_steps is None else warmup_steps
    decay = int(num_steps * 0.2) if decay_steps is None else decay_steps
    _check_fits(num_steps, warmup_steps=warmup, decay_steps=decay)
    if decay == 0:
        return _after_warmup(peak, warmup, optax.constant_schedule(peak))
    stable = optax.constant_schedule(peak)
    down = optax.linear_schedule(peak, peak * final_ratio, decay)
    return _after_warmup(peak, warmup, optax.join_schedules([stable, down], [num_steps - decay - warmup]))


def plateau(
    peak: float,
    num_steps: int,
    warmup_steps: Count = 0,
    factor: Fraction = 0.5,
    patience: Positive = 10,
    window_steps: Positive = 10,
    cooldown: Count = 0,
    tolerance: Fraction = 1e-4,
    final_ratio: Ratio = 0.0,
) -> optax.Schedule:
    """Returns a warm-up (by default none), then the peak; its scale depends on the loss, not on the step."""
    _check_fits(num_steps, warmup_steps=warmup_steps)
    return _after_warmup(peak, warmup_steps, optax.constant_schedule(peak))


SCHEDULES: dict[str, Callable[..., optax.Schedule]] = {
    each.__name__: each for each in (constant, cosine, warmup_cosine, linear, wsd, plateau)
}
"""Name -> function of (peak, num_steps, options)."""


def _after_warmup(peak: float, warmup: int, rest: optax.Schedule) -> optax.Schedule:
    if warmup == 0:
        return rest
    return optax.join_schedules([optax.linear_schedule(peak / (warmup + 1), peak, warmup), rest], [warmup])


def _check_fits(num_steps: int, **parts: int) -> None:
    """Checks that the parts of a schedule leave at least one step of the run after the warm-up."""
    total = sum(parts.values())
    if total > num_steps or parts["warmup_steps"] == num_steps:
        sums = " + ".join(f"{KEY}.{name}={steps}" for name, steps in parts.items())
        raise UserError(
            f"{sums}{f' = {total} steps' if len(parts) > 1 else ''}, but the run has train.steps={num_steps}. "
            "Reduce them, or train for more steps."
        )


def rate_reader(schedule: optax.Schedule, num_steps: int) -> Callable[[int], float]:
    """Returns a function from a step to its learning rate on the host, which computes the rates of many steps together.

    Args:
        schedule: A function from an array of steps to learning rates.
        num_steps: Optimizer steps of the whole run.
    """

    @lru_cache(1)
    def window(first: int) -> np.ndarray:
        steps = np.arange(first, min(first + WINDOW, num_steps))
        return np.broadcast_to(np.asarray(schedule(steps)), steps.shape)  # pyright: ignore

    return lambda step: float(window(step // WINDOW * WINDOW)[step % WINDOW])


def is_plateau(schedule: Mapping[str, Any]) -> bool:
    """Returns whether a schedule follows the loss."""
    return schedule.get("name") == PLATEAU


def scale_on_plateau(schedule: Mapping[str, Any]) -> optax.GradientTransformationExtraArgs:
    """Scales updates down if the loss stops falling.

    Args:
        schedule: `optimizer.schedule` with the name plateau.

    Returns:
        A transformation with an update that needs `value`, the loss, as a scalar.
    """
    parameters = inspect.signature(plateau).parameters.values()
    options = {each.name: each.default for each in parameters if each.default is not each.empty} | {**schedule}
    return optax.contrib.reduce_on_plateau(
        factor=options["factor"],
        patience=options["patience"],
        rtol=options["tolerance"],
        cooldown=options["cooldown"],
        accumulation_size=options["window_steps"],
        min_scale=options["final_ratio"],
    )


def plateau_scale(opt_state: Any) -> Array | None:
    """Returns the current scale of `optimizer.schedule`, or None if no schedule follows the loss.

    Args:
        opt_state: The optimizer's state, `TrainState.opt_state`.

    Returns:
        A scalar (with local steps, one for each group of devices): that of the parameters outside `optimizer.groups`,
        or of the first group if there are none.
    """
    nodes, _ = jax.tree_util.tree_flatten_with_path(opt_state, is_leaf=_is_plateau_state)
    found = [(path, node.scale) for path, node in nodes if _is_plateau_state(node)]
    rest = [scale for path, scale in found if jax.tree_util.DictKey(REST) in path]
    return next(iter(rest or [scale for _, scale in found]), None)


def _is_plateau_state(node: Any) -> bool:
    return isinstance(node, optax.contrib.ReduceLROnPlateauState)

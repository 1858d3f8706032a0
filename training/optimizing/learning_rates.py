"""Learning rates over the steps of a run: functions of the step by name, and their numbers on the host.

Written for `optimizer.learning_rate` = peak, a run of n steps and step s = 0 .. n - 1:

    constant        peak
    cosine          from peak down half a cosine
    warmup_cosine   a straight line up to peak, then as cosine
    linear          (a straight line up to peak, then) a straight line down
    wsd             warm-up, stable, decay: a straight line up, peak, a straight line down at the end
    plateau         (a straight line up to peak, then) peak; the optimizer scales it, as `optimizing/plateau` says

A line up starts at peak / (warmup_steps + 1), not at 0, and is at peak in step `warmup_steps`. A line or cosine down
would reach peak * final_ratio in step n, the first one that is not taken.

Sources: Loshchilov & Hutter 2017, "SGDR" (cosine); Hu et al. 2024, "MiniCPM" (wsd).
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import optax

from ...mesh.errors import UserError
from ...mesh.near_miss import did_you_mean, unknown_options
from .plateau import DEFAULTS

KEY = "optimizer.schedule"
TINY = float(np.finfo(np.float32).tiny)
"""The smallest number over 0 of float32 that devices do not round to 0."""
WINDOW = 2**16
"""Steps whose rates are worked out together."""
LOOKED_AT = 2**20
"""Steps whose rates are looked at before a run starts, besides those of its last window."""


def make_learning_rate(peak: float, schedule: Mapping[str, Any], num_steps: int) -> optax.Schedule:
    """Builds the learning rate of a run.

    Args:
        peak: `optimizer.learning_rate`, the highest.
        schedule: `optimizer.schedule`: a name, and that schedule's options.
        num_steps: Optimizer steps in the whole run.

    Returns:
        A function of the step (an integer, or an array of them) that gives the learning rate.

    Raises:
        UserError: There is no such schedule or option, or the parts of the schedule are longer than the run.
    """
    problems = learning_rate_problems(schedule)
    if problems:
        raise UserError("\n".join(problems))
    options = dict(schedule)
    return SCHEDULES[_canonical(options.pop("name", "constant"))](peak, num_steps, **options)


def learning_rate_problems(schedule: Mapping[str, Any]) -> list[str]:
    """Lists what is wrong with `optimizer.schedule` in a run of any length: its name, its options, their values."""
    options = dict(schedule)
    name = options.pop("name", "constant")
    if _canonical(name) not in SCHEDULES:
        return [f"{KEY}.name={name!r} is not a schedule.{did_you_mean(name, SCHEDULES, otherwise='Choose from')}"]
    _, _, *known = inspect.signature(SCHEDULES[_canonical(name)]).parameters
    problems = unknown_options([option for option in options if option not in known], known, KEY, of=name)
    for option, value in options.items():
        if option.endswith("_steps") and not (_is_number(value, int) and value >= 0):
            problems.append(f"{KEY}.{option}={value!r} has to be a number of steps, at least 0.")
        elif option == "final_ratio" and not (_is_number(value, int | float) and 0 <= value <= 1):
            problems.append(f"{KEY}.{option}={value!r} has to be a part of the learning rate, 0 to 1.")
        elif option in ("factor", "tolerance") and not (_is_number(value, int | float) and TINY <= value < 1):
            problems.append(f"{KEY}.{option}={value!r} has to be between 0 and 1, in float32.")
        elif option in ("patience", "cooldown") and not (_is_number(value, int) and value >= (option == "patience")):
            least = int(option == "patience")
            problems.append(f"{KEY}.{option}={value!r} has to be a number of windows, at least {least}.")
    if options.get("window_steps") == 0:
        problems.append(f"{KEY}.window_steps=0: the loss is a mean over at least 1 step.")
    return problems


def _canonical(name: Any) -> Any:
    return name.replace("-", "_") if isinstance(name, str) else None


def _is_number(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def constant(peak: float, num_steps: int) -> optax.Schedule:
    """The same rate in every step."""
    return optax.constant_schedule(peak)


def cosine(peak: float, num_steps: int, final_ratio: float = 0.0) -> optax.Schedule:
    """Half a cosine from the first step to the last."""
    return optax.cosine_decay_schedule(peak, num_steps, alpha=final_ratio)


def warmup_cosine(
    peak: float, num_steps: int, warmup_steps: int | None = None, final_ratio: float = 0.0
) -> optax.Schedule:
    """A warm-up (5 % of the steps by default), then half a cosine."""
    warmup = _part(num_steps, 0.05) if warmup_steps is None else warmup_steps
    _check_fits(num_steps, warmup_steps=warmup)
    down = optax.cosine_decay_schedule(peak, num_steps - warmup, alpha=final_ratio)
    return _after_warmup(peak, warmup, down)


def linear(peak: float, num_steps: int, warmup_steps: int = 0, final_ratio: float = 0.0) -> optax.Schedule:
    """A warm-up (none by default), then a straight line down."""
    _check_fits(num_steps, warmup_steps=warmup_steps)
    down = optax.linear_schedule(peak, peak * final_ratio, num_steps - warmup_steps)
    return _after_warmup(peak, warmup_steps, down)


def wsd(
    peak: float,
    num_steps: int,
    warmup_steps: int | None = None,
    decay_steps: int | None = None,
    final_ratio: float = 0.0,
) -> optax.Schedule:
    """A warm-up (5 % of the steps by default), the peak, and a straight line down (20 % of the steps by default)."""
    warmup = _part(num_steps, 0.05) if warmup_steps is None else warmup_steps
    decay = _part(num_steps, 0.2) if decay_steps is None else decay_steps
    _check_fits(num_steps, warmup_steps=warmup, decay_steps=decay)
    if decay == 0:
        return _after_warmup(peak, warmup, optax.constant_schedule(peak))
    stable = optax.constant_schedule(peak)
    down = optax.linear_schedule(peak, peak * final_ratio, decay)
    return _after_warmup(peak, warmup, optax.join_schedules([stable, down], [num_steps - decay - warmup]))


def plateau(
    peak: float,
    num_steps: int,
    warmup_steps: int = 0,
    factor: float = DEFAULTS["factor"],
    patience: int = DEFAULTS["patience"],
    window_steps: int = DEFAULTS["window_steps"],
    cooldown: int = DEFAULTS["cooldown"],
    tolerance: float = DEFAULTS["tolerance"],
    final_ratio: float = DEFAULTS["final_ratio"],
) -> optax.Schedule:
    """A warm-up (none by default), then the peak: what it is scaled by depends on the loss, not on the step."""
    _check_fits(num_steps, warmup_steps=warmup_steps)
    return _after_warmup(peak, warmup_steps, optax.constant_schedule(peak))


SCHEDULES: dict[str, Callable[..., optax.Schedule]] = {
    "constant": constant,
    "cosine": cosine,
    "warmup_cosine": warmup_cosine,
    "linear": linear,
    "wsd": wsd,
    "plateau": plateau,
}
"""Name -> function of (peak, num_steps, options). `warmup-cosine` means `warmup_cosine`."""


def _part(num_steps: int, share: float) -> int:
    return int(num_steps * share)


def _after_warmup(peak: float, warmup: int, rest: optax.Schedule) -> optax.Schedule:
    if warmup == 0:
        return rest
    return optax.join_schedules([optax.linear_schedule(peak / (warmup + 1), peak, warmup), rest], [warmup])


def _check_fits(num_steps: int, **parts: int) -> None:
    """Parts that follow each other have to leave at least one step of the run after the warm-up."""
    total = sum(parts.values())
    if total > num_steps or parts["warmup_steps"] == num_steps:
        sums = " + ".join(f"{KEY}.{name}={steps}" for name, steps in parts.items())
        raise UserError(
            f"{sums}{f' = {total} steps' if len(parts) > 1 else ''}, but the run has train.steps={num_steps}. "
            "Make them fewer, or train for more steps."
        )


class LearningRates:
    """The learning rate of each step on the host, indexed like an array of them.

    A window of steps is worked out at a time: no step waits for its rate, and a run of a billion steps holds no billion
    rates.
    """

    def __init__(self, schedule: optax.Schedule, num_steps: int) -> None:
        """Works out nothing yet.

        Args:
            schedule: A function of an array of steps.
            num_steps: Optimizer steps in the whole run.
        """
        self._schedule = schedule
        self._num_steps = num_steps
        self._first = 0
        self._window = np.zeros(0)

    def __len__(self) -> int:
        """Steps in the whole run."""
        return self._num_steps

    def __getitem__(self, step: int) -> float:
        """The learning rate of a step, 0 <= step < len.

        Raises:
            IndexError: There is no such step.
        """
        if not 0 <= step < self._num_steps:
            raise IndexError(f"step {step} of {self._num_steps}")
        if not self._first <= step < self._first + len(self._window):
            self._first = step // WINDOW * WINDOW
            self._window = self._rates(self._first)
        return float(self._window[step - self._first])

    def first_not_finite(self) -> int | None:
        """The first step whose rate is no finite number of float32, of the first million steps and the last ones."""
        last = (self._num_steps - 1) // WINDOW * WINDOW
        for first in dict.fromkeys((*range(0, min(self._num_steps, LOOKED_AT), WINDOW), last)):
            with np.errstate(over="ignore"):
                wrong = np.flatnonzero(~np.isfinite(self._rates(first).astype(np.float32)))
            if len(wrong):
                return first + int(wrong[0])
        return None

    def _rates(self, first: int) -> np.ndarray:
        """The rates of the window that begins at a step."""
        steps = np.arange(first, min(first + WINDOW, self._num_steps))
        return np.broadcast_to(np.asarray(self._schedule(steps)), steps.shape)  # pyright: ignore

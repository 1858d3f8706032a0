"""The callbacks of the catalog by name, those that end the run by a file or the time, and the user's own."""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, ClassVar

from annotated_types import Ge

from ...mesh.errors import UserError, did_you_mean
from ...parallel.model.user_code import import_function
from ...parallel.model.user_errors import accepts
from ...parallel.model.user_options import with_options
from ...parallel.options import LocalPath
from ..run_files import Kind
from ..times import process_age
from .callback import EVENTS, METHODS, Callback, CatalogCallback, Run, implements
from .monitoring import BestCheckpoint, EarlyStopping, ReduceOnPlateau
from .recording import CSVLog, Profile, Samples
from .trackers import MLflow, TensorBoard, WeightsAndBiases

UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
PART = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|m|h|d)\s*")


@dataclass(kw_only=True)
class StopFile(CatalogCallback):
    """Saves and ends the run if a file exists, and removes the file; the same command continues. Exit code 0."""

    writes: ClassVar[Kind | None] = "file"

    path: LocalPath = "stop"
    """The file; a relative path starts from run.dir."""
    seconds: Annotated[float, Ge(0)] = 1.0
    """Seconds between two checks."""

    _next = 0.0

    def on_step_begin(self, run: Run) -> None:
        """Checks for the file from time to time."""
        now = time.monotonic()
        if now < self._next or not run.is_main:
            return
        self._next = now + self.seconds
        file = run.folder / Path(self.path).expanduser()
        if file.exists():
            file.unlink(missing_ok=True)
            run.interrupt(f"the file {file}")


@dataclass(kw_only=True)
class TimeLimit(CatalogCallback):
    """Saves and ends the run after some time; the same command continues.

    The time starts with the process of this command and includes compilation and restoring. The current step and the
    save come on top: set the limit that much shorter.
    """

    after: str
    """The time: "3h", "90m", "2h 30m", "45s"."""
    try_again: bool = False
    """Exit with code 75 instead of 0, so that a supervisor or a scheduler restarts the run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._end = time.monotonic() - process_age() + parse_duration(self.after)

    def on_step_begin(self, run: Run) -> None:
        """Checks the clock."""
        if time.monotonic() > self._end:
            run.interrupt(f"the time limit of {self.after}", try_again=self.try_again)
            self._end = float("inf")


def parse_duration(text: str) -> float:
    """Returns the seconds of a duration such as "2h 30m".

    Raises:
        UserError: It is invalid or zero.
    """
    if not PART.sub("", text).strip() and text.strip():
        seconds = sum(float(number) * UNITS[unit] for number, unit in PART.findall(text))
        if seconds > 0:
            return seconds
    raise UserError(f"after={text!r} is not a valid duration. Use '3h', '90m', '2h 30m' or '45s'.")


CALLBACKS: dict[str, type[Callback]] = {
    "early_stopping": EarlyStopping,
    "reduce_on_plateau": ReduceOnPlateau,
    "best_checkpoint": BestCheckpoint,
    "csv": CSVLog,
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
    "profile": Profile,
    "samples": Samples,
    "stop_file": StopFile,
    "time_limit": TimeLimit,
}
"""Name in a config -> class; its fields are the options."""


def make_callbacks(
    section: Sequence[Mapping[str, Any]], offered: Mapping[str, Any], search_path: Sequence[str | Path] = ()
) -> dict[str, Any]:
    """Creates the callbacks of a config.

    Args:
        section: The section `callbacks`: names and options.
        offered: Values that the user's function receives if it has parameters with these names.
        search_path: Directories that are searched first for the user's code.

    Returns:
        Name for messages -> callback.

    Raises:
        UserError: The user's function is missing, takes other options, fails, or does not return a callback.
    """
    callbacks = {}
    for place, given in enumerate(section):
        key, options = f"callbacks.{place}", dict(given)
        name = options.pop("name")
        if ":" in name:
            function = import_function(name, f"{key}.name", search_path)
            callback = with_options(function, options, offered, key, f"{key}.name={name!r}")()
            check_callback(callback, f"{key}.name={name!r}")
        else:
            callback = CALLBACKS[name](**options)
        callbacks[f"{key} ({name})"] = callback
    return callbacks


def check_callback(callback: Any, given: str) -> None:
    """Checks that an object has methods of a callback, no unknown events, and the right parameters.

    Args:
        callback: The object.
        given: Its origin for messages.

    Raises:
        UserError: It is not a callback.
    """
    if isinstance(callback, type):
        raise UserError(f"{given} returned the class {callback.__name__}. Return an object of it.")
    kind = type(callback).__name__
    if not isinstance(monitored := getattr(callback, "monitors", None), str | None):
        raise UserError(f"{given}: {kind}.monitors={monitored!r} must be the name of a metric, or None.")
    path = getattr(callback, "path", None)
    if isinstance(callback, Callback) and callback.writes and not isinstance(path, str | Path):
        raise UserError(f"{given}: {kind}.path={path!r} must be a string, as {kind}.writes={callback.writes!r} is set.")
    for name in METHODS:
        if not callable(getattr(callback, name, print)):
            raise UserError(f"{given}: {kind}.{name} must be a method, got {getattr(callback, name)!r}.")
        expected = [*signature(getattr(Callback, name)).parameters]
        if implements(callback, name) and not accepts(getattr(callback, name), len(expected) - 1):
            raise UserError(
                f"{given}: {kind}.{name}{signature(getattr(callback, name))} cannot be called with "
                f"({', '.join(expected[1:])}). Define it as {name}({', '.join(expected)})."
            )
    if unknown := [name for name in dir(callback) if name.startswith("on_") and name not in EVENTS]:
        near = did_you_mean(unknown[0], EVENTS, otherwise="They are")
        raise UserError(f"{given}: {kind}.{unknown[0]} is not an event.{near}")
    if not any(implements(callback, name) for name in METHODS if name != "close"):
        raise UserError(f"{given} returned a {kind} without an event of a callback. Define one of {', '.join(EVENTS)}.")

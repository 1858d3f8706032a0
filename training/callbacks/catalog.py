"""The callbacks that a config can name, and the way to the user's own."""

from collections.abc import Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

from ...mesh.errors import UserError
from ...mesh.near_miss import did_you_mean
from ...mesh.user_code import import_function
from ...mesh.user_errors import accepts
from ...mesh.user_options import call_with_options
from .best_checkpoint import BestCheckpoint
from .callback import EVENTS, METHODS, Callback, hears
from .conductor import Named
from .csv_log import CSVLog
from .early_stopping import EarlyStopping
from .plateau import ReduceOnPlateau
from .profile import Profile
from .samples import Samples
from .stop_file import StopFile
from .time_limit import TimeLimit
from .trackers.mlflow import MLflow
from .trackers.tensorboard import TensorBoard
from .trackers.weights_and_biases import WeightsAndBiases

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
"""Name in a config -> class, whose fields are its options."""


def make_callbacks(
    section: Sequence[Mapping[str, Any]], offered: Mapping[str, Any], search_path: Sequence[str | Path] = ()
) -> list[Named]:
    """Makes the callbacks of a config.

    Args:
        section: `callbacks`: of each its name and its options.
        offered: What a function of the user's own gets where it has a parameter of that name.
        search_path: Folders where the user's own are looked for first.

    Raises:
        UserError: The user's function is missing, takes other options, fails, or returns no callback.
    """
    return [_make(f"callbacks.{place}", given, offered, search_path) for place, given in enumerate(section)]


def _make(key: str, given: Mapping[str, Any], offered: Mapping[str, Any], search_path: Sequence[str | Path]) -> Named:
    options = {name: value for name, value in given.items() if name != "name"}
    name = given["name"]
    if ":" not in name:
        return Named(f"{key} ({name})", CALLBACKS[name](**options))
    function = import_function(name, f"{key}.name", search_path)
    callback = call_with_options(function, options, offered, key, f"{key}.name={name!r}")
    check_callback(callback, f"{key}.name={name!r}")
    return Named(f"{key} ({name})", callback)


def check_callback(callback: Any, given: str) -> None:
    """Rejects objects without methods of a callback, unknown events, and methods with other parameters.

    Args:
        callback: An object.
        given: What it was given as, for messages.

    Raises:
        UserError: It is not a callback.
    """
    if isinstance(callback, type):
        raise UserError(f"{given} returned the class {callback.__name__}. Return an object of it.")
    for name in METHODS:
        expected = [*signature(getattr(Callback, name)).parameters]
        if hears(callback, name) and not accepts(getattr(callback, name), len(expected) - 1):
            raise UserError(
                f"{given}: {type(callback).__name__}.{name}{signature(getattr(callback, name))} cannot be called with "
                f"({', '.join(expected[1:])}). Define it as {name}({', '.join(expected)})."
            )
    unknown = [name for name in dir(callback) if name.startswith("on_") and name not in EVENTS]
    if unknown:
        near = did_you_mean(unknown[0], EVENTS, otherwise="They are")
        raise UserError(f"{given}: {type(callback).__name__}.{unknown[0]} is not an event.{near}")
    if not any(hears(callback, name) for name in METHODS if name != "close"):
        raise UserError(
            f"{given} returned a {type(callback).__name__} that hears of nothing. Give it one of {', '.join(EVENTS)}."
        )

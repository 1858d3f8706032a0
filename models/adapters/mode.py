"""The argument by which a module is told whether it is trained or evaluated."""

import inspect
from collections.abc import Callable
from typing import Any

TRAINS = ("train", "training", "is_training")
EVALUATES = ("deterministic", "use_running_average", "inference", "eval")


def mode_arguments(function: Callable[..., Any], training: bool) -> dict[str, bool]:
    """The keyword arguments of `function` that tell training from evaluation; none where it has none.

    Args:
        function: Called by the library's user, such as `Module.__call__`.
        training: What they have to tell.
    """
    known = {**dict.fromkeys(TRAINS, training), **dict.fromkeys(EVALUATES, not training)}
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}
    return {name: value for name, value in known.items() if name in parameters}

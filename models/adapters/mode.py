"""The arguments of a module: what it is called with, and whether it is trained or evaluated."""

import inspect
from collections.abc import Callable, Collection
from typing import Any

from ...layouts.sizes import counted
from ...mesh.errors import UserError

TRAINS = ("train", "training", "is_training", "enable_dropout")
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


def as_arguments(inputs: Any) -> tuple[Any, ...]:
    """What a module is called with: the entries of a tuple, or one argument of any other kind."""
    return inputs if isinstance(inputs, tuple) else (inputs,)


def check_arguments(module: Any, inputs: Any, more: Collection[str] = ()) -> None:
    """Looks whether a module can be called with its inputs.

    Args:
        module: With a `__call__`.
        inputs: As `as_arguments` takes them.
        more: Names of what else it is given where it takes it.

    Raises:
        UserError: It takes fewer arguments, or needs more.
    """
    signature = inspect.signature(type(module).__call__)
    given = {name: None for name in more if name in signature.parameters}
    given |= mode_arguments(type(module).__call__, training=True)
    try:
        signature.bind(module, *as_arguments(inputs), **given)
    except TypeError as error:
        taken = ", ".join([*signature.parameters][1:])
        count = counted(len(as_arguments(inputs)), "argument")
        raise UserError(
            f"{type(module).__name__}.__call__({taken}) cannot be called with {count}: {error}. Set model.inputs to a "
            "module:function of the batch (in Python inputs=) that returns a tuple of all that it is called with, and "
            "give other arguments a default."
        ) from None

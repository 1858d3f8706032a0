"""Checks of a model and an optimizer that a program passes, or that a config names."""

from collections.abc import Mapping
from typing import Any

import optax

from ...mesh.errors import UserError
from .definition import BlockModel, Model

EXPECTED = (
    "a spmdkit.Model or BlockModel, a pair (init, loss), an object with `init(key) -> params` and "
    "`loss(params, batch, key) -> (sum, weight)`, or"
)
OPTIONAL = ("predict", "flops_per_row", "init_state")
"""The further attributes of an object with `init` and `loss` that a model takes over."""


def as_model(value: Any, name: str = "model") -> Model | BlockModel | None:
    """Makes a `Model` of an object with an init and a loss.

    Args:
        value: A `Model`, a `BlockModel`, a pair of functions (init, loss), or an object with `init` and `loss` and,
            optionally, `init_state`, `predict` and `flops_per_row`.
        name: The name in reports, if the value has none.

    Returns:
        The model, or None for any other value.
    """
    if isinstance(value, Model | BlockModel):
        return value
    if isinstance(value, tuple) and len(value) == 2:
        init, loss = value
    else:
        init = getattr(value, "init", None)
        loss = getattr(value, "loss", None)
    if not callable(init) or not callable(loss):
        return None
    optional: Mapping[str, Any] = {option: getattr(value, option, None) for option in OPTIONAL}
    return Model(init=init, loss=loss, name=name, **optional)


def require_model(value: Any, function: str) -> Model | BlockModel:
    """Returns the model that a program passes to a function of the library; see `as_model`.

    Args:
        value: The argument.
        function: The name of the function, for the message.

    Raises:
        UserError: It is not a model.
    """
    model = as_model(value)
    if model is None:
        raise UserError(f"{function}: the model is {_describe(value)}. It must be {EXPECTED} {adapted_module(value)}")
    return model


def adapted_module(module: Any) -> str:
    """Returns how a module of another library becomes a model, with the module's own name in the call."""
    module_class = module if isinstance(module, type) else type(module)
    is_module = module_class.__module__.split(".")[0] not in ("builtins", "types")
    name = module_class.__name__ if is_module else "module"
    return f"a module of Flax, Equinox or Keras as spmdkit.adapt({name}(...), loss=..., example=...)."


def check_is_optimizer(optimizer: Any, what: str) -> None:
    """Checks that an optimizer is an optax transformation.

    Args:
        optimizer: The optimizer.
        what: Its origin, for the message: "Trainer: the optimizer".

    Raises:
        UserError: It is something else.
    """
    if callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None)):
        return
    remedy = "Give one, such as optax.adamw(1e-3)."
    if isinstance(optimizer, str) and hasattr(optax, optimizer):
        remedy = f"Give optax.{optimizer}(1e-3), with your learning rate."
    elif callable(optimizer):
        name = getattr(optimizer, "__name__", "it")
        remedy = f"Call {name}, with your learning rate: {name}(1e-3)."
    raise UserError(f"{what} must be an optax.GradientTransformation, got {_describe(optimizer)}. {remedy}")


def _describe(value: Any) -> str:
    if isinstance(value, str | int | float | None):
        return f"{value!r} ({type(value).__name__})"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = getattr(value, "__name__", "")
    kind = f"an object of type {type(value).__name__}"
    return f"{kind} ({name})" if name else kind

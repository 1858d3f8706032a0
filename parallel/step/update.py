"""The optimizer's part of a step: from averaged gradients to the next parameters; any optax transformation.

    updates, opt_state = optimizer.update(gradients, opt_state, params, value=loss, grad=gradients)

`value` and `grad` are for transformations that ask for them (`optax.GradientTransformationExtraArgs`): the loss of the
batch before the update, and the gradients that are given anyway. Functions (`value_fn`, `grad_fn`) would run the model
again within a step, which holds one forward and one backward pass: an optimizer that needs them is refused.
"""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from ...layouts.paths import leaves_with_paths
from ...mesh.errors import UserError
from ..model import Params
from ..xla.error_texts import NOT_AN_ARRAY, matches

_MISSING = re.compile(r"missing \d+ required keyword-only arguments?: (.*)")


def abstract_optimizer_state(optimizer: optax.GradientTransformation, params: Params) -> Any:
    """Shapes and dtypes of an optimizer's state.

    Args:
        optimizer: An optax transformation.
        params: Shapes and dtypes of the parameters.

    Raises:
        UserError: The state contains something other than arrays; the message has its path.
    """
    try:
        return jax.eval_shape(optimizer.init, params)
    except TypeError as error:
        if not matches(error, NOT_AN_ARRAY):
            raise
        raise UserError(
            f"The optimizer's init returned something other than an array: {str(error).splitlines()[0]}. Its state is "
            "kept on devices and in checkpoints, so it holds arrays and numbers alone. Keep other settings in the "
            "function that makes the optimizer."
        ) from error


def apply_optimizer(
    optimizer: optax.GradientTransformation, gradients: Params, opt_state: Any, params: Params, loss: Array
) -> tuple[Params, Any]:
    """Updates parameters once. Traced.

    Args:
        optimizer: An optax transformation.
        gradients: The averaged and clipped gradients.
        opt_state: The optimizer's state.
        params: The parameters of the gradients.
        loss: The loss of the gradients, a scalar.

    Returns:
        The next parameters and state.

    Raises:
        UserError: The optimizer needs more than a step has, decides by numbers that are known on devices alone, or
            returned something else than updates and a state like those that it was given.
    """
    try:
        result = optax.with_extra_args_support(optimizer).update(
            gradients, opt_state, params, value=loss, grad=gradients
        )
    except jax.errors.ConcretizationTypeError as error:
        raise UserError(
            "The optimizer's update needs the value of an array in Python (`if`, `float(...)`), but a step is compiled "
            "once for all values. Write it with jnp.where or jax.lax.cond, and keep counters as arrays in its state. "
            f"JAX says: {str(error).splitlines()[0]}"
        ) from error
    except TypeError as error:
        missing = _MISSING.search(str(error))
        if missing is None:
            raise
        raise UserError(
            f"The optimizer's update needs {missing[1]}, which a step does not have: it gives value= (the loss) and "
            "grad= (the gradients), and runs the model once. A line search runs it several times: leave it out, "
            "as in optax.lbfgs(learning_rate, linesearch=None), or take another optimizer."
        ) from error
    if not isinstance(result, tuple) or len(result) != 2:
        raise UserError(
            f"The optimizer's update returned a {type(result).__name__}. It has to return (updates, state)."
        )
    updates, new_state = result
    _check_alike("updates", updates, params, lambda leaf: f"of shape {list(jnp.shape(leaf))}")
    _check_alike("a state", new_state, opt_state, lambda leaf: f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}")
    return optax.apply_updates(params, updates), new_state


def _check_alike(what: str, found: Any, wanted: Any, describe: Callable[[Any], str]) -> None:
    """Rejects a tree with other paths than another, or with leaves that are described differently."""
    leaves, expected = dict(leaves_with_paths(found)), dict(leaves_with_paths(wanted))
    for path in dict.fromkeys((*expected, *leaves)):
        given, want = (describe(tree[path]) if path in tree else "missing" for tree in (leaves, expected))
        if given != want:
            raise UserError(
                f"The optimizer's update returned {what} in which {path!r} is {given}, expected {want}. Updates have "
                "the structure and the shapes of the parameters; a state also keeps its dtypes from step to step."
            )

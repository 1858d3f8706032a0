"""Checks of a model's functions before its step is compiled: on one device, or on the mesh of the step."""

from collections.abc import Mapping

import jax

from ..model import BlockModel, Model
from ..model.user_errors import as_user_error, describe_error
from ..sharding.model_errors import ModelError, check_loss
from .train_step import Step

MESH_ERRORS = ("axis name", "mesh")
"""Words of JAX's errors for a collective that is traced outside its mesh."""


def check_functions(
    model: Model | BlockModel, step: Step, batch: Mapping[str, jax.ShapeDtypeStruct], *, evaluates: bool
) -> bool:
    """Traces the model's functions on the rows of one device.

    Args:
        model: The model, not split.
        step: Its step, in which a model with collectives of its own is traced on the mesh.
        batch: Global shapes and dtypes of a batch.
        evaluates: Whether the loss is also called without a key.

    Returns:
        True if the model runs on one device; False if it runs only on the mesh.

    Raises:
        ModelError: It does neither.
    """
    local = step.plan.rows(step.accumulate).part(batch)
    try:
        precision = step.precision
        check_loss(model, local, compute=precision.compute, stored=precision.params, evaluates=evaluates)
    except ModelError as error:
        cause = error.__cause__
        if cause is None:
            raise
        try:
            with as_user_error(f"model {model.name!r}: on the mesh, loss", model.loss, ModelError):
                jax.eval_shape(step.gradients, step.abstract_state(), dict(batch))
                if evaluates:
                    jax.eval_shape(step.evaluate, step.abstract_state().params, dict(batch))
        except ModelError as on_the_mesh:
            needs_mesh = any(word in describe_error(cause) for word in MESH_ERRORS)
            if needs_mesh:
                raise on_the_mesh from cause
            raise error from cause
        return False
    return True

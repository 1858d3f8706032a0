"""The work of a model's loss, counted in its traced program."""

from collections.abc import Mapping
from typing import Any

import jax

from ...mesh.keys import make_key
from ..model import BlockModel, Model, has_state
from ..model.loss_sums import LossSums
from ..options import Precision, cast_floats, cast_inputs
from ..xla.program_work import PARAMETER, ROWS, Origin, Work, count_work
from .model_errors import abstract_init, abstract_state


def loss_work(model: Model | BlockModel, batch: Mapping[str, jax.ShapeDtypeStruct], precision: Precision) -> Work:
    """Returns the work of the loss and its gradients for some rows on one device, without a mesh.

    Args:
        model: The model, not split.
        batch: Shapes and dtypes of the rows of one device.
        precision: The dtypes.

    Returns:
        The work. If the loss cannot be traced without a mesh, nothing is counted, and `uncounted` says so.
    """
    params = jax.eval_shape(lambda tree: cast_floats(tree, precision.compute), abstract_init(model))
    rows = jax.eval_shape(lambda tree: cast_inputs(tree, precision.compute), dict(batch))
    state = abstract_state(model) if has_state(model) else ()
    key = jax.eval_shape(lambda: make_key(0))

    def loss(params: Any, rows: Any, state: Any, key: Any) -> LossSums:
        further = [state] if has_state(model) else []
        return LossSums(*model.loss(params, rows, key, *further))

    try:
        program = jax.make_jaxpr(loss)(params, rows, state, key).jaxpr
    except Exception as error:  # the model's own code, which may need its mesh
        return Work(uncounted=(f"the loss, which cannot be traced without its mesh ({type(error).__name__})",))
    numbers = [len(jax.tree.leaves(tree)) for tree in (params, rows, state, key)]
    kinds = [PARAMETER, ROWS, Origin(), Origin()]
    origins = [kind for kind, number in zip(kinds, numbers, strict=True) for _ in range(number)]
    return count_work(program, origins)

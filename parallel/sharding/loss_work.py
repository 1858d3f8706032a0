"""The work of a model's loss, counted in its traced program."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import jax

from ...mesh.keys import make_key
from ..model import BlockModel, Model, has_state
from ..model.loss_sums import LossSums
from ..options import Precision, cast_floats, cast_inputs
from ..xla.program_work import PARAMETER, ROWS, Origin, Work, count_work
from .batch_rows import record_batch_axes
from .model_errors import abstract_init, abstract_state


def loss_work(
    model: Model | BlockModel,
    batch: Mapping[str, jax.ShapeDtypeStruct],
    precision: Precision,
    axes: Mapping[str, int],
) -> Work:
    """Returns the work of the loss and its gradients for the rows of one device.

    A loss whose rows depend on each other, such as one that gathers the rows of all devices, has other work on a mesh
    than on one device: it is traced as a device of the mesh runs it.

    Args:
        model: The model, not split.
        batch: Shapes and dtypes of the rows of one device.
        precision: The dtypes.
        axes: Mesh axis -> size.

    Returns:
        The work. If the loss cannot be traced, nothing is counted, and `uncounted` says so.
    """
    params = jax.eval_shape(lambda tree: cast_floats(tree, precision.compute), abstract_init(model))
    rows = jax.eval_shape(lambda tree: cast_inputs(tree, precision.compute), dict(batch))
    state = abstract_state(model) if has_state(model) else ()
    key = jax.eval_shape(lambda: make_key(0))

    def loss(params: Any, rows: Any, state: Any, key: Any) -> LossSums:
        further = [state] if has_state(model) else []
        return LossSums(*model.loss(params, rows, key, *further))

    program = None
    with (
        record_batch_axes() as requests,
        suppress(Exception),
    ):  # errors of the model's own code, which may need its mesh
        program = jax.make_jaxpr(loss)(params, rows, state, key).jaxpr
    if program is None or requests:
        environment = list(axes.items())
        with suppress(Exception):
            program = jax.make_jaxpr(lambda *given: loss(*given), axis_env=environment)(params, rows, state, key).jaxpr
    if program is None:
        return Work(uncounted=("a loss that cannot be traced by itself",))
    numbers = [len(jax.tree.leaves(tree)) for tree in (params, rows, state, key)]
    kinds = [PARAMETER, ROWS, Origin(), Origin()]
    origins = [kind for kind, number in zip(kinds, numbers, strict=True) for _ in range(number)]
    return count_work(program, origins)

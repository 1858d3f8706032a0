"""What the update of a step moves: ZeRO's gathers, and what XLA adds where an optimizer looks across elements."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from .. import zero
from ..collectives import Collective, merge
from ..step.train_step import Step
from ..step.update import apply_optimizer
from ..xla.census import census

ACROSS = ("sort", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "rev", "triangular_solve", "lu")
"""Operations that look across elements of arrays which keep their shape."""


def predicted_of_update(step: Step) -> tuple[Collective, ...]:
    """ZeRO's gathers of updated parameters; nothing else is predicted of an update."""
    layouts = step.layouts
    if not layouts.zero:
        return ()
    platform = str(layouts.mesh.devices.flat[0]).split(":")[0]
    return merge(zero.cost(layouts.table, layouts.update_table, 2, step.precision.reduce, platform=platform))


def traffic_of_update(step: Step) -> tuple[Collective, ...]:
    """The collectives of the optimizer's update, compiled on its own, from gradients to parameters where they live."""
    state, gradients = step.abstract_state(), _abstract_gradients(step)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, (state.params, state.opt_state))
    lowered = jax.jit(_update_of(step), out_shardings=shardings).lower(gradients, state.opt_state, gradients)
    return census(lowered.compile().as_text() or "", step.layouts.mesh)


def looks_across(step: Step) -> bool:
    """Whether an optimizer's update of an element depends on other elements: an operation of it changes shapes."""
    state, gradients = step.abstract_state(), _abstract_gradients(step)
    program = jax.make_jaxpr(_update_of(step))(gradients, state.opt_state, gradients)
    return any(map(_mixes, _equations(program.jaxpr)))


def _mixes(equation: Any) -> bool:
    shapes = {variable.aval.shape for variable in (*equation.invars, *equation.outvars) if variable.aval.shape}
    return len(shapes) > 1 or (bool(shapes) and equation.primitive.name in ACROSS)


def _equations(jaxpr: Any) -> Iterator[Any]:
    """The operations of a program, those of programs inside it in their place."""
    for equation in jaxpr.eqns:
        inner = [getattr(each, "jaxpr", each) for value in equation.params.values() for each in _listed(value)]
        inner = [each for each in inner if hasattr(each, "eqns")]
        if not inner:
            yield equation
        for each in inner:
            yield from _equations(each)


def _listed(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _update_of(step: Step) -> Any:
    def update(params: Any, opt_state: Any, gradients: Any) -> Any:
        return apply_optimizer(step.optimizer, gradients, opt_state, params, jnp.zeros(()))

    return update


def _abstract_gradients(step: Step) -> Any:
    """Shapes of what is updated, where it is updated."""
    shardings = step.layouts.update_table.shardings()
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        step.abstract_state().params,
        shardings,
    )

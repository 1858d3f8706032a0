"""What the update of a step moves: ZeRO's gathers, and what XLA adds where an optimizer looks across elements."""

from typing import Any

import jax
import jax.numpy as jnp

from .. import zero
from ..collectives import Collective, merge
from ..step.train_step import Step
from ..step.update import apply_optimizer
from ..xla.census import census
from ..xla.equations import equations, inner_programs

ACROSS = ("sort", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "rev", "triangular_solve", "lu")
"""Operations that look across elements of arrays which keep their shape."""


def predicted_of_update(step: Step) -> tuple[Collective, ...]:
    """ZeRO's gathers of updated parameters; nothing else is predicted of an update."""
    return merge(zero.gathers(step.plan, step.plan.platform))


def traffic_of_update(step: Step) -> tuple[Collective, ...]:
    """The collectives of the optimizer's update, compiled on its own, from gradients to parameters where they live."""
    state, gradients = step.abstract_state(), _abstract_gradients(step)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, (state.params, state.opt_state))
    lowered = jax.jit(_update_of(step), out_shardings=shardings).lower(gradients, state.opt_state, gradients)
    return census(lowered.compile().as_text() or "", step.layouts.mesh)


def looks_across(step: Step) -> bool:
    """Whether the update of an element depends on other elements: some operation of the optimizer changes shapes."""
    state, gradients = step.abstract_state(), _abstract_gradients(step)
    program = jax.make_jaxpr(_update_of(step))(gradients, state.opt_state, gradients)
    return any(_mixes(each) for each in equations(program.jaxpr) if not inner_programs(each))


def _mixes(equation: Any) -> bool:
    given, made = (
        {each.aval.shape for each in some if each.aval.shape} for some in (equation.invars, equation.outvars)
    )
    to_scalars = bool(given) and not made
    return to_scalars or len(given | made) > 1 or (bool(given) and equation.primitive.name in ACROSS)


def _update_of(step: Step) -> Any:
    def update(params: Any, opt_state: Any, gradients: Any) -> Any:
        return apply_optimizer(step.optimizer, gradients, opt_state, params, jnp.zeros(()))

    return update


def _abstract_gradients(step: Step) -> Any:
    """Shapes and shardings of the gradients that the optimizer is given."""
    shardings = step.layouts.update_table.shardings()
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        step.abstract_state().params,
        shardings,
    )

"""An exponential moving average of the parameters: often a better model to evaluate and to deploy.

    t        = t + 1                                          updates, without skipped ones
    average  = average + max(1 - decay, 9 / (9 + t)) (parameters - average)

The weight of the new parameters falls from 0.9, at the first update, to 1 - decay: otherwise the initial parameters
would dominate the average for 1 / (1 - decay) steps. From t = 9 decay / (1 - decay) on (8991 for a decay of 0.999) it
is the plain rule.

The average is part of the optimizer's state, and each of its arrays is laid out like the updates of its parameter, so
it needs no communication. It is float32 if the parameters are narrower, because rounding would lose increments of 1 -
decay. Frozen parameters have no average: they are constant.

Source: Polyak & Juditsky 1992, "Acceleration of Stochastic Approximation by Averaging"; the weights of the first steps
are those of TensorFlow's `ExponentialMovingAverage` with `num_updates`.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from annotated_types import Ge, Lt
from jax import Array

from ...layouts.paths import map_with_path
from ...mesh.errors import raise_problems
from ...parallel.model import Params
from ...parallel.options import type_problems
from ...parallel.plan import ShardingPlan
from ...parallel.step.skipping import skipped
from ...parallel.step.state import TrainState

WARM_UP = 9
"""The weight of the new parameters is at least 9 / (9 + t)."""


@dataclass(frozen=True, kw_only=True)
class EMAConfig:
    """An exponential moving average of the parameters."""

    decay: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Fraction of the average that a step keeps, such as 0.999; less in the first 9 decay / (1 - decay) steps. 0 = no
    average."""
    evaluate: bool = False
    """Evaluate the average during training; the training loss is never that of the average."""

    def __post_init__(self) -> None:
        problems = type_problems("optimizer.ema", self)
        if self.evaluate and not self.decay:
            problems.append("optimizer.ema.evaluate=true requires an average. Set optimizer.ema.decay, such as 0.999.")
        raise_problems(problems)


class Averaged(NamedTuple):
    """The state of an optimizer with averaged parameters.

    Attributes:
        updates: The number of averaged updates, an int32 scalar.
        average: The averages, structured and laid out like the trained parameters, with nodes without leaves in place
            of frozen ones.
        inner: The optimizer's own state.
    """

    updates: Array
    average: Any
    inner: Any


def averaged(
    inner: optax.GradientTransformation, decay: float, frozen: Collection[str] = ()
) -> optax.GradientTransformationExtraArgs:
    """Averages the parameters of an optimizer; must be the outermost wrapper.

    Args:
        inner: The optimizer with all other wrappers.
        decay: Fraction of the average that a step keeps, in [0, 1).
        frozen: Paths of parameters that do not train.

    Returns:
        The same optimizer with an `Averaged` as state.
    """
    inner = optax.with_extra_args_support(inner)

    def init(params: Any) -> Averaged:
        trained = map_with_path(lambda path, leaf: optax.MaskedNode() if path in frozen else _wide(leaf), params)
        return Averaged(jnp.zeros((), jnp.int32), trained, inner.init(params))

    def update(updates: Any, state: Any, params: Any = None, **more: Any) -> tuple[Any, Averaged]:
        updates, after = inner.update(updates, state.inner, params, **more)
        count = state.updates + _accepted(state.inner, after)
        # The weight is computed in the widest enabled dtype.
        weight = jnp.maximum(1 - decay, WARM_UP / (WARM_UP + count.astype(float))) * _accepted(state.inner, after)
        new = optax.apply_updates(params, updates)

        def moved(average: Any, leaf: Array) -> Any:
            if isinstance(average, optax.MaskedNode):
                return average
            return average + weight.astype(average.dtype) * (leaf.astype(average.dtype) - average)

        return updates, Averaged(count, jax.tree.map(moved, state.average, new, is_leaf=_is_masked), after)

    return optax.GradientTransformationExtraArgs(init, update)


def _accepted(before: Any, after: Any) -> Array:
    """Returns 1, or 0 if `skip_not_finite` has skipped the update."""
    were, are = skipped(before), skipped(after)
    return jnp.int32(1) if were is None or are is None else jnp.int32(1) - (are - were)


def average_reader(plan: ShardingPlan) -> Callable[[TrainState], Params]:
    """Returns a function from a state to its averages, with the layouts and dtypes of the parameters.

    Args:
        plan: The layouts of the parameters; with ZeRO the averages are gathered.

    Returns:
        A compiled function of a state with an `averaged` optimizer; frozen parameters are returned as they are.
    """

    def merged(params: Params, average: Any) -> Params:
        def chosen(mean: Any, leaf: Array) -> Array:
            return leaf if isinstance(mean, optax.MaskedNode) else mean.astype(leaf.dtype)

        return jax.tree.map(chosen, average, params, is_leaf=_is_masked)

    compiled = jax.jit(merged, out_shardings=plan.table.shardings())
    return lambda state: compiled(state.params, state.opt_state.average)


def _wide(leaf: Any) -> Array:
    return jnp.asarray(leaf, jnp.promote_types(leaf.dtype, jnp.float32))


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)

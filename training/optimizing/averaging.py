"""An exponential moving average of the parameters, kept beside them: often the better model to evaluate and to ship.

    t        = t + 1                                          updates, those left out not counted
    average  = average + max(1 - decay, 9 / (9 + t)) (parameters - average)

The weight of the newest parameters falls from 0.9, at the first update, to 1 - decay: the average begins at the initial
parameters, and would otherwise hold on to them for 1 / (1 - decay) steps. From t = 9 decay / (1 - decay) on (8991 for a
decay of 0.999) it is the plain rule.

The average is part of the optimizer's state, and each array of it is laid out as its parameter's updates are: split
wherever these are, so that nothing is communicated. It is float32 where parameters are narrower, since they lose what
a step of 1 - decay adds. Frozen parameters have none: they are their own average.

Source: Polyak & Juditsky 1992, "Acceleration of Stochastic Approximation by Averaging"; the weights of the first steps
are those of TensorFlow's `ExponentialMovingAverage` with `num_updates`.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from ...layouts.paths import map_with_path
from ...mesh.errors import UserError
from ...parallel.model import Params
from ...parallel.plan import ShardingPlan
from ...parallel.step.state import TrainState
from .skipping import skipped

WARM_UP = 9
"""The weight of the newest parameters is at least 9 / (9 + t)."""


@dataclass(frozen=True, kw_only=True)
class EMAConfig:
    """An average of the parameters, beside them."""

    decay: float = 0.0
    """Part of the average that stays in a step, such as 0.999; less in the first 9 decay / (1 - decay) steps. 0 = no
    average is kept."""
    evaluate: bool = False
    """Whether evaluations during training are of the average; the training loss never is."""

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise UserError(f"optimizer.ema.decay={self.decay} has to be at least 0 and below 1; 0 keeps no average.")
        if self.evaluate and not self.decay:
            raise UserError(
                "optimizer.ema.evaluate=true: there is no average. Give optimizer.ema.decay, such as 0.999."
            )


class Averaged(NamedTuple):
    """The state of an optimizer whose parameters are averaged.

    Attributes:
        updates: int32 scalar, updates that the average has seen.
        average: structured, shaped and laid out like the parameters that train; in place of each other one a node
            without leaves.
        inner: the optimizer's own state.
    """

    updates: Array
    average: Any
    inner: Any


def averaged(
    inner: optax.GradientTransformation, decay: float, frozen: Collection[str] = ()
) -> optax.GradientTransformationExtraArgs:
    """Keeps an average of the parameters that an optimizer makes; the outermost of what is put around it.

    Args:
        inner: The optimizer, with all that scales or leaves out its updates.
        decay: Part of the average that stays in a step, from 0 to below 1.
        frozen: Paths of parameters that do not train.

    Returns:
        The same optimizer, its state in an `Averaged`.
    """
    inner = optax.with_extra_args_support(inner)

    def init(params: Any) -> Averaged:
        trained = map_with_path(lambda path, leaf: optax.MaskedNode() if path in frozen else _wide(leaf), params)
        return Averaged(jnp.zeros((), jnp.int32), trained, inner.init(params))

    def update(updates: Any, state: Any, params: Any = None, **more: Any) -> tuple[Any, Averaged]:
        updates, after = inner.update(updates, state.inner, params, **more)
        count = state.updates + _accepted(state.inner, after)
        weight = _weight(count, decay) * _accepted(state.inner, after)
        new = optax.apply_updates(params, updates)

        def moved(average: Any, leaf: Array) -> Any:
            if isinstance(average, optax.MaskedNode):
                return average
            return average + weight.astype(average.dtype) * (leaf.astype(average.dtype) - average)

        return updates, Averaged(count, jax.tree.map(moved, state.average, new, is_leaf=_is_masked), after)

    return optax.GradientTransformationExtraArgs(init, update)


def _weight(count: Array, decay: float) -> Array:
    """The weight of the parameters after update number `count`, in the widest dtype that there is."""
    number = count.astype(float)
    return jnp.maximum(1 - decay, WARM_UP / (WARM_UP + number))


def _accepted(before: Any, after: Any) -> Array:
    """1, or 0 where `skip_not_finite` has left the update out."""
    were, are = skipped(before), skipped(after)
    return jnp.int32(1) if were is None or are is None else jnp.int32(1) - (are - were)


def average_reader(plan: ShardingPlan) -> Callable[[TrainState], Params]:
    """What makes parameters of the averages in a state: laid out and of the dtypes as these, frozen ones themselves.

    Args:
        plan: Where the parameters live; under ZeRO the averages are gathered.

    Returns:
        A compiled function of a state whose optimizer is `averaged`.
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

"""The reference of every strategy: the same model and optimizer on one device, in plain JAX without the runtime.

(sum, weight), gradients = jax.value_and_grad(model.loss)(params, batch, key)          one device, whole arrays
gradients, norm          = gradients / weight, their global norm
params                   = optimizer.update(clip(gradients))                           optax alone
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from .model import BlockModel, Model, Params
from .stages import Stages

HostBatch = Mapping[str, Any]
"""A global batch as host arrays, rows on dim 0."""

TOLERANCES = {"float64": 1e-9, "float32": 1e-5, "float16": 1e-2, "bfloat16": 5e-2}
"""The relative error that rounding alone explains, where the narrowest numbers of a program have this dtype."""

JITTER = 0.1
"""How far first parameters are moved."""


class Sums(NamedTuple):
    """One batch on one device.

    Attributes:
        total: Sum of the weighted losses.
        weight: Sum of the weights.
        gradients: Gradients of `total`, a pytree of host arrays.
    """

    total: float
    weight: float
    gradients: Params


class Reference(NamedTuple):
    """A few steps on one device.

    Attributes:
        losses: The mean loss of each batch, before its update.
        weight: The weight of the first batch.
        gradients: Gradients of the mean loss of the first batch, not clipped: a pytree of host arrays.
        norm: Their global norm.
        params: The parameters after all steps, likewise.
    """

    losses: tuple[float, ...]
    weight: float
    gradients: Params
    norm: float
    params: Params


class OneDevice:
    """Training on one device.

    Args:
        model: The model, whole.
        optimizer: An optax transformation without clipping.
        clip_norm: Largest global norm of gradients; 0 = never clip.
        compute: The dtype that parameters are cast to before the model sees them.
        seed: The run's seed.
        stages: Stages of a pipeline; parameters and gradients are then given and returned as these store them, while
            the model and the optimizer have them in the model's own order.
    """

    def __init__(
        self,
        model: Model | BlockModel,
        optimizer: optax.GradientTransformation,
        *,
        clip_norm: float,
        compute: str,
        seed: int,
        stages: Stages | None = None,
    ) -> None:
        self.model = model
        self.stages = stages
        self.compute = compute
        self.seed = seed
        self.clip = optax.clip_by_global_norm(clip_norm) if clip_norm else optax.identity()
        self.optimizer = optimizer

    def init(self, dtype: str) -> Params:
        """The first parameters, stored in `dtype`, on the host."""
        params = jax.jit(lambda key: _cast(self.model.init(key), dtype))(_key_of(self.seed))
        return jax.tree.map(np.asarray, params)

    def sums(self, params: Params, batch: HostBatch, step: int = 0) -> Sums:
        """The sums of a batch and their gradients.

        Args:
            params: Host arrays.
            batch: A global batch.
            step: The number of steps done before; dropout depends on it.
        """
        sums = self._sums_of(self._to_model(params), batch, step)
        return sums._replace(gradients=self._to_stored(sums.gradients))

    def _sums_of(self, params: Params, batch: HostBatch, step: int) -> Sums:
        (total, weight), gradients = self._differentiate(params, dict(batch), np.int32(step))
        return Sums(float(total), float(weight), jax.tree.map(np.asarray, gradients))

    def train(self, params: Params, batches: Sequence[HostBatch]) -> Reference:
        """One step for each batch, from these parameters."""
        params = self._to_model(params)
        opt_state = jax.jit(self.optimizer.init)(params)
        losses: list[float] = []
        first: Sums | None = None
        for number, batch in enumerate(batches):
            sums = self._sums_of(params, batch, number)
            first = first or sums
            mean = jax.tree.map(lambda leaf, weight=sums.weight: (leaf / (weight or 1)).astype(leaf.dtype), sums[2])
            losses.append(sums.total / (sums.weight or 1))
            params, opt_state = self._update(params, opt_state, mean, losses[-1])
        assert first is not None, "there is at least one batch"
        gradients = jax.tree.map(lambda leaf: leaf / (first.weight or 1), first.gradients)
        norm = float(np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(gradients))))
        gradients, params = self._to_stored(gradients), self._to_stored(params)
        return Reference(tuple(losses), first.weight, gradients, norm, params)

    def tolerances(self, params: Params, batch: HostBatch) -> tuple[float, float]:
        """What rounding explains in loss and gradients, and in the update: a model may cast to float32 by itself."""
        params = self._to_model(params)
        loss = jax.make_jaxpr(self._sums)(params, dict(batch), np.int32(0))
        opt_state = jax.eval_shape(self.optimizer.init, params)
        update = jax.make_jaxpr(self._apply)(params, opt_state, params, 0.0)
        stored = max((str(leaf.dtype) for leaf in jax.tree.leaves(params) if _is_float(leaf)), key=_width, default="")
        narrowest = (  # a learning rate in float32 is the same number everywhere
            min((stored, *_narrowed(loss.jaxpr, scalars=True)), key=_width),
            min((stored, *_narrowed(update.jaxpr, scalars=False)), key=_width),
        )
        of_loss, of_update = (TOLERANCES.get(dtype, 0.0) for dtype in narrowest)
        return of_loss, max(of_loss, of_update)

    def _to_model(self, params: Params) -> Params:
        return self._ordered(params, self.stages.to_natural) if self.stages else params

    def _to_stored(self, params: Params) -> Params:
        return self._ordered(params, self.stages.to_storage) if self.stages else jax.tree.map(np.asarray, params)

    def _ordered(self, params: Params, order: Callable[[Params], Params]) -> Params:
        return jax.tree.map(np.asarray, {**params, "blocks": order(params["blocks"])})

    def _sums(self, params: Params, batch: Any, step: Array) -> tuple[tuple[Array, Array], Params]:
        key = jax.random.fold_in(_key_of(self.seed), step)
        compared = ("weights", "targets")  # with what the model makes in float32: they stay as they are
        batch = {name: rows if name in compared else _cast(rows, self.compute) for name, rows in batch.items()}

        def loss(params: Params) -> tuple[Array, Array]:
            total, weight = self.model.loss(_cast(params, self.compute), batch, key)
            return _wide(total), _wide(weight)

        return jax.value_and_grad(loss, has_aux=True)(params)

    def _apply(self, params: Params, opt_state: Any, gradients: Params, loss: Any) -> tuple[Params, Any]:
        gradients, _ = self.clip.update(gradients, self.clip.init(params))
        optimizer = optax.with_extra_args_support(self.optimizer)  # some ask for the loss, or the gradients
        updates, opt_state = optimizer.update(gradients, opt_state, params, value=jnp.asarray(loss), grad=gradients)
        return optax.apply_updates(params, updates), opt_state

    @cached_property
    def _differentiate(self) -> Any:
        return jax.jit(self._sums)

    @cached_property
    def _update(self) -> Any:
        return jax.jit(self._apply)


def prepared(model: Model | BlockModel, dtype: str) -> Model | BlockModel:
    """The same model, made fit to show mistakes.

    Its first parameters are moved off their start: a table of zeros or ones hides mistakes, as its gradient may be zero
    and its parts are the same in any order. Every element is scaled by a random factor near 1, and zeros become small
    numbers over 0. Its loss and weight are given in `dtype`, so that they travel with gradients of that dtype.

    Args:
        model: Any model.
        dtype: The dtype in which gradients are summed.
    """

    def init(key: Array) -> Any:
        leaves, treedef = jax.tree.flatten(model.init(key))
        return jax.tree.unflatten(treedef, [_moved(leaf, number) for number, leaf in enumerate(leaves)])

    if isinstance(model, Model):
        return replace(model, init=init, loss=_in_dtype(model.loss, dtype))
    changes: dict[str, Any] = {"init": init, "head": _in_dtype(model.head, dtype)}
    parallelize = model.parallelize
    if parallelize is not None:
        changes["parallelize"] = lambda parallel: prepared(parallelize(parallel), dtype)
    return replace(model, **changes)


def _in_dtype(function: Callable[..., Any], dtype: str) -> Callable[..., Any]:
    """The same sums, as arrays of at least this dtype; what is no pair of scalars is left to the runtime to refuse."""

    def call(*arguments: Any) -> Any:
        result = function(*arguments)
        return jax.tree.map(
            lambda scalar: jnp.asarray(scalar, jnp.promote_types(jnp.result_type(scalar), dtype)), result
        )

    return call


def _moved(leaf: Any, number: int) -> Any:
    leaf = jnp.asarray(leaf)
    if not _is_float(leaf):
        return leaf
    index = jnp.arange(leaf.size, dtype=jnp.uint32).reshape(leaf.shape) + jnp.uint32(number * 7919)
    hashed = index * jnp.uint32(2654435761) >> 8  # whole numbers, so that every program gives the same
    noise = hashed.astype(jnp.float32) * 2.0**-23 - 1.0
    moved = jnp.where(leaf == 0, JITTER * (1.5 + noise), leaf * (1.0 + JITTER * noise))
    return moved.astype(leaf.dtype)


def _key_of(seed: int) -> Array:
    """The run's key: masks and first parameters are threefry's, whatever JAX's default generator is."""
    return jax.random.key(seed, impl="threefry2x32")


def _cast(tree: Params, dtype: str) -> Params:
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if _is_float(leaf) else leaf, tree)


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def _wide(scalar: Any) -> Array:
    return jnp.asarray(scalar, jnp.promote_types(jnp.result_type(scalar), jnp.float32))


def _width(dtype: str) -> int:
    return jnp.finfo(dtype).bits if dtype else 0


def _narrowed(jaxpr: Any, scalars: bool) -> Iterator[str]:
    """The dtypes that floating-point numbers are cast down to, anywhere in a program; `scalars` too, if asked for."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "convert_element_type":
            given, made = (variables[0].aval.dtype for variables in (equation.invars, equation.outvars))
            counts = scalars or equation.outvars[0].aval.shape
            if (
                counts
                and all(jnp.issubdtype(each, jnp.floating) for each in (given, made))
                and made.itemsize < given.itemsize
            ):
                yield str(made)
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _narrowed(inner, scalars)

"""The reference of every strategy: the same model and optimizer on one device, in plain JAX, without the runtime.

(sum, weight), gradients = jax.value_and_grad(model.loss)(params, batch, key)          one device, whole arrays
gradients, norm          = gradients / weight, their global norm
params                   = optimizer.update(clip(gradients))                           optax alone
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from ..model import BlockModel, Model, Params
from ..schedule.stages import Stages
from .rounding import tolerance, width

HostBatch = Mapping[str, Any]
"""A global batch as host arrays, rows on dim 0."""


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
        weights: The weight of each batch.
        norms: The global norm of the gradients of each batch, not clipped.
        gradients: Gradients of the mean loss of the first batch, not clipped: a pytree of host arrays.
        params: The parameters after all steps, likewise.
        opt_state: The optimizer's state after all steps, blocks in the model's order.
    """

    losses: tuple[float, ...]
    weights: tuple[float, ...]
    norms: tuple[float, ...]
    gradients: Params
    params: Params
    opt_state: Any

    @property
    def weight(self) -> float:
        """The weight of the first batch."""
        return self.weights[0]

    @property
    def norm(self) -> float:
        """The global norm of the first batch's gradients."""
        return self.norms[0]


class OneDevice:
    """Training on one device.

    Args:
        model: The model, whole, its blocks in its own order.
        optimizer: An optax transformation without clipping.
        clip_norm: Largest global norm of gradients; 0 = never clip.
        compute: The dtype that parameters are cast to before the model sees them.
        seed: The run's seed.
        stages: Stages of a pipeline, asked for `order` alone: which slot holds which block. Parameters and gradients
            are then given and returned as the stages store them; the model and the optimizer have them in the model's
            order.
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
        """The initial parameters, stored in `dtype`, on the host."""
        params = jax.jit(lambda key: _cast(self.model.init(key), dtype))(_key_of(self.seed))
        return self._to_stored(params)

    def sums(self, params: Params, batch: HostBatch, step: int = 0) -> Sums:
        """The sums of a batch and their gradients.

        Args:
            params: Host arrays.
            batch: A global batch.
            step: The number of steps done before; dropout depends on it.
        """
        sums = self.sums_in_order(self.to_model(params), batch, step)
        return sums._replace(gradients=self._to_stored(sums.gradients))

    def sums_in_order(self, params: Params, batch: HostBatch, step: int) -> Sums:
        """The same with parameters and gradients in the model's order."""
        (total, weight), gradients = self._differentiate(params, dict(batch), np.int32(step))
        return Sums(float(total), float(weight), jax.tree.map(np.asarray, gradients))

    def train(self, params: Params, batches: Sequence[HostBatch]) -> Reference:
        """One step for each batch, from these parameters."""
        params = self.to_model(params)
        opt_state = self.first_state(params)
        losses: list[float] = []
        weights: list[float] = []
        norms: list[float] = []
        first: Params = None
        for number, batch in enumerate(batches):
            sums = self.sums_in_order(params, batch, number)
            weight = sums.weight or 1
            mean = jax.tree.map(lambda leaf, weight=weight: leaf / weight, sums.gradients)
            first = mean if number == 0 else first
            params, opt_state = self.update(params, opt_state, sums)
            losses.append(sums.total / weight)
            weights.append(sums.weight)
            norms.append(_norm(mean))
        gradients, params = self._to_stored(first), self._to_stored(params)
        return Reference(tuple(losses), tuple(weights), tuple(norms), gradients, params, opt_state)

    def first_state(self, params: Params) -> Any:
        """The optimizer's state before the first step, for parameters in the model's order."""
        return jax.jit(self.optimizer.init)(params)

    def update(self, params: Params, opt_state: Any, sums: Sums) -> tuple[Params, Any]:
        """One update with the sums of a batch, all in the model's order."""
        weight = sums.weight or 1
        mean = jax.tree.map(lambda leaf: (leaf / weight).astype(leaf.dtype), sums.gradients)
        return self._update(params, opt_state, mean, sums.total / weight)

    def key(self, step: int | Array) -> Array:
        """The key of a step."""
        return jax.random.fold_in(_key_of(self.seed), step)

    def evaluate(self, params: Params, batch: HostBatch) -> tuple[float, float]:
        """The sums (loss, weight) of a batch without randomness.

        Args:
            params: Host arrays.
            batch: A global batch.
        """
        total, weight = self._evaluate(self.to_model(params), dict(batch))
        return float(total), float(weight)

    def tolerances(self, params: Params, batch: HostBatch) -> tuple[float, float]:
        """The errors that rounding explains: of loss and gradients, and of the update.

        The programs tell them, since a model may cast to float32 by itself.
        """
        params = self.to_model(params)
        loss = jax.make_jaxpr(self._sums)(params, dict(batch), np.int32(0))
        opt_state = jax.eval_shape(self.optimizer.init, params)
        update = jax.make_jaxpr(self._apply)(params, opt_state, params, 0.0)
        stored = max((str(leaf.dtype) for leaf in jax.tree.leaves(params) if _is_float(leaf)), key=width, default="")
        of_loss, of_update = tolerance(loss.jaxpr, stored), tolerance(update.jaxpr, stored, scalars=False)
        return of_loss, max(of_loss, of_update)

    def to_model(self, params: Params) -> Params:
        """Puts the blocks of parameters that are stored stage by stage into the model's order."""
        if self.stages is None:
            return params
        order = list(self.stages.order)
        slots = [order.index(block) for block in range(max(order) + 1)]
        blocks = jax.tree.map(lambda leaf: np.asarray(leaf)[slots], params["blocks"])
        return {**params, "blocks": blocks}

    def _to_stored(self, params: Params) -> Params:
        params = jax.tree.map(np.asarray, params)
        if self.stages is None:
            return params
        order = self.stages.order

        def stored(leaf: np.ndarray) -> np.ndarray:
            return np.stack([leaf[block] if block >= 0 else np.zeros_like(leaf[0]) for block in order])

        return {**params, "blocks": jax.tree.map(stored, params["blocks"])}

    def _inputs(self, batch: Any) -> Any:
        def dtype_of(name: str, rows: Any) -> str:
            counts = name in ("weights", "targets") and width(str(rows.dtype)) > width(self.compute)
            return str(rows.dtype) if counts else self.compute

        return {name: _cast(rows, dtype_of(name, rows)) if _is_float(rows) else rows for name, rows in batch.items()}

    def _sums(self, params: Params, batch: Any, step: Array) -> tuple[tuple[Array, Array], Params]:
        key, batch = self.key(step), self._inputs(batch)

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
    def _evaluate(self) -> Any:
        def sums(params: Params, batch: Any) -> tuple[Array, Array]:
            total, weight = self.model.loss(_cast(params, self.compute), self._inputs(batch), None)
            return _wide(total), _wide(weight)

        return jax.jit(sums)

    @cached_property
    def _update(self) -> Any:
        return jax.jit(self._apply)


def _norm(gradients: Params) -> float:
    return float(np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(gradients))))


def _key_of(seed: int) -> Array:
    """The run's key: masks and initial parameters are threefry's, whatever JAX's default generator is."""
    return jax.random.key(seed, impl="threefry2x32")


def _cast(tree: Params, dtype: str) -> Params:
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if _is_float(leaf) else leaf, tree)


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def _wide(scalar: Any) -> Array:
    return jnp.asarray(scalar, jnp.promote_types(jnp.result_type(scalar), jnp.float32))

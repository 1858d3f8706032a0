"""The reference of every strategy: the same model and optimizer on one device, in plain JAX, without the runtime.

(sum, weight), gradients = jax.value_and_grad(model.loss)(params, batch, key)          one device, whole arrays; if rows
                                                                                       depend on each other, one
                                                                                       microbatch after another
gradients, norm          = gradients / weight, their global norm
params                   = optimizer.update(clip(gradients))                           optax alone
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from ...layouts.paths import leaves_with_paths
from ..model import BlockModel, Model, Params
from ..sharding.batch_rows import uses_batch_axes
from .rounding import Narrowing, narrowing, width

HostBatch = Mapping[str, Any]
"""A global batch as host arrays, rows on dim 0."""


class Sums(NamedTuple):
    """The sums of one batch.

    Attributes:
        total: Sum of the weighted losses.
        weight: Sum of the weights.
        gradients: Gradients of `total`.
        metrics: The model's own metrics: name -> (sum, weight).
        state: The model's next state; () for a model without state.
    """

    total: float
    weight: float
    gradients: Params
    metrics: Mapping[str, tuple[float, float]] = {}
    state: Any = ()


class Reference(NamedTuple):
    """A few steps on one device, as host arrays.

    Attributes:
        reports: The numbers that each step reports, see `report`.
        first: The sums of the first batch; gradients not clipped.
        params: The parameters after all steps.
        opt_state: The optimizer's state after all steps.
        state: The model's state after all steps.
        moved: Training from perturbed parameters, see `rounding.py`; None until it is needed.
    """

    reports: tuple[Mapping[str, float], ...]
    first: Sums
    params: Params
    opt_state: Any
    state: Any = ()
    moved: "Reference | None" = None

    @property
    def frozen(self) -> list[str]:
        """The parameters with a gradient of zero in the first batch."""
        return [path for path, leaf in leaves_with_paths(self.first.gradients) if not np.any(leaf)]


@dataclass(eq=False)
class OneDevice:
    """Training on one device.

    Attributes:
        model: The model, whole, its blocks in its own order.
        optimizer: An optax transformation without clipping.
        clip_norm: The maximum global norm of gradients; 0 = no clipping.
        compute: The dtype that parameters are cast to before the model sees them.
        seed: The run's seed.
        accumulate: The number n of microbatches per step, each of every nth row; unused if rows are independent.
    """

    model: Model | BlockModel
    optimizer: optax.GradientTransformation
    clip_norm: float
    compute: str
    seed: int
    accumulate: int = 1

    def __post_init__(self) -> None:
        self.clip = optax.clip_by_global_norm(self.clip_norm) if self.clip_norm else optax.identity()
        self._differentiate, self._update = jax.jit(self._sums), jax.jit(self._apply)
        self._evaluate = jax.jit(lambda params, batch, state: self._loss(params, self._inputs(batch), None, state))

    def init(self, dtype: str) -> Params:
        """Returns the initial parameters, stored in `dtype`, on the host."""
        return jax.device_get(jax.jit(lambda key: _cast(self.model.init(key), dtype))(_key_of(self.seed)))

    def first_model_state(self, params: Params) -> Any:
        """Returns the model's first state on the host, in the widest dtype of its parameters; () without a state."""
        init_state = getattr(self.model, "init_state", None)
        if init_state is None:
            return ()
        return jax.device_get(jax.jit(lambda key: _cast(init_state(key), _widest(params)))(_key_of(self.seed)))

    def sums(self, params: Params, batch: HostBatch, step: int, state: Any = None) -> Sums:
        """Returns the sums of a batch and their gradients.

        Args:
            params: Host arrays.
            batch: A global batch.
            step: The number of completed steps; dropout depends on it.
            state: The model's state; by default, the initial one.
        """
        state = self.first_model_state(params) if state is None else state
        pieces = self.accumulate
        if pieces > 1 and not state and not uses_batch_axes(self._sums, params, dict(batch), np.int32(0), state):
            pieces = 1
        sums: list[Any] = []
        for first in range(pieces):
            piece = {name: rows[first::pieces] for name, rows in batch.items()}
            (_, (*scalars, state)), gradients = self._differentiate(params, piece, np.int32(step), state)
            sums.append((*scalars, gradients))
        total, weight, metrics, gradients = jax.tree.map(lambda *parts: sum(map(np.asarray, parts)), *sums)
        return Sums(float(total), float(weight), gradients, on_host(metrics), jax.device_get(state))

    def train(self, params: Params, batches: Sequence[HostBatch]) -> Reference:
        """Takes one step for each batch, from these parameters."""
        opt_state, state = jax.jit(self.optimizer.init)(params), self.first_model_state(params)
        reports, all_sums = list[Mapping[str, float]](), list[Sums]()
        for number, batch in enumerate(batches):
            sums = self.sums(params, batch, number, state)
            state, weight = sums.state, sums.weight or 1
            metrics = {name: total / (counted or 1) for name, (total, counted) in sums.metrics.items()}
            mean = jax.tree.map(lambda leaf, weight=weight: (leaf / weight).astype(leaf.dtype), sums.gradients)
            params, opt_state = self._update(params, opt_state, mean, sums.total / weight)
            reports.append(report(sums.total / weight, _norm(sums.gradients) / weight, sums.weight, metrics))
            all_sums.append(sums)
        return Reference(tuple(reports), all_sums[0], jax.device_get(params), opt_state, state)

    def key(self, step: int | Array) -> Array:
        """Returns the key of a step."""
        return jax.random.fold_in(_key_of(self.seed), step)

    def measure(self, params: Params, batch: HostBatch, state: Any = None) -> Sums:
        """Returns the sums of a batch and of the model's metrics, without randomness and gradients.

        Args:
            params: Host arrays.
            batch: A global batch.
            state: The model's state; by default, the initial one.
        """
        state = self.first_model_state(params) if state is None else state
        total, weight, metrics, _ = self._evaluate(params, dict(batch), state)
        return Sums(float(total), float(weight), None, on_host(metrics))

    def narrowings(self, params: Params, batch: HostBatch) -> tuple[Narrowing, Narrowing]:
        """Returns the narrowest numbers of the loss with its gradients, and of the update."""
        state = self.first_model_state(params)
        loss = jax.make_jaxpr(self._sums)(params, dict(batch), np.int32(0), state)
        opt_state = jax.eval_shape(self.optimizer.init, params)
        update = jax.make_jaxpr(self._apply)(params, opt_state, params, 0.0)
        stored = _widest(params)
        return narrowing(loss.jaxpr, stored), narrowing(update.jaxpr, stored, scalars=False)

    def _inputs(self, batch: Any) -> Any:
        def dtype_of(name: str, rows: Any) -> str:
            counts = name in ("weights", "targets") and width(str(rows.dtype)) > width(self.compute)
            return str(rows.dtype) if counts else self.compute

        return {name: _cast(rows, dtype_of(name, rows)) if _is_float(rows) else rows for name, rows in batch.items()}

    def _sums(self, params: Params, batch: Any, step: Array, state: Any) -> tuple[tuple[Array, Any], Params]:
        key, batch = self.key(step), self._inputs(batch)

        def loss(params: Params) -> tuple[Array, Any]:
            sums = self._loss(params, batch, key, state)
            return sums[0], sums

        return jax.value_and_grad(loss, has_aux=True)(params)

    def _loss(self, params: Params, batch: Any, key: Array | None, state: Any) -> tuple[Array, Array, Any, Any]:
        """Returns the sums, the metrics by full name, and the next state in the dtypes of the previous one."""
        more = () if getattr(self.model, "init_state", None) is None else (state,)
        result = (*self.model.loss(_cast(params, self.compute), batch, key, *more), (), ())
        metrics = {path: tuple(map(wide_scalar, pair)) for path, pair in pairs(result[2])}
        after = jax.tree.map(lambda new, old: jnp.asarray(new).astype(old.dtype), result[3] if more else (), state)
        return wide_scalar(result[0]), wide_scalar(result[1]), metrics, after

    def _apply(self, params: Params, opt_state: Any, gradients: Params, loss: Any) -> tuple[Params, Any]:
        gradients, _ = self.clip.update(gradients, self.clip.init(params))
        optimizer = optax.with_extra_args_support(self.optimizer)  # some optimizers need the loss or the gradients
        updates, opt_state = optimizer.update(gradients, opt_state, params, value=jnp.asarray(loss), grad=gradients)
        return optax.apply_updates(params, updates), opt_state


def _widest(params: Params) -> str:
    """Returns the widest dtype of the stored parameters."""
    return max((str(leaf.dtype) for leaf in jax.tree.leaves(params) if _is_float(leaf)), key=width, default="float32")


def _norm(gradients: Params) -> float:
    return float(np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(gradients))))


def _key_of(seed: int) -> Array:
    """Returns the run's key, which is threefry for any default generator of JAX."""
    return jax.random.key(seed, impl="threefry2x32")


def _cast(tree: Params, dtype: str) -> Params:
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if _is_float(leaf) else leaf, tree)


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def wide_scalar(scalar: Any) -> Array:
    """Returns a scalar in float32, or in its own dtype if that is wider."""
    return jnp.asarray(scalar, jnp.promote_types(jnp.result_type(scalar), jnp.float32))


def pairs(metrics: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every pair of a tree of metrics with its full name."""
    for name, value in dict(metrics).items():
        if isinstance(value, Mapping):
            yield from pairs(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


def on_host(metrics: Any) -> dict[str, tuple[float, float]]:
    """Converts metrics to host numbers."""
    return {name: (float(total), float(weight)) for name, (total, weight) in metrics.items()}


def report(loss: Any, norm: Any, weight: Any, metrics: Mapping[str, Any]) -> dict[str, float]:
    """Returns the reported numbers of a step by the names of the comparison; `norm` is the norm before clipping."""
    named = {"loss": loss, "gradient norm": norm, "weight": weight}
    named |= {f"metric {name!r}": value for name, value in metrics.items()}
    return {name: float(value) for name, value in named.items()}

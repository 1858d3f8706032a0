"""Which strategy acts when: what each device runs in one step, from its shards and its rows to reduced gradients.

    params    = make_varying(params)                  gradients stay local until we reduce them
    params    = strategy.begin(params)                each in turn: what is whole for a step (pipe's embedding and head)
    batch     = cast_inputs(batch)                    to the compute dtype, as parameters are cast where they are used
    gradients = accumulate_gradients(local loss)      inside: FSDP's gathers and reduce-scatters, what the model splits
                                                      itself (tensor, context, expert), the ticks of a pipeline
    gradients = strategy.finish(gradients)            each in turn: pipe's reduce-scatter, then ZeRO-1's
    gradients = strategy.reduce(gradients)            each in turn: data's all-reduce, or the compressed one
    gradients = gradients * (clip_factor / weight)    the one division by the weight of the global batch (and by what
                                                      the loss was multiplied by: `loss_scaling`)

"In turn" is the order of `STRATEGIES`, that of the mesh axes. Around it: `train_step`, or `diloco_step`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from ...layouts.paths import join
from ...layouts.table import LayoutTable
from ...mesh.compat import varying_axes
from ...mesh.errors import UserError
from ...mesh.keys import key_of, make_key
from ..blocks.forward import LocalLoss, local_loss
from ..collectives import vary
from ..data import make_varying, reduce_gradients
from ..executor.loss import pipeline_loss
from ..model import Batch, BlockModel, Model, Params, has_state
from ..model.loss_sums import LossSums, state_problem
from ..plan import Reduced, ShardingPlan
from ..precision import cast_inputs, scaled
from ..sharding.named_outputs import NamedOutputs
from ..sharding.parallel_context import parallel_context
from ..sharding.strategies import STRATEGIES
from .gradients import accumulate_gradients, clip_factor, complete_squares, global_norm
from .loss_scaling import scale_in_force, where_finite
from .manual_axes import over_manual_axes
from .model_state import settle
from .state import StepMetrics


def as_split(model: Model | BlockModel, plan: ShardingPlan) -> Model | BlockModel:
    """The model as a device of this plan runs it: its own work split, where it has any to split."""
    context = parallel_context(plan)
    split = model.parallelize if isinstance(model, BlockModel) else None
    return split(context) if split and context.splits_anything else model


def with_frozen(gradients: Params, params: Params, plan: ShardingPlan) -> Params:
    """Gradients of all parameters, from those that a device step makes of the parameters given: zeros of the frozen."""
    return join(gradients, jax.tree.map(jnp.zeros_like, plan.split_frozen(params)[0]))


class DeviceStep:
    """The per-device half of a step, to run inside `shard_map` over `plan.manual_axes`."""

    def __init__(self, model: Model | BlockModel, plan: ShardingPlan) -> None:
        """Composes the strategies.

        Args:
            model: The model, not split.
            plan: The plan, with the options of the step.
        """
        self.plan, self.outputs = plan, NamedOutputs(plan)
        self.model = self.outputs.within(as_split(model, plan))
        self._loss = self._local_loss()

    def _local_loss(self) -> LocalLoss:
        """The loss of this device's rows: of the stages of a pipeline, or of all blocks."""
        model, plan, options = self.model, self.plan, self.plan.options
        if isinstance(model, BlockModel) and plan.pipeline:
            return pipeline_loss(model, plan, remat=options.remat, precision=options.precision)
        return local_loss(model, plan, remat=options.remat, precision=options.precision)

    def gradients(
        self,
        params: Params,
        batch: Batch,
        key_data: Array,
        step: Array,
        errors: Any,
        model_state: Any,
        loss_scale: Any = (),
    ) -> tuple[Params, StepMetrics, Any, Any]:
        """The reduced, averaged and clipped gradients, laid out as the update, the metrics, and what follows them.

        Frozen parameters have none: None stands in their place.

        Args:
            params: This device's shards.
            batch: Its rows.
            key_data: Raw data of the run's key.
            step: The number of steps done.
            errors: What compression owes from the step before (`compression.Errors`), or ().
            model_state: The model's state, or ().
            loss_scale: The state of loss scaling, or ().

        Returns:
            Gradients, metrics (the model's own as pairs of sums), and the next `errors` and `model_state`.
        """
        plan, options, axes = self.plan, self.plan.options, self.plan.summed_axes
        trained, update = plan.trained, plan.trained.update_table.layouts
        key = jax.random.fold_in(key_of(key_data), step)
        batch = cast_inputs(batch, options.precision.compute)
        params = self._begun(make_varying(params, plan.table.layouts, axes))
        loss_factor = scale_in_force(options.precision, loss_scale)
        gradients, sums = self._gradients(params, batch, key, model_state, loss_factor)
        metrics, metrics_tree = jax.tree.flatten(sums.metrics)
        for strategy in STRATEGIES.values():
            gradients = strategy.finish(gradients, trained)
        together = [jnp.stack(metrics)] if metrics else []  # XLA sums a weight once that several of them share
        scalars = [sums.total, sums.weight, *together, *complete_squares(gradients, update, axes)]
        found = Reduced(gradients, scalars, errors, loss_factor)
        for strategy in STRATEGIES.values():
            found = strategy.reduce(found, trained)
        total, weight, *further = found.scalars
        metrics, squares = list(further[0]) if metrics else [], further[len(together) :]
        divisor = jnp.where(weight == 0, 1, weight)
        of_gradients = scaled(divisor, loss_factor)
        norm = global_norm(found.gradients, update, axes, squares, of_gradients)
        next_state = where_finite(norm, self._settled(sums.state, model_state, batch), model_state)
        next_errors = where_finite(norm, found.errors, errors) if loss_scale else found.errors
        scale = clip_factor(norm, options.clip_norm) / of_gradients
        gradients = jax.tree.map(lambda leaf: leaf * scale.astype(leaf.dtype), found.gradients)
        pairs = jax.tree.unflatten(metrics_tree, metrics)
        return gradients, StepMetrics(total / divisor, norm, weight, pairs), next_errors, next_state

    def _begun(self, params: Params) -> Params:
        """Parameters as a step begins with them."""
        for strategy in STRATEGIES.values():
            params = strategy.begin(params, self.plan)
        return params

    def _gradients(
        self, params: Params, batch: Batch, key: Array, model_state: Any, scale: Array | None
    ) -> tuple[Params, LossSums]:
        """Local sums of gradients, scaled, and this device's share of the sums of the loss."""
        inputs = params, batch, key, model_state, scale
        microbatches, axes = self.plan.options.accumulate, self.plan.manual_axes
        return accumulate_gradients(self._loss, *inputs, microbatches=microbatches, axes=axes)

    def local_sums(self, params: Params, batch: Batch, model_state: Any) -> tuple[Params, LossSums, Any]:
        """What a device sums before any strategy reduces it, and the model's next state: the start of `gradients`.

        Traced alone, it shows what the model itself moves between devices.
        """
        key = make_key(0)
        batch = cast_inputs(batch, self.plan.options.precision.compute)
        params = self._begun(make_varying(params, self.plan.table.layouts, self.plan.summed_axes))
        gradients, sums = self._gradients(params, batch, key, model_state, None)
        return gradients, sums._replace(state=()), self._settled(sums.state, model_state, batch)

    def _settled(self, found: Any, model_state: Any, batch: Batch) -> Any:
        """The model's next state, the same on every device."""
        if not has_state(self.model):
            return ()
        if problem := state_problem(found, model_state):
            raise UserError(f"model {self.model.name!r}: loss {problem}")
        typed = any(varying_axes(rows) for rows in batch.values())
        return settle(found, model_state, self.plan.summed_axes, typed=typed)

    def sums(self, params: Params, batch: Batch, model_state: Any) -> LossSums:
        """The sums over the global batch, for evaluation; no state."""
        plan, precision = self.plan, self.plan.options.precision
        varying = self._begun(make_varying(params, plan.table.layouts, plan.manual_axes))
        batch = cast_inputs(batch, precision.compute)
        kept = self._loss.keep(varying)
        shares = self._loss.loss(self._loss.carriers(varying), kept, batch, None, model_state)._replace(state=())
        leaves, structure = jax.tree.flatten(shares)
        leaves = [vary(leaf, plan.manual_axes) for leaf in leaves]
        return jax.tree.unflatten(structure, reduce_gradients((), leaves, (), plan.manual_axes, precision.reduce)[1])

    def mapped_gradients(self, extra_table: LayoutTable, *, abstract: bool) -> Callable[..., Any]:
        """`gradients` on global arrays, zeros for frozen parameters; `extra_table` lays out `errors`.

        With `abstract`, it needs no devices.
        """
        plan, whole = self.plan, PartitionSpec()
        errors = plan.manual_specs(extra_table) if plan.compressed else ()
        in_specs = (plan.manual_specs(plan.table), plan.batch_spec, whole, whole, errors, whole, whole)
        out_specs = (plan.manual_specs(plan.trained.update_table), whole, errors, whole)
        mapped = over_manual_axes(self.gradients, plan, in_specs, out_specs, abstract=abstract)

        def gradients(params: Params, *others: Any) -> Any:
            found, *more = mapped(params, *others)
            return (with_frozen(found, params, plan), *more)

        return gradients

    def mapped_sums(self) -> Callable[..., Any]:
        """`sums` on global arrays."""
        plan, whole = self.plan, PartitionSpec()
        in_specs = (plan.manual_specs(plan.table), plan.batch_spec, whole)
        return over_manual_axes(self.sums, plan, in_specs, whole, abstract=False)

"""The order of the strategies within a step, on one device: from its shards and rows to reduced gradients.

    params    = make_varying(params)                  gradients stay local until the runtime reduces them
    params    = strategy.begin(params)                each: gathers for an entire step (pipe's embedding and head)
    batch     = cast_inputs(batch)                    to the compute dtype, as parameters are cast when they are used
    gradients = accumulate_gradients(local loss)      inside: FSDP's gathers and reduce-scatters, the collectives of the
                                                      model (tensor, context, expert), the ticks of a pipeline
    gradients = strategy.finish(gradients)            each: pipe's reduce-scatter, then ZeRO-1's
    gradients = strategy.reduce(gradients)            each: data's all-reduce, or the compressed one
    gradients = gradients * (clip_factor / weight)    the one division by the weight of the global batch (and by the
                                                      loss scale: `loss_scaling`)

"Each" means one strategy after another, in the order of `STRATEGIES`, which is that of the mesh axes. `train_step` or,
for local steps, `update` adds the rest of the step.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from ...layouts.paths import join
from ...layouts.table import LayoutTable
from ...mesh.compat import varying_axes
from ...mesh.errors import UserError
from ...mesh.keys import key_of, make_key
from ..blocks.forward import local_loss, part_of
from ..collectives import vary
from ..data import make_varying
from ..executor.pipeline_loss import pipeline_loss
from ..model import Batch, BlockModel, Model, Params, has_state
from ..model.loss_sums import LossSums, state_problem
from ..options import cast_inputs, scaled
from ..plan import Reduced, ShardingPlan
from ..sharding.named_outputs import NamedOutputs
from ..sharding.parallel_context import parallel_context
from ..sharding.strategies import STRATEGIES
from .gradients import accumulate_gradients, clip_factor, complete_squares, global_norm
from .loss_scaling import scale_in_force
from .manual_axes import over_manual_axes
from .state import StepMetrics, reduce_model_state


def split_model(model: Model | BlockModel, plan: ShardingPlan) -> Model | BlockModel:
    """Returns the model in the form that a device runs: with its work split and the kernels of the platform."""
    context = parallel_context(plan)
    split = model.parallelize if isinstance(model, BlockModel) else None
    return split(context) if split and (context.splits_anything or context.platform != "cpu") else model


def with_frozen(gradients: Params, params: Params, plan: ShardingPlan) -> Params:
    """Adds zeros for the frozen parameters to the gradients of the trained ones."""
    return join(gradients, jax.tree.map(jnp.zeros_like, plan.split_frozen(params)[0]))


class DeviceStep:
    """The per-device half of a step, to run inside `shard_map` over `plan.manual_axes`."""

    def __init__(self, model: Model | BlockModel, plan: ShardingPlan) -> None:
        """Combines the strategies.

        Args:
            model: The model, not split.
            plan: The plan, with the options of the step.
        """
        self.plan, self.outputs = plan, NamedOutputs(plan)
        self.model = model = self.outputs.within(split_model(model, plan))
        if isinstance(model, BlockModel) and plan.pipeline:
            self._loss = pipeline_loss(model, plan)
        else:
            self._loss = local_loss(model, plan)

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
        """Returns the reduced, averaged and clipped gradients in the layouts of the update, and the metrics.

        Frozen parameters have None instead of a gradient.

        Args:
            params: The shards of this device.
            batch: The rows of this device.
            key_data: The raw data of the run's key.
            step: The number of completed steps.
            errors: The errors of compression from the previous step (`compression.Errors`), or ().
            model_state: The model's state, or ().
            loss_scale: The state of loss scaling, or ().

        Returns:
            The gradients, the metrics (the model's own as pairs of sums), and the next `errors` and `model_state`, even
            if they are not finite: `loss_scaling.accept` keeps those from before.
        """
        plan, options, axes = self.plan, self.plan.options, self.plan.summed_axes
        trained, update = plan.trained, plan.trained.update_table.layouts
        key = jax.random.fold_in(key_of(key_data), step)
        batch = cast_inputs(batch, options.precision.compute)
        params = self._begin(self._varying(params))
        loss_factor = scale_in_force(options.precision, loss_scale)
        gradients, sums = accumulate_gradients(self._loss, plan, params, batch, key, model_state, loss_factor)
        metrics, metrics_tree = jax.tree.flatten(sums.metrics)
        for strategy in STRATEGIES.values():
            gradients = strategy.finish(gradients, trained)
        # Stacked, so that XLA does not merge weights that they share.
        together = [jnp.stack(metrics)] if metrics else []
        scalars = [sums.total, sums.weight, *together, *complete_squares(gradients, update, axes)]
        found = Reduced(gradients, scalars, errors, loss_factor, self._loss.summed)
        for strategy in STRATEGIES.values():
            found = strategy.reduce(found, trained)
        total, weight, *further = found.scalars
        metrics, squares = list(further[0]) if metrics else [], further[len(together) :]
        divisor = jnp.where(weight == 0, 1, weight)
        gradient_divisor = scaled(divisor, loss_factor)
        norm = global_norm(found.gradients, update, axes, squares, gradient_divisor)
        next_state = self._reduce_state(sums.state, model_state, batch)
        scale = clip_factor(norm, options.clip_norm) / gradient_divisor
        gradients = jax.tree.map(lambda leaf: leaf * scale.astype(leaf.dtype), found.gradients)
        pairs = jax.tree.unflatten(metrics_tree, metrics)
        return gradients, StepMetrics(total / divisor, norm, weight, pairs), found.errors, next_state

    def _varying(self, params: Params) -> Params:
        """Types parameters as varying over the axes of the batch, except those with gradients summed in backward."""
        plan, summed = self.plan, self._loss.summed
        if not summed:
            return make_varying(params, plan.table.layouts, plan.summed_axes)
        others = [name for name in params if name not in summed]
        layouts = part_of(others, plan.table.layouts)
        return {**params, **make_varying(part_of(others, params), layouts, plan.summed_axes)}

    def _begin(self, params: Params) -> Params:
        """Runs the `begin` of every strategy."""
        for strategy in STRATEGIES.values():
            params = strategy.begin(params, self.plan)
        return params

    def local_sums(self, params: Params, batch: Batch, model_state: Any) -> tuple[Params, LossSums, Any]:
        """Returns a device's sums before any strategy reduces them, and the model's next state.

        `gradients` does the same; tracing this part separately shows the model's own collectives.
        """
        key = make_key(0)
        batch = cast_inputs(batch, self.plan.options.precision.compute)
        params = self._begin(self._varying(params))
        gradients, sums = accumulate_gradients(self._loss, self.plan, params, batch, key, model_state, None)
        return gradients, sums._replace(state=()), self._reduce_state(sums.state, model_state, batch)

    def _reduce_state(self, found: Any, model_state: Any, batch: Batch) -> Any:
        """Returns the model's next state, the same on every device."""
        if not has_state(self.model):
            return ()
        if problem := state_problem(found, model_state):
            raise UserError(f"model {self.model.name!r}: loss {problem}")
        typed = any(varying_axes(rows) for rows in batch.values())
        return reduce_model_state(found, model_state, self.plan.summed_axes, typed=typed)

    def sums(self, params: Params, batch: Batch, model_state: Any) -> LossSums:
        """Returns the sums over the global batch, for evaluation, without a state."""
        plan = self.plan
        varying = self._begin(make_varying(params, plan.table.layouts, plan.manual_axes))
        batch = cast_inputs(batch, plan.options.precision.compute)
        kept = self._loss.keep(varying)
        shares = self._loss.loss(self._loss.carriers(varying), kept, batch, None, model_state)._replace(state=())
        shares = jax.tree.map(lambda leaf: vary(leaf, plan.manual_axes), shares)
        return lax.psum(shares, plan.manual_axes) if plan.manual_axes else shares

    def mapped_gradients(self, extra_table: LayoutTable, *, abstract: bool) -> Callable[..., Any]:
        """Returns `gradients` as a function of global arrays, with zeros for frozen parameters.

        Args:
            extra_table: The layouts of `errors`.
            abstract: Map over a mesh without devices.
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
        """Returns `sums` as a function of global arrays."""
        plan, whole = self.plan, PartitionSpec()
        in_specs = (plan.manual_specs(plan.table), plan.batch_spec, whole)
        return over_manual_axes(self.sums, plan, in_specs, whole, abstract=False)

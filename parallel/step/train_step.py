"""The step: one compiled program (state, batch) -> (state, metrics) that donates the state, composed of strategies.

    shard_map over the manual axes, check_vma=True        all of it per device: see `step/composition.py`
        gradients = DeviceStep.gradients(params, batch)   all collectives of all strategies
    under the same jit, on global arrays in their layouts
        params    = optimizer.update(gradients)           no communication if the optimizer is elementwise; XLA adds
                                                          the collectives that other optimizers need

The optimizer runs outside `shard_map` on purpose. There, an optax transformation receives global (sharded) arrays, so
an optimizer that combines elements of a parameter (adafactor's factored moments, muon's orthogonalization, a per-tensor
trust ratio) is correct on every mesh without special code, and an elementwise one compiles without communication.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from ...layouts.resolve import resolve_optimizer_state
from ...layouts.table import LayoutTable
from ...mesh.errors import UserError
from ...mesh.keys import WORDS, check_seed, key_of, make_key
from ...mesh.targets import compiling_for
from .. import compression, diloco
from ..collectives import Collective, merge
from ..model import AbstractBatch, Batch, BlockModel, Model, Params, has_state
from ..model.loss_sums import LossSums
from ..options import cast_floats
from ..plan import ShardingPlan
from ..sharding.batch_rows import check_eval_rows, check_rows
from ..sharding.lay_out import abstract_parameters
from ..sharding.stored_order import StoredOrder, in_stage_order, stored_order
from .composition import DeviceStep
from .cost import step_cost
from .inputs import BatchCheck, BatchShapes, explain_errors, shapes_of, warn_of_recompilation
from .loss_scaling import Carried, accept, first_loss_scale, loss_to_follow
from .state import StepMetrics, TrainState, abstract_model_state, first_model_state, place_params, with_means
from .update import abstract_optimizer_state, apply_optimizer, dims_of_blocks, make_local_step, start_copies


class Step:
    """One training step, built from abstract values alone; see `build_step`."""

    def __init__(self, model: Model | BlockModel, optimizer: optax.GradientTransformation, plan: ShardingPlan) -> None:
        """Composes the step; `plan` holds its options, see `build_step`."""
        self.given_model = model
        self.model = in_stage_order(model, stored_order(plan).stages)
        self.optimizer = optimizer
        self.plan = plan
        self.accumulate, self.precision = plan.options.accumulate, plan.options.precision
        self._device_step = DeviceStep(model, plan)
        self._exact = self._device_step if plan.exact is plan else DeviceStep(model, plan.exact)
        self._compiled: dict[BatchShapes, jax.stages.Compiled] = {}
        self._traced: set[BatchShapes] = set()
        rows = partial(check_rows, plan, accumulate=plan.options.accumulate)
        self._batches, self._own_batches = (BatchCheck(name, rows) for name in ("the step", "step.gradients"))
        self._eval_batches = BatchCheck("step.evaluate", partial(check_eval_rows, plan))

    def __repr__(self) -> str:
        return f"Step({self.plan.title})"

    def lower_init(self, *, draws: bool = True) -> dict[str, jax.stages.Lowered]:
        """Lowers the programs of `init`, to compare them between processes; touches no device.

        Args:
            draws: Whether the model draws its parameters; False if they are given.

        Returns:
            What a program creates -> the program.
        """
        abstract = self.abstract_state()
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
        key_data = jax.ShapeDtypeStruct(abstract.key.shape, abstract.key.dtype)
        programs = {"the optimizer's state": self._jit_first_state(shardings).lower(abstract.params, key_data)}
        if draws:
            programs["the parameters"] = self._jit_draw(shardings).lower(key_data)
        if has_state(self.model):
            programs["the model's state"] = self._jit_model_state(shardings).lower(key_data)
        return programs

    def init(self, seed: int, params: Params | None = None) -> TrainState:
        """Creates the initial state. Every array is created in its own layout.

        Args:
            seed: The run's seed, from 0 to 2**32 - 1. Parameters depend on the seed, never on the mesh.
            params: The initial parameters, instead of drawn ones: whole host arrays, see `place_params`.

        Raises:
            UserError: The given parameters do not fit the model, or the seed is out of range.
        """
        check_seed(seed)
        abstract = self.abstract_state()
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
        key_data = jax.random.key_data(make_key(seed))
        if params is None:
            # In a program of their own, parameters have the same bits for every strategy.
            params = self._jit_draw(shardings)(key_data)
        else:
            params = place_params(params, abstract.params, stored_order(self.plan))
        state = self._jit_first_state(shardings)(params, key_data)
        if not has_state(self.model):
            return state
        return state._replace(model_state=self._jit_model_state(shardings)(key_data))

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        """Runs one step. The given state is donated and must not be used again.

        Args:
            state: The state from `init`, a checkpoint or the previous step.
            batch: Global arrays with rows on dim 0, laid out by `plan.batch_sharding()`; host arrays are placed
                accordingly.

        Returns:
            The next state and the metrics of this step. Both are computed asynchronously: read the metrics late.

        Raises:
            UserError: The state was consumed or belongs to another step, or the batch or the optimizer is invalid.
            LayoutError: A rule for activations does not fit the model.
        """
        with explain_errors(state, self.abstract_state, batch, self._batches, watched=getattr(state, "step", None)):
            shapes = shapes_of(batch)
            if shapes in self._compiled:
                return self._compiled[shapes](state, batch)
            result = self._run(state, batch)
            if shapes not in self._traced:
                for before in (*self._compiled, *self._traced)[:1]:
                    warn_of_recompilation(before, shapes)
                self._traced.add(shapes)
            return result

    def compile(self, abstract_batch: AbstractBatch) -> jax.stages.Compiled:
        """Compiles the step for batches of these global shapes; later calls with such batches reuse the program.

        If batches have several shapes, such as buckets of lengths, compile for each shape.

        Returns:
            The compiled program, for its memory analysis and its text.
        """
        shapes = shapes_of(abstract_batch)
        if shapes not in self._compiled:
            with compiling_for(self.plan.mesh.target):
                self._compiled[shapes] = self.lower(abstract_batch).compile()
        return self._compiled[shapes]

    def evaluate(self, params: Params, batch: Batch, model_state: Any = ()) -> tuple[Array, Array]:
        """Returns the sums (loss, weight) over one global batch, without randomness or an update.

        Args:
            params: The parameters of a state.
            batch: A global batch.
            model_state: The model's state, if it has one.
        """
        sums = self.measure(params, batch, model_state)
        return sums.total, sums.weight

    def measure(self, params: Params, batch: Batch, model_state: Any = ()) -> LossSums:
        """Returns all sums of `evaluate`, including those of the model's metrics."""
        if has_state(self.model) and not jax.tree.leaves(model_state):
            raise UserError(
                f"model {self.model.name!r} has a state (init_state), which evaluation needs. Pass it too: "
                "step.evaluate(state.params, batch, state.model_state)."
            )
        with explain_errors(params, lambda: self.abstract_state().params, batch, self._eval_batches):
            return self._evaluate(params, batch, model_state)

    def gradients(self, state: TrainState, batch: Batch) -> tuple[Params, StepMetrics]:
        """Returns the gradients of the next step (averaged and clipped), in the layouts of the update.

        Under local steps and compression: exactly those of `state.params`. The state is not consumed.
        """
        with explain_errors(state, self.abstract_state, batch, self._own_batches):
            whole = state.key, state.step, state.model_state, state.loss_scale
            return self._differentiate(state.params, batch, *whole)

    def lower(self, abstract_batch: AbstractBatch, platform: str | None = None) -> jax.stages.Lowered:
        """Lowers the step from shapes alone, without arrays and, with `platform`, without devices.

        Args:
            abstract_batch: The global shapes and dtypes of a batch.
            platform: The platform to lower for ("cpu", "cuda", "tpu"), over an abstract mesh whose devices do not have
                to exist. None lowers for the devices of the mesh, so that the result can be compiled and run here.
        """
        if platform is not None:
            return self.trace(abstract_batch).lower(lowering_platforms=(platform,))
        state, batch = self._abstract_arguments(abstract_batch, abstract=False)
        with explain_errors(state, lambda: state, batch, self._batches), compiling_for(self.plan.mesh.target):
            return self._run.lower(state, batch)

    def trace(self, abstract_batch: AbstractBatch) -> jax.stages.Traced:
        """Traces the step over the mesh without its devices, for batches of these global shapes."""
        return self._jit_step(abstract=True).trace(*self._abstract_arguments(abstract_batch, abstract=True))

    def _abstract_arguments(self, abstract_batch: AbstractBatch, *, abstract: bool) -> tuple[TrainState, AbstractBatch]:
        self._batches.check(abstract_batch)
        sharding = self.plan.batch_sharding(abstract=abstract)
        batch = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for name, x in abstract_batch.items()}
        return self.abstract_state(abstract=abstract), batch

    def abstract_state(self, *, abstract: bool = False) -> TrainState:
        """Returns the shapes, dtypes and shardings of the state; `abstract` uses a mesh without devices."""
        tables = self.plan.table, self.optimizer_table, self.extra_table
        params, opt_state, extra = (table.sharded_arrays(abstract=abstract) for table in tables)
        replicated: Any = self.plan.replicated(abstract=abstract)
        step, key = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((WORDS,), jnp.uint32)
        loss_scale = jax.eval_shape(lambda: first_loss_scale(self.precision))
        whole = step, key, abstract_model_state(self.model, self.precision.params), loss_scale
        step, key, model_state, loss_scale = jax.tree.map(lambda leaf: leaf.update(sharding=replicated), whole)
        return TrainState(step, params, opt_state, key, extra, model_state, loss_scale, self.order)

    @cached_property
    def order(self) -> StoredOrder:
        """The order in which the arrays of the state store blocks."""
        order = replace(stored_order(self.plan), packing=compression.packing(self.plan))
        if order.stages is None:
            return order
        params = abstract_parameters(self.model, self.precision)
        dims = dims_of_blocks(self.optimizer, params, len(order.stages.order))
        first = 1 if self.plan.local_steps else 0  # dim 0 counts the groups
        moments = {path: tuple(first + dim for dim in found) for path, found in dims.items()}
        return replace(order, moments=tuple(moments.items()))

    @cached_property
    def optimizer_table(self) -> LayoutTable:
        """The layout of every array of the optimizer's state."""
        params = abstract_parameters(self.model, self.precision)
        state = abstract_optimizer_state(self.optimizer, params)
        table = resolve_optimizer_state(state, self.plan.update_table)
        return diloco.copies_table(table) if self.plan.local_steps else table

    @cached_property
    def extra_table(self) -> LayoutTable:
        """The layout of every array of `TrainState.extra`."""
        if self.plan.local_steps:
            return diloco.extra_table(self.plan.table)
        if self.plan.compressed:
            return compression.errors_table(self.plan)
        return LayoutTable(rows=(), treedef=jax.tree.structure(()), mesh=self.plan.mesh)

    def cost(self, abstract_batch: AbstractBatch | None = None, platform: str | None = None) -> tuple[Collective, ...]:
        """Returns the collectives of one step over the manual axes, predicted from the layouts.

        Args:
            abstract_batch: The global shapes and dtypes of a batch; required if the model splits its own work.
            platform: The platform of the step ("cpu", "cuda", ...); by default that of the mesh's devices.
        """
        return merge(step_cost(self.given_model, self.plan, abstract_batch, platform or self.plan.platform))

    def _jit_draw(self, shardings: TrainState) -> "jax.stages.Wrapped":
        return jax.jit(self._draw_params, out_shardings=shardings.params)

    def _jit_first_state(self, shardings: TrainState) -> "jax.stages.Wrapped":
        return jax.jit(self._first_state, out_shardings=shardings._replace(model_state=()), donate_argnums=0)

    def _jit_model_state(self, shardings: TrainState) -> "jax.stages.Wrapped":
        first = partial(first_model_state, self.model, self.precision.params)
        return jax.jit(first, out_shardings=shardings.model_state)

    def _draw_params(self, key_data: Array) -> Params:
        """Returns the parameters drawn by the model's init, in the stored dtype and order. Traced."""
        return cast_floats(self.model.init(key_of(key_data)), self.precision.params)

    def _first_state(self, params: Params, key_data: Array) -> TrainState:
        loss_scale = first_loss_scale(self.precision)
        state = TrainState(jnp.zeros((), jnp.int32), params, (), key_data, loss_scale=loss_scale, order=self.order)
        if self.plan.local_steps:
            return start_copies(state, self.optimizer, self.plan.mesh_size(diloco.AXIS))
        errors = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self.extra_table.abstract_arrays)
        return state._replace(opt_state=self.optimizer.init(params), extra=errors)

    def _step(
        self, abstract: bool, gradients: Callable[..., Any], state: TrainState, batch: Batch
    ) -> tuple[TrainState, StepMetrics]:
        kept = state.extra, state.model_state, state.loss_scale
        grads, metrics, extra, model_state = gradients(state.params, batch, state.key, state.step, *kept)
        params = state.params
        if self.plan.zero:  # each device updates its own parts
            params = jax.lax.with_sharding_constraint(params, self.plan.update_table.shardings(abstract=abstract))
        before = Carried(params, state.opt_state, state.extra, state.model_state)
        loss = loss_to_follow(metrics.loss, metrics)
        updated = apply_optimizer(self.optimizer, grads, state.opt_state, params, loss)
        after = Carried(*updated, extra, model_state)
        after, loss_scale = accept(after, before, state.loss_scale, metrics, self.precision)
        following = state._replace(
            step=state.step + 1,
            params=after.params,
            opt_state=after.opt_state,
            extra=after.errors,
            model_state=after.model_state,
            loss_scale=loss_scale,
        )
        return following, with_means(metrics, state.loss_scale)

    def _jit_step(self, *, abstract: bool) -> Any:
        state_shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state(abstract=abstract))
        return jax.jit(
            self._whole_step(abstract),
            in_shardings=(state_shardings, self.plan.batch_sharding(abstract=abstract)),
            out_shardings=(state_shardings, self.plan.replicated(abstract=abstract)),
            donate_argnums=0,
            compiler_options=dict(self.plan.options.xla) or None,
        )

    def _whole_step(self, abstract: bool) -> Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]:
        """Returns the step as a function of global arrays."""
        if self.plan.local_steps:
            step = make_local_step(self._device_step, self.optimizer, abstract=abstract)
        else:
            mapped = self._device_step.mapped_gradients(self.extra_table, abstract=abstract)
            step = partial(self._step, abstract, mapped)
        return self._batches.around(self._device_step.outputs.around(step))

    @cached_property
    def _run(self) -> Any:
        return self._jit_step(abstract=False)

    @cached_property
    def _differentiate(self) -> Any:
        table, replicated = self.plan.table, self.plan.replicated()
        mapped = self._exact.outputs.around(self._exact.mapped_gradients(self.extra_table, abstract=False))

        def differentiate(*arguments: Any) -> tuple[Params, StepMetrics]:
            gradients, metrics, *_ = mapped(*arguments[:4], (), *arguments[4:])
            return gradients, with_means(metrics)

        return jax.jit(
            self._own_batches.around(differentiate),
            in_shardings=(table.shardings(), self.plan.batch_sharding(), *[replicated] * 4),
            out_shardings=(self.plan.update_table.shardings(), replicated),
        )

    @cached_property
    def _evaluate(self) -> Any:
        sums = self._device_step.outputs.around(self._device_step.mapped_sums(), unused=False)
        layouts: Any = (self.plan.table.shardings(), self.plan.batch_sharding(), self.plan.replicated())
        options = dict(self.plan.options.xla) or None
        return jax.jit(self._eval_batches.around(sums), in_shardings=layouts, compiler_options=options)

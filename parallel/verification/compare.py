"""Compares training under a strategy with one device: loss, gradients, norm, parameters, state and collectives.

`verify` builds the step of a strategy and runs it next to its reference, the same model in plain JAX on one device.
If the two differ, it reports the first difference and runs experiments to find its cause (`diagnosis`).
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
import optax

from ...mesh.errors import UserError
from ..model import BlockModel, Model
from ..options import Precision
from ..sharding.lay_out import StrategyLike, lay_out
from ..sharding.stored_order import stored_order
from ..step.build import build_step
from ..step.state import StepMetrics, TrainState
from ..step.train_step import Step
from . import claims, diagnosis
from .after_training import Averages, beyond_steps
from .claims import frozen_parameters
from .collective_check import CollectiveCheck, check_collectives
from .diagnosis import Training
from .differences import INIT_TOLERANCE, LeafError, array_errors, leaf_errors, relative, widened
from .first_difference import differences, reported_error
from .perturb import prepared
from .reference import HostBatch, OneDevice, Sums
from .result import Difference, Verification
from .round_trip import SaveAndRestore
from .rounding import moved
from .row_counts import Case

FLOAT64 = Precision(params="float64", compute="float64", reduce="float64")
"""All dtypes float64, so that rounding cannot be mistaken for an error."""

OTHER_STEP = 7919
"""A step with random numbers that must differ from those of step 0."""


def verify(
    model: Model | BlockModel,
    strategy: StrategyLike,
    batches: Sequence[HostBatch],
    *,
    optimizer: optax.GradientTransformation | None = None,
    rules: Any = None,
    accumulate: int = 1,
    clip_norm: float = 0.0,
    remat: str = "none",
    precision: Precision = FLOAT64,
    seed: int = 0,
    devices: Sequence[str] | None = None,
) -> Verification:
    """Compares training under a strategy with training on one device.

    The initial parameters are perturbed first, since zeros and ones hide mistakes.

    Args:
        model: The model; give a small one of the same structure.
        strategy: The strategy, in any form that `lay_out` accepts.
        batches: Global batches as host arrays, one per step, of equal shapes. Weights that differ between rows reveal
            mistakes that equal weights hide.
        optimizer: Any optax transformation without clipping; AdamW by default.
        rules: Layout rules, in any form that `lay_out` accepts.
        accumulate: Microbatches per step.
        clip_norm: Maximum global norm of the gradients; 0 = no clipping.
        remat: The rematerialization policy of blocks.
        precision: The dtypes; float64 throughout by default.
        seed: The seed of the initial parameters and dropout.
        devices: Names of the mesh devices; all devices by default.

    Returns:
        The measurements; `ok` if everything agrees.

    Raises:
        UserError: The strategy does not fit the model or the batches.
    """
    with x64(precision):
        model = prepared(model, precision.reduce)
        layouts = lay_out(model, strategy, rules=rules, precision=precision, devices=devices)
        optimizer = optimizer or optax.adamw(1e-3, weight_decay=0.1)
        step = build_step(
            model, optimizer, layouts, accumulate=accumulate, clip_norm=clip_norm, remat=remat, precision=precision
        )
        return verify_step(step, batches, clip_norm=clip_norm, seed=seed)


def x64(precision: Precision) -> Any:
    """Enables 64-bit types within a `with` block if the precision needs them."""
    return jax.enable_x64(True) if precision.needs_x64 else nullcontext()


def verify_step(
    step: Step,
    batches: Sequence[HostBatch],
    *,
    clip_norm: float = 0.0,
    seed: int = 0,
    reduced: Mapping[str, tuple[Any, Any]] | None = None,
    save_and_restore: SaveAndRestore | None = None,
    averages: Averages | None = None,
) -> Verification:
    """Compares an existing step with one device; see `verify`.

    Args:
        step: The step.
        batches: Global batches; see `verify`.
        clip_norm: The maximum gradient norm of the step.
        seed: The seed; see `verify`.
        reduced: Config key -> (before, after), for the report.
        save_and_restore: Writes a state to files and reads it; by default, states stay in memory.
        averages: Reads the parameter averages that the optimizer keeps, if any.

    Returns:
        The measurements.

    Raises:
        UserError: The strategy trains differently from one device on purpose.
    """
    if step.plan.exact is not step.plan:
        option, off = ("local_steps", "0") if step.plan.local_steps else ("compress", "none")
        raise UserError(
            f"strategy.data.{option}={getattr(step.plan.configs['data'], option)} does not train like one device, by "
            f"design. To verify the rest of the strategy, set strategy.data.{option}={off}."
        )
    device = step.plan.mesh.backend_mesh.devices.flat[0]
    with x64(step.precision), jax.default_device(device):
        host: list[HostBatch] = [dict(batch) for batch in batches]
        return _compare(step, host, clip_norm, seed, reduced or {}, save_and_restore, averages)


def _compare(
    step: Step,
    batches: list[HostBatch],
    clip_norm: float,
    seed: int,
    reduced: Mapping[str, tuple[Any, Any]],
    save_and_restore: SaveAndRestore | None,
    averages: Averages | None,
) -> Verification:
    pipeline, compute = step.plan.pipeline, step.precision.compute
    options: Any = {"accumulate": step.accumulate, "stages": pipeline.stages if pipeline else None}
    one_device = OneDevice(step.given_model, step.optimizer, clip_norm=clip_norm, compute=compute, seed=seed, **options)
    start = one_device.init(step.precision.params)
    narrowings = one_device.narrowings(start, batches[0])
    of_loss, of_update = tolerances = narrowings[0].tolerance, max(each.tolerance for each in narrowings)
    state = step.init(seed)
    init = leaf_errors(state.params, start, tolerance=of_loss)[0]
    params = jax.tree.map(np.asarray, state.params)
    reference = one_device.train(params, batches)
    facts = {
        "mesh": dict(zip(step.plan.mesh.axis_names, step.plan.mesh.shape, strict=True)),
        "dtype": compute,
        "tolerance": of_loss,
        "init_tolerance": max(of_loss, INIT_TOLERANCE),
        "params_tolerance": of_update,
        "reference_losses": reference.losses,
        "reduced": reduced,
        "notes": step.plan.notes,
    }
    try:
        collectives = check_collectives(step, batches[0], frozen_parameters(reference))
        found, norm = summed(step, state, batches[0], clip_norm)
    except ValueError as error:
        cause = diagnosis.refused(error, step.plan)
        if cause is None:
            raise
        return _refused(facts, *cause)
    reported: list[StepMetrics] = []
    for batch in batches:
        state, metrics = step(state, batch)
        reported.append(jax.device_get(metrics))
    saved = stored_order(step.plan).to_model(state)
    errors = array_errors(found, state, saved, reference, *tolerances, one_device.to_model)
    if errors.over(*tolerances):  # perhaps by rounding alone
        reference = reference._replace(moved=one_device.train(moved(params, of_loss), batches))
        errors = array_errors(found, state, saved, reference, *tolerances, one_device.to_model)
    losses = tuple(float(metrics.loss) for metrics in reported)
    measured = Verification(
        **{**facts, **errors._asdict()},
        steps=len(batches),
        init_rel=init.relative,
        loss_rel=relative(losses[0], reference.losses[0]),
        weight_rel=relative(found.weight, reference.weights[0]),
        grad_norm_rel=relative(norm, reference.norms[0]),
        reported=reported_error(reported, reference),
        losses=losses,
        collectives=collectives,
        first_difference=None,
        widened=tuple(widened(init, errors, narrowings, step.precision)),
    )
    training = Training(step, one_device, batches, seed, *tolerances)
    case = partial(_case, training, clip_norm)
    first = next(differences(measured, init, found, norm, reference, case, training), None)
    measured = replace(measured, first_difference=first)
    if measured.ok:  # the later checks need correct steps
        measured = beyond_steps(measured, training, state, reference, save_and_restore, case, averages)
    totals = {one_device.sums(params, batches[0], number).total for number in (0, OTHER_STEP)}
    checked = {"files": save_and_restore is not None, "random": len(totals) > 1}
    unseen = claims.not_looked_at(measured, reference, params, clip_norm=clip_norm, **checked)
    return replace(measured, proved=tuple(claims.proved(measured, **checked)), not_looked_at=tuple(unseen))


def _case(training: Training, clip_norm: float) -> Case:
    """Returns the data for finding the cause of a difference."""
    step, pipeline = training.step, training.step.plan.pipeline
    microbatches = step.accumulate * (pipeline.schedule.microbatches if pipeline else 1)
    fresh = step.init(training.seed)

    def run(params: Any, batch: HostBatch) -> Sums:
        return summed(step, fresh._replace(params=params), batch, clip_norm)[0]

    first = training.batches[0]
    return Case(step.plan, microbatches, run, fresh.params, training.one_device, first, training.tolerance)


def summed(step: Step, state: TrainState, batch: HostBatch, clip_norm: float) -> tuple[Sums, float]:
    """Returns the sums of one batch under a strategy, without clipping, and the norm of the mean gradient.

    Args:
        step: The step.
        state: Its state; it is not consumed.
        batch: A global batch.
        clip_norm: The maximum gradient norm of the step.

    Returns:
        The sums, their gradients as arrays on the mesh, and the norm.
    """
    gradients, metrics = step.gradients(state, dict(batch))
    weight, norm = float(metrics.weight), float(metrics.grad_norm)
    factor = (weight or 1.0) * (norm / clip_norm if 0 < clip_norm < norm else 1.0)

    def scale(gradients: Any, factor: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf * factor.astype(leaf.dtype), gradients)

    scaled = jax.jit(scale, out_shardings=step.plan.update_table.shardings())(gradients, np.float64(factor))
    return Sums(float(metrics.loss) * (weight or 1.0), weight, scaled), norm


def _refused(facts: Mapping[str, Any], path: str, hint: str) -> Verification:
    """Returns the result for a step that JAX refuses to compile, because devices would differ."""
    infinite = float("inf")
    unknown = (LeafError(infinite, path),)
    return Verification(
        **facts,
        steps=0,
        init_rel=0.0,
        loss_rel=infinite,
        weight_rel=infinite,
        gradients=unknown,
        grad_norm_rel=infinite,
        params=unknown,
        optimizer=unknown,
        reported=(infinite, ""),
        losses=(),
        collectives=CollectiveCheck(),
        first_difference=Difference(what="gradients", where=path, relative=infinite, hint=hint),
        not_looked_at=("anything else: the step does not compile",),
    )

"""Does a strategy train as one device does? Compares loss, gradients, norm, parameters, state and collectives.

`verify` builds the step of a strategy and runs it beside its reference, the same model in plain JAX on one device.
Where the two differ, it names the first thing that does, and measures what usually causes it (`diagnosis`).
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from ...mesh.errors import UserError
from ..model import BlockModel, Model
from ..precision import Precision
from ..sharding.lay_out import StrategyLike, lay_out
from ..sharding.stored_order import stored_order
from ..step.build import build_step
from ..step.state import StepMetrics, TrainState
from ..step.train_step import Step
from . import claims, diagnosis
from .beyond_steps import Averages, beyond_steps
from .claims import frozen_parameters
from .collective_check import CollectiveCheck, check_collectives
from .differences import LeafError, array_errors, leaf_errors, relative
from .first_difference import Found, first_difference, reported_error
from .prepared import prepared
from .reference import HostBatch, OneDevice, Reference, Sums
from .result import Difference, Verification
from .round_trip import SaveAndRestore
from .rounding import moved
from .row_counts import Case
from .update_cause import Training
from .widened import INIT_TOLERANCE, widened

FLOAT64 = Precision(params="float64", compute="float64", reduce="float64")
"""Everything in float64, where rounding cannot be taken for a mistake."""

OTHER_STEP = 7919
"""The step whose random numbers are compared with those of step 0."""


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

    The initial parameters are moved off zeros and ones first, since these hide mistakes.

    Args:
        model: The model; give a small one of the same structure.
        strategy: As `lay_out` takes it.
        batches: Global batches as host arrays, one a step, of equal shapes. Weights that differ from row to row show
            mistakes that equal ones hide.
        optimizer: Any optax transformation without clipping; AdamW by default.
        rules: Layout rules, as `lay_out` takes them.
        accumulate: Microbatches a step.
        clip_norm: Largest global norm of gradients; 0 = never clip.
        remat: What blocks keep for backward.
        precision: The dtypes; float64 throughout by default.
        seed: Of the initial parameters and dropout.
        devices: Devices of the mesh by name; all of them by default.

    Returns:
        What was measured; `ok` where everything agrees.

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
    """A context with 64-bit types where the precision needs them."""
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
    """Compares a step with one device; `verify` for a step that is built already.

    Args:
        step: The step.
        batches: As in `verify`.
        clip_norm: What the step was built with.
        seed: As in `verify`.
        reduced: Config key -> (before, after), to be stated.
        save_and_restore: Writes a state to files and reads it; without it, states are passed on in memory.
        averages: Reads the averages of the parameters that the optimizer keeps; None if there are none.

    Returns:
        What was measured.

    Raises:
        UserError: The strategy trains differently from one device on purpose.
    """
    _check_exact(step)
    device = step.layouts.mesh.backend_mesh.devices.flat[0]
    with x64(step.precision), jax.default_device(device):
        given: list[HostBatch] = [dict(batch) for batch in batches]
        return _compare(_Asked(step, given, clip_norm, seed, reduced or {}, save_and_restore, averages))


class _Asked(NamedTuple):
    """The arguments of `verify_step`."""

    step: Step
    batches: list[HostBatch]
    clip_norm: float
    seed: int
    reduced: Mapping[str, tuple[Any, Any]]
    save_and_restore: SaveAndRestore | None
    averages: Averages | None


def _check_exact(step: Step) -> None:
    if step.layouts.exact is step.layouts:
        return
    option, off = ("local_steps", "0") if step.layouts.local_steps else ("compress", "none")
    raise UserError(
        f"strategy.data.{option}={getattr(step.plan.configs['data'], option)} does not train as one device would, by "
        f"design. The rest of the strategy can be verified: set strategy.data.{option}={off}."
    )


def _compare(asked: _Asked) -> Verification:
    step, batches, clip_norm = asked.step, asked.batches, asked.clip_norm
    compute, pipeline = step.precision.compute, step.layouts.pipeline
    stages = pipeline.stages if pipeline else None
    one_device = OneDevice(
        step.given_model,
        step.optimizer,
        clip_norm=clip_norm,
        compute=compute,
        seed=asked.seed,
        accumulate=step.accumulate,
        stages=stages,
    )
    start = one_device.init(step.precision.params)
    narrowings = one_device.narrowings(start, batches[0])
    of_loss, of_update = tolerances = narrowings[0].tolerance, max(each.tolerance for each in narrowings)
    state = step.init(asked.seed)
    init = leaf_errors(state.params, start, tolerance=of_loss)
    params = jax.tree.map(np.asarray, state.params)
    reference = one_device.train(params, batches)
    try:
        collectives = check_collectives(step, batches[0], frozen_parameters(reference))
        found, norm = summed(step, state, batches[0], clip_norm)
    except ValueError as error:
        cause = diagnosis.refused(error, step.layouts)
        if cause is None:
            raise
        return _refused(asked, reference, cause, tolerances)
    reported: list[StepMetrics] = []
    for batch in batches:
        state, metrics = step(state, batch)
        reported.append(jax.device_get(metrics))
    saved = stored_order(step.plan).to_model(state)
    losses = tuple(float(metrics.loss) for metrics in reported)
    errors = array_errors(found, state, saved, reference, *tolerances, one_device.to_model)
    if errors.over(*tolerances):  # by rounding alone, perhaps
        reference = reference._replace(moved=one_device.train(moved(params, of_loss), batches))
        errors = array_errors(found, state, saved, reference, *tolerances, one_device.to_model)
    measured = Verification(
        **_facts(asked, len(batches), tolerances),
        init_rel=init[0].relative,
        loss_rel=relative(losses[0], reference.losses[0]),
        weight_rel=relative(found.weight, reference.weight),
        grad_norm_rel=relative(norm, reference.norm),
        **errors._asdict(),
        reported=reported_error(reported, reference),
        losses=losses,
        reference_losses=reference.losses,
        collectives=collectives,
        first_difference=None,
        widened=tuple(widened(init[0], errors, narrowings, step.precision)),
    )
    training = Training(step, one_device, batches, asked.seed, of_loss, of_update)
    results = Found(measured, init[0], found, norm, reference, lambda: _case(asked, one_device, of_loss), training)
    measured = replace(measured, first_difference=first_difference(results))
    if measured.ok:  # what is beyond the steps is looked at if these are right
        hooks = asked.save_and_restore, results.case, asked.averages
        measured = beyond_steps(measured, training, state, reference, *hooks)
    return replace(measured, **_claims(asked, measured, one_device, reference, params))


def _case(asked: _Asked, one_device: OneDevice, tolerance: float) -> Case:
    """What a cause is looked for with, once something differs."""
    step, pipeline = asked.step, asked.step.layouts.pipeline
    microbatches = step.accumulate * (pipeline.schedule.microbatches if pipeline else 1)
    fresh = step.init(asked.seed)

    def run(params: Any, batch: HostBatch) -> Sums:
        return summed(step, fresh._replace(params=params), batch, asked.clip_norm)[0]

    return Case(step.layouts, microbatches, run, fresh.params, one_device, asked.batches[0], tolerance)


def _claims(
    asked: _Asked, measured: Verification, one_device: OneDevice, reference: Reference, params: Any
) -> dict[str, tuple[str, ...]]:
    """What is proved, and what was not looked at."""
    totals = {one_device.sums(params, asked.batches[0], step).total for step in (0, OTHER_STEP)}
    files, random = asked.save_and_restore is not None, len(totals) > 1
    unseen = claims.not_looked_at(measured, reference, params, files=files, random=random, clip_norm=asked.clip_norm)
    return {
        "proved": tuple(claims.proved(measured, files=files, random=random)),
        "not_looked_at": tuple(unseen),
    }


def summed(step: Step, state: TrainState, batch: HostBatch, clip_norm: float) -> tuple[Sums, float]:
    """Sums up one batch under a strategy, with clipping undone, and gives the norm of the mean gradient.

    Args:
        step: The step.
        state: Its state; it is not consumed.
        batch: A global batch.
        clip_norm: What the step was built with.

    Returns:
        The sums, their gradients as arrays on the mesh, and the norm.
    """
    gradients, metrics = step.gradients(state, dict(batch))
    weight, norm = float(metrics.weight), float(metrics.grad_norm)
    factor = (weight or 1.0) * (norm / clip_norm if 0 < clip_norm < norm else 1.0)
    scaled = jax.jit(_scaled, out_shardings=step.layouts.update_table.shardings())(gradients, np.float64(factor))
    return Sums(float(metrics.loss) * (weight or 1.0), weight, scaled), norm


def _scaled(gradients: Any, factor: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf * factor.astype(leaf.dtype), gradients)


def _refused(
    asked: _Asked, reference: Reference, cause: tuple[str, str], tolerances: tuple[float, float]
) -> Verification:
    """The result of a step that does not even compile, as JAX sees that devices would differ."""
    path, hint = cause
    unknown = LeafError(float("inf"), path)
    return Verification(
        **_facts(asked, 0, tolerances),
        init_rel=0.0,
        loss_rel=float("inf"),
        weight_rel=float("inf"),
        gradients=(unknown,),
        grad_norm_rel=float("inf"),
        params=(unknown,),
        optimizer=(unknown,),
        reported=(float("inf"), ""),
        losses=(),
        reference_losses=reference.losses,
        collectives=CollectiveCheck(),
        first_difference=Difference(what="gradients", where=path, relative=float("inf"), hint=hint),
        not_looked_at=("anything else: the step does not compile",),
    )


def _facts(asked: _Asked, steps: int, tolerances: tuple[float, float]) -> dict[str, Any]:
    mesh = asked.step.layouts.mesh
    return {
        "mesh": dict(zip(mesh.axis_names, mesh.shape, strict=True)),
        "dtype": asked.step.precision.compute,
        "steps": steps,
        "tolerance": tolerances[0],
        "init_tolerance": max(tolerances[0], INIT_TOLERANCE),
        "params_tolerance": tolerances[1],
        "reduced": asked.reduced,
        "notes": asked.step.layouts.notes,
    }

"""Is a strategy's training that of one device? Loss, gradients, norm, parameters and collectives, compared.

`verify` builds the step of a strategy and runs it beside the same model in plain JAX on one device (`oracle`); where
they differ, it names the first thing that does and measures what usually causes it (`diagnosis`).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax

from ..mesh.errors import UserError
from . import diagnosis
from .collective_check import CollectiveCheck, check_collectives
from .diagnosis import Case
from .differences import LeafError, leaf_errors, relative
from .lay_out import StrategyLike, lay_out
from .model import BlockModel, Model
from .oracle import HostBatch, OneDevice, Reference, Sums, prepared
from .precision import Precision
from .state import TrainState
from .step import Step, build_step
from .verification import Difference, Verification

FLOAT64 = Precision(params="float64", compute="float64", reduce="float64")
"""Everything in float64, where rounding cannot be taken for a mistake."""

INIT_TOLERANCE = 1e-5
"""First parameters are drawn in float32 by most models."""


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
) -> Verification:
    """Compares a step with one device; `verify` for a step that is built already.

    Args:
        step: The step.
        batches: As in `verify`.
        clip_norm: What the step was built with.
        seed: As in `verify`.
        reduced: Config key -> (before, after), to be stated.

    Returns:
        What was measured.

    Raises:
        UserError: The strategy trains differently from one device on purpose.
    """
    _check_exact(step)
    device = step.layouts.mesh.backend_mesh.devices.flat[0]
    with x64(step.precision), jax.default_device(device):
        return _compare(step, [dict(batch) for batch in batches], clip_norm, seed, reduced or {})


def _check_exact(step: Step) -> None:
    if step.layouts.exact is step.layouts:
        return
    option, off = ("local_steps", "0") if step.layouts.local_steps else ("compress", "none")
    raise UserError(
        f"strategy.data.{option}={getattr(step.layouts.data, option)} does not train as one device would, by design. "
        f"The rest of the strategy can be verified: set strategy.data.{option}={off}."
    )


def _compare(
    step: Step, batches: list[HostBatch], clip_norm: float, seed: int, reduced: Mapping[str, tuple[Any, Any]]
) -> Verification:
    compute, pipeline = step.precision.compute, step.layouts.pipeline
    stages = pipeline.stages if pipeline else None
    oracle = OneDevice(step.model, step.optimizer, clip_norm=clip_norm, compute=compute, seed=seed, stages=stages)
    start = oracle.init(step.precision.params)
    of_loss, of_update = oracle.tolerances(start, batches[0])
    state = step.init(seed)
    init = leaf_errors(state.params, start, tolerance=of_loss)
    params = jax.tree.map(np.asarray, state.params)
    reference = oracle.train(params, batches)
    try:
        collectives = check_collectives(step, batches[0])
        found, norm = summed(step, state, batches[0], clip_norm)
    except ValueError as error:
        cause = diagnosis.refused(error, step.layouts)
        if cause is None:
            raise
        return _refused(step, reference, cause, (of_loss, of_update), reduced)
    gradients = leaf_errors(found.gradients, reference.gradients, scale=found.weight or 1.0, tolerance=of_loss)
    losses = []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics.loss))
    measured = Verification(
        **_facts(step, len(batches), (of_loss, of_update), reduced),
        init_rel=init[0].relative,
        loss_rel=relative(losses[0], reference.losses[0]),
        gradients=tuple(gradients),
        grad_norm_rel=relative(norm, reference.norm),
        params=tuple(leaf_errors(state.params, reference.params, tolerance=of_update)),
        losses=tuple(losses),
        reference_losses=reference.losses,
        collectives=collectives,
        first_difference=None,
    )

    microbatches = step.accumulate * (pipeline.schedule.microbatches if pipeline else 1)

    def case() -> Case:
        fresh = step.init(seed)

        def run(params: Any, batch: HostBatch) -> Sums:
            return summed(step, fresh._replace(params=params), batch, clip_norm)[0]

        return Case(step.layouts, microbatches, run, fresh.params, oracle, batches[0])

    return replace(measured, first_difference=_first(measured, init[0], found, norm, reference, case))


def _first(
    measured: Verification,
    init: LeafError,
    found: Sums,
    norm: float,
    reference: Reference,
    case: Callable[[], Case],
) -> Difference | None:
    """The first thing that differs, with its cause."""
    tolerance, worst, changed = measured.tolerance, measured.gradients[0], measured.params[0]
    weight = reference.weight or 1.0
    expected = Sums(
        reference.losses[0] * weight, reference.weight, jax.tree.map(lambda leaf: leaf * weight, reference.gradients)
    )
    unexpected = measured.collectives.unexpected
    if init.relative > measured.init_tolerance:
        hint = "The same seed draws other parameters on this mesh: they depend on the seed and the path alone."
        return Difference(what="initial parameters", where=init.path, relative=init.relative, hint=hint)
    if measured.loss_rel > tolerance:
        hint = diagnosis.of_loss(case(), found, expected)
        return Difference(what="loss", where="", relative=measured.loss_rel, hint=hint)
    if worst.relative > tolerance:
        hint = diagnosis.of_gradient(case(), worst.path, found, expected)
        return Difference(what="gradients", where=worst.path, relative=worst.relative, hint=hint)
    if measured.grad_norm_rel > tolerance:
        hint = diagnosis.of_norm(case(), norm, reference.norm, reference.gradients)
        return Difference(what="gradient norm", where="", relative=measured.grad_norm_rel, hint=hint)
    if changed.relative > measured.params_tolerance:
        hint = diagnosis.of_parameters(changed.path, case(), measured.losses, reference.losses, tolerance)
        return Difference(what="parameters", where=changed.path, relative=changed.relative, hint=hint)
    if unexpected:
        hint = "The numbers are right, but more or less moves than the strategies say: " + "; ".join(unexpected) + "."
        return Difference(what="collectives", where="", relative=float(len(unexpected)), hint=hint)
    return None


def summed(step: Step, state: TrainState, batch: HostBatch, clip_norm: float) -> tuple[Sums, float]:
    """What a strategy sums up over one batch, with clipping undone, and the norm of the mean gradient.

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
    step: Step,
    reference: Reference,
    cause: tuple[str, str],
    tolerances: tuple[float, float],
    reduced: Mapping[str, tuple[Any, Any]],
) -> Verification:
    """The result where the step does not even compile, as JAX sees that devices would differ."""
    path, hint = cause
    unknown = LeafError(float("inf"), path)
    return Verification(
        **_facts(step, 0, tolerances, reduced),
        init_rel=0.0,
        loss_rel=float("inf"),
        gradients=(unknown,),
        grad_norm_rel=float("inf"),
        params=(unknown,),
        losses=(),
        reference_losses=reference.losses,
        collectives=CollectiveCheck(),
        first_difference=Difference(what="gradients", where=path, relative=float("inf"), hint=hint),
    )


def _facts(
    step: Step, steps: int, tolerances: tuple[float, float], reduced: Mapping[str, tuple[Any, Any]]
) -> dict[str, Any]:
    mesh = step.layouts.mesh
    return {
        "mesh": dict(zip(mesh.axis_names, mesh.shape, strict=True)),
        "dtype": step.precision.compute,
        "steps": steps,
        "tolerance": tolerances[0],
        "init_tolerance": max(tolerances[0], INIT_TOLERANCE),
        "params_tolerance": tolerances[1],
        "reduced": reduced,
        "notes": step.layouts.notes,
    }

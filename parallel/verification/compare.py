"""Compares training under a strategy with one device: loss, gradients, norm, parameters, state and collectives.

`verify` builds the step of a strategy and runs it next to its reference, the same model in plain JAX on one device.
If the two differ, it reports the first difference and runs experiments to find its cause (`diagnosis`).
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from ...mesh.compat import known_faults
from ...mesh.errors import UserError
from ..model import BlockModel, Model
from ..options import Precision
from ..sharding.lay_out import StrategyLike, lay_out
from ..sharding.model_errors import check_loss
from ..step.build import build_step
from ..step.model_order import in_model_order
from ..step.train_step import Step
from .after_training import Averages, check_after_steps
from .case import Case
from .collective_check import check_collectives
from .contract.breaches import CHECKS
from .contract.probe import moved as perturbed
from .diagnosis import explain_rejection, explanations, first_difference
from .differences import GRADIENTS, INIT_TOLERANCE, LeafError, array_errors, leaf_errors, relative, widened
from .light_batch import measure_light_batch
from .reference import HostBatch, OneDevice, Reference, report
from .result import (
    BREAKS_CONTRACT,
    LIGHT_BATCH,
    Difference,
    Extent,
    Measured,
    Verification,
    list_proved,
    list_unchecked,
)
from .round_trip import SaveAndRestore
from .rounding import moved

FLOAT64 = Precision(params="float64", compute="float64", reduce="float64")
"""All dtypes float64, so that rounding cannot be mistaken for an error."""

CONTRACT_OFF = "Nothing else was compared; to compare such a model, set model.check to warn or off."
OTHER_STEP = 7919
"""The index of a step that must draw other random numbers than step 0."""


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
    check: str = "error",
) -> Verification:
    """Compares training under a strategy with training on one device.

    Training starts near the initial parameters, since zeros and ones hide mistakes.

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
        check: The reaction to a model that breaks its contract: "error" reports it and compares nothing else, "warn"
            notes it, "off" does not check.

    Returns:
        The measurements; `ok` if everything agrees.

    Raises:
        ModelError: The model does not run on one device, for example because it names an axis of the mesh.
        UserError: The strategy does not fit the model or the batches.
    """
    with x64(precision):
        layouts = lay_out(model, strategy, rules=rules, precision=precision, devices=devices)
        optimizer = optimizer or optax.adamw(1e-3, weight_decay=0.1)
        step = build_step(
            model, optimizer, layouts, accumulate=accumulate, clip_norm=clip_norm, remat=remat, precision=precision
        )
        return verify_step(step, batches, clip_norm=clip_norm, seed=seed, check=check)


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
    check: str = "error",
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
        check: The reaction to a model that breaks its contract (`model.check`): "error" reports it and compares nothing
            else, "warn" notes it, "off" does not check.

    Returns:
        The measurements.

    Raises:
        ModelError: The model does not run on one device, for example because it names an axis of the mesh.
        UserError: The strategy trains differently from one device by design.
    """
    if check not in CHECKS:
        raise UserError(f"check={check!r} is not one of {', '.join(CHECKS)}.")
    if step.plan.exact is not step.plan:
        option, off = ("local_steps", "0") if step.plan.local_steps else ("compress", "none")
        raise UserError(
            f"strategy.data.{option}={getattr(step.plan.configs['data'], option)} does not train like one device, by "
            f"design. To verify the rest of the strategy, set strategy.data.{option}={off}."
        )
    device = step.plan.mesh.backend_mesh.devices.flat[0]
    with x64(step.precision), jax.default_device(device):
        host: list[HostBatch] = [dict(batch) for batch in batches]
        options = _Options(clip_norm, seed, reduced or {}, save_and_restore, averages, check)
        result = _compare(step, host, options)
    faults = tuple(
        f"{fault.describe()}. The reference may be wrong, too: {fault.remedy}."
        for fault in known_faults(device.platform)
    )
    return replace(result, known_faults=faults)


class _Options(NamedTuple):
    """The other arguments of `verify_step`."""

    clip_norm: float
    seed: int
    reduced: Mapping[str, tuple[Any, Any]]
    save_and_restore: SaveAndRestore | None
    averages: Averages | None
    check: str


def _compare(step: Step, batches: list[HostBatch], options: _Options) -> Verification:
    precision = step.precision
    check_loss(step.given_model, _shapes(batches[0]), compute=precision.compute, stored=precision.params)
    one_device = _one_device(step, options)
    drawn = one_device.init(step.precision.params)
    narrowings = one_device.narrowings(drawn, batches[0])
    tolerances = narrowings[0].tolerance, max(each.tolerance for each in narrowings)
    case = Case(step, one_device, perturbed(drawn), batches, options.clip_norm, *tolerances)
    facts = _facts(case, options)
    broken = "" if options.check == "off" else case.contract.text
    if broken and options.check == "error":
        first = Difference(what=BREAKS_CONTRACT, where="", relative=1.0, hint=f"{broken} {CONTRACT_OFF}")
        return Verification(**facts, first_difference=first, not_looked_at=("anything else: the contract is broken",))
    if broken:
        facts["notes"] = (*facts["notes"], broken)
    initial = case.in_model_order(step.init(options.seed).params)
    init = leaf_errors(initial, drawn, tolerance=case.tolerance)[0]
    reference = one_device.train(case.params, batches)
    facts["reference_losses"] = tuple(each["loss"] for each in reference.reports)
    state = step.init(options.seed, case.params)
    try:
        collectives = check_collectives(step, batches[0], reference.first.gradients)
        found, norm = case.sums(state, batches[0])
    except ValueError as error:
        cause = explain_rejection(error, step.plan)
        if cause is None:
            raise
        path, hint = cause
        first = Difference(what=GRADIENTS, where=path, relative=float("inf"), hint=hint)
        unseen = ("anything else: the step does not compile",)
        return Verification(**facts, first_difference=first, not_looked_at=unseen)
    light = measure_light_batch(case, state)
    reported: list[Mapping[str, float]] = []
    for batch in batches:
        state, metrics = step(state, batch)
        reported.append(report(metrics.loss, metrics.grad_norm, metrics.weight, metrics.model))
    saved = in_model_order(state)
    arrays = array_errors(found, saved, reference, *tolerances)
    if any(error.differs for error in _worst(arrays).values()):  # perhaps by rounding alone
        reference = reference._replace(moved=one_device.train(moved(case.params, case.tolerance), batches))
        arrays = array_errors(found, saved, reference, *tolerances)
    worst, right = _worst(arrays), reference.reports[0]
    errors = {
        "initial parameters": Measured(init.relative, max(case.tolerance, INIT_TOLERANCE), init.path),
        "loss": Measured(relative(reported[0]["loss"], right["loss"]), case.tolerance),
        "weight": Measured(relative(found.weight, right["weight"]), case.tolerance),
        GRADIENTS: worst.pop(GRADIENTS),
        "gradient norm": Measured(relative(norm, right["gradient norm"]), case.tolerance),
        **({LIGHT_BATCH: light} if light else {}),
        **worst,
        "what a step reports": _worst_report(reported, reference, case.params_tolerance),
    }
    measured = Verification(
        **facts,
        errors=errors,
        gradients=arrays[GRADIENTS],
        losses=tuple(each["loss"] for each in reported),
        collectives=collectives,
        first_difference=None,
        widened=tuple(widened(init, arrays, narrowings, (step.precision.params, step.precision.compute))),
    )
    explain = explanations(case, initial, drawn, found, norm, saved, reference)
    measured = replace(measured, first_difference=first_difference(measured, reference, explain))
    if measured.ok:  # the later checks need correct steps
        measured = check_after_steps(measured, case, state, reference, options.save_and_restore, options.averages)
    other = one_device.sums(case.params, batches[0], OTHER_STEP).total
    is_random = other != reference.first.total
    extent = Extent(
        files=options.save_and_restore is not None,
        random=is_random,
        contract=_unproved_contract(case, options.check),
        replaces_gpu_code=bool(step.plan.notes),
    )
    unseen = list_unchecked(measured, reference, case.params, extent, options.clip_norm)
    return replace(measured, proved=tuple(list_proved(measured, extent)), not_looked_at=tuple(unseen))


def _facts(case: Case, options: _Options) -> dict[str, Any]:
    """Returns the fields of a verification that are known before anything runs."""
    plan = case.step.plan
    return {
        "mesh": dict(zip(plan.mesh.axis_names, plan.mesh.shape, strict=True)),
        "dtype": case.step.precision.compute,
        "tolerance": case.tolerance,
        "params_tolerance": case.params_tolerance,
        "reduced": options.reduced,
        "notes": plan.notes,
    }


def _unproved_contract(case: Case, check: str) -> str:
    """Returns why the model's contract is not proved, or ""."""
    if check == "off":
        return "model.check: off"
    if case.contract.breaches:
        return "it is broken, see the note"
    return case.contract.untried


def _one_device(step: Step, options: _Options) -> OneDevice:
    return OneDevice(
        step.given_model,
        step.optimizer,
        clip_norm=options.clip_norm,
        compute=step.precision.compute,
        seed=options.seed,
        accumulate=step.accumulate,
    )


def _shapes(batch: HostBatch) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes and dtypes of a batch as JAX stores them."""
    shapes: dict[str, jax.ShapeDtypeStruct] = {}
    for name, array in batch.items():
        rows = np.asarray(array)
        shapes[name] = jax.ShapeDtypeStruct(rows.shape, jax.dtypes.canonicalize_dtype(rows.dtype))
    return shapes


def _worst(arrays: Mapping[str, Sequence[LeafError]]) -> dict[str, Measured]:
    """Returns the worst array of each kind, with the tolerance of the kind."""
    return {kind: Measured(each[0].relative, each[0].tolerance, each[0].path) for kind, each in arrays.items() if each}


def _worst_report(reported: Sequence[Mapping[str, float]], reference: Reference, tolerance: float) -> Measured:
    """Returns the largest error of the numbers that the steps report."""
    errors = [
        (relative(found[name], right), f"{name} of step {number}")
        for number, (found, expected) in enumerate(zip(reported, reference.reports, strict=True))
        for name, right in expected.items()
    ]
    error, name = max(errors)
    return Measured(error, tolerance, name)

"""The result of a verification: every error and the first difference with its likely cause, as text and JSON."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite, prod
from textwrap import fill
from typing import Any, NamedTuple

import jax
import numpy as np

from ...layouts.paths import leaves_with_paths, some
from ...layouts.sizes import counted, format_bytes
from ..model import Params
from .causality import Future
from .collective_check import CollectiveCheck
from .differences import LeafError, Widened
from .reference import Reference
from .round_trip import RoundTrip

MAX_SHOWN = 5
"""The maximum number of listed arrays."""
SEES_AHEAD = "the model sees later tokens"
NO_GRADIENT = "the model has no gradient"
NOT_FINITE = "the loss is not finite"
BREAKS_CONTRACT = "the model breaks its contract"
OF_THE_MODEL = (SEES_AHEAD, NO_GRADIENT, NOT_FINITE, BREAKS_CONTRACT)
"""Problems that occur on one device as well."""
LIGHT_BATCH = "a batch of weight 0.5"
"""The quantity of `light_batch`: loss, weight and gradient norm."""

NEVER_CHECKED = (
    "the code of the model and the optimizer (both sides run it)",
    "reading and order of data",
    "`predict`",
    "several processes",
    "accelerators and their kernels",
    "speed and memory",
)
JSON_NAMES = {
    "init_rel": "initial parameters",
    "loss_rel": "loss",
    "weight_rel": "weight",
    "grad_max_rel": "gradients",
    "grad_norm_rel": "gradient norm",
    "light_batch_rel": LIGHT_BATCH,
    "params_rel": "parameters",
    "optimizer_rel": "optimizer's state",
    "model_state_rel": "the model's state",
    "reported_rel": "what a step reports",
    "evaluation_rel": "evaluation",
    "averages_rel": "evaluation of the averages",
}
"""Key of the JSON -> quantity."""
JSON_PLACES = {"worst_leaf": "gradients", "worst_parameter": "parameters"}
"""Key of the JSON -> the quantity; the value is the name of its worst array."""
LINES = ("predicted", "found", "left_to_xla", "of_the_model")
"""Collectives in the JSON."""


class Measured(NamedTuple):
    """The comparison of one quantity.

    Attributes:
        relative: The relative error of the worst element on any device.
        tolerance: The largest relative error that rounding explains.
        where: The path of the worst array, a metric, or "".
    """

    relative: float
    tolerance: float
    where: str = ""

    @property
    def differs(self) -> bool:
        """True if the error exceeds its tolerance."""
        return not self.relative <= self.tolerance


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first difference from one device."""

    what: str
    """A key of `Verification.errors`, "collectives", "loss scale" or "checkpoint"; or one of `OF_THE_MODEL`."""
    where: str
    """The path of the worst leaf, a metric, or ""."""
    relative: float
    """The relative error; for collectives and a checkpoint, the number of lines."""
    hint: str
    """The measurement, and its cause if an experiment shows it."""


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The comparison of a strategy with one device."""

    mesh: Mapping[str, int]
    """Mesh axis -> size."""
    dtype: str
    """The dtype in which both sides compute."""
    tolerance: float
    """The tolerance of loss, gradients and norm; wider than the dtype's own if the model casts to narrower numbers."""
    params_tolerance: float
    """The tolerance after all steps; wider than the dtype's own if the optimizer casts to narrower numbers."""
    errors: Mapping[str, Measured] = field(default_factory=dict)
    """The compared quantities in causal order; quantities after the steps only if the steps agree."""
    gradients: Sequence[LeafError] = ()
    """Every gradient of the first batch, before clipping, the worst first."""
    losses: tuple[float, ...] = ()
    """The loss of each step."""
    reference_losses: tuple[float, ...] = ()
    """The losses of one device; empty if the model breaks its contract."""
    collectives: CollectiveCheck = field(default_factory=CollectiveCheck)
    """The collectives of the compiled step."""
    first_difference: Difference | None
    """The first difference; None if there is none."""
    loss_scale: str | None = None
    """The problem with dynamic loss scaling, "" if none; None if it was not checked."""
    round_trip: RoundTrip | None = None
    """The result of saving and restoring; None if it was not checked."""
    future: Future | None = None
    """The result of changing later tokens; None if it was not checked."""
    proved: tuple[str, ...] = ()
    """The proved properties; empty if anything differs."""
    not_looked_at: tuple[str, ...] = ()
    """The properties that were not checked."""
    widened: tuple[Widened, ...] = ()
    """Tolerances that are wider than those of `dtype`, and elements that are not compared."""
    reduced: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    """Config key -> (configured value, verified value)."""
    notes: tuple[str, ...] = ()
    """Differences between the verified program and the one that other devices would run."""
    known_faults: tuple[str, ...] = ()
    """Wrong numbers that the installed jaxlib is known to compute on these devices, on both sides."""

    @property
    def ok(self) -> bool:
        """True if everything agrees with one device."""
        return self.first_difference is None

    def to_json(self) -> dict[str, Any]:
        """Returns the result as JSON values, for `--json`."""
        errors, moved = self.errors, self.collectives
        result = {
            **{name: getattr(self, name) for name in ("ok", "mesh", "dtype", "tolerance", "params_tolerance")},
            "steps": len(self.losses),
            **{key: errors[what].relative if what in errors else None for key, what in JSON_NAMES.items()},
            **{key: errors[what].where if what in errors else None for key, what in JSON_PLACES.items()},
            "gradients": {each.path: each.relative for each in sorted(self.gradients, key=lambda each: each.path)},
            **{name: getattr(self, name) for name in ("losses", "reference_losses", "loss_scale")},
            "checkpoint": self.round_trip._asdict() if self.round_trip else None,
            "future": self.future._asdict() if self.future else None,
            "proved": self.proved,
            "not_looked_at": self.not_looked_at,
            "widened": [each._asdict() for each in self.widened],
            "collectives": {
                **{name: list(map(asdict, getattr(moved, name))) for name in LINES},
                "equal": not moved.unexpected,
                "fewer": moved.fewer,
            },
            "notes": self.notes,
            "known_faults": self.known_faults,
            "reduced": {key: {"from": before, "to": after} for key, (before, after) in self.reduced.items()},
            "first_difference": asdict(self.first_difference) if self.first_difference else None,
        }
        return _finite(result)

    def __str__(self) -> str:
        sizes = ", ".join(f"{axis}={size}" for axis, size in self.mesh.items() if size > 1) or "no axes"
        parts = [f"{sizes}: {counted(prod(self.mesh.values()), 'device')} against one, in {self.dtype}"]
        if self.reduced:
            lines = [f"  {key:<28} {before} -> {after}" for key, (before, after) in self.reduced.items()]
            parts.append("\n".join(["Verified at a reduced size (--full for that of the config)", *lines]))
        if self.errors:
            parts.append("\n".join(_error_lines(self)))
            parts.append("\n".join(_collective_lines(self.collectives)))
        claims = f"proved: {', '.join(self.proved) or 'nothing'}; not looked at: {', '.join(self.not_looked_at)}"
        if self.widened:
            claims += f"; wider tolerances: {'; '.join(map(str, self.widened))}"
        notes = [f"Note: {note}" for note in (*self.notes, *self.known_faults)]
        return "\n\n".join([*parts, *notes, _verdict(self), claims])


class Extent(NamedTuple):
    """The parts that a verification covered, beside its errors.

    Attributes:
        files: True if the state was written to files.
        random: True if the loss depends on the key.
        contract: The reason if the model's contract was not checked, or how it is broken, or "".
        replaces_gpu_code: True if the verified program replaces code that only GPUs run.
    """

    files: bool
    random: bool
    contract: str = ""
    replaces_gpu_code: bool = False


def list_proved(measured: Verification, extent: Extent) -> Iterator[str]:
    """Yields the proved properties; none if anything differs.

    Args:
        measured: The measurements.
        extent: The covered parts.
    """
    if not measured.ok:
        return
    if not extent.contract:
        yield "the model's contract"
    yield from measured.errors
    yield "collectives"
    if extent.random:
        yield "random numbers"
    if measured.loss_scale is not None:
        yield "a step that is not finite, and the loss scale"
    if trip := measured.round_trip:
        saved = "a checkpoint in files" if extent.files else "the state in memory"
        yield f"{saved} restored onto {trip.target} and back"


def list_unchecked(
    measured: Verification, reference: Reference, params: Params, extent: Extent, clip_norm: float
) -> Iterator[str]:
    """Yields the properties that were not checked.

    Args:
        measured: The measurements.
        reference: The training on one device.
        params: The initial parameters, on the host.
        extent: The covered parts.
        clip_norm: The maximum gradient norm of the step.
    """
    future, trip = measured.future or Future(), measured.round_trip
    frozen, norms = reference.frozen, [each["gradient norm"] for each in reference.reports]
    pairs = zip(leaves_with_paths(params), jax.tree.leaves(reference.params), strict=True)
    still = [path for (path, first), last in pairs if path not in frozen and np.array_equal(first, last)]
    conditions = {
        f"the model's contract ({extent.contract})": extent.contract,
        "a batch with a weight below 1 (its weights are no floating-point numbers)": LIGHT_BATCH not in measured.errors,
        "the GPU code that replaces the code in the note": extent.replaces_gpu_code,
        "evaluation, checkpoints and later tokens (earlier results differ)": trip is None,
        "checkpoint files": trip and not extent.files,
        "evaluation (one device cannot evaluate the model)": trip and "evaluation" not in measured.errors,
        f"later tokens ({future.untried})": future.untried,
        "a term of the loss that all positions of a row share (later tokens change it)": future.shared,
        "random numbers (the loss does not depend on the key)": not extent.random,
        "the bytes of the model's own collectives": measured.collectives.has_unpredicted_of_the_model,
        f"clipping (no norm was over {clip_norm:g})": clip_norm and max(norms) <= clip_norm,
        f"gradients that are zero on one device ({some(frozen)})": frozen,
        f"updates of parameters that do not change on one device ({some(still)})": still,
        "the config's own sizes": measured.reduced,
    }
    yield from NEVER_CHECKED
    yield from (text for text, condition in conditions.items() if condition)
    yield f"other dtypes than {measured.dtype}"


def _error_lines(result: Verification) -> Iterator[str]:
    """Yields the table of relative errors."""
    labels = {
        "gradients": f"gradients, {counted(len(result.gradients), 'array')}",
        "parameters": f"parameters after {counted(len(result.losses), 'step')}",
    }
    yield f"{'':<28} relative error   at most   worst"
    for what, error in result.errors.items():
        where = f"{error.where}{'   DIFFERS' if error.differs else ''}"
        yield f"{labels.get(what, what):<28} {error.relative:>14.1e} {error.tolerance:>9.0e}   {where}".rstrip()
    if trip := result.round_trip:
        counts = f"{len(trip.differing)} differ" if trip.differing else f"{trip.arrays} arrays"
        yield f"{'restored, bit for bit':<28} {counts:>14}"
    off = [each for each in result.gradients if each.relative > result.tolerance][1:MAX_SHOWN]
    yield from (f"  and the gradient of {each.path}: {each.relative:.1e}" for each in off)


def _collective_lines(moved: CollectiveCheck) -> Iterator[str]:
    yield f"Collectives of the compiled step, {moved.verdict}"
    width = max([14, *(len(" x ".join(line.axes)) for line in moved.found)])
    for line in moved.found:
        left = "   left to XLA" if line in moved.left_to_xla else ""
        left = "   with the model's own" if line in moved.of_the_model else left
        figures = f"{line.count:>5} a step {format_bytes(line.bytes):>12}"
        yield f"  {line.kind:<18} over {' x '.join(line.axes):<{width}} {figures}{left}"
    if not moved.found:
        yield "  none"
    yield from (f"  more: {line}" for line in moved.unexpected)
    yield from (f"  fewer: {line}" for line in moved.fewer)


def _verdict(result: Verification) -> str:
    first = result.first_difference
    if first is None:
        return "The same as on one device."
    at = f" of {first.where}" if first.where else ""
    hint = fill(first.hint, 118, initial_indent="  ", subsequent_indent="  ")
    if first.what in OF_THE_MODEL:
        return f"WRONG on one device already: {first.what}\n{hint}"
    return f"DIFFERENT from one device, first in: {first.what}{at}\n{hint}"


def _finite(value: Any) -> Any:
    """Replaces infinities and NaN, which JSON lacks, with None."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not isfinite(value) else value

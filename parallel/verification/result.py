"""The result of a verification: every error and the first difference with its likely cause, as text and JSON."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from math import isfinite, prod
from textwrap import fill
from typing import Any

from ...layouts.sizes import counted, format_bytes
from ..collectives import Collective
from .causality import Future
from .collective_check import CollectiveCheck
from .differences import LeafError, Widened
from .round_trip import RoundTrip

MAX_SHOWN = 5
"""The maximum number of listed leaves."""
SEES_AHEAD = "the model sees later tokens"
NO_GRADIENT = "the model has no gradient"
NOT_FINITE = "the loss is not finite"
OF_THE_MODEL = (SEES_AHEAD, NO_GRADIENT, NOT_FINITE)
"""Problems that occur on one device as well."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first difference from one device."""

    what: str
    """initial parameters, loss, weight, gradients, gradient norm, parameters, optimizer's state, the model's state,
    what a step reports, evaluation, evaluation of the averages, loss scale, checkpoint or collectives; or one of
    `OF_THE_MODEL`."""
    where: str
    """The path of the worst leaf, a metric, or ""."""
    relative: float
    """The relative error; for collectives and a checkpoint, the number of lines."""
    hint: str
    """The measurement, and its usual cause."""


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The comparison of a strategy with one device. Relative errors are those of the worst element on any device."""

    mesh: Mapping[str, int]
    """Mesh axis -> size."""
    dtype: str
    """The dtype that both compute in."""
    steps: int
    """Optimizer steps taken."""
    tolerance: float
    """The tolerance of loss, gradients and norm; wider than the dtype's own if the model casts to narrower numbers."""
    params_tolerance: float
    """The tolerance after all steps; wider as well if the optimizer casts to narrower numbers."""
    init_tolerance: float
    """The tolerance of the initial parameters, which most models draw in float32."""
    init_rel: float
    """The error of the initial parameters."""
    loss_rel: float
    """The error of the loss of the first batch."""
    weight_rel: float
    """The error of its weight."""
    gradients: tuple[LeafError, ...]
    """Every gradient of the first batch, before clipping, the worst first."""
    grad_norm_rel: float
    """The error of their global norm."""
    params: tuple[LeafError, ...]
    """Every parameter after all steps, the worst first."""
    optimizer: tuple[LeafError, ...]
    """Every array of the optimizer's state after all steps, the worst first."""
    reported: tuple[float, str]
    """The largest error of the reported loss, weight, norm and model metrics, with its name: "loss of step 2"."""
    losses: tuple[float, ...]
    """The loss of each step."""
    reference_losses: tuple[float, ...]
    """The losses of one device."""
    collectives: CollectiveCheck
    """The collectives of the compiled step."""
    first_difference: Difference | None
    """The first difference; None if there is none."""
    model_state: tuple[LeafError, ...] = ()
    """Every array of the model's own state after all steps, the worst first."""
    evaluation_rel: float | None = None
    """The larger error of the sums (loss, weight) of an evaluation; None if it was not checked, because a step
    differs."""
    averages_rel: float | None = None
    """The same error with the averages of the parameters, if the optimizer keeps them."""
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

    @property
    def ok(self) -> bool:
        """True if everything agrees with one device."""
        return self.first_difference is None

    def to_json(self) -> dict[str, Any]:
        """Returns the result as plain values, for `--json`."""
        worst, moved = self.gradients[0], self.collectives
        result = {
            "ok": self.ok,
            "mesh": dict(self.mesh),
            "dtype": self.dtype,
            "tolerance": self.tolerance,
            "params_tolerance": self.params_tolerance,
            "steps": self.steps,
            "init_rel": self.init_rel,
            "loss_rel": self.loss_rel,
            "weight_rel": self.weight_rel,
            "grad_max_rel": worst.relative,
            "worst_leaf": worst.path,
            "grad_norm_rel": self.grad_norm_rel,
            "params_rel": self.params[0].relative,
            "worst_parameter": self.params[0].path,
            "gradients": {each.path: each.relative for each in sorted(self.gradients, key=lambda each: each.path)},
            "losses": list(self.losses),
            "reference_losses": list(self.reference_losses),
            "optimizer_rel": max((each.relative for each in self.optimizer), default=0.0),
            "model_state_rel": max((each.relative for each in self.model_state), default=0.0),
            "reported_rel": self.reported[0],
            "evaluation_rel": self.evaluation_rel,
            "averages_rel": self.averages_rel,
            "loss_scale": self.loss_scale,
            "checkpoint": _checkpoint(self.round_trip),
            "future": self.future._asdict() if self.future else None,
            "proved": list(self.proved),
            "not_looked_at": list(self.not_looked_at),
            "widened": [each._asdict() for each in self.widened],
            "collectives": {
                "predicted": _lines(moved.predicted),
                "found": _lines(moved.found),
                "left_to_xla": _lines(moved.left_to_xla),
                "of_the_model": _lines(moved.of_the_model),
                "equal": not moved.unexpected,
            },
            "notes": list(self.notes),
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
        parts.append("\n".join(_error_lines(self)))
        parts.append("\n".join(_collective_lines(self.collectives)))
        claims = f"proved: {', '.join(self.proved) or 'nothing'}; not looked at: {', '.join(self.not_looked_at)}"
        if self.widened:
            claims += f"; wider tolerances: {'; '.join(map(str, self.widened))}"
        return "\n\n".join([*parts, *(f"Note: {note}" for note in self.notes), _verdict(self), claims])


def _error_lines(result: Verification) -> Iterator[str]:
    """The table of relative errors."""
    worst, changed = result.gradients[0], result.params[0]
    optimizer = result.optimizer[0] if result.optimizer else LeafError(0.0, "none")
    rows = [
        ("initial parameters", result.init_rel, result.init_tolerance, ""),
        ("loss", result.loss_rel, result.tolerance, ""),
        ("weight", result.weight_rel, result.tolerance, ""),
        (f"gradients, {counted(len(result.gradients), 'array')}", worst.relative, result.tolerance, worst.path),
        ("gradient norm", result.grad_norm_rel, result.tolerance, ""),
        (f"parameters after {counted(result.steps, 'step')}", changed.relative, result.params_tolerance, changed.path),
        ("optimizer's state", optimizer.relative, result.params_tolerance, optimizer.path),
        *(("the model's state", each.relative, result.params_tolerance, each.path) for each in result.model_state[:1]),
        ("reported by each step", result.reported[0], result.params_tolerance, result.reported[1]),
    ]
    if result.evaluation_rel is not None:
        rows.append(("evaluation", result.evaluation_rel, result.tolerance, ""))
    if result.averages_rel is not None:
        rows.append(("evaluation of the averages", result.averages_rel, result.params_tolerance, ""))
    if result.future and result.future.positions:
        position, change = result.future.seen or (None, 0.0)
        place = "" if position is None else f"after position {position}"
        rows.append(("loss with other later tokens", change, result.tolerance, place))
    trip = result.round_trip
    if trip:
        rows.append(("saved parameters", trip.params[0].relative, result.params_tolerance, trip.params[0].path))
        rows.append(("a step after restoring", trip.next_step, result.params_tolerance, ""))
    yield f"{'':<28} relative error   at most   worst"
    for name, error, bound, path in rows:
        yield f"{name:<28} {error:>14.1e} {bound:>9.0e}   {path}{'' if error <= bound else '   DIFFERS'}".rstrip()
    if trip:
        counts = f"{len(trip.differing)} differ" if trip.differing else f"{trip.arrays} arrays"
        yield f"{'restored, bit for bit':<28} {counts:>14}"
    off = [each for each in result.gradients if each.relative > result.tolerance][:MAX_SHOWN]
    yield from (f"  and the gradient of {each.path}: {each.relative:.1e}" for each in off[1:])


def _collective_lines(moved: CollectiveCheck) -> Iterator[str]:
    yield f"Collectives of the compiled step, {'NOT as predicted' if moved.unexpected else 'as predicted'}"
    named = [" x ".join(line.axes) for line in moved.found]
    width = max([14, *map(len, named)])
    for line, axes in zip(moved.found, named, strict=True):
        left = "   left to XLA" if line in moved.left_to_xla else ""
        left = "   with the model's own" if line in moved.of_the_model else left
        yield f"  {line.kind:<18} over {axes:<{width}} {line.count:>5} a step {format_bytes(line.bytes):>12}{left}"
    if not moved.found:
        yield "  none"
    yield from (f"  {line}" for line in moved.unexpected)


def _verdict(result: Verification) -> str:
    first = result.first_difference
    if first is None:
        return "The same as on one device."
    at = f" of {first.where}" if first.where else ""
    hint = fill(first.hint, 118, initial_indent="  ", subsequent_indent="  ")
    if first.what in OF_THE_MODEL:
        return f"WRONG on one device already: {first.what}\n{hint}"
    return f"DIFFERENT from one device, first in: {first.what}{at}\n{hint}"


def _checkpoint(trip: RoundTrip | None) -> dict[str, Any] | None:
    if trip is None:
        return None
    return {
        "restored_onto": dict(trip.mesh),
        "arrays": trip.arrays,
        "params_rel": trip.params[0].relative,
        "differing": list(trip.differing),
        "next_step_rel": trip.next_step,
    }


def _lines(collectives: Iterable[Collective]) -> list[dict[str, Any]]:
    return [{**asdict(line), "axes": list(line.axes)} for line in collectives]


def _finite(value: Any) -> Any:
    """Replaces infinities and NaN, which JSON lacks, with None."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not isfinite(value) else value

"""What a verification found: every error, the first difference and its likely cause, as text and as JSON."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from math import isfinite, prod
from textwrap import fill
from typing import Any

from ..layouts.sizes import format_bytes
from .collective_check import CollectiveCheck
from .collectives import Collective
from .differences import LeafError

MOST_SHOWN = 5
"""Leaves listed where something differs."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first thing that is not as on one device."""

    what: str
    """initial parameters, loss, gradients, gradient norm, parameters or collectives."""
    where: str
    """The path of the worst leaf, or ""."""
    relative: float
    """How far it is off; for collectives, how many lines."""
    hint: str
    """What was measured, and what usually causes it."""


@dataclass(frozen=True, kw_only=True)
class Verification:
    """How a strategy compares with one device. Relative errors count the worst element on any device."""

    mesh: Mapping[str, int]
    """Mesh axis -> size."""
    dtype: str
    """What both computed in."""
    steps: int
    """Optimizer steps taken."""
    tolerance: float
    """Of loss, gradients and norm; wider than the dtype's own where the model casts to narrower numbers by itself."""
    params_tolerance: float
    """Of the parameters after all steps; likewise, with what the optimizer casts to."""
    init_tolerance: float
    """Of the initial parameters, which most models draw in float32."""
    init_rel: float
    """The initial parameters."""
    loss_rel: float
    """The loss of the first batch."""
    gradients: tuple[LeafError, ...]
    """Every gradient of the first batch, before clipping, the worst first."""
    grad_norm_rel: float
    """Their global norm."""
    params: tuple[LeafError, ...]
    """Every parameter after all steps, the worst first."""
    losses: tuple[float, ...]
    """The loss of each step."""
    reference_losses: tuple[float, ...]
    """Those of one device."""
    collectives: CollectiveCheck
    """The collectives of the compiled step."""
    first_difference: Difference | None
    """What differs first; None where nothing does."""
    reduced: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    """Config key -> (what the config says, what was verified)."""

    notes: tuple[str, ...] = ()
    """Where the program that was verified is not the one that other devices would run."""

    @property
    def ok(self) -> bool:
        """Whether everything is as on one device."""
        return self.first_difference is None

    def to_json(self) -> dict[str, Any]:
        """The same as plain values, for `--json`."""
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
            "grad_max_rel": worst.relative,
            "worst_leaf": worst.path,
            "grad_norm_rel": self.grad_norm_rel,
            "params_rel": self.params[0].relative,
            "worst_parameter": self.params[0].path,
            "gradients": {path: error for error, path in sorted(self.gradients, key=lambda each: each.path)},
            "losses": list(self.losses),
            "reference_losses": list(self.reference_losses),
            "collectives": {
                "predicted": _lines(moved.predicted),
                "found": _lines(moved.found),
                "left_to_xla": _lines(moved.left_to_xla),
                "equal": not moved.unexpected,
            },
            "notes": list(self.notes),
            "reduced": {key: {"from": before, "to": after} for key, (before, after) in self.reduced.items()},
            "first_difference": asdict(self.first_difference) if self.first_difference else None,
        }
        return _finite(result)

    def __str__(self) -> str:
        sizes = ", ".join(f"{axis}={size}" for axis, size in self.mesh.items() if size > 1) or "no axes"
        parts = [f"{sizes}: {prod(self.mesh.values())} device(s) against one, in {self.dtype}"]
        if self.reduced:
            lines = [f"  {key:<28} {before} -> {after}" for key, (before, after) in self.reduced.items()]
            parts.append("\n".join(["Verified at a reduced size (--full for that of the config)", *lines]))
        parts.append("\n".join(_error_lines(self)))
        parts.append("\n".join(_collective_lines(self.collectives)))
        parts += [f"Note: {note}" for note in self.notes]
        parts.append(_verdict(self))
        return "\n\n".join(parts)


def _error_lines(result: Verification) -> Iterator[str]:
    """The table of relative errors."""
    worst, changed = result.gradients[0], result.params[0]
    rows = [
        ("initial parameters", result.init_rel, result.init_tolerance, ""),
        ("loss", result.loss_rel, result.tolerance, ""),
        (f"gradients, {_arrays(len(result.gradients))}", worst.relative, result.tolerance, worst.path),
        ("gradient norm", result.grad_norm_rel, result.tolerance, ""),
        (f"parameters after {result.steps} steps", changed.relative, result.params_tolerance, changed.path),
    ]
    yield f"{'':<28} relative error   at most   worst"
    for name, error, bound, path in rows:
        mark = "" if error <= bound else "   DIFFERS"
        yield f"{name:<28} {error:>14.1e} {bound:>9.0e}   {path}{mark}".rstrip()
    off = [each for each in result.gradients if each.relative > result.tolerance][:MOST_SHOWN]
    for error, path in off[1:]:
        yield f"  and the gradient of {path}: {error:.1e}"


def _arrays(count: int) -> str:
    return "1 array" if count == 1 else f"{count} arrays"


def _collective_lines(moved: CollectiveCheck) -> Iterator[str]:
    yield f"Collectives of the compiled step, {'NOT as predicted' if moved.unexpected else 'as predicted'}"
    named = [" x ".join(line.axes) for line in moved.found]
    width = max([14, *map(len, named)])
    for line, axes in zip(moved.found, named, strict=True):
        left = "   left to XLA" if line in moved.left_to_xla else ""
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
    return f"DIFFERENT from one device, first in: {first.what}{at}\n{hint}"


def _lines(collectives: Iterable[Collective]) -> list[dict[str, Any]]:
    return [{**asdict(line), "axes": list(line.axes)} for line in collectives]


def _finite(value: Any) -> Any:
    """JSON has no infinity: null stands for what is not a finite number."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not isfinite(value) else value

"""Formats of numbers for people: prefixes, durations, losses."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
OWN_FIGURES = frozenset(
    {"step", "loss", "eval_loss", "grad_norm", "weight", "learning_rate"}
    | {"run", "seconds", "tokens_per_second", "rows_per_second", "flops_per_second"}
)
"""The figures that every run logs, and its identity; other figures of a record are metrics of the model."""


def speed_key(records: Iterable[Mapping[str, Any]]) -> str:
    """Returns the key of the speed to show: rows per second if the records have it, else tokens per second."""
    return "rows_per_second" if any("rows_per_second" in record for record in records) else "tokens_per_second"


def is_number(value: Any) -> bool:
    """Returns True if a metric is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def compact(value: float) -> str:
    """Formats a count with three significant digits, for example "12.3k" or "950"."""
    return "".join(_scale(value))


def with_unit(value: float, unit: str) -> str:
    """Formats a quantity with a prefixed unit, for example "1.20 GFLOP/s"."""
    digits, prefix = _scale(value)
    return f"{digits} {prefix}{unit}"


def duration(seconds: float) -> str:
    """Formats a duration, for example "43.1 ms", "8.2 s", "2:05 min" or "1:02:05 h"."""
    if seconds < 0.9995:
        return f"{_fixed(seconds * 1000)} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02} h" if hours else f"{minutes}:{rest:02} min"


def loss_text(loss: float) -> str:
    """Formats a loss with four decimals, or in powers of ten if it is very small or large."""
    return f"{loss:.4f}" if loss == 0 or 1e-3 <= abs(loss) < 1e5 else f"{loss:.3e}"


def three_digits(value: float) -> str:
    """Formats a number with three significant digits, for example "0.0123" or "1.2e-05"."""
    return f"{value:.3g}"


def _scale(value: float) -> tuple[str, str]:
    for size, prefix in PREFIXES:
        if abs(value) >= 0.9995 * size:
            return _fixed(value / size), prefix
    return (str(int(value)) if value == int(value) else _fixed(value)), ""


def _fixed(value: float) -> str:
    decimals = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{decimals}f}"

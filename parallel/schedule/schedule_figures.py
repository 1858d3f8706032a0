"""The figures of a pipeline schedule, as text and as JSON values."""

from collections.abc import Sequence
from typing import Any

from .schedule_table import Schedule
from .timing import Timing, peak_activations, peak_inputs


def schedule_to_json(schedule: Schedule, timing: Timing) -> dict[str, Any]:
    """Returns the figures of a schedule as JSON values, for `--json`."""
    return {
        "name": schedule.name,
        "stages": schedule.stages,
        "microbatches": schedule.microbatches,
        "virtual": schedule.chunks,
        **timing._asdict(),
        "peak_activations": peak_activations(schedule),
        "peak_inputs": peak_inputs(schedule),
    }


def summarize(schedule: Schedule, timing: Timing) -> str:
    """Returns the costs of a schedule as a few lines of text."""
    rows = [
        ("time", f"{timing.time:.6g}", f"{timing.ticks} ticks, each as long as its slowest action"),
        ("ideal time", f"{timing.ideal_time:.6g}", "the same order, if no stage waits for a tick to end"),
        ("bubble", f"{timing.bubble:.1%}", "of the time, stages are idle"),
        ("peak activations", _join(peak_activations(schedule)), "microbatches, stage by stage"),
    ]
    if any(peak_inputs(schedule)):
        rows.append(("peak inputs", _join(peak_inputs(schedule)), "microbatches with only their input on a stage"))
    width = max(len(value) for _, value, _ in rows if len(value) <= 16)  # the values of many stages can be longer
    return "\n".join(f"{name:<18}{value:<{width}}  {meaning}" for name, value, meaning in rows)


def _join(numbers: Sequence[int | float]) -> str:
    return " ".join(f"{number:g}" for number in numbers)

"""`spmdkit explain`: a run as it will be, on the devices of this machine or on a target that is not here."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from ..configs.schema import Config
from ..mesh.devices import list_devices
from ..mesh.files import write_text
from ..mesh.targets import parse_target
from ..runtime.build_run import build, prepare_devices
from ..runtime.compilation import open_cache
from ..runtime.explain import Explanation, explain_built
from .auto_strategy import choose_strategy
from .run_plan import time_lines, tokens_per_device
from .timeline import Timeline, simulate

TPU_CENSUS = (
    "Note: libtpu states no trip counts, so a collective inside a loop counts once above, and it writes a "
    "reduce-scatter as an all-reduce and a slice. The prediction has what the strategies send."
)


@dataclass(frozen=True)
class ExplainedRun:
    """What a run will need, known without training.

    Attributes:
        explanation: Its mesh, layouts, memory and collectives.
        timeline: Its simulated step; None on the devices of this machine, and for TPUs.
        tokens: Tokens of a step on one device; 0 for a model without tokens.
    """

    explanation: Explanation
    timeline: Timeline | None
    tokens: float

    def to_json(self) -> dict[str, Any]:
        """Returns plain values for `--json`; `timeline` only if there is one."""
        found = self.explanation.to_json()
        if self.timeline is None:
            return found
        timeline = timeline_to_json(self.timeline)
        if self.tokens:
            timeline["tokens_per_second_per_device"] = self.tokens / self.timeline.step_seconds
        return found | {"timeline": timeline}

    def __str__(self) -> str:
        parts = [str(self.explanation)]
        if self.timeline is not None:
            title = "Simulated step (a model of the scheduled program, not a measurement)"
            parts.append("\n".join([title, *time_lines(self.timeline, self.timeline.step_seconds, self.tokens)]))
        if self.explanation.target and parse_target(self.explanation.target).shape:
            parts.append(TPU_CENSUS)
        return "\n\n".join(parts)


def explain(config: Config, target: str | None = None, hlo: Path | None = None) -> ExplainedRun:
    """Lays out and compiles the run of a config, without training.

    Args:
        config: The run's configuration.
        target: Accelerators to compile for instead of the devices of this machine, such as "h100:16x8".
        hlo: The file to which the scheduled HLO of the step is written.

    Raises:
        UserError: The config or the target is invalid, see `build` and `list_devices`.
    """
    if target is None:
        prepare_devices(config.run, config.precision)
        open_cache(config.run, config.timeouts.rendezvous)
    elif config.precision.needs_x64:
        jax.config.update("jax_enable_x64", True)
    config = choose_strategy(config, parse_target(target) if target else None)
    built = build(config, devices=list_devices(target=target) if target else None)
    explanation = explain_built(built)
    text = built.step.compile(built.batch).as_text() or "" if target or hlo else ""
    if hlo is not None:
        write_text(hlo, text)
    planned, pipeline = built.layouts.mesh.target, built.layouts.pipeline
    timetable = pipeline.timetable if pipeline else None
    timeline = simulate(text, planned, timetable=timetable) if planned and not planned.shape else None
    return ExplainedRun(explanation, timeline, tokens_per_device(built))


def timeline_to_json(timeline: Timeline) -> dict[str, Any]:
    """Returns the figures of a timeline as plain values."""
    return {
        **{name: value for name, value in timeline._asdict().items() if name != "exchanges"},
        "exposed_share": timeline.exposed_share,
        "exchanges": [
            {name: value for name, value in each._asdict().items() if name != "attributes"}
            for each in timeline.exchanges
        ],
    }

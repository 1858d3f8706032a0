"""`spmdkit plan`: whether a run fits a cluster, what it sends and how long a step takes, without the cluster.

The step that `spmdkit train` would run is compiled for the target, and its scheduled program is simulated. Without the
compiler, the plan is analytic: it has the state of the run and the collectives that the strategies predict, but not the
temporaries, and its step time is an estimate.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..configs.schema import Config
from ..layouts.sizes import format_bytes
from ..mesh.devices import list_devices
from ..mesh.errors import UserError, first_line
from ..mesh.targets import CompilerMissing, Target
from ..parallel.schedule.timing import measure
from ..parallel.xla.program_work import Work
from ..runtime.build_run import Built, build
from ..runtime.explain import explain_built, state_bytes
from ..runtime.model_flops import model_work, with_counted_flops
from .candidates import AXES, Candidate, model_sizes
from .estimate import Estimator
from .kernel_time import EFFICIENCY
from .memory import AnalyticMemory, Remedy, analytic_memory, find_remedies
from .pipeline_time import idle_share
from .timeline import Timeline, simulate
from .trace import MAX_EVENTS, Event, Recorder, write_trace
from .traffic import Traffic, expected_traffic, find_traffic

MAX_EXPOSED_LINES = 5
PREALLOCATED = 0.75
"""The share of a GPU's memory that JAX takes by default (XLA_PYTHON_CLIENT_MEM_FRACTION)."""
USABLE = 0.95
"""The share that a program can use: CUDA, cuDNN and NCCL take the rest."""
WORK_AXES = {"tensor", "expert", "pipe"}
"""A block's products wait for the collectives over these axes."""
TPU_NOTE = (
    "a program for TPUs is not simulated: its step time is an estimate, and its collectives are those of the "
    "strategies, because libtpu rewrites them"
)


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """What a run needs on a target, per device.

    Attributes:
        target: The accelerators.
        mesh: Mesh axis -> size.
        state: Kind -> bytes that the layouts imply: parameters, optimizer, gradients, batch.
        traffic: The collectives of a step.
        bubble: The share of a pipeline's time in which stages are idle: of the simulated step, or of the schedule if
            all actions took equally long. 0 without a pipeline.
        model_flops: Operations of the model for one step, all devices, which it states or which are counted in its
            traced loss; None if they are unknown.
        dtype: The compute dtype.
        tokens: Tokens of a step on one device; 0 for a model without tokens.
        step_seconds: The time of a step; None if it is unknown.
        analytic: The memory that the layouts and the traced program imply.
        peak_bytes: The most memory that the compiled step needs; of an analytic plan, that of `analytic`.
        temporaries: Bytes of the compiled step besides the state and the batch: gradients, activations that backward
            reads, gathered parameters. None if the step was not compiled.
        timeline: The simulated step; None if it was not compiled.
        compile_seconds: The time that the compiler took; None if the step was not compiled.
        refused: True if the compiler found that the step does not fit into memory, as libtpu does.
        events: The kernels and collectives of the simulated step, if they were asked for.
        remedies: Changes with which the run needs less memory, if it does not fit.
        notes: Facts about the plan that its figures do not show.
        uncounted: What of the model has an unknown number of operations, with its source line.
    """

    target: Target
    mesh: dict[str, int]
    state: dict[str, int]
    traffic: tuple[Traffic, ...]
    bubble: float
    model_flops: float | None
    dtype: str
    tokens: float
    step_seconds: float | None
    analytic: AnalyticMemory
    peak_bytes: int
    temporaries: int | None = None
    timeline: Timeline | None = None
    compile_seconds: float | None = None
    refused: bool = False
    events: tuple[Event, ...] = ()
    remedies: tuple[Remedy, ...] = ()
    notes: tuple[str, ...] = ()
    uncounted: tuple[str, ...] = ()

    @property
    def fits(self) -> bool | None:
        """True if the step needs at most `USABLE` of the memory of a device; None if an analytic plan cannot tell."""
        if self.refused or self.peak_bytes > USABLE * self.target.card.memory_bytes:
            return False
        return None if self.temporaries is None else True

    @property
    def mfu(self) -> float | None:
        """Model FLOP utilization: operations of the model / (devices x step time x peak of the compute dtype)."""
        peak = self.target.card.flops.get(self.dtype)
        if self.model_flops is None or not self.step_seconds or peak is None:
            return None
        return self.model_flops / (self.target.size * self.step_seconds * peak)

    @property
    def tokens_per_second_per_device(self) -> float | None:
        """Tokens per second of one device; None for a model without tokens."""
        return self.tokens / self.step_seconds if self.tokens and self.step_seconds else None

    def write_trace(self, path: Path) -> None:
        """Writes the simulated step for Perfetto.

        Args:
            path: The JSON file.

        Raises:
            UserError: The plan has no simulated step.
            OSError: The file cannot be written.
        """
        if not self.events:
            raise UserError(f"{path}: a trace needs a simulated step, and this plan has none: {self.notes[-1]}")
        write_trace(path, self.events, f"a device of {self.target.text}")

    def to_json(self) -> dict[str, Any]:
        """Returns plain values for `--json`."""
        capacity = self.target.card.memory_bytes
        memory = {
            **self.state,
            "activations": self.analytic.activations,
            "communication": self.analytic.communication,
            "temporaries": self.temporaries,
            "headroom_bytes": round(USABLE * capacity) - self.peak_bytes,
            "peak_bytes": self.peak_bytes,
            "analytic_peak_bytes": self.analytic.peak_bytes,
        }
        return {
            "target": self.target.text,
            "devices": self.target.size,
            "mesh": self.mesh,
            "compiled": self.compile_seconds is not None,
            "compile_seconds": self.compile_seconds,
            "memory": memory | {"capacity_bytes": capacity, "fits": self.fits},
            "remedies": [asdict(each) for each in self.remedies],
            "traffic": [{**asdict(each), "axes": list(each.axes)} for each in self.traffic],
            "step_seconds": self.step_seconds,
            "tokens_per_second_per_device": self.tokens_per_second_per_device,
            "mfu": self.mfu,
            "exposed_communication": self.timeline.exposed_share if self.timeline else None,
            "bubble": self.bubble,
            "efficiency": EFFICIENCY._asdict(),
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        sizes = " x ".join(f"{axis} {size}" for axis, size in self.mesh.items() if size > 1) or "one device"
        how = (
            f"compiled in {self.compile_seconds:.1f} s"
            if self.compile_seconds is not None
            else "ANALYTIC, not compiled"
        )
        title = f"{self.target.text}: {self.target.size:,} x {self.target.card.name}, {sizes}; {how}"
        parts = [title, *map("\n".join, (_memory_lines(self), _traffic_lines(self), _time_lines(self)))]
        return "\n\n".join([*parts, *(f"Note: {note}" for note in self.notes)])


def plan_run(config: Config, target: str, with_events: bool = False) -> RunPlan:
    """Plans the run of a config.

    Args:
        config: The run's configuration.
        target: The accelerators, such as "h100:16x8".
        with_events: Keeps the events of the simulated step, see `write_trace`.

    Raises:
        UserError: The config or the target is invalid, see `build` and `list_devices`, or the model is too large for
            every mesh of the target.
    """
    if config.precision.needs_x64:
        jax.config.update("jax_enable_x64", True)
    built = build(config, devices=list_devices(target=target))
    mesh = built.layouts.mesh
    pipeline = built.layouts.pipeline
    assert mesh.target is not None
    _check_any_mesh(built, mesh.target)
    rows = config.train.global_batch
    work = Work() if built.model.flops_per_row is not None else model_work(built)
    flops_per_row = with_counted_flops(built, work).flops_per_row
    common = {
        "target": mesh.target,
        "mesh": dict(zip(mesh.axis_names, mesh.shape, strict=True)),
        "bubble": measure(pipeline.schedule).bubble if pipeline else 0.0,
        "model_flops": None if flops_per_row is None else flops_per_row * rows,
        "uncounted": work.uncounted,
        "dtype": config.precision.compute,
        "tokens": tokens_per_device(built),
        "analytic": analytic_memory(built),
    }
    try:
        plan = _compiled(built, common, with_events)
    except CompilerMissing as error:
        plan = _analytic(built, common, str(error))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        plan = replace(_analytic(built, common, f"the compiler refuses: {first_line(error)}"), refused=True)
    if plan.fits is False:
        return replace(plan, remedies=find_remedies(config, target, plan.analytic.peak_bytes))
    return plan


def _check_any_mesh(built: Built, target: Target) -> None:
    """Checks that the parameters and the optimizer fit into the memory of all devices together."""
    parameters, optimizer = built.layouts.table.bytes_global, built.step.optimizer_table.bytes_global
    usable = USABLE * target.card.memory_bytes
    if parameters + optimizer > usable * target.size:
        capacity = f"{target.size:,} x {USABLE:.0%} of {format_bytes(target.card.memory_bytes)}"
        raise UserError(
            f"{target.text} is too small for every mesh: parameters {format_bytes(parameters)} + optimizer "
            f"{format_bytes(optimizer)} = {format_bytes(parameters + optimizer)}, and {capacity} = "
            f"{format_bytes(int(usable * target.size))}. Plan for more than "
            f"{math.floor((parameters + optimizer) / usable):,} devices (--target), or a smaller model."
        )


def tokens_per_device(built: Built) -> float:
    """Returns the tokens of a step on one device; 0 if the targets of the data are not tokens."""
    ids = built.batch.get("targets")
    if ids is None or len(ids.shape) != 2 or not np.issubdtype(ids.dtype, np.integer):
        return 0
    return ids.size / built.layouts.mesh.size


def _compiled(built: Built, common: dict[str, Any], with_events: bool) -> RunPlan:
    begin = time.perf_counter()
    compiled = built.step.compile(built.batch)
    seconds = time.perf_counter() - begin
    explanation = explain_built(built)
    text, mesh, notes = compiled.as_text() or "", built.layouts.mesh, explanation.notes
    recorder, timeline = Recorder(MAX_EVENTS if with_events else 0), None
    if common["target"].shape:
        traffic = expected_traffic(explanation.predicted, mesh)
        step_seconds = _estimate(built, common, traffic)
        estimate = (compiled.cost_analysis() or {}).get("optimal_seconds", 0.0)
        notes = (*notes, TPU_NOTE, f"libtpu's optimal_seconds, which count each loop once: {estimate * 1e3:,.1f} ms")
    else:
        pipeline = built.layouts.pipeline
        timetable = pipeline.timetable if pipeline else None
        timeline = simulate(text, common["target"], recorder=recorder, timetable=timetable)
        common = common | ({"bubble": idle_share(timetable, timeline.parts)} if timetable else {})
        traffic = find_traffic(text, timeline, mesh)
        step_seconds = timeline.step_seconds
    return RunPlan(
        **common,
        state=explanation.bytes_per_device,
        traffic=traffic,
        step_seconds=step_seconds,
        peak_bytes=explanation.compiled["total"],
        temporaries=explanation.compiled["temporaries"],
        timeline=timeline,
        compile_seconds=seconds,
        events=tuple(recorder.events),
        notes=notes,
    )


def _analytic(built: Built, common: dict[str, Any], why: str) -> RunPlan:
    """Plans without a compiler."""
    traffic = expected_traffic(built.step.cost(built.batch), built.layouts.mesh)
    return RunPlan(
        **common,
        state=state_bytes(built),
        traffic=traffic,
        step_seconds=_estimate(built, common, traffic),
        peak_bytes=common["analytic"].peak_bytes,
        notes=(*built.notes, why),
    )


def _estimate(built: Built, common: dict[str, Any], traffic: tuple[Traffic, ...]) -> float | None:
    """Returns the seconds of a step whose kernels hide the traffic of all axes but those that split a block's work."""
    config, target, mesh = built.config, common["target"], built.layouts.mesh
    if common["model_flops"] is None or common["dtype"] not in target.card.flops:
        return None
    candidate = Candidate(
        mesh=tuple((axis, mesh.axis_size(axis)) for axis in AXES),
        remat=config.train.remat,
        recompute=getattr(config.strategy.get("pipe"), "recompute", False),
    )
    estimator = Estimator(model_sizes(config, target.size), target, config.train.global_batch, config.precision)
    waiting = sum(each.least_seconds for each in traffic if WORK_AXES & {*each.axes}) / EFFICIENCY.network
    hidden = sum(each.least_seconds for each in traffic) / EFFICIENCY.network - waiting
    return (max(estimator.kernel_seconds(candidate), hidden) + waiting) / (1 - common["bubble"])


def _memory_lines(plan: RunPlan) -> Iterator[str]:
    capacity = plan.target.card.memory_bytes
    yield "Memory of each device"
    for kind, size in plan.state.items():
        yield f"  {kind:<14} {format_bytes(size):>10}{'   among the temporaries' if kind == 'gradients' else ''}"
    analytic = plan.analytic
    yield f"  {'activations':<14} {format_bytes(analytic.activations):>10}   kept for backward, among the temporaries"
    yield f"  {'communication':<14} {format_bytes(analytic.communication):>10}   gathered, among the temporaries"
    if plan.temporaries is None:
        yield "  temporaries       unknown   known after compiling"
    else:
        yield f"  {'temporaries':<14} {format_bytes(plan.temporaries):>10}   all of the compiled step"
    verdict = {True: "fits", False: "DOES NOT FIT", None: "may fit"}[plan.fits]
    share, expected = plan.peak_bytes / capacity, format_bytes(analytic.peak_bytes)
    yield (
        f"  {'peak':<14} {format_bytes(plan.peak_bytes):>10}   {share:.0%} of {format_bytes(capacity)}: {verdict}"
        + (f"; analytic {expected}" if plan.temporaries is not None else "")
    )
    headroom = USABLE * capacity - plan.peak_bytes
    if headroom >= 0:
        yield f"  {'headroom':<14} {format_bytes(round(headroom)):>10}   of the {USABLE:.0%} that a program can use"
    if plan.fits is False:
        yield from (f"  {format_bytes(each.peak_bytes):>25}   with {each.change} (analytic)" for each in plan.remedies)
        if not plan.remedies:
            yield "  To need less: more devices, with strategy.fsdp, strategy.tensor or strategy.pipe over them."
    elif share > PREALLOCATED:
        yield (
            f"  JAX takes {PREALLOCATED:.0%} of a GPU by default: set XLA_PYTHON_CLIENT_MEM_FRACTION={USABLE} in "
            "launch.environment."
        )


def _traffic_lines(plan: RunPlan) -> Iterator[str]:
    yield f"Collectives of a step, {'of the compiled step' if plan.timeline else 'as the strategies predict'}"
    for each in plan.traffic:
        yield (
            f"  {each.kind:<18} over {' x '.join(each.axes):<14} {each.count:>5,} a step {format_bytes(each.bytes):>10}"
            f"   {each.link:<7} at least {each.least_seconds * 1e3:,.1f} ms   {each.strategy:<6} {each.source}".rstrip()
        )
    if not plan.traffic:
        yield "  none"


def _time_lines(plan: RunPlan) -> Iterator[str]:
    yield "Step" + (", simulated: not a measurement" if plan.timeline else ", bound by operations and bytes")
    if plan.step_seconds is None:
        why = f"the card of the target has no peak for {plan.dtype} (flops)"
        if plan.model_flops is None:
            why = "the model has no products to count"
        if plan.uncounted:
            why = f"the operations of {plan.uncounted[0]} cannot be counted: state flops_per_row in the model"
        yield f"  unknown: {why}"
        return
    yield from time_lines(plan.timeline, plan.step_seconds, plan.tokens)
    if plan.mfu is not None:
        yield f"  MFU               {plan.mfu:>10.1%}    model FLOPs / (devices x time x peak of {plan.dtype})"
    if plan.bubble:
        yield f"  bubble            {plan.bubble:>10.1%}    of the pipeline's time"


def time_lines(timeline: Timeline | None, step_seconds: float, tokens: float) -> Iterator[str]:
    """Yields the lines about the time of a step, and about the collectives that nothing hides.

    Args:
        timeline: The simulated step; None if it was not compiled.
        step_seconds: The time of the step.
        tokens: Tokens of a step on one device; 0 for a model without tokens.
    """
    yield f"  step              {step_seconds * 1e3:>10,.1f} ms"
    if timeline:
        yield f"  kernels           {timeline.compute_seconds * 1e3:>10,.1f} ms"
        yield (
            f"  communication     {timeline.communication_seconds * 1e3:>10,.1f} ms, of which "
            f"{timeline.exposed_seconds * 1e3:,.1f} ms ({timeline.exposed_share:.1%}) are exposed"
        )
        exposed = [each for each in timeline.exchanges if each.exposed > 0.01 * timeline.exposed_seconds]
        for each in exposed[:MAX_EXPOSED_LINES]:
            yield (
                f"  exposed {each.exposed * 1e3:>9,.1f} ms   {each.kind}, {each.runs:,.0f} a step, beside "
                f"{each.matmuls} products: {each.source.rpartition('shard_map/')[2] or each.name}"
            )
    if tokens:
        yield f"  tokens/s, device  {tokens / step_seconds:>10,.0f}"

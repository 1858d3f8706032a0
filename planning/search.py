"""`spmdkit plan --search`: the best mesh, schedule, microbatches and rematerialization of a config for a target.

Every candidate is estimated in closed form (`estimate.py`). The most promising are compiled in separate processes by
`spmdkit plan` itself. Each compiled step corrects the estimates of similar candidates, and the next one to compile is
the fastest by the corrected estimates. The search ends if no other candidate is near the best by them, after a number
of compiled steps that fit, or at a time limit.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax

from ..configs.config_text import resolved_yaml
from ..configs.launch_config import LaunchConfig
from ..configs.schema import Config
from ..layouts.sizes import format_bytes
from ..mesh.errors import UserError, counted
from ..mesh.files import write_text
from ..mesh.targets import Target, has_compiler, parse_target
from .candidates import Candidate, enumerate_candidates, model_sizes
from .estimate import Estimate, Estimator
from .run_plan import USABLE
from .separate_process import STILL_COMPILING, Compilations, Outcome

A_WEEK = 604800
"""Seconds."""
MAX_PER_MESH = 3
"""Variants of one mesh that are compiled at most, unless all are too large: the others differ little from them."""
MAX_ROWS = 20
"""Candidates in the table."""
SLACK = 1.1
"""Estimates of time up to this share above the best compiled step are still compiled."""
MARGIN = 1.1
"""Estimates of memory up to this share above the limit are still compiled."""


@dataclass
class Row:
    """One candidate of a search.

    Attributes:
        candidate: The candidate.
        estimate: Its estimated step.
        outcome: The result of compiling it; None if it was not compiled.
        correction: The compiled over the estimated step time of another candidate of its kind.
        may_fit: False if it needs too much by the estimate that compiled steps of its kind correct.
        reason: Why it lost; "" for the winner.
    """

    candidate: Candidate
    estimate: Estimate
    outcome: Outcome | None = None
    correction: float = 1.0
    may_fit: bool = True
    reason: str = ""

    @property
    def plan(self) -> Mapping[str, Any] | None:
        """The plan of the compiled step, as `spmdkit plan --json` prints it; None without one."""
        return self.outcome.plan if self.outcome else None

    @property
    def is_too_large(self) -> bool:
        """True if its compiled step does not fit."""
        return self.plan is not None and self.plan["memory"]["fits"] is False

    @property
    def failed(self) -> bool:
        """True if it could not be planned; not of a compilation that the time limit ended."""
        return self.outcome is not None and self.plan is None and not self.outcome.is_late

    @property
    def step_seconds(self) -> float:
        """The time of a step: of the compiled step, or the corrected estimate."""
        return (self.plan or {}).get("step_seconds") or self.estimate.step_seconds * self.correction

    @property
    def peak_bytes(self) -> float:
        """The most memory that a device needs: of the compiled step, or estimated."""
        return self.plan["memory"]["peak_bytes"] if self.plan else self.estimate.peak_bytes

    @property
    def exposed(self) -> float:
        """The share of the communication that nothing hides."""
        return (self.plan["exposed_communication"] or 0.0) if self.plan else self.estimate.exposed_share

    @property
    def bubble(self) -> float:
        """The share of a pipeline's time in which stages are idle."""
        return self.plan["bubble"] if self.plan else self.estimate.bubble

    def to_json(self) -> dict[str, Any]:
        """Returns plain values."""
        return {
            "strategy": self.candidate.strategy,
            "accumulate": self.candidate.accumulate,
            "remat": self.candidate.remat,
            "compiled": self.plan is not None,
            "step_seconds": self.step_seconds,
            "peak_bytes": int(self.peak_bytes),
            "exposed_communication": self.exposed,
            "bubble": self.bubble,
            "estimated_step_seconds": self.estimate.step_seconds,
            "estimated_peak_bytes": int(self.estimate.peak_bytes),
            "reason": self.reason,
        }


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The ranking of a search.

    Attributes:
        target: The accelerators.
        config: The config with the choice of the winner.
        rows: The best variant of each mesh that fits, and everything that was compiled; the winner comes first.
        counts: Group -> number of candidates, over all that the sizes allow.
        seconds: The time of the search.
        notes: Facts about the search that the rows do not show.
    """

    target: Target
    config: Config
    rows: tuple[Row, ...]
    counts: Mapping[str, int]
    seconds: float
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns plain values for `--json`."""
        return {
            "target": self.target.text,
            "devices": self.target.size,
            "capacity_bytes": self.target.card.memory_bytes,
            "search_seconds": self.seconds,
            "counts": dict(self.counts),
            "winner": self.rows[0].to_json(),
            "ranked": [row.to_json() for row in self.rows],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        compiled = self.counts["compiled"]
        title = (
            f"{self.target.text}: {self.target.size:,} x {self.target.card.name}; {self.counts['candidates']:,} "
            f"candidates, {compiled} compiled, in {self.seconds:.0f} s"
        )
        parts = [title, "\n".join(_table(self.rows[:MAX_ROWS])), "\n".join(_rest(self))]
        return "\n\n".join([*parts, *(f"Note: {note}" for note in self.notes)])


@dataclass
class Corrections:
    """What compiled steps tell about the estimates of candidates of the same kind.

    Attributes:
        times: Kind -> compiled over estimated step time, the latest.
        memory: Kind -> compiled over estimated peak, the smallest: a candidate is dropped only if it cannot fit.
    """

    times: dict[Any, float] = field(default_factory=dict)
    memory: dict[Any, float] = field(default_factory=dict)

    def add(self, row: Row) -> None:
        """Learns from a compiled step."""
        kind, ratio = _kind(row.candidate), row.peak_bytes / row.estimate.peak_bytes
        self.times[kind] = row.step_seconds / row.estimate.step_seconds
        self.memory[kind] = min(ratio, self.memory.get(kind, ratio))

    def correct(self, row: Row) -> None:
        """Corrects the estimated time of a candidate, if its kind was compiled."""
        row.correction = self.times.get(_kind(row.candidate), 1.0)

    def may_fit(self, row: Row, limit: float) -> bool:
        """Returns False if the candidate needs too much by the corrected estimate."""
        return row.estimate.peak_bytes * self.memory.get(_kind(row.candidate), 1 / MARGIN) <= limit


def _kind(candidate: Candidate) -> tuple[Any, ...]:
    loops = candidate.schedule or min(candidate.accumulate, 2)
    return (loops, candidate.recompute, candidate.remat, candidate.size("context") > 1, candidate.size("tensor") > 1)


def search(
    config: Config,
    target_text: str,
    *,
    compile: int = 8,
    seconds: float = 840.0,
    write: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> SearchResult:
    """Searches the best way to run a config.

    Args:
        config: The run's configuration. Its strategy, `train.accumulate` and `train.remat` are replaced; the global
            batch stays.
        target_text: The accelerators, such as "h100:8x8".
        compile: Compiled steps that fit, after which the search ends; 0 compiles nothing.
        seconds: The time limit of the search.
        write: A file for the config with the winner.
        environment: Variables of the processes that compile, besides those of this process.

    Raises:
        UserError: The config or the target is invalid, or nothing fits.
    """
    begin = time.monotonic()
    target = parse_target(target_text)
    most = compile
    notes = []
    if most < 0 or not 0 < seconds <= A_WEEK:
        raise UserError(f"--compile must be at least 0 and --seconds more than 0, got {most} and {seconds:g}.")
    if most and not has_compiler(target):
        notes.append("ANALYTIC: nothing was compiled, because the compiler is missing: pip install 'spmdkit[targets]'")
        most = 0
    if config.precision.needs_x64:
        jax.config.update("jax_enable_x64", True)
    rows, counts = rank(config, target)
    if most:
        local = replace(config, launch=LaunchConfig())

        def to_yaml(candidate: Candidate) -> str:
            return resolved_yaml(candidate.configure(local))

        with Compilations(target_text, environment or {}) as compilations:
            late = _compile_best(rows, compilations, to_yaml, _limit(target), most, begin + seconds)
        notes += _notes_of_compilation(rows, late, seconds)
    compiled = [row for row in rows if row.outcome]
    winner = _choose_winner(rows, target)
    shown = _best_of_meshes(rows, winner)
    for row in shown:
        row.reason = "" if row is winner else _reason(row, winner, target)
    counts = counts | {"compiled": sum(row.plan is not None for row in compiled)}
    chosen = winner.candidate.configure(config)
    if write:
        write_text(write, resolved_yaml(chosen))
    return SearchResult(
        target=target,
        config=chosen,
        rows=tuple(sorted(shown, key=lambda row: (row is not winner, row.plan is None, row.step_seconds))),
        counts=counts,
        seconds=time.monotonic() - begin,
        notes=tuple(notes),
    )


def _choose_winner(rows: list[Row], target: Target) -> Row:
    """Returns the fastest candidate whose compiled step fits; without one, the fastest that may fit by the estimate.

    Raises:
        UserError: All candidates that may fit were compiled, and need too much or could not be planned.
    """
    fitting = [row for row in rows if row.plan and not row.is_too_large]
    unknown = [row for row in rows if row.plan is None and not row.failed and row.may_fit]
    if fitting or unknown:
        return min(fitting or unknown, key=lambda row: row.step_seconds)
    too_large = [row for row in rows if row.is_too_large]
    if too_large:
        raise UserError(_nothing_fits(min(too_large, key=lambda row: row.peak_bytes), target, "compiled"))
    raise UserError(
        f"no candidate for {target.text} could be planned: {_first_failure(rows)}. `spmdkit plan` with that strategy "
        "shows the error, and --compile 0 ranks by estimates alone."
    )


def _first_failure(rows: list[Row]) -> str:
    row = next(row for row in rows if row.failed)
    assert row.outcome is not None
    return f"{row.candidate}: {row.outcome.problem}"


def _notes_of_compilation(rows: list[Row], late: bool, seconds: float) -> Iterator[str]:
    """Yields a note if the search ended before it had compiled a step that fits, or before it was finished."""
    fits = any(row.plan and not row.is_too_large for row in rows)
    if fits and late:
        yield f"The search ended at its time limit of {seconds:g} s: --seconds raises it."
    if fits:
        return
    facts = []
    running = [str(row.candidate) for row in rows if row.outcome and row.outcome.is_late]
    if running:
        facts.append(f"still compiling: {'; '.join(running)}")
    too_large = sum(row.is_too_large for row in rows)
    if too_large:
        facts.append(f"too large for a device: {too_large:,}")
    failed = sum(row.failed for row in rows)
    if failed:
        facts.append(f"not planned: {failed:,}, the first of them {_first_failure(rows)}")
    untried = sum(row.outcome is None for row in rows)
    facts.append(f"not tried: {untried:,}")
    limit = f" at the time limit of {seconds:g} s, which --seconds raises" if late else ""
    yield (
        f"ANALYTIC: no step that fits had compiled{limit}. The ranking and the winner are estimates. Of the "
        f"candidates: {'. '.join(facts)}."
    )


def rank(config: Config, target: Target) -> tuple[list[Row], dict[str, int]]:
    """Estimates all candidates of a config, without a compiler.

    Args:
        config: The run's configuration.
        target: The accelerators.

    Returns:
        The candidates that may fit, the fastest first, and the number of candidates in each group. The same on every
        process.

    Raises:
        UserError: The model or its data is invalid, or nothing fits.
    """
    model = model_sizes(config, target.size)
    estimator, limit = Estimator(model, target, config.train.global_batch, config.precision), _limit(target)
    counts: Counter[str] = Counter({"candidates": 0, "too large": 0})
    rows, smallest = [], None
    for candidate in enumerate_candidates(model, target, config.train.global_batch):
        counts["candidates"] += 1
        needed = estimator.peak_bytes(candidate)
        if needed <= MARGIN * limit:
            rows.append(Row(candidate, estimator.estimate(candidate)))
            continue
        counts["too large"] += 1
        if smallest is None or needed < smallest[0]:
            smallest = needed, candidate
    if not rows and smallest is None:
        raise UserError(
            f"no mesh of {target.size:,} devices divides train.global_batch={config.train.global_batch} and the sizes "
            "of the model. Change the number of devices or the batch."
        )
    if not rows and smallest:
        raise UserError(_nothing_fits(Row(smallest[1], estimator.estimate(smallest[1])), target, "estimated"))
    rows.sort(key=_order)
    fits_surely = [row for row in rows if row.estimate.peak_bytes <= limit]
    return fits_surely + [row for row in rows if row.estimate.peak_bytes > limit], dict(counts)


def _order(row: Row) -> tuple[float, float, int, str]:
    """Returns the place of a candidate in the ranking: of equally fast and large ones, few microbatches come first."""
    passes = row.candidate.accumulate * row.candidate.microbatches
    return row.estimate.step_seconds, row.estimate.peak_bytes, passes, str(row.candidate)


def _limit(target: Target) -> float:
    return USABLE * target.card.memory_bytes


def _nothing_fits(row: Row, target: Target, how: str) -> str:
    return (
        f"no mesh of {target.text} fits: of all {how} candidates, the one with the least memory ({row.candidate}) "
        f"needs {format_bytes(int(row.peak_bytes))} of {format_bytes(int(_limit(target)))} on each device. Use more "
        "devices, devices with more memory, a smaller model, or shorter rows (data.length)."
    )


def _workers() -> int:
    """Returns the number of processes that compile at once: at most one per core, and 6 GiB for each."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    memory = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(cores, int(memory // (6 << 30))))


def _compile_best(
    rows: list[Row],
    compilations: Compilations,
    to_yaml: Callable[[Candidate], str],
    limit: float,
    most: int,
    deadline: float,
) -> bool:
    """Compiles the most promising candidates, and corrects the estimates of others; returns True at the deadline."""
    corrections = Corrections()
    left = list(rows)
    meshes = Counter[Any]()
    running: dict[int, Row] = {}
    best, found, workers = float("inf"), 0, _workers()
    while True:
        while len(running) < workers and found < most:
            may_fit = [row for row in left if row.may_fit]
            allowed = [row for row in may_fit if meshes[row.candidate.mesh] < MAX_PER_MESH]
            if not allowed and not found and not running and not any(row.failed for row in rows):
                allowed = may_fit  # all compiled steps are too large: a slower variant of a mesh may need less
            row = min(allowed, key=lambda row: row.step_seconds, default=None)
            if row is None or row.step_seconds >= SLACK * best:
                break
            left.remove(row)
            meshes[row.candidate.mesh] += 1
            running[compilations.start(to_yaml(row.candidate))] = row
        if not running:
            return False
        finished = compilations.wait(deadline)
        if finished is None:
            for row in running.values():
                row.outcome = Outcome(None, STILL_COMPILING)
            return True
        number, outcome = finished
        row = running.pop(number)
        row.outcome = outcome
        if row.plan:
            corrections.add(row)
            for other in left:
                corrections.correct(other)
                other.may_fit = corrections.may_fit(other, limit)
            if row.plan["memory"]["fits"]:
                found += 1
                best = min(best, row.step_seconds)


def _best_of_meshes(rows: list[Row], winner: Row) -> list[Row]:
    """Returns the winner, every compiled candidate, and the fastest of each other mesh."""
    shown = [winner, *(row for row in rows if row.outcome and row is not winner)]
    meshes = {row.candidate.mesh for row in shown}
    for row in rows:
        if row.candidate.mesh not in meshes:
            meshes.add(row.candidate.mesh)
            shown.append(row)
    return shown


def _reason(row: Row, winner: Row, target: Target) -> str:
    """Returns why a candidate lost."""
    if row.outcome and not row.plan:
        return f"not planned: {row.outcome.problem}"
    if row.plan and row.plan["memory"]["fits"] is False:
        return f"does not fit: {format_bytes(int(row.peak_bytes))} of {format_bytes(int(_limit(target)))}"
    slower = row.step_seconds / winner.step_seconds
    if slower < 1:
        return "may be as fast: not compiled, because the search ended earlier (--compile, --seconds)"
    more = {
        name: row.estimate.terms.get(name, 0.0) - winner.estimate.terms.get(name, 0.0)
        for name in {**row.estimate.terms, **winner.estimate.terms}
    }
    largest = max(more, key=lambda name: more[name])
    cost = f", most of it in {largest} (+{_milliseconds(more[largest])})" if more[largest] > 0 else ""
    return f"{slower:.2f} x the time{cost}"


def _milliseconds(seconds: float) -> str:
    """Formats a time in milliseconds, with two digits at least."""
    milliseconds = seconds * 1e3
    return f"{milliseconds:,.0f} ms" if milliseconds >= 10 else f"{milliseconds:.2g} ms"


def _table(rows: tuple[Row, ...]) -> Iterator[str]:
    yield f"{'':>4}{'step':>12}{'memory':>12}{'exposed':>9}{'bubble':>8}  {'figures':<10}strategy"
    for place, row in enumerate(rows, 1):
        step = _milliseconds(row.step_seconds)
        memory = format_bytes(int(row.peak_bytes))
        yield (
            f"{place:>3} {step:>12}{memory:>12}{row.exposed:>9.0%}"
            f"{row.bubble:>8.0%}  {'compiled' if row.plan else 'estimated':<10}{row.candidate}"
        )
        yield f"{'':>6}{row.reason or 'the winner'}"


def _rest(result: SearchResult) -> Iterator[str]:
    counts, hidden = result.counts, len(result.rows) - MAX_ROWS
    if hidden > 0:
        yield f"{counted(hidden, 'other mesh', 'other meshes')}: slower by the estimate (--json lists them)"
    yield f"{counts['too large']:,} candidates: need more than a device has"
    same = counts["candidates"] - counts["too large"] - len(result.rows)
    yield f"{same:,} candidates: slower by the estimate than another variant of the same mesh"

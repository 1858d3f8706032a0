"""The end of a run: a sample of what the model writes, a yardstick for its loss, and the report."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from ...configs.schema import Config
from ...configs.write import as_plain
from ...data.bigram import bigram_loss
from ...data.source import is_stream
from ...mesh.processes import is_main_process
from ...parallel.step.state import TrainState
from ...training.checkpointing.checkpoints import Checkpoints, DamagedCheckpoint
from ...training.display import Display
from ...training.metrics import read_metrics
from ...training.report.costs import StepCosts
from ...training.report.report import write_report
from ..drawing.schedule_svg import draw_svg
from .build import Built
from .callbacks import complete
from .explain import Explanation, schedule_figures
from .guarding.guards import goodput
from .sample import predicts_bytes, sample_text, writes_text

REPORT = "report.html"
MOST_DRAWN = 4000
"""Stages times ticks of a schedule up to which the report draws it: a megabyte."""


def is_reported(folder: Path, checkpoint: Path) -> bool:
    """Tells whether a run came to its very end: its report is not older than its last checkpoint."""
    report = folder / REPORT
    return report.exists() and report.stat().st_mtime >= checkpoint.stat().st_mtime


def nothing_is_left(
    config: Config, folder: Path, checkpoints: Checkpoints, start: int, say: Callable[[str], None]
) -> bool:
    """Whether a run is trained and reported, as its config and its callbacks see it; says so.

    Args:
        config: Of the run.
        folder: Where it lives.
        checkpoints: Of the run.
        start: The step of the newest; 0 where there is none.
        say: Prints a line.
    """
    steps, why = config.train.steps, ""
    if start and config.callbacks:
        with suppress(DamagedCheckpoint):  # the run goes back to the one before it
            why = complete(config, checkpoints.notes(start))
    if (start < steps and not why) or not is_reported(folder, folder / "checkpoints" / str(start)):
        return False
    said, more = (f" ({why})", "Change callbacks") if why and start < steps else ("", "Raise train.steps")
    say(
        f"{folder} is finished: it holds step {start} of {steps}{said}. {more} to go on, or start anew with another "
        "run.dir or --fresh."
    )
    return True


def finish(built: Built, explanation: Explanation, state: TrainState, folder: Path, display: Display) -> None:
    """Says how the run went, samples from a language model, and writes report.html.

    Args:
        built: The run.
        explanation: What it holds and moves.
        state: Its last state.
        folder: Where it lives; metrics.jsonl is complete.
        display: Where to say it.
    """
    sample = _sample(built, state)
    if not is_main_process():
        return
    metrics = read_metrics(folder / "metrics.jsonl")
    summary = dict(_summary(built, metrics))
    for line in _verdict(summary):
        display.message(line)
    if sample is not None:
        display.message(f"A sample of what it writes:\n\n{sample}\n")
    report = folder / REPORT
    write_report(
        report,
        config=as_plain(built.config),
        metrics=metrics,
        table=built.layouts.table,
        mesh=built.layouts.mesh,
        summary=summary,
        sample=sample,
        costs=step_costs(explanation),
        goodput=goodput(folder),
    )
    display.message(f"Wrote {report}")


def step_costs(explanation: Explanation) -> StepCosts:
    """What the report shows of an explanation; a schedule of very many actions in words alone."""
    schedule = explanation.schedule
    drawn = schedule is not None and schedule.stages * schedule.num_ticks <= MOST_DRAWN
    return StepCosts(
        held=explanation.bytes_per_device,
        compiled=explanation.compiled,
        predicted=explanation.predicted,
        found=explanation.found,
        notes=explanation.notes,
        schedule_svg=draw_svg(schedule) if schedule is not None and drawn else "",
        schedule_text=schedule_figures(schedule) if schedule is not None else "",
    )


def _sample(built: Built, state: TrainState) -> str | None:
    wanted = built.config.sample
    if not wanted.length or not writes_text(built):
        return None
    return sample_text(built, state.params, wanted.prompt, wanted.length, wanted.temperature)


def _summary(built: Built, metrics: list[dict[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The figures of a whole run, by name."""
    yield "title", built.config.run.dir
    yield "status", f"finished, {metrics[-1]['step']} steps"
    yield "model", built.model.name
    yield "parameters", built.layouts.num_parameters
    yield "data", built.splits.description
    yield "steps", metrics[-1]["step"]
    if all("seconds" in record for record in metrics):
        ends = [0, *(record["step"] for record in metrics)]
        counts = (end - start for start, end in pairwise(ends))
        yield "seconds", sum(record["seconds"] * count for record, count in zip(metrics, counts, strict=True))
    if all("flops_per_second" in record for record in metrics):
        yield "flops_per_second", median(record["flops_per_second"] for record in metrics)
    evaluations = [record["eval_loss"] for record in metrics if "eval_loss" in record]
    if evaluations:
        yield "eval_loss", evaluations[-1]
    evaluation, vocabulary = built.splits.evaluation, built.splits.vocabulary
    streamed = is_stream(built.splits.train)  # it cannot be read once more
    if evaluation is not None and vocabulary is not None and not streamed and predicts_bytes(built):
        rows = built.config.eval.batches * built.config.train.global_batch or None  # those the model is evaluated on
        yield "bigram_loss", bigram_loss(built.splits.train, evaluation, vocabulary, max_examples=rows)


def _verdict(summary: dict[str, Any]) -> Iterator[str]:
    if "eval_loss" not in summary:
        return
    yield f"Evaluation loss {summary['eval_loss']:.4f} after {summary['steps']} steps."
    if "bigram_loss" in summary:
        side = "below" if summary["eval_loss"] < summary["bigram_loss"] else "NOT below"
        yield f"That is {side} the {summary['bigram_loss']:.4f} of a bigram model fitted on the same training text."

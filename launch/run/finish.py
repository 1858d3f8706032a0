"""The end of a run: a sample of what the model writes, a yardstick for its loss, and the report."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from ...configs.write import as_plain
from ...data.bigram import bigram_loss
from ...mesh.processes import is_main_process
from ...models.sample import generate
from ...parallel.model import with_state
from ...parallel.sharding.stored_order import stored_order
from ...parallel.step.state import TrainState
from ...training.display import Display
from ...training.metrics import read_metrics
from ...training.report import write_report
from ...training.report_costs import StepCosts
from ..drawing.schedule_svg import draw_svg
from .build import Built
from .explain import Explanation, schedule_figures
from .guards import goodput

REPORT = "report.html"
MOST_DRAWN = 4000
"""Stages times ticks of a schedule up to which the report draws it: a megabyte."""


def is_reported(folder: Path, checkpoint: Path) -> bool:
    """Tells whether a run came to its very end: its report is not older than its last checkpoint."""
    report = folder / REPORT
    return report.exists() and report.stat().st_mtime >= checkpoint.stat().st_mtime


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


def _is_byte_model(built: Built) -> bool:
    """Whether the model predicts bytes of text, so that a sample can be read and a bigram model is a fair yardstick."""
    targets = built.splits.train[0].get("targets")
    return built.splits.vocabulary == 256 and targets is not None and targets.ndim == 1


def _sample(built: Built, state: TrainState) -> str | None:
    wanted = built.config.sample
    if not wanted.length or not _is_byte_model(built) or built.model.predict is None:
        return None
    tokens = generate(
        with_state(built.model, state.model_state),
        stored_order(built.layouts).to_model(state.params),
        wanted.prompt,
        length=wanted.length,
        window=built.config.data.length,
        temperature=wanted.temperature,
        seed=built.config.run.seed,
    )
    return bytes(tokens).decode("utf-8", errors="replace")


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
    streamed = getattr(built.splits.train, "is_stream", False)  # it cannot be read once more
    if evaluation is not None and vocabulary is not None and _is_byte_model(built) and not streamed:
        rows = built.config.eval.batches * built.config.train.global_batch or None  # those the model is evaluated on
        yield "bigram_loss", bigram_loss(built.splits.train, evaluation, vocabulary, max_examples=rows)


def _verdict(summary: dict[str, Any]) -> Iterator[str]:
    if "eval_loss" not in summary:
        return
    yield f"Evaluation loss {summary['eval_loss']:.4f} after {summary['steps']} steps."
    if "bigram_loss" in summary:
        side = "below" if summary["eval_loss"] < summary["bigram_loss"] else "NOT below"
        yield f"That is {side} the {summary['bigram_loss']:.4f} of a bigram model fitted on the same training text."

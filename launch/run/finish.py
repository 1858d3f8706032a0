"""The end of a run: a sample of what the model writes, a yardstick for its loss, and the report."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ...configs.schema import Config
from ...data.bigram import bigram_loss
from ...data.source import is_stream
from ...mesh.processes import is_main_process, local_copy
from ...mesh.text import counted
from ...parallel.schedule.table import Schedule
from ...parallel.step.state import TrainState
from ...training.checkpointing.checkpoints import Checkpoints, DamagedCheckpoint
from ...training.display import Display
from ...training.metrics import read_metrics
from ...training.report.costs import StepCosts
from ..drawing.schedule_svg import draw_svg
from ..reporting.facts import Facts, facts_of, read_facts, write_facts
from ..reporting.figures import summary_of
from ..reporting.record import read_run
from ..reporting.renew import REPORT, renew
from .build import Built
from .callbacks import complete
from .explain import Explanation, schedule_figures
from .guarding.memory import measured_memory
from .sample import predicts_bytes, sample_text, writes_text

MOST_DRAWN = 4000
"""Stages times ticks of a schedule up to which the report draws it: a megabyte."""


def is_reported(folder: Path, checkpoint: Path) -> bool:
    """Tells whether a run came to its very end: its report is not older than its last checkpoint, and was not written
    by a command before that."""
    report, facts = folder / REPORT, read_facts(folder)
    newer = report.exists() and report.stat().st_mtime >= checkpoint.stat().st_mtime
    return newer and (facts is None or facts.finished >= int(checkpoint.name))


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


def start_report(built: Built, explanation: Explanation, folder: Path) -> None:
    """Writes what the report needs besides the logs, so that it can be drawn while the run trains; in process 0.

    A file system that cannot be written to costs that and nothing else.
    """
    if is_main_process():
        with suppress(OSError):
            write_facts(folder, run_facts(built, explanation))


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
    facts = run_facts(built, explanation)
    end = {"figures": dict(_yardsticks(built)), "measured": measured_memory(), "sample": sample or ""}
    write_facts(folder, replace(facts, finished=int(np.asarray(local_copy(state.step)).flat[0]), **end))
    if not read_metrics(folder / "metrics.jsonl"):
        display.message(
            "The update of every step was left out: there is nothing to report. Raise train.steps to go on."
        )
        return
    record = read_run(folder)
    for line in _verdict(summary_of(record)):
        display.message(line)
    if sample is not None:
        display.message(f"A sample of what it writes:\n\n{sample}\n")
    display.message(f"Wrote {renew(record)}")


def run_facts(built: Built, explanation: Explanation) -> Facts:
    """What the report shows of a run besides its logs, as far as it is known at its start."""
    return facts_of(
        built.model.name,
        built.layouts.num_parameters,
        built.splits.description,
        built.layouts.table,
        step_costs(explanation),
        _drawn(explanation),
    )


def step_costs(explanation: Explanation) -> StepCosts:
    """What the report shows of an explanation; a schedule of very many actions in words alone."""
    schedule, drawn = explanation.schedule, _drawn(explanation)
    return StepCosts(
        held=explanation.bytes_per_device,
        compiled=explanation.compiled,
        predicted=explanation.predicted,
        found=explanation.found,
        notes=explanation.notes,
        unexpected=explanation.unexpected,
        schedule_svg=draw_svg(drawn) if drawn is not None else "",
        schedule_text=schedule_figures(schedule) if schedule is not None else "",
    )


def _drawn(explanation: Explanation) -> Schedule | None:
    """The schedule of a pipeline, where it is not too large for a picture."""
    schedule = explanation.schedule
    fits = schedule is not None and schedule.stages * schedule.num_ticks <= MOST_DRAWN
    return schedule if fits else None


def _sample(built: Built, state: TrainState) -> str | None:
    wanted = built.config.sample
    if not wanted.length or not writes_text(built):
        return None
    return sample_text(built, state.params, wanted.prompt, wanted.length, wanted.temperature)


def _yardsticks(built: Built) -> Iterator[tuple[str, float]]:
    """Losses to compare the run's own with, by name."""
    evaluation, vocabulary = built.splits.evaluation, built.splits.vocabulary
    streamed = is_stream(built.splits.train)  # it cannot be read once more
    if evaluation is not None and vocabulary is not None and not streamed and predicts_bytes(built):
        rows = built.config.eval.batches * built.config.train.global_batch or None  # those the model is evaluated on
        yield "bigram_loss", bigram_loss(built.splits.train, evaluation, vocabulary, max_examples=rows)


def _verdict(summary: dict[str, Any]) -> Iterator[str]:
    if "eval_loss" not in summary:
        return
    yield f"Evaluation loss {summary['eval_loss']:.4f} after {counted(summary['steps'], 'step')}."
    if "bigram_loss" in summary:
        side = "below" if summary["eval_loss"] < summary["bigram_loss"] else "NOT below"
        yield f"That is {side} the {summary['bigram_loss']:.4f} of a bigram model fitted on the same training text."

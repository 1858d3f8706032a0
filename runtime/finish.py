"""The end of a run: a generated sample, a baseline for the loss, and the report."""

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from ..checkpoints.manager import Checkpoints, DamagedCheckpoint
from ..configs import config_paths
from ..data.bigram import bigram_loss
from ..data.source import is_stream
from ..data.sources.texts import BYTES
from ..data.splits import is_text, open_codec
from ..mesh.errors import counted
from ..mesh.processes import is_main_process, local_copy
from ..models.generation import generate
from ..parallel.model import LOGITS, has_state, without_predict
from ..parallel.sharding.stored_order import stored_order
from ..parallel.step.state import TrainState
from ..training.callbacks.conductor import restore_callbacks
from ..training.display import Display
from ..training.metrics import read_metrics
from .build_run import Built, configured_callbacks
from .explain import Explanation


class Ending(NamedTuple):
    """Results that are known at the end of a run.

    Attributes:
        step: The last step.
        figures: Name -> number, such as bigram_loss.
        measured: Owner -> the peak of bytes in use.
        sample: The generated text, or "".
    """

    step: int
    figures: dict[str, float]
    measured: dict[str, int]
    sample: str


class Reporter(Protocol):
    """Writes the report of a run. Process 0 calls `start` and `finish`."""

    def is_finished(self, folder: Path, step: int) -> bool:
        """Returns True if the run wrote its report after the checkpoint of this step."""
        ...

    def start(self, built: Built, explanation: Explanation, folder: Path) -> None:
        """Writes what the report needs besides the logs, before the first step."""
        ...

    def finish(
        self, built: Built, explanation: Explanation, folder: Path, ending: Ending
    ) -> tuple[dict[str, Any], Path]:
        """Writes the report; returns the figures of the run by name, and the file."""
        ...


def is_finished(
    built: Built,
    folder: Path,
    checkpoints: Checkpoints,
    start: int,
    reporter: Reporter | None,
    say: Callable[[str], None],
) -> bool:
    """Returns True, and prints so, if a run is trained and reported.

    Args:
        built: The run.
        folder: The run directory.
        checkpoints: The run's checkpoints.
        start: The step of the latest checkpoint, or 0.
        reporter: Recognizes the report; None skips this condition.
        say: Prints a line.
    """
    steps, why = built.config.train.steps, ""
    if start and built.config.callbacks:
        with suppress(DamagedCheckpoint):  # the run goes back to the one before it
            why = restore_callbacks(configured_callbacks(built.config), checkpoints.notes(start))
    if (start < steps and not why) or (reporter is not None and not reporter.is_finished(folder, start)):
        return False
    reason, more = (f" ({why})", "Change callbacks") if why and start < steps else ("", "Raise train.steps")
    say(
        f"{folder} is finished: it holds step {start} of {steps}{reason}. {more} to go on, or start anew with another "
        "run.dir or --fresh."
    )
    return True


def finish(
    built: Built,
    explanation: Explanation,
    state: TrainState,
    folder: Path,
    display: Display,
    reporter: Reporter | None,
) -> None:
    """Prints the results of a run, generates a sample from a language model, and writes the report.

    Args:
        built: The run.
        explanation: The explanation of its step.
        state: The last state.
        folder: The run directory; metrics.jsonl is complete.
        display: Prints the lines.
        reporter: Writes the report; None writes none.
    """
    wanted, sample = built.config.sample, None
    if wanted.length and writes_text(built):  # all processes generate together
        sample = sample_text(built, state.params, wanted.prompt, wanted.length, wanted.temperature)
    if not is_main_process() or reporter is None:
        return
    if not read_metrics(folder / "metrics.jsonl"):
        display.message(
            "The update of every step was left out: there is nothing to report. Raise train.steps to go on."
        )
        return
    step = int(np.asarray(local_copy(state.step)).flat[0])
    ending = Ending(step, dict(baselines(built)), measured_memory(), sample or "")
    summary, path = reporter.finish(built, explanation, folder, ending)
    for line in describe_losses(summary):
        display.message(line)
    if sample is not None:
        display.message(f"A sample of what it writes:\n\n{sample}\n")
    display.message(f"Wrote {path}")


def baselines(built: Built) -> Iterator[tuple[str, float]]:
    """Yields losses to compare the run's own with, by name."""
    evaluation, vocabulary = built.splits.evaluation, built.splits.vocabulary
    is_read_once = is_stream(built.splits.train)
    if evaluation is not None and vocabulary is not None and not is_read_once and predicts_bytes(built):
        rows = built.config.eval.batches * built.config.train.global_batch or None  # the same rows as the evaluation
        yield "bigram_loss", bigram_loss(built.splits.train, evaluation, vocabulary, max_examples=rows)


def describe_losses(summary: dict[str, Any]) -> Iterator[str]:
    """Yields lines about the last evaluation loss."""
    if "eval_loss" not in summary:
        return
    yield f"Evaluation loss {summary['eval_loss']:.4f} after {counted(summary['steps'], 'step')}."
    if "bigram_loss" in summary:
        side = "below" if summary["eval_loss"] < summary["bigram_loss"] else "NOT below"
        yield f"That is {side} the {summary['bigram_loss']:.4f} of a bigram model fitted on the same training text."


def measured_memory() -> dict[str, int]:
    """Returns the peak of bytes in use, by the backend's count, or by the operating system's for CPUs.

    Returns:
        Owner -> bytes: the fullest device of this process; for CPUs, the process with all its devices. Empty if
        unknown.
    """
    devices = jax.local_devices()
    if devices[0].platform != "cpu":
        peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in devices]
        return {"fullest device": max(peaks)} if max(peaks) else {}
    with suppress(ImportError, OSError):
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        owner = f"the process, with {counted(len(devices), 'device')}"
        return {owner: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    return {}


def predicts_bytes(built: Built) -> bool:
    """Returns True if the model predicts bytes of text, so that a bigram model is a fair baseline."""
    return built.splits.vocabulary == BYTES and predicts_text(built)


def predicts_text(built: Built) -> bool:
    """Returns True if the model predicts tokens of text, so that a sample is readable."""
    targets = built.splits.train[0].get("targets")
    return is_text(built.config.data, built.splits.vocabulary) and targets is not None and targets.ndim == 1


def writes_text(built: Built) -> bool:
    """Returns True if `sample_text` can generate a sample."""
    return predicts_text(built) and built.model.predict is not None and not has_state(built.model)


def explain_missing_sample(built: Built) -> str:
    """Returns the reason why a run on text will write no sample although its config asks for one; "" if it will."""
    if not built.config.sample.length or not predicts_text(built) or writes_text(built):
        return ""
    if built.model.predict is None:
        return without_predict(built.model.name, "no sample is written at the end", LOGITS)
    return f"No sample is written at the end: the model {built.model.name} keeps a state. Use `spmdkit generate` later."


def sample_text(built: Built, params: Any, prompt: str, length: int, temperature: float) -> str:
    """Continues a prompt; all processes of a run call this together.

    Args:
        built: A run that writes text.
        params: The parameters of its state, as stored.
        prompt: The beginning of the text.
        length: Tokens to generate.
        temperature: 0 = always the likeliest token; 1 = the model's own distribution.
    """
    config = built.config
    codec = open_codec(config.data, config_paths.search_path(config.run.root))
    tokens = generate(
        built.model,
        stored_order(built.layouts).to_model(params),
        codec.encode(prompt),
        length=length,
        window=config.data.length,
        temperature=temperature,
        seed=config.run.seed,
    )
    return codec.decode(tokens)

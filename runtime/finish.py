"""Results for the end of a run: a generated sample, a baseline for the loss, and the interface of the report."""

import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax

from ..data.bigram import bigram_loss
from ..data.source import is_stream
from ..data.sources.texts import BYTES
from ..data.splits import is_text, open_codec
from ..mesh.errors import counted
from ..models.generation import generate
from ..parallel.model import LOGITS, has_state, without_predict
from ..parallel.sharding.stored_order import stored_order
from .build_run import Built
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


def baselines(built: Built) -> Iterator[tuple[str, float]]:
    """Yields losses to compare the run's own with, by name: for bytes of text, that of a bigram model."""
    train, evaluation = built.splits.train, built.splits.evaluation
    predicts_bytes = built.splits.vocabulary == BYTES and predicts_text(built)
    if evaluation is not None and predicts_bytes and not is_stream(train):
        rows = built.config.eval.batches * built.config.train.global_batch or None  # the same rows as the evaluation
        yield "bigram_loss", bigram_loss(train, evaluation, BYTES, max_examples=rows)


def describe_losses(summary: dict[str, Any]) -> Iterator[str]:
    """Yields lines about the last evaluation loss."""
    if "eval_loss" not in summary:
        return
    yield f"Evaluation loss {summary['eval_loss']:.4f} after {counted(summary['steps'], 'step')}."
    if "bigram_loss" in summary:
        side = "below" if summary["eval_loss"] < summary["bigram_loss"] else "not below"
        yield f"That is {side} the {summary['bigram_loss']:.4f} of a bigram model fitted on the same training text."


def measured_memory() -> dict[str, int]:
    """Returns the peak of bytes in use, by the backend's count, or by the operating system's for CPUs.

    Returns:
        Owner -> bytes: the fullest device of this process, if known; for CPUs, the process with all its devices.
    """
    devices = jax.local_devices()
    if devices[0].platform != "cpu":
        peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in devices]
        return {"fullest device": max(peaks)} if max(peaks) else {}
    unit = 1 if sys.platform == "darwin" else 1024
    owner = f"the process, with {counted(len(devices), 'device')}"
    return {owner: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}


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
    codec = open_codec(config.data, config.run.search_path)
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

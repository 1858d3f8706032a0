"""The rollbacks of a run (rollbacks.json) with the batches that it skips since, and the batches of the remaining steps.

The seed determines the order of the data; a batch is skipped by its number in this order, from the step on that failed.
Therefore every earlier checkpoint has trained on the same batches with and without the rollback.
"""

import json
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..data.batches import EXAMPLE_MODULUS, train_batches
from ..data.ordering.order import batch_number
from ..mesh.errors import UserError
from ..mesh.files import write_text
from ..mesh.processes import broadcast_text, is_main_process
from ..training.steps.not_finite import DATA, Diverged
from .build_run import Built

NAME = "rollbacks.json"


class Rollback(NamedTuple):
    """One rollback of a run.

    Attributes:
        step: The step that was not finite.
        to: The step that the run went back to.
        batch: The number of that step's batch in the order of the data, from 0; skipped since.
        samples: The first and the last global sample of the batch.
        found: The finding, as text.
        at: The local time.
    """

    step: int
    to: int
    batch: int
    samples: Sequence[int]
    found: str
    at: str

    def __str__(self) -> str:
        first, last = self.samples
        return f"step {self.step} ({self.at}): {self.found}; batch {self.batch}, samples {first} to {last}"


def parse_rollbacks(text: str, path: Path) -> list[Rollback]:
    """Parses the content of rollbacks.json.

    Args:
        text: The content, or "" if the file is missing.
        path: The file, for messages.

    Raises:
        UserError: The content is invalid.
    """
    try:
        return [Rollback(**each) for each in json.loads(text)["rollbacks"]] if text else []
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"{path} is corrupt ({error}): it lists the batches that the run leaves out. Restore it from a copy, or "
            "start anew: with another run.dir, or with --fresh, which moves this run aside."
        ) from error


class Rollbacks:
    """The rollbacks of one run, including those of earlier starts."""

    def __init__(
        self, max_rollbacks: int, global_batch: int, folder: Path, rendezvous: float, *, fresh: bool = False
    ) -> None:
        """Reads the rollbacks of earlier starts. Every process of the run calls this.

        Args:
            max_rollbacks: The maximum number of rollbacks of the whole run.
            global_batch: The rows of a batch.
            folder: The run directory, shared by all processes.
            rendezvous: Seconds to wait for process 0.
            fresh: Ignores earlier starts.

        Raises:
            UserError: rollbacks.json is corrupt.
            ProcessesMissing: Process 0 did not answer.
        """
        self._path, self._most, self._rows = folder / NAME, max_rollbacks, global_batch
        exists = is_main_process() and not fresh and self._path.exists()
        text = self._path.read_text(encoding="utf-8", errors="replace") if exists else ""
        text = broadcast_text("batches that are left out", text, seconds=rendezvous)
        self._done = parse_rollbacks(text, self._path)

    def __len__(self) -> int:
        """Returns the number of rollbacks."""
        return len(self._done)

    @property
    def left_out(self) -> tuple[int, ...]:
        """Numbers of the skipped batches."""
        return tuple(each.batch for each in self._done)

    def lines(self) -> list[str]:
        """Returns a line for each rollback."""
        return [f"Left out since a rollback: {each}." for each in self._done]

    def check(self, error: Diverged) -> None:
        """Returns if another rollback is allowed.

        Raises:
            Diverged: It is not: the same error under another policy, otherwise one with the earlier rollbacks.
        """
        if not self._most:
            raise error
        if len(self._done) >= self._most:
            before = "".join(f"\n  {each}" for each in self._done)
            data = f"{DATA} Otherwise: " if DATA in error.advice else ""
            raise Diverged(
                error.step,
                error.found,
                f" It went back {len(self._done)} times before, of at most {self._most} "
                f"(train.most_not_finite):{before}\n{data}Lower optimizer.learning_rate, set train.clip_norm, or look "
                "at these samples; raise train.most_not_finite to leave out more. Checkpoints on disk are from before "
                "it.",
            ) from None

    def add(self, step: int, found: str, to: int) -> None:
        """Skips the batch of a step from now on.

        Args:
            step: The step that was not finite.
            found: The finding, as text.
            to: The step that the run will go back to.
        """
        batch = batch_number(step - 1, self.left_out)
        samples = (batch * self._rows, (batch + 1) * self._rows - 1)
        self._done.append(Rollback(step, to, batch, samples, found, time.strftime("%Y-%m-%d %H:%M:%S")))

    def write(self, to: int) -> str:
        """Writes rollbacks.json, so that a restart skips the last batch too.

        Args:
            to: The step that the run went back to: an earlier one if a checkpoint is corrupt.

        Returns:
            A line to print.

        Raises:
            OSError: The file cannot be written.
        """
        last = self._done[-1] = self._done[-1]._replace(to=to)
        if is_main_process():
            rollbacks = [each._asdict() for each in self._done]
            write_text(self._path, json.dumps({"rollbacks": rollbacks}, indent=2) + "\n")
        return (
            f"Step {last.step}: {last.found}. Went back to step {to}; batch {last.batch} (samples {last.samples[0]} to "
            f"{last.samples[1]}) is left out from now on. Rollback {len(self._done)} of at most "
            f"{self._most} (train.most_not_finite)."
        )


def batches_after(start: int, built: Built, left_out: Collection[int] = ()) -> Any:
    """Returns the batches of the remaining steps, read by background threads; the caller closes them.

    If the run does not stop at values that are not finite, these reach the step, and every process sees them.

    Args:
        start: Steps done.
        built: The run.
        left_out: Numbers of the skipped batches.
    """
    config = built.config
    remaining = max(0, config.train.steps - start)  # a config may ask for fewer steps than are done
    return train_batches(
        built.splits.train,
        built.layouts.batch_sharding(),
        global_batch=config.train.global_batch,
        seed=config.run.seed,
        start_step=start,
        num_steps=remaining,
        shuffle=config.data.shuffle,
        prefetch=config.data.prefetch,
        threads=config.data.threads,
        limits=built.limits._replace(finite=config.train.not_finite == "stop"),
        layout=config.data.layout,
        left_out=left_out,
    )


def data_position(step: int, left_out: Collection[int]) -> dict[str, Any]:
    """Returns the position in the data, for the notes of a checkpoint.

    Args:
        step: Steps done.
        left_out: Numbers of the skipped batches.

    Returns:
        `batches`: the number of batches that were read or skipped; `left_out`: the numbers of the skipped ones.
    """
    read = batch_number(step - 1, left_out) + 1 if step else 0
    return {"batches": read, "left_out": [number for number in sorted(left_out) if number < read]}


def check_position(noted: Mapping[str, Any], step: int, left_out: Collection[int]) -> None:
    """Checks that a run continues in its data at the position of its checkpoint.

    Args:
        noted: `data_position` at the time of the save.
        step: The step of the checkpoint.
        left_out: Numbers of the batches that rollbacks.json lists.

    Raises:
        UserError: Batches would be read twice, or never.
    """
    now = data_position(step, left_out)
    if noted != now:
        raise UserError(
            f"The checkpoint of step {step} was saved after {noted['batches']} batches of the data, of which "
            f"{noted['left_out'] or 'none'} were left out; rollbacks.json now gives {now['batches']} and "
            f"{now['left_out'] or 'none'}. Batches would be read twice or never. Restore rollbacks.json, or start "
            "anew with --fresh, which moves this run aside."
        )


def check_first_batch(batch: Mapping[str, Any], step: int, left_out: Collection[int]) -> None:
    """Checks that the first batch of a start contains the samples after those of the earlier steps.

    Args:
        batch: The first batch; this process checks the rows of one of its devices.
        step: Steps done.
        left_out: Numbers of the skipped batches.

    Raises:
        RuntimeError: It contains other samples.
    """
    examples = batch["example"]
    shard = examples.addressable_shards[0]
    first = batch_number(step, left_out) * examples.shape[0]
    expected = ((first + np.arange(examples.shape[0])) % EXAMPLE_MODULUS)[shard.index[0]]
    found = np.asarray(shard.data)
    if not np.array_equal(found, expected):
        raise RuntimeError(
            f"The first batch after step {step} begins with sample {found[0]} instead of {expected[0]}: samples would "
            "be read twice or never. Nothing was trained. This is an error in the data source or in spmdkit."
        )

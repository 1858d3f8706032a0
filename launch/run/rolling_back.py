"""`train.not_finite: roll_back`: how often a run has gone back, whether it may once more, and what it leaves out since.

Every process finds the same step not finite at the same point of its loop, so all go back together; process 0 alone
writes down what is left out, and tells the others what was there at the start.
"""

import time
from collections.abc import Callable
from pathlib import Path

from ...configs.not_finite import policy_of
from ...configs.schema import Config
from ...data.ordering.order import batch_number
from ...mesh.coordination import told_by_first
from ...mesh.files import write_text
from ...mesh.processes import is_main_process
from ...training.rollbacks import NAME, Rollback, as_json, from_json
from ...training.steps.not_finite import Diverged


class Rollbacks:
    """The rollbacks of one run, those of earlier starts among them."""

    def __init__(self, config: Config, folder: Path, *, fresh: bool = False) -> None:
        """Reads what earlier starts left out. Every process of the run calls this.

        Args:
            config: Of the run.
            folder: Where it lives, shared by all processes.
            fresh: Nothing was before.

        Raises:
            UserError: The file that says it is damaged.
            ProcessesMissing: Process 0 did not say what it read.
        """
        self._path, self._policy = folder / NAME, policy_of(config)
        self._batch = config.train.global_batch
        there = is_main_process() and not fresh and self._path.exists()
        text = self._path.read_text(encoding="utf-8", errors="replace") if there else ""
        told = told_by_first("batches that are left out", text, seconds=config.timeouts.rendezvous)
        self._done = from_json(told, self._path)

    def __len__(self) -> int:
        """How many there were."""
        return len(self._done)

    @property
    def left_out(self) -> tuple[int, ...]:
        """Numbers of the batches that no step gets."""
        return tuple(each.batch for each in self._done)

    def tell(self, say: Callable[[str], None]) -> None:
        """Says what earlier starts left out."""
        for each in self._done:
            say(f"Left out since a rollback: {each}.")

    def check(self, error: Diverged) -> None:
        """Returns where the run may go back once more.

        Raises:
            Diverged: It may not: the same error where the policy is another, else one that says when it went back.
        """
        if self._policy.policy != "roll_back":
            raise error
        if len(self._done) >= self._policy.most:
            before = "".join(f"\n  {each}" for each in self._done)
            raise Diverged(
                error.step,
                error.found,
                f" It went back {len(self._done)} times before, of at most {self._policy.most} "
                f"(train.most_not_finite):{before}\nLower optimizer.learning_rate, set train.clip_norm, or look at "
                "these samples; raise train.most_not_finite to leave out more. Checkpoints on disk are from before it.",
            ) from None

    def add(self, step: int, found: str, to: int) -> None:
        """Leaves out the batch of a step from now on.

        Args:
            step: The step that was not finite.
            found: What was found.
            to: The step that the run is to go back to.
        """
        batch = batch_number(step - 1, self.left_out)
        samples = (batch * self._batch, (batch + 1) * self._batch - 1)
        self._done.append(Rollback(step, to, batch, samples, found, time.strftime("%Y-%m-%d %H:%M:%S")))

    def write(self, to: int) -> str:
        """Writes down what was left out last, so that a restart leaves it out too.

        Args:
            to: The step that the run has gone back to: an earlier one, where a checkpoint is damaged.

        Returns:
            A line for people.

        Raises:
            OSError: It cannot be written down.
        """
        last = self._done[-1] = self._done[-1]._replace(to=to)
        if is_main_process():
            write_text(self._path, as_json(self._done))
        return (
            f"Step {last.step}: {last.found}. Went back to step {to}; batch {last.batch} (samples {last.samples[0]} to "
            f"{last.samples[1]}) is left out from now on. Rollback {len(self._done)} of at most {self._policy.most} "
            "(train.most_not_finite)."
        )

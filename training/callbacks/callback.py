"""Callbacks: the events of a run, the view of the run that they get, and what they can request.

    on_train_begin(run)                 everything is checked, restored and compiled; run.state is the first state
      on_epoch_begin(run, epoch)
        on_step_begin(run)              every step, right before the host starts it
        on_step_end(run, record)        a logged step, a few steps after it was started, with its metrics
      on_epoch_end(run, epoch)          in a pause: all devices are done
      on_evaluation_begin(run)          in a pause
      on_evaluation_end(run, metrics)   in a pause
      on_save_begin(run)                in a pause, before the state is copied
      on_save_end(run)                  once the state may change again; writing continues in the background
    on_train_end(run)                   the run is complete or stopped, without an error
    close()                             always

Every process calls every method in the same order. `on_step_begin` and `on_step_end` never wait for devices. Methods
"in a pause" see `run.state` and may compute with it, all processes together. Numbers in `metrics` and in `record`
(except speeds) are equal in all processes.

Only the requests of process 0 count. In a pause (an evaluation, a save, the end of an epoch) all processes receive them
at once; otherwise they agree on the next step that none of them has started (`Gate.ask`).
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from ...mesh.errors import UserError, raise_problems
from ...mesh.processes import is_main_process
from ...parallel.options import type_problems
from ...parallel.step.state import TrainState
from ..run_files import Kind

End = Literal["", "finished", "interrupted", "try_again"]


@dataclass(frozen=True, kw_only=True)
class Requests:
    """The requests of callbacks after one step.

    Attributes:
        end: "" to continue; finished, the run is complete; interrupted, the same command continues it later; try_again,
            so does a supervisor or scheduler (exit code 75).
        reason: The reason of the end, for people.
        evaluate: Evaluate now.
        save: Save now.
        factor: A factor on updates from now on, on top of earlier factors.
        parts: Name of a part of the parameters -> the factor on its updates from now on; 0 stops training it.
    """

    end: End = ""
    reason: str = ""
    evaluate: bool = False
    save: bool = False
    factor: float = 1.0
    parts: dict[str, float] = field(default_factory=dict)

    def __or__(self, other: "Requests") -> "Requests":
        """Combines both: of two ends the first wins, of two factors of one part the last."""
        first, evaluate, save = self if self.end else other, self.evaluate or other.evaluate, self.save or other.save
        factor, parts = self.factor * other.factor, {**self.parts, **other.parts}
        return replace(first, evaluate=evaluate, save=save, factor=factor, parts=parts)

    def __bool__(self) -> bool:
        return self != Requests()

    def text(self) -> str:
        """Returns the requests as text, for messages between processes."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, texts: Iterable[str]) -> Self:
        """Combines the requests in several texts."""
        return reduce(cls.__or__, (cls(**json.loads(text)) for text in texts), cls())  # pyright: ignore


@dataclass(kw_only=True)
class Run:
    """A run as its callbacks see it; the same in every process except for clocks.

    Attributes:
        folder: The run directory, shared by all processes; only `is_main` should write to it.
        start: Completed steps when this process began.
        num_steps: Optimizer steps of the whole run.
        batch: Rows of a global batch.
        examples: Rows of an epoch; 0 = unknown, and then there are no epochs.
        left_out: Numbers of the batches that are skipped, see `train.not_finite`.
        config: Every key of the config as plain values; empty for a run from Python.
        evaluates: Whether there is an evaluation split.
        metrics: Returns the names of the metrics of an evaluation; None if only an evaluation itself can tell.
        say: Prints a line in process 0.
        generate: Continues a prompt with the current parameters: (prompt, length, temperature) -> text. None if the
            model does not generate text. All processes must call it together, in a pause.
        step: The current step; in a pause, the completed step.
        state: In a pause, the state after that step; otherwise None. The next step consumes it: keep no part of it.
        learning_rate_factor: The current factor on updates.
        can_scale: Whether the optimizer's state contains that factor.
        parts: Name of a part of the parameters -> the current factor on its updates (see `in_parts`).
        on_request: Receives requests in process 0.
    """

    folder: Path
    start: int
    num_steps: int
    batch: int = 0
    examples: int = 0
    left_out: tuple[int, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    evaluates: bool = True
    metrics: Callable[[], Sequence[str] | None] = lambda: None
    say: Callable[[str], None] = print
    generate: Callable[[str, int, float], str] | None = None
    step: int = 0
    state: TrainState | None = None
    learning_rate_factor: float = 1.0
    can_scale: bool = False
    parts: dict[str, float] = field(default_factory=dict)
    on_request: Callable[[Requests], None] = lambda requests: None
    _kept: dict[int, frozenset[int]] = field(default_factory=dict)

    @property
    def is_main(self) -> bool:
        """True in process 0, which writes for all processes and decides on requests."""
        return is_main_process()

    def stop(self, reason: str) -> None:
        """Requests the end of the run: it is evaluated, saved and reported as after its last step; exit code 0.

        Args:
            reason: The reason for people, such as "early stopping: eval_loss has not fallen in 3 evaluations".
        """
        self._request(Requests(end="finished", reason=reason))

    def interrupt(self, reason: str, *, try_again: bool = False) -> None:
        """Requests to save and end; the same command continues the run.

        Args:
            reason: The reason for people, such as "the time limit".
            try_again: Exit with code 75, on which supervisors and schedulers restart the run, instead of 0.
        """
        self._request(Requests(end="try_again" if try_again else "interrupted", reason=reason))

    def evaluate(self) -> None:
        """Requests an evaluation.

        Raises:
            UserError: The evaluation split is missing.
        """
        if not self.evaluates:
            raise UserError("run.evaluate(): the evaluation split is missing. Raise data.eval_fraction.")
        self._request(Requests(evaluate=True))

    def save(self) -> None:
        """Requests a checkpoint."""
        self._request(Requests(save=True))

    def scale_learning_rate(self, by: float) -> None:
        """Requests to multiply the learning rate of the following steps; the factor is saved with the state.

        Args:
            by: A positive, finite factor.

        Raises:
            UserError: The factor is invalid, or no callback of this run declares that it changes the learning rate.
        """
        if not (isinstance(by, int | float) and 0 < by < math.inf):
            raise UserError(f"scale_learning_rate(by={by!r}): the factor must be a positive, finite number.")
        if not self.can_scale:
            raise UserError(
                "A callback changes the learning rate, but the step was built without a factor to change. Set "
                "`changes_learning_rate = True` in the class of the callback; from Python, give build_step the "
                "optimizer `adjustable(optimizer)` of spmdkit.training.callbacks.rate_factor."
            )
        self._request(Requests(factor=float(by)))

    def train_part(self, name: str, factor: float = 1.0) -> None:
        """Requests to train a part of the parameters from the next step on; the factor is saved with the state.

        Args:
            name: The name of the part in `in_parts`.
            factor: A non-negative, finite factor on its updates; 0 stops training it.

        Raises:
            UserError: The factor is invalid, or the optimizer does not have the part.
        """
        if name not in self.parts:
            known = ", ".join(self.parts) or "no parts"
            raise UserError(
                f"train_part({name!r}): the optimizer has {known}. Make it in_parts(optimizer, {{{name!r}: regular "
                "expression of paths}) of spmdkit.training.callbacks.rate_factor."
            )
        if not (isinstance(factor, int | float) and 0 <= factor < math.inf):
            raise UserError(f"train_part({name!r}, {factor!r}): the factor must be a non-negative, finite number.")
        self._request(Requests(parts={name: float(factor)}))

    def keep(self, owner: object, steps: Iterable[int]) -> None:
        """Keeps the checkpoints of some steps, in addition to the latest ones and those of other callbacks.

        Args:
            owner: The callback; replaces the steps that it kept before.
            steps: The steps; steps without a checkpoint are ignored.
        """
        self._kept[id(owner)] = frozenset(steps)

    @property
    def kept(self) -> frozenset[int]:
        """The steps with checkpoints that are kept in addition to the latest ones."""
        return frozenset().union(*self._kept.values())

    def _request(self, requests: Requests) -> None:
        if self.is_main:
            self.on_request(requests)


class Callback:
    """A callback that does nothing; inherit from it, or write a class with some of its methods."""

    changes_learning_rate: ClassVar[bool] = False
    """True if it calls `run.scale_learning_rate`: the optimizer's state then contains a factor."""
    writes: ClassVar[Kind | None] = None
    """The kind of its option `path`, a file or a directory, which is checked before training; None = no such option."""
    monitors: str | None = None
    """The metric that every evaluation must have; "" if any evaluation will do, None if it needs no evaluation."""

    def prepare(self, run: Run) -> None:
        """Checks that the callback can work, before anything is compiled or written.

        Raises:
            UserError: It cannot; for example, a library is missing.
        """

    def state(self) -> Mapping[str, Any]:
        """Returns plain values that are needed to continue after this step; the checkpoint contains them."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores the result of `state` from the checkpoint that the run continues from."""

    def finished(self) -> str:
        """Returns the reason that a restored run is already complete, or ""."""
        return ""

    def on_train_begin(self, run: Run) -> None:
        """Called before the first step of this process."""

    def on_train_end(self, run: Run) -> None:
        """Called when training has ended without an error."""

    def on_epoch_begin(self, run: Run, epoch: int) -> None:
        """Called when an epoch begins, counted from 0, or when the run resumes within one."""

    def on_epoch_end(self, run: Run, epoch: int) -> None:
        """Called when every example of the training split has been read once more."""

    def on_step_begin(self, run: Run) -> None:
        """Called right before step `run.step` starts; its time adds to every step."""

    def on_step_end(self, run: Run, record: Mapping[str, Any]) -> None:
        """Called for a logged step: `record` is its line of metrics.jsonl, `run.step` the current step of the host."""

    def on_evaluation_begin(self, run: Run) -> None:
        """Called before an evaluation."""

    def on_evaluation_end(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Called after an evaluation."""

    def on_save_begin(self, run: Run) -> None:
        """Called before a checkpoint of `run.step` is saved."""

    def on_save_end(self, run: Run) -> None:
        """Called when the state may change again; the checkpoint is being written."""

    def close(self) -> None:
        """Releases resources, whether or not the run failed."""


class CatalogCallback(Callback):
    """A callback of the catalog: a dataclass with its options as fields."""

    def __post_init__(self) -> None:
        """Checks the types and ranges of the options."""
        known = [each for each in type(self).__mro__ if each.__module__.startswith(f"{__package__}.")]
        catalog = next(filter(is_dataclass, known), None)  # subclasses of yours may have fields of any type
        raise_problems(type_problems(type(self).__name__, self, catalog) if catalog else ())


EVENTS = tuple(name for name in vars(Callback) if name.startswith("on_"))
METHODS = (*EVENTS, "prepare", "state", "restore", "finished", "close")


def implements(callback: Any, name: str) -> bool:
    """Returns whether a callback has its own method of a name."""
    found = getattr(type(callback), name, None) or getattr(callback, name, None)
    return callable(found) and found is not getattr(Callback, name)

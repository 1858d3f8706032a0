"""The events of a run. A callback has methods for those that it wants to hear of, and no others.

    on_train_begin(run)                 everything is checked, restored and compiled; run.state is the first state
      on_epoch_begin(run, epoch)
        on_step_begin(run)              every step, right before the host starts it
        on_step_end(run, record)        a logged step, a few steps after it was started, with its metrics
      on_epoch_end(run, epoch)          in a pause: all devices are done
      on_evaluation_begin(run)          in a pause
      on_evaluation_end(run, metrics)   in a pause
      on_save_begin(run)                in a pause, before the state is copied
      on_save_end(run)                  once it may change again; the writing goes on in the background
    on_train_end(run)                   the run ended in order: complete, or stopped
    close()                             whatever happened

Every process calls every method, in the same order. `on_step_begin` and `on_step_end` never wait for devices; those "in
a pause" see `run.state`, and may compute with it, all processes together. Numbers in `metrics` and in `record` (but for
its speeds) are equal in all processes.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from ..run_files import Kind
from .run import Run


class Callback:
    """A callback that does nothing; inherit from it, or write a class of your own with some of its methods."""

    changes_learning_rate: ClassVar[bool] = False
    """Whether it calls `run.scale_learning_rate`: the optimizer's state then holds a factor."""
    writes: ClassVar[Kind | None] = None
    """The kind of what its option `path` names: the path is checked before training. None if it has no such option."""
    monitors: str | None = None
    """The metric that every evaluation must have; "" if any evaluation will do, None if it needs no evaluation."""

    def prepare(self, run: Run) -> None:
        """Looks whether it can do its work, before anything is compiled or written.

        Raises:
            UserError: It cannot; a library is missing, say.
        """

    def state(self) -> Mapping[str, Any]:
        """What has to be known to go on after this step: plain values, kept in the checkpoint."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes what `state` gave when the checkpoint was saved that the run goes on from."""

    def finished(self) -> str:
        """Why the run is complete, as it has been restored; "" where it goes on."""
        return ""

    def on_train_begin(self, run: Run) -> None:
        """Training begins; nothing was trained by this process yet."""

    def on_train_end(self, run: Run) -> None:
        """Training has ended in order."""

    def on_epoch_begin(self, run: Run, epoch: int) -> None:
        """An epoch begins, from 0; also the one in whose midst the run goes on."""

    def on_epoch_end(self, run: Run, epoch: int) -> None:
        """Every example of the training split has been read once more."""

    def on_step_begin(self, run: Run) -> None:
        """Step `run.step` is about to be started; costs every step what it takes."""

    def on_step_end(self, run: Run, record: Mapping[str, Any]) -> None:
        """A step was logged: `record` is its line of metrics.jsonl, `run.step` the step that the host is at."""

    def on_evaluation_begin(self, run: Run) -> None:
        """An evaluation begins."""

    def on_evaluation_end(self, run: Run, metrics: Mapping[str, float]) -> None:
        """An evaluation is done."""

    def on_save_begin(self, run: Run) -> None:
        """A checkpoint of `run.step` is about to be saved."""

    def on_save_end(self, run: Run) -> None:
        """The state may change again; the checkpoint is being written."""

    def close(self) -> None:
        """Lets go of what it holds, however the run ended."""


EVENTS = tuple(name for name in vars(Callback) if name.startswith("on_"))
METHODS = (*EVENTS, "prepare", "state", "restore", "finished", "close")


def hears(callback: Any, name: str) -> bool:
    """Whether a callback has a method of its own for an event."""
    found = getattr(type(callback), name, None) or getattr(callback, name, None)
    return callable(found) and found is not getattr(Callback, name)

"""The metrics of a run as TensorBoard reads them; written by tensorboardX, which needs no TensorFlow."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ...run_files import Kind
from ..callback import Callback
from ..run import Run
from .optional import needs


@dataclass(kw_only=True)
class TensorBoard(Callback):
    """Writes the metrics of logged steps for TensorBoard (extra `tensorboard`); look with `tensorboard --logdir`."""

    writes: ClassVar[Kind | None] = "folder"

    path: str = "tensorboard"
    """The folder; a relative path starts from run.dir."""

    def __post_init__(self) -> None:
        self._writer: Any = None

    def prepare(self, run: Run) -> None:
        """Looks for tensorboardX."""
        needs("tensorboardX", "tensorboard")

    def on_train_begin(self, run: Run) -> None:
        """Begins a file; what others hold of steps after this one is shown no more."""
        if run.is_main:
            from tensorboardX import SummaryWriter

            folder = run.folder / Path(self.path).expanduser()
            self._writer = SummaryWriter(str(folder), purge_step=run.start + 1 if run.start else None)

    def on_step_end(self, run: Run, record: Mapping[str, Any]) -> None:
        """Adds each metric."""
        if self._writer is not None:
            for name, value in record.items():
                if name != "step":
                    self._writer.add_scalar(name, value, record["step"])

    def on_train_end(self, run: Run) -> None:
        """Writes what is left."""
        self.close()

    def close(self) -> None:
        """Writes what is left."""
        if self._writer is not None:
            self._writer.close()
        self._writer = None

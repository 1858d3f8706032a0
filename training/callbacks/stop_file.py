"""Ends the run, saved, where somebody makes a file."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ..run_files import Kind
from .callback import Callback
from .monitor import number_problems, refuse
from .run import Run


@dataclass(kw_only=True)
class StopFile(Callback):
    """Saves and ends where there is a file, which it then removes; the same command goes on. Exit code 0."""

    writes: ClassVar[Kind | None] = "file"

    path: str = "stop"
    """The file; a relative path starts from run.dir."""
    seconds: float = 1.0
    """Between two looks."""

    def __post_init__(self) -> None:
        refuse(number_problems({"seconds": 0}, vars(self)))
        self._next = 0.0

    def on_step_begin(self, run: Run) -> None:
        """Looks for the file now and then."""
        now = time.monotonic()
        if now < self._next or not run.is_main:
            return
        self._next = now + self.seconds
        file = run.folder / Path(self.path).expanduser()
        if file.exists():
            file.unlink(missing_ok=True)
            run.interrupt(f"the file {file}")

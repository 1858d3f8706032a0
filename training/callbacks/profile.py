"""A trace of a few steps, of the host and of its devices, by `jax.profiler`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import jax

from ..run_files import Kind
from ..steps.late_log import RUN_AHEAD
from .callback import Callback
from .monitor import number_problems, refuse
from .run import Run


@dataclass(kw_only=True)
class Profile(Callback):
    """Traces a few steps into run.dir/profile, to be opened in xprof or TensorBoard, or in Perfetto (ui.perfetto.dev).

    Process 0 traces itself and its own devices.
    """

    writes: ClassVar[Kind | None] = "folder"

    start: int = 10
    """The first step that is traced; the first after a start compiles and says little."""
    steps: int = 3
    """How many steps. The host runs a few ahead, so that the trace holds parts of the steps beside them."""
    perfetto: bool = True
    """Whether to write perfetto_trace.json.gz too, which takes seconds where a step has very many operations."""
    path: str = "profile"
    """The folder; a relative path starts from run.dir."""

    def __post_init__(self) -> None:
        refuse(number_problems({"start": 1, "steps": 1}, vars(self)))
        self._is_tracing = False
        self._annotation: Any = None

    def on_step_begin(self, run: Run) -> None:
        """Begins with step `start`, and ends when the last of its steps is known to be done: waits for none."""
        if run.step == max(self.start, run.start + 1) and run.start < self.start + self.steps and run.is_main:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # every call of Python's would fill the trace
            folder = str(self._folder(run))
            jax.profiler.start_trace(folder, create_perfetto_trace=self.perfetto, profiler_options=options)
            self._is_tracing = True
        if not self._is_tracing:
            return
        self._mark(None)
        if run.step > self.start + self.steps + RUN_AHEAD:
            self.close()
            run.say(f"Wrote a trace of steps {self.start} to {self.start + self.steps - 1}: {self._folder(run)}")
        elif run.step < self.start + self.steps:
            self._mark(jax.profiler.StepTraceAnnotation("train", step_num=run.step))

    def on_train_end(self, run: Run) -> None:
        """Ends a trace that the run was too short for."""
        self.close()

    def close(self) -> None:
        """Ends the trace."""
        self._mark(None)
        if self._is_tracing:
            self._is_tracing = False
            jax.profiler.stop_trace()

    def _folder(self, run: Run) -> Path:
        return run.folder / Path(self.path).expanduser()

    def _mark(self, annotation: Any) -> None:
        """Ends the mark of a step, and begins that of the next."""
        if self._annotation is not None:
            self._annotation.__exit__(None, None, None)
        if annotation is not None:
            annotation.__enter__()
        self._annotation = annotation

"""Callbacks that record the run into files: a CSV table, samples of text, a profiler trace."""

import csv
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import jax
from annotated_types import Ge

from ...mesh.errors import UserError
from ...mesh.files import atomic_write
from ...parallel.options import LocalPath
from ..metrics import MetricsLog, remark_cut_line
from ..run_files import Kind
from ..steps.late_log import RUN_AHEAD
from .callback import CatalogCallback, Run

SAMPLES = "samples.jsonl"


@dataclass(kw_only=True)
class CSVLog(CatalogCallback):
    """Writes each line of metrics.jsonl to a table too; lines of steps that are trained again are dropped."""

    writes: ClassVar[Kind | None] = "file"

    path: LocalPath = "metrics.csv"
    """The file; a relative path starts from run.dir."""

    _file = None
    _columns = ()

    def prepare(self, run: Run) -> None:
        """Checks that an existing file of that name is a table of metrics."""
        self._path = run.folder / Path(self.path).expanduser()
        if run.is_main:
            self._read()

    def on_train_begin(self, run: Run) -> None:
        """Opens the table without lines after the step that the run continues from."""
        if run.is_main:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._path.exists():
                remark_cut_line(self._path)
            self._rewrite([row for row in self._read() if int(row["step"]) <= run.start])

    def on_step_end(self, run: Run, record: Mapping[str, Any]) -> None:
        """Adds a line; a new metric adds a column."""
        if self._file is None:
            return
        if record.keys() <= set(self._columns):
            csv.DictWriter(self._file, self._columns).writerow(record)
            self._file.flush()
        else:
            self._rewrite([*self._read(), record])

    def close(self) -> None:
        """Closes the table."""
        if self._file is not None:
            self._file.close()
        self._file = None

    def _read(self) -> list[dict[str, Any]]:
        """Returns the lines so far, without an incomplete last one."""
        if not self._path.exists():
            return []
        text = self._path.read_bytes().decode(errors="replace")
        table = csv.DictReader(text[: text.rfind("\n") + 1].splitlines())
        rows = list(table)
        has_steps = "step" in (table.fieldnames or ()) and all((row["step"] or "").isdecimal() for row in rows)
        if text and not has_steps:
            raise UserError(f"{self._path} is not a table of metrics: some lines lack a step. Move it away.")
        return rows

    def _rewrite(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Replaces the table atomically, and opens it for more lines."""
        self.close()
        self._columns = list(dict.fromkeys(name for row in rows for name in row))
        with atomic_write(self._path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns)
            if self._columns:
                writer.writeheader()
            writer.writerows(rows)
        self._file = self._path.open("a", newline="", encoding="utf-8")


@dataclass(kw_only=True)
class Samples(CatalogCallback):
    """Lets a language model continue a prompt after evaluations; run.dir/samples.jsonl contains the results."""

    every: Annotated[int, Ge(1)] = 1
    """Evaluations between two samples."""
    prompt: str = "def "
    """The beginning of the text."""
    length: Annotated[int, Ge(1)] = 100
    """Tokens to generate."""
    temperature: Annotated[float, Ge(0)] = 0.8
    """0 = always the most likely token; 1 = the model's own distribution."""

    monitors = ""
    _seen = 0
    _log = None

    def state(self) -> Mapping[str, int]:
        """Returns the number of evaluations."""
        return {"seen": self._seen}

    def restore(self, state: Mapping[str, int]) -> None:
        """Restores the result of `state`."""
        self._seen = state["seen"]

    def prepare(self, run: Run) -> None:
        """Checks that the model generates text."""
        if run.generate is None:
            raise UserError("callbacks: samples require a model of text that has a `predict`. Remove samples.")

    def on_train_begin(self, run: Run) -> None:
        """Opens the file without the samples of steps that are trained again."""
        if run.is_main:
            self._log = MetricsLog(run.folder / SAMPLES, start_step=run.start)

    def on_evaluation_end(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Generates text, all processes together."""
        self._seen += 1
        if self._seen % self.every:
            return
        assert run.generate is not None
        text = run.generate(self.prompt, self.length, self.temperature)
        run.say(f"Step {run.step} writes:\n\n{text}\n")
        if self._log is not None:
            self._log.write({"step": run.step, "text": text})

    def close(self) -> None:
        """Closes the file."""
        if self._log is not None:
            self._log.close()


@dataclass(kw_only=True)
class Profile(CatalogCallback):
    """Traces a few steps into run.dir/profile, for xprof, TensorBoard or Perfetto (ui.perfetto.dev).

    Process 0 traces itself and its own devices with `jax.profiler`.
    """

    writes: ClassVar[Kind | None] = "folder"

    start: Annotated[int, Ge(1)] = 10
    """The first step to trace; the first step after a start compiles and is not representative."""
    steps: Annotated[int, Ge(1)] = 3
    """Number of steps. The host runs a few steps ahead, so the trace contains parts of neighboring steps."""
    perfetto: bool = True
    """Write perfetto_trace.json.gz too, which takes seconds if a step has very many operations."""
    path: LocalPath = "profile"
    """The directory; a relative path starts from run.dir."""

    _is_tracing = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._annotation = ExitStack()

    def on_step_begin(self, run: Run) -> None:
        """Starts with step `start`, and ends when the last of its steps is known to be done; never waits."""
        if run.step == max(self.start, run.start + 1) and run.start < self.start + self.steps and run.is_main:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # every Python call would fill the trace
            folder = str(self._folder(run))
            jax.profiler.start_trace(folder, create_perfetto_trace=self.perfetto, profiler_options=options)
            self._is_tracing = True
        if not self._is_tracing:
            return
        self._annotation.close()
        if run.step > self.start + self.steps + RUN_AHEAD:
            self.close()
            run.say(f"Wrote a trace of steps {self.start} to {self.start + self.steps - 1}: {self._folder(run)}")
        elif run.step < self.start + self.steps:
            self._annotation.enter_context(jax.profiler.StepTraceAnnotation("train", step_num=run.step))

    def close(self) -> None:
        """Ends the trace, also if the run was too short for it."""
        self._annotation.close()
        if self._is_tracing:
            self._is_tracing = False
            jax.profiler.stop_trace()

    def _folder(self, run: Run) -> Path:
        return run.folder / Path(self.path).expanduser()

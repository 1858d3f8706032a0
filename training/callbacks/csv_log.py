"""The metrics of a run as a table: a line for each logged step."""

import csv
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TextIO

from ...mesh.errors import UserError
from ..run_files import Kind
from .callback import Callback
from .run import Run


@dataclass(kw_only=True)
class CSVLog(Callback):
    """Writes each line of metrics.jsonl to a table as well; lines of steps that are trained again are dropped."""

    writes: ClassVar[Kind | None] = "file"

    path: str = "metrics.csv"
    """The file; a relative path starts from run.dir."""

    def __post_init__(self) -> None:
        self._file: TextIO | None = None
        self._columns: list[str] = []

    def prepare(self, run: Run) -> None:
        """Checks that a file of that name is a table of metrics."""
        self._path = run.folder / Path(self.path).expanduser()
        if run.is_main:
            self._read()

    def on_train_begin(self, run: Run) -> None:
        """Opens the table, without what came after the step that the run goes on from."""
        if not run.is_main:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        rows = [row for row in self._read() if int(row["step"]) <= run.start]
        self._columns = list(dict.fromkeys(name for row in rows for name in row))
        self._rewrite(rows)

    def on_step_end(self, run: Run, record: Mapping[str, Any]) -> None:
        """Adds a line; a metric that is new makes a column."""
        if self._file is None:
            return
        new = [name for name in record if name not in self._columns]
        if new:
            self._file.flush()
            rows = self._read()
            self._columns += new
            self._rewrite(rows)
        assert self._file is not None
        csv.DictWriter(self._file, self._columns).writerow(record)
        self._file.flush()

    def close(self) -> None:
        """Closes the table."""
        if self._file is not None:
            self._file.close()
        self._file = None

    def _read(self) -> list[dict[str, Any]]:
        """The lines so far, but for a last one that is not whole."""
        if not self._path.exists():
            return []
        try:
            with self._path.open(newline="", encoding="utf-8") as file:
                text = file.read()
            table = csv.DictReader(text[: text.rfind("\n") + 1].splitlines())
            rows = list(table)
        except (UnicodeDecodeError, csv.Error) as error:
            raise UserError(f"{self._path} is not a table of metrics: {error}. Move it away.") from error
        has_steps = "step" in (table.fieldnames or ()) and all((row["step"] or "").isdecimal() for row in rows)
        if text and not has_steps:
            raise UserError(f"{self._path} is not a table of metrics: not every line has a step. Move it away.")
        return rows

    def _rewrite(self, rows: list[dict[str, Any]]) -> None:
        """Replaces the table as a whole, and opens it for more."""
        self.close()
        beside = self._path.with_name(f"{self._path.name}.new")
        try:
            with beside.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, self._columns)
                if self._columns:
                    writer.writeheader()
                writer.writerows(rows)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(self._path)
        except OSError:
            with suppress(OSError):
                beside.unlink(missing_ok=True)
            raise
        self._file = self._path.open("a", newline="", encoding="utf-8")

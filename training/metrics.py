"""metrics.jsonl: one JSON object per logged step, only whole lines, no step twice."""

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from errno import ENOSPC
from pathlib import Path
from typing import Any, Self

from ..mesh.errors import UserError
from ..mesh.files import write_text
from ..mesh.processes import print_progress


class MetricsLog:
    """Appends records to a file of JSON lines; one process of a run writes it."""

    def __init__(self, path: Path, *, start_step: int = 0) -> None:
        """Opens the log for the steps after `start_step`.

        Drops records of later steps, which a run killed after its last checkpoint leaves behind, since those steps are
        trained again, and an incomplete last line, about which it prints a line. The file is replaced atomically.

        Args:
            path: The file; a missing directory is created.
            start_step: Optimizer steps done; 0 for a new run.

        Raises:
            OSError: The file cannot be written; it is unchanged.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            records = read_metrics(path)
            remark_cut_line(path)
            kept = [each for each in records if type(each.get("step")) is not int or each["step"] <= start_step]
            write_text(path, "".join(map(_to_line, kept)))
        self._path = path
        self._file = path.open("ab", buffering=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends one record in a single write, so that a reader or a kill never sees half of it.

        Args:
            record: `step` and metrics by name: Python, NumPy or JAX scalars. Values that are not finite become null.

        Raises:
            OSError: The record cannot be written; the log is unchanged. The error names the file.
        """
        line = _to_line(record).encode()
        try:
            end = self._file.seek(0, os.SEEK_END)
            if self._file.write(line) < len(line):  # a write takes the last free bytes of a disk without an error
                with suppress(OSError):
                    self._file.truncate(end)
                raise OSError(ENOSPC, os.strerror(ENOSPC))
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Reads the records of a log in the order written, without an incomplete last line.

    Args:
        path: The file.

    Raises:
        UserError: A line is not a JSON object, nor the beginning of one at the end.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    records = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict):
            records.append(record)
        elif number < len(lines) or line.strip("\0")[:1] not in ("", "{"):
            raise UserError(f"{path} line {number} is not a JSON object: {line[:80]!r}. Remove it.")
    return records


def remark_cut_line(path: Path) -> None:
    """Prints a line if the last line of a file is incomplete, so that its reader leaves it out."""
    content = path.read_bytes()
    if not content or content.endswith(b"\n"):
        return
    last = content.rpartition(b"\n")[2]
    print_progress(
        f"{path}: removing its last line, of which only the first {len(last):,} bytes were written: a process was "
        "killed, or the disk was full."
    )


def _to_line(record: Mapping[str, Any]) -> str:
    return json.dumps({name: _to_plain(value) for name, value in record.items()}, allow_nan=False) + "\n"


def _to_plain(value: Any) -> Any:
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value

"""metrics.jsonl: one JSON object per logged step, whole lines only, no step twice."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from errno import ENOSPC
from pathlib import Path
from typing import Any, Self

from ..mesh.errors import UserError


class MetricsLog:
    """Appends records to a file of JSON lines; one process of a run writes it."""

    def __init__(self, path: Path, *, start_step: int = 0) -> None:
        """Opens the log for the steps after `start_step`.

        Records of later steps, left by a run that was killed after its last checkpoint, are dropped, since those steps
        are trained again; so is a line cut short. The file is replaced as a whole or not at all.

        Args:
            path: The file; its folder is made where missing.
            start_step: Optimizer steps done; 0 for a new run.

        Raises:
            OSError: It cannot be written, named by its path; the file is as it was.
        """
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _rewrite(path, [record for record in read_metrics(path) if record.get("step", 0) <= start_step])
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends one record in a single write, so that a reader or a kill never sees half of it.

        Args:
            record: `step` and metrics by name: Python, NumPy or JAX scalars. What is not finite becomes null.

        Raises:
            OSError: It could not be written, named by its path; the log holds what it held before.
        """
        line = (_line(record) + "\n").encode()
        with _named(self._path):
            end = os.lseek(self._file, 0, os.SEEK_END)
            written = os.write(self._file, line)
            if written < len(line):  # of a full disk the last free bytes are taken without an error
                with suppress(OSError):
                    os.ftruncate(self._file, end)
                raise OSError(ENOSPC, os.strerror(ENOSPC))

    def close(self) -> None:
        """Closes the file."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Reads the records of a log; a last line cut short is left out.

    Args:
        path: The file.

    Returns:
        The records, in the order written.

    Raises:
        UserError: If a line other than the last is no JSON object; names it.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    records = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        record = _parse(line)
        if record is not None:
            records.append(record)
        elif number < len(lines):
            raise UserError(f"{path} line {number} is not a JSON object: {line[:80]!r}. Remove it.")
    return records


def _parse(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps({name: _plain(value) for name, value in record.items()}, allow_nan=False)


def _plain(value: Any) -> Any:
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _rewrite(path: Path, records: list[dict[str, Any]]) -> None:
    beside = path.with_name(path.name + ".new")
    try:
        with _named(path), beside.open("w", encoding="utf-8") as file:
            file.writelines(_line(record) + "\n" for record in records)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Names the file in an error of writing it; the system names none."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error

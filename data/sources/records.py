"""ArrayRecord files: records with random access, each a text, token ids, or an example.

    data.records: documents                       the bytes of a text (UTF-8); data.vocabulary is 256
    data.records: documents, data.dtype: uint16   token ids of that type, in native byte order, as in a raw token file
    data.records: arrays                          an example: what np.savez writes of its arrays, without a row dim

Documents are read into memory when the data is opened, as for jsonl and parquet. Examples stay in their files and are
read when a batch needs them, through Grain's `ArrayRecordDataSource`.
"""

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...mesh.errors import UserError, counted
from ..config import DataConfig
from ..examples import is_numeric, shapes_of, with_weights
from ..source import BadDataError, Splits, fingerprint, spread_indices
from .columns import read_columns
from .source_files import BadRecords, explain_missing, find_files, raise_system_error, reason_of
from .texts import Corpus, hold_out

SUFFIXES = (".array_record", ".arrayrecord")
ARCHIVE = b"PK\x03\x04"
"""The first bytes of an archive of np.savez."""
SAMPLED = 64
"""Records, evenly spread, that the fingerprint of examples covers."""
WRITE = "Write it with np.savez(buffer, inputs=..., targets=...), one example per record."


class _InvalidRecordError(ValueError):
    """A record without an example, with the reason."""


_UNREADABLE = (RuntimeError, ValueError, OSError)
"""Errors for a corrupt record: from Riegeli, from NumPy, from the archive in it."""


def read_records(patterns: tuple[str, ...], config: DataConfig, key: str) -> Corpus:
    """Reads documents.

    Args:
        patterns: Files or globs, `*.array_record` or `*.arrayrecord`.
        config: `dtype` of token ids, or "" for texts; `bad_records`, the maximum number to leave out.
        key: Config key of the patterns, for messages.

    Raises:
        UserError: A pattern does not match any file, a file is not valid ArrayRecord, more records than allowed cannot
            be read, or the package is not installed.
    """

    def values(path: Path, column: str, bad: BadRecords) -> Iterator[tuple[str, Any]]:
        del column
        records = _open([path])
        for number in range(len(records)):
            where = f"{path}, record {number}"
            try:
                yield where, _document(records[number], config.dtype)
            except _UNREADABLE as error:
                raise_system_error(error)
                bad.leave_out(where, _reason(error))

    return read_columns(_find(patterns, key), values, config, key, "arrayrecord file")


class RecordSource:
    """Examples that are the records of ArrayRecord files.

    A record that cannot be read has weights of 0, and keeps its place in the order.

    Args:
        paths: The files; their records follow each other.
        bad: Counts records that cannot be read.
        rows: int64, the numbers of the records that are examples, over all files; None: all.
    """

    def __init__(self, paths: Sequence[Path], bad: BadRecords, rows: np.ndarray | None = None) -> None:
        self._records = _open(paths)
        sizes = [len(_open([path])) for path in paths]
        self._paths, self._starts = paths, np.cumsum([0, *sizes])
        self._bad, self._rows = bad, rows
        self.form = self._first_form() if len(self) else {}

    def __len__(self) -> int:
        """Returns the number of examples."""
        return len(self._records) if self._rows is None else len(self._rows)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Returns example `index`.

        Raises:
            BadDataError: The record cannot be read or has another form than the first, and the limit of bad records is
                reached.
        """
        try:
            example = self._read(index)
            if shapes_of(example) != self.form:
                raise _InvalidRecordError(f"it has {shapes_of(example)}, but the first record has {self.form}. {WRITE}")
            return example
        except _UNREADABLE as error:
            raise_system_error(error)
            self._bad.leave_out(self.origin(index), _reason(error))
        return {name: np.zeros(shape, dtype) for name, (dtype, shape) in self.form.items()}

    def origin(self, index: int) -> str:
        """Returns file and record of example `index`."""
        row = self._row(index)
        file = int(np.searchsorted(self._starts, row, side="right")) - 1
        return f"{self._paths[file]}, record {row - int(self._starts[file])}"

    def raw(self, index: int) -> np.ndarray:
        """Returns the bytes of example `index`, uint8; empty if it cannot be read."""
        try:
            return np.frombuffer(self._records[self._row(index)], np.uint8)
        except _UNREADABLE as error:
            raise_system_error(error)
            return np.zeros(0, np.uint8)

    def _row(self, index: int) -> int:
        return int(index if self._rows is None else self._rows[index])

    def _read(self, index: int) -> dict[str, np.ndarray]:
        return with_weights(_arrays(self._records[self._row(index)]), 0)

    def _first_form(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Returns the form of the first record that can be read."""
        for index in range(len(self)):
            try:
                return shapes_of(self._read(index))
            except _UNREADABLE as error:
                raise_system_error(error)
                self._bad.leave_out(self.origin(index), _reason(error))
        raise UserError(f"none of the {len(self):,} records of {self._paths[0]} and the other files can be read.")


def read_record_arrays(config: DataConfig) -> Splits:
    """Opens files of examples, which are read when batches need them.

    Args:
        config: `files`, and `eval_files` or `eval_fraction` (records are held out by the hash of their number);
            `bad_records`, the maximum number that each process leaves out.

    Raises:
        UserError: A pattern does not match any file, a file is not valid ArrayRecord, or a split has no examples.
        BadDataError: The first record cannot be read, and none may be left out.
    """
    bad = BadRecords(config.bad_records, BadDataError)
    paths = _find(config.files, "data.files")
    if config.eval_files:
        sources = [RecordSource(paths, bad), RecordSource(_find(config.eval_files, "data.eval_files"), bad)]
    else:
        held_out = hold_out(len(_open(paths)), config.eval_fraction)
        kept = [~held_out, held_out] if config.eval_fraction else [~held_out]
        sources = [RecordSource(paths, bad, np.flatnonzero(rows)) for rows in kept]
    sizes = " and ".join(f"{len(source):,}" for source in sources)
    if not all(map(len, sources)):
        raise UserError(
            f"data.files: {sizes} records for training and evaluation; both need some. Give more records, change "
            "data.eval_fraction, or set it to 0 to train without evaluation."
        )
    if len(sources) > 1 and sources[0].form != sources[1].form:
        raise UserError(f"training records are {sources[0].form}, but evaluation records {sources[1].form}.")
    sampled = [source.raw(index) for source in sources for index in spread_indices(len(source), SAMPLED)]
    return Splits(
        train=sources[0],
        evaluation=sources[1] if len(sources) > 1 else None,
        vocabulary=config.vocabulary or None,
        description=f"arrayrecord: {', '.join(sources[0][0])}; {sizes} examples in {counted(len(paths), 'file')}",
        fingerprint=fingerprint(sampled, [len(source) for source in sources]),
    )


def _find(patterns: tuple[str, ...], key: str) -> list[Path]:
    return [file.path for file in find_files(patterns, key=key, suffixes=SUFFIXES)]


def _open(paths: Sequence[Path]) -> Any:
    """Returns the records of some files, by number."""
    with explain_missing("data.source=arrayrecord", "array_record", "arrayrecord"):
        import array_record.python.array_record_module  # noqa: F401  (Grain's reader needs it)
        import grain
    try:
        return grain.sources.ArrayRecordDataSource([str(path) for path in paths])
    except RuntimeError as error:
        if len(paths) > 1:
            for path in paths:  # names the corrupt file
                _open([path])
        reason = " ".join(str(error).split())[:200] or "its end is missing or corrupt"
        raise UserError(
            f"{paths[0]}: it cannot be read as ArrayRecord: {reason}. Check that it was written to its end."
        ) from error


def _document(record: bytes, dtype: str) -> bytes | np.ndarray:
    """Returns the bytes of a text, or the ids of a document."""
    if record.startswith(ARCHIVE):
        raise _InvalidRecordError("it is an archive of arrays, not a text; set data.records: arrays.")
    if not dtype:
        return record
    if len(record) % np.dtype(dtype).itemsize:
        raise _InvalidRecordError(
            f"its {len(record):,} bytes must be a multiple of the size of {dtype}; check data.dtype."
        )
    return np.frombuffer(record, dtype)


def _arrays(record: bytes) -> dict[str, np.ndarray]:
    """Returns the arrays of an example."""
    if not record.startswith(ARCHIVE):
        raise _InvalidRecordError(f"it is not an archive of arrays. {WRITE} For texts and ids, leave data.records out.")
    try:
        with np.load(io.BytesIO(record)) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except Exception as error:  # NumPy raises any of several types for invalid content
        raise _InvalidRecordError(f"its arrays cannot be read: {reason_of(error)}. {WRITE}") from error
    wrong = [f"{name!r} contains {array.dtype}" for name, array in arrays.items() if not is_numeric(array.dtype)]
    if wrong or not arrays:
        raise _InvalidRecordError(f"{', '.join(wrong) or 'the record is empty'}. {WRITE}")
    return arrays


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, _InvalidRecordError) else f"it cannot be read: {reason_of(error)}."

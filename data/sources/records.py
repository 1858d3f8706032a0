"""ArrayRecord files: records with random access, each a text, token ids, or an example.

    data.records: documents                       the bytes of a text (UTF-8); data.vocabulary is 256
    data.records: documents, data.dtype: uint16   token ids of that type, in native byte order, as in a raw token file
    data.records: arrays                          an example: what np.savez writes of its arrays, without a row dim

Documents are read into memory when the data is opened, as for jsonl and parquet. Examples stay in their files and are
read when a batch needs them, through Grain's `ArrayRecordDataSource`.
"""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ...mesh.errors import UserError, counted
from ..config import DataConfig
from ..examples import not_numeric
from ..source import Splits, divide_rows, find_part
from .columns import read_columns
from .file_examples import UNREADABLE, Records, make_file_splits
from .source_files import BadRecords, explain_missing, find_files, raise_system_error, reason_of
from .texts import Corpus

SUFFIXES = (".array_record", ".arrayrecord")
ARCHIVE = b"PK\x03\x04"
"""The first bytes of an archive of np.savez."""
WRITE = "Write it with np.savez(buffer, inputs=..., targets=...), one example per record"


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

    def values(path: Path, _: str, bad: BadRecords) -> Iterator[tuple[str, Any]]:
        records = _open(path)
        for number in range(len(records)):
            where = f"{path}, record {number}"
            try:
                yield where, _document(records[number], config.dtype)
            except UNREADABLE as error:
                raise_system_error(error)
                bad.leave_out(where, f"it cannot be read: {reason_of(error)}.")

    return read_columns(_find(patterns, key), values, config, key, "arrayrecord file")


def read_record_arrays(config: DataConfig) -> Splits:
    """Opens files of examples, which are read when batches need them.

    Args:
        config: `files`, and `eval_files` or `eval_fraction` (records are held out by the hash of their number);
            `bad_records`, the maximum number that each process leaves out.

    Raises:
        UserError: A pattern does not match any file, a file is not valid ArrayRecord, or a split has no examples.
        BadDataError: A record cannot be read, and none may be left out.
    """
    paths = _find(config.files, "data.files")
    num_train_files = len(paths)
    if config.eval_files:
        paths += _find(config.eval_files, "data.eval_files")
    files = [_open(path) for path in paths]
    starts = np.cumsum([0, *map(len, files)])
    num_train = int(starts[num_train_files])
    if config.eval_files:
        rows = [np.arange(num_train), np.arange(num_train, starts[-1])]
    else:
        rows = divide_rows(num_train, config.eval_fraction)

    def read(row: int) -> bytes:
        file, record = find_part(starts, row)
        return files[file][record]

    def describe(row: int) -> str:
        file, record = find_part(starts, row)
        return f"{paths[file]}, record {record}"

    splits = make_file_splits(Records(read, lambda row, record: _arrays(record), describe, WRITE), rows, config)
    return splits._replace(description=f"{splits.description} in {counted(len(files), 'file')}")


def _find(patterns: tuple[str, ...], key: str) -> list[Path]:
    return [file.path for file in find_files(patterns, key=key, suffixes=SUFFIXES)]


def _open(path: Path) -> Any:
    """Returns the records of a file, by number."""
    with explain_missing("data.source=arrayrecord", "array_record", "arrayrecord"):
        import array_record.python.array_record_module  # noqa: F401  (Grain's reader needs it)
        import grain
    try:
        return grain.sources.ArrayRecordDataSource([str(path)])
    except RuntimeError as error:
        reason = reason_of(error) if str(error) else "its end is missing or corrupt"
        raise UserError(f"{path}: it cannot be read as ArrayRecord: {reason}. Check that it is complete.") from error


def _document(record: bytes, dtype: str) -> bytes | np.ndarray:
    """Returns the bytes of a text, or the ids of a document."""
    if record.startswith(ARCHIVE):
        raise ValueError("it is an archive of arrays, not a text; set data.records: arrays")
    if not dtype:
        return record
    if len(record) % np.dtype(dtype).itemsize:
        raise ValueError(f"its {len(record):,} bytes must be a multiple of the size of {dtype}; check data.dtype")
    return np.frombuffer(record, dtype)


def _arrays(record: bytes) -> dict[str, np.ndarray]:
    """Returns the arrays of an example."""
    if not record.startswith(ARCHIVE):
        raise ValueError(f"it is not an archive of arrays. {WRITE}. For texts and ids, leave data.records out")
    try:
        with np.load(io.BytesIO(record)) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except Exception as error:  # NumPy raises any of several types for invalid content
        raise ValueError(f"its arrays cannot be read: {reason_of(error)}. {WRITE}") from error
    wrong = not_numeric(arrays) if arrays else "the record is empty"
    if wrong:
        raise ValueError(f"{wrong}. {WRITE}")
    return arrays

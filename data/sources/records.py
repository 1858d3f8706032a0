"""ArrayRecord files: records with random access, each a text, token ids, or an example.

    data.records: documents                       the bytes of a text (UTF-8); data.vocabulary is 256
    data.records: documents, data.dtype: uint16   token ids of that type, in native byte order, as in a raw token file
    data.records: arrays                          an example: what np.savez writes of its arrays, with no dim of rows

Documents are read into memory when the data is opened, as those of jsonl and parquet. Examples stay in their files and
are read where a batch needs them, through Grain's `ArrayRecordDataSource`.
"""

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...mesh.errors import UserError
from ...mesh.text import counted
from ..config import DataConfig
from ..source import BadDataError, Splits, fingerprint
from .bad_records import BadRecords
from .files import find_files
from .texts.columns import read_columns
from .texts.documents import Corpus, hash_fraction
from .values import is_no_number, with_weights

SUFFIXES = (".array_record", ".arrayrecord")
ARCHIVE = b"PK\x03\x04"
"""What an archive of np.savez begins with."""
LOOKED_AT = 64
"""Records, evenly spread, that the fingerprint of examples is made of."""
WRITE = "Write it with np.savez(buffer, inputs=..., targets=...), one example a record."


def read_records(patterns: tuple[str, ...], config: DataConfig, key: str) -> Corpus:
    """Reads documents.

    Args:
        patterns: Files or globs, `*.array_record` or `*.arrayrecord`.
        config: `dtype` of token ids, or "" for texts; `bad_records`, how many may be left out.
        key: Config key of the patterns, for messages.

    Raises:
        UserError: a pattern matches nothing, a file is no ArrayRecord, more records than allowed cannot be read, or the
            package is not installed.
    """
    paths = [file.path for file in find_files(patterns, key=key, suffixes=SUFFIXES)]

    def values(path: Path, column: str, bad: BadRecords) -> Iterator[tuple[str, Any]]:
        del column
        records = _open([path])
        for number in range(len(records)):
            where = f"{path}, record {number}"
            try:
                yield where, _document(records[number], config.dtype)
            except _UNREADABLE as error:
                _raise_of_system(error)
                bad.leave_out(where, _reason(error))

    return read_columns(paths, values, config, key, "arrayrecord file")


class RecordSource:
    """Examples that are the records of ArrayRecord files.

    A record that cannot be read has weights of 0: it counts for nothing, and moves no other example.

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
        self._form = self._first_form() if len(self) else {}

    def __len__(self) -> int:
        """Number of examples."""
        return len(self._records) if self._rows is None else len(self._rows)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Example `index`.

        Raises:
            BadDataError: the record cannot be read or has another form than the first, and no more may be left out.
        """
        try:
            example = self._read(index)
            if _form(example) != self._form:
                raise _NoExampleError(f"it has {_form(example)}, and the first record has {self._form}. {WRITE}")
            return example
        except _UNREADABLE as error:
            _raise_of_system(error)
            self._bad.leave_out(self.origin(index), _reason(error))
        return {name: np.zeros(shape, dtype) for name, (dtype, shape) in self._form.items()}

    def origin(self, index: int) -> str:
        """File and record of example `index`."""
        row = int(index if self._rows is None else self._rows[index])
        file = int(np.searchsorted(self._starts, row, side="right")) - 1
        return f"{self._paths[file]}, record {row - int(self._starts[file])}"

    def raw(self, index: int) -> np.ndarray:
        """The bytes of example `index`, uint8; none where it cannot be read."""
        try:
            return np.frombuffer(self._bytes(index), np.uint8)
        except _UNREADABLE as error:
            _raise_of_system(error)
            return np.zeros(0, np.uint8)

    def _bytes(self, index: int) -> bytes:
        return self._records[int(index if self._rows is None else self._rows[index])]

    def _read(self, index: int) -> dict[str, np.ndarray]:
        return with_weights(_arrays(self._bytes(index)), 0)

    def _first_form(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """The form of the first record that can be read."""
        for index in range(len(self)):
            try:
                return _form(self._read(index))
            except _UNREADABLE as error:
                _raise_of_system(error)
                self._bad.leave_out(self.origin(index), _reason(error))
        raise UserError(f"none of the {len(self):,} records of {self._paths[0]} and the other files can be read.")


def read_record_arrays(config: DataConfig) -> Splits:
    """Opens files of examples; they are read where batches need them.

    Args:
        config: `files`, and `eval_files` or `eval_fraction` (records are held out by the hash of their number);
            `bad_records`, how many each process may leave out.

    Raises:
        UserError: a pattern matches nothing, a file is no ArrayRecord, or a split holds no examples.
        BadDataError: the first record cannot be read, and none may be left out.
    """
    bad = BadRecords(config.bad_records, BadDataError)
    paths = _found(config.files, "data.files")
    if config.eval_files:
        sources = [RecordSource(paths, bad), RecordSource(_found(config.eval_files, "data.eval_files"), bad)]
    else:
        number = len(_open(paths))
        held_out = np.array([hash_fraction(b"%d" % row) < config.eval_fraction for row in range(number)], bool)
        kept = [~held_out, held_out] if config.eval_fraction else [~held_out]
        sources = [RecordSource(paths, bad, np.flatnonzero(rows)) for rows in kept]
    sizes = " and ".join(f"{len(source):,}" for source in sources)
    if not all(map(len, sources)):
        raise UserError(
            f"data.files: {sizes} records for training and evaluation; both need some. Give more records, change "
            "data.eval_fraction, or set it to 0 to go without evaluation."
        )
    if len(sources) > 1 and _form(sources[0][0]) != _form(sources[1][0]):
        raise UserError(f"training records are {_form(sources[0][0])}, evaluation records {_form(sources[1][0])}.")
    return Splits(
        train=sources[0],
        evaluation=sources[1] if len(sources) > 1 else None,
        vocabulary=config.vocabulary or None,
        description=f"arrayrecord: {', '.join(sources[0][0])}; {sizes} examples in {counted(len(paths), 'file')}",
        fingerprint=fingerprint(*_looked_at(sources)),
    )


class _NoExampleError(ValueError):
    """A record is no example; says why."""


_UNREADABLE = (RuntimeError, ValueError, OSError)
"""What reading a damaged record raises: of Riegeli, of NumPy, of the archive in it."""


def _found(patterns: tuple[str, ...], key: str) -> list[Path]:
    return [file.path for file in find_files(patterns, key=key, suffixes=SUFFIXES)]


def _open(paths: Sequence[Path]) -> Any:
    """The records of some files, by number."""
    try:
        import array_record.python.array_record_module  # noqa: F401  (what Grain's reader needs)
        import grain
    except ImportError as error:
        raise UserError(
            "data.source=arrayrecord needs array_record, which is not installed: pip install 'spmdkit[arrayrecord]'"
        ) from error
    try:
        return grain.sources.ArrayRecordDataSource([str(path) for path in paths])
    except RuntimeError as error:
        wrong = next((path for path in paths if not _opens(grain, path)), paths[0])
        reason = " ".join(str(error).split())[:200] or "its end is missing or damaged"
        raise UserError(
            f"{wrong}: it cannot be read as ArrayRecord: {reason}. Check that it was written to its end."
        ) from error


def _opens(grain: Any, path: Path) -> bool:
    try:
        return len(grain.sources.ArrayRecordDataSource([str(path)])) >= 0
    except RuntimeError:
        return False


def _document(record: bytes, dtype: str) -> bytes | np.ndarray:
    """The bytes of a text, or the ids of a document."""
    if record.startswith(ARCHIVE):
        raise _NoExampleError("it is an archive of arrays, not a text; set data.records: arrays.")
    if not dtype:
        return record
    if len(record) % np.dtype(dtype).itemsize:
        raise _NoExampleError(f"its {len(record):,} bytes are no whole number of {dtype}; check data.dtype.")
    return np.frombuffer(record, dtype)


def _arrays(record: bytes) -> dict[str, np.ndarray]:
    """The arrays of an example."""
    if not record.startswith(ARCHIVE):
        raise _NoExampleError(f"it is no archive of arrays. {WRITE} For texts and ids, leave data.records out.")
    try:
        with np.load(io.BytesIO(record)) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except Exception as error:  # whatever parsing garbage raises; objects are refused, since they are programs
        raise _NoExampleError(f"its arrays cannot be read: {' '.join(str(error).split())[:200]}. {WRITE}") from error
    wrong = [f"{name!r} holds {array.dtype}" for name, array in arrays.items() if is_no_number(array.dtype)]
    if wrong or not arrays:
        raise _NoExampleError(f"{', '.join(wrong) or 'it holds no arrays'}. {WRITE}")
    return arrays


def _form(example: dict[str, np.ndarray]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (str(array.dtype), array.shape) for name, array in sorted(example.items())}


def _raise_of_system(error: BaseException) -> None:
    """Raises an error of the file system, which is not that of what a file holds."""
    if getattr(error, "errno", None) is not None or isinstance(error, UserError):
        raise error


def _reason(error: BaseException) -> str:
    if isinstance(error, _NoExampleError):
        return str(error)
    return f"it cannot be read: {' '.join(str(error).split())[:300].rstrip('.')}."


def _looked_at(sources: Sequence[RecordSource]) -> tuple[Any, ...]:
    """What a fingerprint is made of: some records of every split, and the splits' sizes."""
    records = [
        source.raw(int(index))
        for source in sources
        for index in np.unique(np.linspace(0, len(source) - 1, LOOKED_AT).astype(int))
    ]
    return records, [len(source) for source in sources]

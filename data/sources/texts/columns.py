"""One column of JSONL or Parquet files: texts (as bytes), or lists of token ids. Each row is a document.

Rows are read into memory. They are split by their content, so equal rows fall on the same side. Missing (null) and
empty values hold no text and are left out.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ....mesh.errors import UserError
from ....mesh.near_miss import did_you_mean
from ....mesh.text import counted
from ...config import DataConfig
from ...source import BadDataError
from ..bad_records import BadRecords
from ..files import find_files
from .documents import Corpus, Document
from .text import BYTES, SEPARATOR
from .tokens import token_separator


def read_jsonl(patterns: tuple[str, ...], config: DataConfig, key: str) -> Corpus:
    """Reads one key of JSONL files (one JSON object per line; blank lines are skipped).

    Args:
        patterns: Files or globs, `*.jsonl`, `*.ndjson` or `*.json`.
        config: `column`, the key to read; `bad_records`, how many lines may be left out.
        key: Config key of the patterns, for messages.

    Raises:
        UserError: a pattern matches nothing; more lines than allowed are no JSON object, lack the key, or hold neither
            text nor ids.
    """
    files = find_files(patterns, key=key, suffixes=(".jsonl", ".ndjson", ".json"))
    return read_columns([file.path for file in files], _jsonl_values, config, key, "jsonl file")


def read_parquet(patterns: tuple[str, ...], config: DataConfig, key: str) -> Corpus:
    """Reads one column of Parquet files.

    Args:
        patterns: Files or globs, `*.parquet` or `*.pq`.
        config: `column`, the column to read; `bad_records`, how many rows may be left out.
        key: Config key of the patterns, for messages.

    Raises:
        UserError: a pattern matches nothing, the column is missing, more rows than allowed cannot be read or hold
            neither text nor ids, or pyarrow is not installed.
    """
    files = find_files(patterns, key=key, suffixes=(".parquet", ".pq"))
    return read_columns([file.path for file in files], _parquet_values, config, key, "parquet file")


Values = Callable[[Path, str, BadRecords], Iterable[tuple[str, Any]]]
"""(file, column, what to tell of records that cannot be read) -> where each value is in the file, and the value."""


def read_columns(paths: Sequence[Path], values: Values, config: DataConfig, key: str, kind: str) -> Corpus:
    """All rows of all files as a corpus of bytes, or of token ids.

    Args:
        paths: The files, in an order that does not depend on the machine.
        values: Reads one column of a file.
        config: `column`, `vocabulary`, `separator` and `bad_records`.
        key: Config key of the files, for messages.
        kind: What one of the files is, for people: "jsonl file".

    Raises:
        UserError: there is no text in them, texts and ids are mixed, or more rows than allowed cannot be read.
        BadDataError: a row holds an id outside the vocabulary of the config.
    """
    counts, bad = Counter[str](), BadRecords(config.bad_records)
    documents = [
        document
        for path in paths
        for document in _documents(path, values(path, config.column, bad), config.vocabulary, counts, bad)
    ]
    if not documents:
        raise UserError(_nothing_in(config.column, key, len(paths), counts))
    kinds = {document.ids.dtype for document in documents}
    if len(kinds) > 1:
        raise UserError(
            f"data.column={config.column!r} holds texts in some rows and token ids in others; give one kind."
        )
    described = f"rows ({counted(len(documents), 'row')} of {counted(len(paths), kind)}{bad.described()})"
    if kinds == {np.dtype(np.uint32)}:
        return Corpus(documents, token_separator(config), None, f"token id {described}")
    if config.separator >= 0 and documents and not config.tokenizer:
        raise UserError(
            f"data.separator={config.separator}: data.column={config.column!r} holds texts, which end with byte 0; "
            "leave data.separator out."
        )
    return Corpus(documents, SEPARATOR, BYTES, f"text {described}")


def _nothing_in(column: str, key: str, num_files: int, counts: Counter[str]) -> str:
    """Why there is no text at all."""
    files = counted(num_files, "file")
    if not counts["rows"]:
        return f"{key}: the {files} hold{'s' if num_files == 1 else ''} no rows. Give files with text in them."
    return (
        f"{key}: data.column={column!r} is null in {counts['null']:,} and empty in {counts['rows'] - counts['null']:,} "
        f"of {counts['rows']:,} rows of {files}, so there is no text. Set data.column to the column that holds it."
    )


def _documents(
    path: Path, values: Iterable[tuple[str, Any]], vocabulary: int, counts: Counter[str], bad: BadRecords
) -> Iterator[Document]:
    """Each row with something in it as a document of bytes (uint8) or of token ids (uint32); counts rows, and nulls."""
    name = str(path)
    for where, value in values:
        counts["rows"] += 1
        counts["null"] += value is None
        try:
            document = _document(value, where, vocabulary, name)
        except _Unreadable as error:
            bad.leave_out(where, str(error))
            continue
        if len(document.ids):
            yield document


class _Unreadable(Exception):
    """A row holds neither text nor ids; says why."""


def _document(value: Any, where: str, vocabulary: int, name: str) -> Document:
    """One row as a document."""
    if isinstance(value, str):
        value = _encoded(value)
    if isinstance(value, bytes):
        return Document(value, np.frombuffer(value, np.uint8), name)
    ids = _token_ids([] if value is None else value)
    _check_vocabulary(ids, vocabulary, where)
    return Document(ids.tobytes(), ids, name)


def _encoded(text: str) -> bytes:
    """A text as UTF-8."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise _Unreadable("the text holds half a character (a lone surrogate). Write it anew.") from None


def _token_ids(value: Any) -> np.ndarray:
    """A row's list of token ids."""
    try:
        ids = np.asarray(value)
    except ValueError:  # lists of different depths
        ids = np.asarray(None)
    if ids.ndim == 1 and len(ids) == 0:
        return ids.astype(np.uint32)
    if ids.ndim != 1 or ids.dtype.kind not in "ui" or ids.min() < 0 or ids.max() >= 2**31:
        raise _Unreadable(f"{str(value)[:60]!r} is neither a text nor a list of token ids in [0, 2**31).{_remedy(ids)}")
    return ids.astype(np.uint32)


def _remedy(ids: np.ndarray) -> str:
    return " Token ids are whole numbers: write them without a decimal point." if ids.dtype.kind == "f" else ""


def _check_vocabulary(ids: np.ndarray, vocabulary: int, where: str) -> None:
    """Raises where a row holds an id outside the vocabulary that the config gives; 0 gives none."""
    if vocabulary and len(ids) and ids.max() >= vocabulary:
        raise BadDataError(
            f"{where}: it holds token id {ids.max()}; data.vocabulary={vocabulary} allows 0 .. {vocabulary - 1}. Raise "
            "data.vocabulary (0 finds it), or mend the row."
        )


def _jsonl_values(path: Path, column: str, bad: BadRecords) -> Iterator[tuple[str, Any]]:
    """The values of one key, line by line."""
    offset, row = 0, 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}, line {number}"
            start, offset = offset, offset + len(line)
            if not line.strip():
                continue
            row += 1
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, or lists in lists without end
                bad.leave_out(where, f"it cannot be read as JSON: {error}. It begins at byte {start:,}.")
                continue
            if not isinstance(record, dict):
                bad.leave_out(where, f"a JSON {type(record).__name__}; each line is an object.")
            elif column not in record:
                bad.leave_out(where, unknown_column(column, list(record)))
            else:
                yield f"{path}, row {row}", record[column]


def _parquet_values(path: Path, column: str, bad: BadRecords) -> Iterator[tuple[str, Any]]:
    """The values of one column, row group by row group; what is left of one that cannot be read is left out."""
    try:
        import pyarrow.parquet as parquet
    except ModuleNotFoundError as error:
        raise UserError(
            "data.source=parquet needs pyarrow, which is not installed: pip install 'spmdkit[parquet]'"
        ) from error
    try:
        opened = parquet.ParquetFile(path, page_checksum_verification=True)
    except ValueError as error:
        raise UserError(f"{path}: it cannot be read as Parquet: {error}") from error
    row = 0
    with opened as file:
        names = file.schema_arrow.names
        if column not in names:
            raise UserError(f"{path}: {unknown_column(column, names)}")
        for group in range(file.num_row_groups):
            end = row + file.metadata.row_group(group).num_rows
            try:
                for batch in file.iter_batches(row_groups=[group], columns=[column]):
                    for value in batch.column(0):
                        row += 1
                        yield f"{path}, row {row}", plain_value(value)
            except (ValueError, OSError) as error:
                if getattr(error, "errno", None) is not None:  # of the file system, not of what the file holds
                    raise
                reason = f"row group {group}, from byte {_offset(file, group, column):,} on, cannot be read: "
                told = " ".join(str(error).split()).rstrip(".")
                bad.leave_out(f"{path}, rows {row + 1} to {end}", f"{reason}{told}.", end - row)
            row = end


def _offset(file: Any, group: int, column: str) -> int:
    """Where the first page of a column of a row group begins in the file."""
    chunks = file.metadata.row_group(group)
    each = (chunks.column(number) for number in range(chunks.num_columns))
    return next(chunk.data_page_offset for chunk in each if chunk.path_in_schema.split(".")[0] == column)


def plain_value(value: Any) -> Any:
    """The value of an Arrow scalar: a text, bytes, None, or an array of ids."""
    return value.values.to_numpy(zero_copy_only=False) if _is_list(value) else value.as_py()


def _is_list(value: Any) -> bool:
    """Whether an Arrow scalar is a list that is not null (its values then convert without passing through Python)."""
    return value.is_valid and hasattr(value, "values")


def unknown_column(column: str, names: list[str]) -> str:
    """That a column is not there, with those that are."""
    hint = did_you_mean(column, names, prefix="data.column: ")
    return f"there is no column {column!r} (data.column); the columns are {', '.join(names)}.{hint}"

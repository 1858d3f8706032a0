"""One column of JSONL or Parquet files: texts (as bytes), or lists of token ids. Each row is a document.

Rows are read into memory. They are split by their content, so equal rows are on the same side. Missing (null) and empty
values are left out.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...mesh.errors import UserError, counted, did_you_mean
from ..config import DataConfig
from ..source import BadDataError
from .source_files import BadRecords, explain_missing, find_files, raise_system_error, reason_of
from .texts import BYTES, SEPARATOR, Corpus, Document

Values = Callable[[Path, str, BadRecords], Iterable[tuple[str, Any]]]
"""(file, column, counter of bad records) -> pairs of the place of a value in the file, and the value."""


def read_jsonl(patterns: tuple[str, ...], config: DataConfig, key: str) -> Corpus:
    """Reads one key of JSONL files (one JSON object per line; blank lines are skipped).

    Args:
        patterns: Files or globs, `*.jsonl`, `*.ndjson` or `*.json`.
        config: `column`, the key to read; `bad_records`, the maximum number of lines to leave out.
        key: Config key of the patterns, for messages.

    Raises:
        UserError: A pattern does not match any file; more lines than allowed are not a JSON object, lack the key, or
            have neither text nor ids.
    """
    files = find_files(patterns, key=key, suffixes=(".jsonl", ".ndjson", ".json"))
    return read_columns([file.path for file in files], _jsonl_values, config, key, "jsonl file")


def read_parquet(patterns: tuple[str, ...], config: DataConfig, key: str) -> Corpus:
    """Reads one column of Parquet files.

    Args:
        patterns: Files or globs, `*.parquet` or `*.pq`.
        config: `column`, the column to read; `bad_records`, the maximum number of rows to leave out.
        key: Config key of the patterns, for messages.

    Raises:
        UserError: A pattern does not match any file, the column is missing, more rows than allowed cannot be read or
            have neither text nor ids, or pyarrow is not installed.
    """
    files = find_files(patterns, key=key, suffixes=(".parquet", ".pq"))
    return read_columns([file.path for file in files], _parquet_values, config, key, "parquet file")


def read_columns(paths: Sequence[Path], values: Values, config: DataConfig, key: str, kind: str) -> Corpus:
    """Returns all rows of all files as a corpus of bytes, or of token ids.

    Args:
        paths: The files, in an order that does not depend on the machine.
        values: Reads one column of a file.
        config: `column`, `vocabulary`, `separator` and `bad_records`.
        key: Config key of the files, for messages.
        kind: A name for one of the files: "jsonl file".

    Raises:
        UserError: Text is missing, texts and ids are mixed, or more rows than allowed cannot be read.
        BadDataError: A row has an id outside the vocabulary of the config.
    """
    bad = BadRecords(config.bad_records)
    documents = []
    for path in paths:
        for where, value in values(path, config.column, bad):
            try:
                document = _document(value, where, config.vocabulary, str(path))
            except _UnreadableRow as error:
                bad.leave_out(where, str(error))
                continue
            if len(document.ids):
                documents.append(document)
    files = counted(len(paths), kind)
    if not documents:
        raise UserError(
            f"{key}: data.column={config.column!r} of {files} lacks text: every row is null or empty. Give files with "
            "text, or set data.column to the column that has it."
        )
    kinds = {document.ids.dtype for document in documents}
    if len(kinds) > 1:
        raise UserError(f"data.column={config.column!r} has texts in some rows and token ids in others; give one kind.")
    described = f"rows ({counted(len(documents), 'row')} of {files}{bad.description()})"
    if kinds == {np.dtype(np.uint32)}:
        return Corpus(documents, config.document_end, None, f"token id {described}")
    if config.separator >= 0 and not config.tokenizer:
        raise UserError(f"data.separator={config.separator}: texts end with byte 0; leave data.separator out.")
    return Corpus(documents, SEPARATOR, BYTES, f"text {described}")


class _UnreadableRow(Exception):
    """A row with neither text nor ids."""


def _document(value: Any, where: str, vocabulary: int, name: str) -> Document:
    """Returns a row as a document of bytes (uint8) or of token ids (uint32)."""
    if isinstance(value, str):
        try:
            value = value.encode()
        except UnicodeEncodeError:
            raise _UnreadableRow("the text contains an unpaired surrogate. Write it again.") from None
    if isinstance(value, bytes):
        return Document(value, np.frombuffer(value, np.uint8), name)
    ids = _token_ids([] if value is None else value)
    if vocabulary and len(ids) and ids.max() >= vocabulary:
        raise BadDataError(
            f"{where}: invalid token id {ids.max()}; data.vocabulary={vocabulary} allows 0 .. {vocabulary - 1}. Raise "
            "data.vocabulary (0 finds it), or fix the row."
        )
    return Document(ids.tobytes(), ids, name)


def _token_ids(value: Any) -> np.ndarray:
    """Returns a row's list of token ids."""
    try:
        ids = np.asarray(value)
    except ValueError:  # lists of different depths
        ids = np.asarray(None)
    if ids.ndim == 1 and len(ids) == 0:
        return ids.astype(np.uint32)
    if ids.ndim != 1 or ids.dtype.kind not in "ui" or ids.min() < 0 or ids.max() >= 2**31:
        fix = ""
        if ids.dtype.kind == "f":
            fix = " Token ids must be integers: write them without a decimal point."
        raise _UnreadableRow(f"expected a text or a list of token ids in [0, 2**31), got {str(value)[:60]!r}.{fix}")
    return ids.astype(np.uint32)


def _jsonl_values(path: Path, column: str, bad: BadRecords) -> Iterator[tuple[str, Any]]:
    """Yields the values of one key, line by line."""
    row = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}, line {number}"
            if not line.strip():
                continue
            row += 1
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                bad.leave_out(where, f"it cannot be read as JSON: {error}.")
                continue
            if not isinstance(record, dict):
                bad.leave_out(where, f"each line must be a JSON object, got a {type(record).__name__}.")
            elif column not in record:
                bad.leave_out(where, unknown_column(column, list(record)))
            else:
                yield f"{path}, row {row}", record[column]


def _parquet_values(path: Path, column: str, bad: BadRecords) -> Iterator[tuple[str, Any]]:
    """Yields the values of one column; leaves out the rest of a row group that cannot be read."""
    with explain_missing("data.source=parquet", "pyarrow", "parquet"):
        import pyarrow.parquet as parquet
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
                raise_system_error(error)
                reason = f"row group {group} cannot be read: {reason_of(error)}."
                bad.leave_out(f"{path}, rows {row + 1} to {end}", reason, end - row)
            row = end


def plain_value(value: Any) -> Any:
    """Returns the value of an Arrow scalar: a text, bytes, None, or an array of ids."""
    if value.is_valid and hasattr(value, "values"):  # a list, converted without a Python object per id
        return value.values.to_numpy(zero_copy_only=False)
    return value.as_py()


def unknown_column(column: str, names: list[str]) -> str:
    """Returns the message about a missing column, with the existing ones."""
    hint = did_you_mean(column, names, prefix="data.column: ")
    return f"unknown column {column!r} (data.column); the columns are {', '.join(names)}.{hint}"

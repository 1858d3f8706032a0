"""One column of JSONL or Parquet files: texts (as bytes), or lists of token ids. Each row is a document.

Rows are read into memory. They are split by their content, so equal rows fall on the same side. Missing (null) and
empty values hold no text and are left out.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..mesh.errors import UserError
from ..mesh.near_miss import did_you_mean
from .config import DataConfig
from .documents import Corpus, Document
from .files import find_files
from .source import BadDataError
from .text import BYTES, SEPARATOR
from .tokens import token_separator


def read_jsonl(patterns: tuple[str, ...], config: DataConfig, key: str) -> Corpus:
    """Reads one key of JSONL files (one JSON object per line; blank lines are skipped).

    Args:
        patterns: Files or globs, `*.jsonl`, `*.ndjson` or `*.json`.
        config: `column`, the key to read.
        key: Config key of the patterns, for messages.

    Raises:
        UserError: a pattern matches nothing, a line is no JSON object, lacks the key, or holds neither text nor ids.
    """
    return _read_columns(patterns, config, key, (".jsonl", ".ndjson", ".json"), _jsonl_values)


def read_parquet(patterns: tuple[str, ...], config: DataConfig, key: str) -> Corpus:
    """Reads one column of Parquet files.

    Args:
        patterns: Files or globs, `*.parquet` or `*.pq`.
        config: `column`, the column to read.
        key: Config key of the patterns, for messages.

    Raises:
        UserError: a pattern matches nothing, the column is missing or holds neither text nor ids, or pyarrow is not
            installed.
    """
    return _read_columns(patterns, config, key, (".parquet", ".pq"), _parquet_values)


def _read_columns(
    patterns: tuple[str, ...],
    config: DataConfig,
    key: str,
    suffixes: tuple[str, ...],
    values: Callable[[Path, str], Iterable[Any]],
) -> Corpus:
    """All rows of all files as a corpus of bytes, or of token ids."""
    files = find_files(patterns, key=key, suffixes=suffixes)
    counts = Counter[str]()
    documents = [
        document
        for file in files
        for document in _documents(file.path, values(file.path, config.column), config.vocabulary, counts)
    ]
    if not documents:
        raise UserError(_nothing_in(config.column, key, len(files), counts))
    kinds = {document.ids.dtype for document in documents}
    if len(kinds) > 1:
        raise UserError(
            f"data.column={config.column!r} holds texts in some rows and token ids in others; give one kind."
        )
    described = f"rows ({len(documents):,} rows of {len(files):,} {suffixes[0][1:]} files)"
    if kinds == {np.dtype(np.uint32)}:
        return Corpus(documents, token_separator(config), None, f"token id {described}")
    if config.separator >= 0 and documents:
        raise UserError(
            f"data.separator={config.separator}: data.column={config.column!r} holds texts, which end with byte 0; "
            "leave data.separator out."
        )
    return Corpus(documents, SEPARATOR, BYTES, f"text {described}")


def _nothing_in(column: str, key: str, num_files: int, counts: Counter[str]) -> str:
    """Why there is no text at all."""
    files = "1 file" if num_files == 1 else f"{num_files:,} files"
    if not counts["rows"]:
        return f"{key}: the {files} hold no rows. Give files with text in them."
    return (
        f"{key}: data.column={column!r} is null in {counts['null']:,} and empty in {counts['rows'] - counts['null']:,} "
        f"of {counts['rows']:,} rows of {files}, so there is no text. Set data.column to the column that holds it."
    )


def _documents(path: Path, values: Iterable[Any], vocabulary: int, counts: Counter[str]) -> Iterator[Document]:
    """Each row with something in it as a document of bytes (uint8) or of token ids (uint32); counts rows, and nulls."""
    name = str(path)
    for row, value in enumerate(values, 1):
        counts["rows"] += 1
        counts["null"] += value is None
        if isinstance(value, str):
            value = _encoded(value, f"{path}, row {row}")
        if isinstance(value, bytes):
            ids = np.frombuffer(value, np.uint8)
        else:
            ids = _token_ids([] if value is None else value, f"{path}, row {row}")
            _check_vocabulary(ids, vocabulary, f"{path}, row {row}")
            value = ids.tobytes()
        if len(ids):
            yield Document(value, ids, name)


def _encoded(text: str, where: str) -> bytes:
    """A text as UTF-8."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{where}: the text holds half a character (a lone surrogate). Write it anew.") from None


def _token_ids(value: Any, where: str) -> np.ndarray:
    """A row's list of token ids."""
    try:
        ids = np.asarray(value)
    except ValueError:  # lists of different depths
        ids = np.asarray(None)
    if ids.ndim == 1 and len(ids) == 0:
        return ids.astype(np.uint32)
    if ids.ndim != 1 or ids.dtype.kind not in "ui" or ids.min() < 0 or ids.max() >= 2**31:
        raise UserError(
            f"{where}: {str(value)[:60]!r} is neither a text nor a list of token ids in [0, 2**31).{_remedy(ids)}"
        )
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


def _jsonl_values(path: Path, column: str) -> Iterator[Any]:
    """The values of one key, line by line."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, or lists in lists without end
                raise UserError(f"{path}, line {number}: it cannot be read as JSON: {error}.") from None
            if not isinstance(record, dict):
                raise UserError(f"{path}, line {number}: a JSON {type(record).__name__}; each line is an object.")
            if column not in record:
                raise UserError(f"{path}, line {number}: {_unknown_column(column, list(record))}")
            yield record[column]


def _parquet_values(path: Path, column: str) -> Iterator[Any]:
    """The values of one column, row group by row group."""
    try:
        import pyarrow.parquet as parquet
    except ModuleNotFoundError as error:
        raise UserError(
            "data.source=parquet needs pyarrow, which is not installed: pip install 'spmdkit[parquet]'"
        ) from error
    try:
        opened = parquet.ParquetFile(path)
    except ValueError as error:
        raise UserError(f"{path}: it cannot be read as Parquet: {error}") from error
    with opened as file:
        names = file.schema_arrow.names
        if column not in names:
            raise UserError(f"{path}: {_unknown_column(column, names)}")
        for batch in file.iter_batches(columns=[column]):
            for value in batch.column(0):
                yield value.values.to_numpy(zero_copy_only=False) if _is_list(value) else value.as_py()


def _is_list(value: Any) -> bool:
    """Whether an Arrow scalar is a list that is not null (its values then convert without passing through Python)."""
    return value.is_valid and hasattr(value, "values")


def _unknown_column(column: str, names: list[str]) -> str:
    hint = did_you_mean(column, names, prefix="data.column: ")
    return f"there is no column {column!r} (data.column); the columns are {', '.join(names)}.{hint}"

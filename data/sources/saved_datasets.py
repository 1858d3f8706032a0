"""Hugging Face datasets as `Dataset.save_to_disk` leaves them: a folder of Arrow files, read without their library.

    data.records: documents    one column: texts (as bytes) or lists of token ids, each row a document
    data.records: arrays       every column that holds numbers is an array of its name, each row an example

Rows are read into memory. To leave a large dataset in its files, give `datasets.load_from_disk(...)` to
`spmdkit.data.from_dataset`.
"""

import glob
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ...mesh.errors import UserError
from ..config import DataConfig
from ..source import Splits
from .arrays import from_arrays, held_out_rows
from .bad_records import BadRecords
from .texts.columns import plain_value, read_columns, unknown_column
from .texts.documents import Corpus

STATE, SPLITS = "state.json", "dataset_dict.json"


def read_saved(patterns: tuple[str, ...], config: DataConfig, key: str) -> Corpus:
    """Reads one column of saved datasets.

    Args:
        patterns: Folders or globs of folders, each with the state.json of `save_to_disk`.
        config: `column`, the column to read; `bad_records`, how many rows may be left out.
        key: Config key of the patterns, for messages.

    Raises:
        UserError: a pattern matches no saved dataset, the column is missing or holds neither text nor ids, a file is
            damaged, or pyarrow is not installed.
    """
    return read_columns(_files(patterns, key), _values, config, key, "Arrow file")


def read_saved_arrays(config: DataConfig) -> Splits:
    """Reads the columns of saved datasets that hold numbers, into memory.

    Args:
        config: `files`, and `eval_files` or `eval_fraction` (rows are held out by the hash of their number).

    Raises:
        UserError: As `read_saved`, or the rows of a column have different shapes.
        BadDataError: As `from_arrays`.
    """
    (arrays, left_out), vocabulary = _arrays(config.files, "data.files"), config.vocabulary or None
    if config.eval_files:
        evaluation, _ = _arrays(config.eval_files, "data.eval_files")
        splits = from_arrays(arrays, evaluation, vocabulary=vocabulary)
    else:
        splits = held_out_rows(arrays, config.eval_fraction, vocabulary)
    told = f"; no numbers in {', '.join(left_out)}, left out" if left_out else ""
    return splits._replace(description=f"huggingface: {splits.description}{told}")


def _files(patterns: tuple[str, ...], key: str) -> list[Path]:
    """The Arrow files of all datasets that the patterns match, in the order in which the datasets hold them."""
    files: list[Path] = []
    for pattern in patterns:
        matches = sorted(glob.glob(os.path.expanduser(pattern), recursive=True))
        folders = [Path(match) for match in matches if os.path.isfile(os.path.join(match, STATE))]
        if not folders:
            raise UserError(f"{key}: {pattern!r} matches no dataset saved on disk{_instead(matches)}")
        files += [file for folder in folders for file in _files_of(folder)]
    missing = [file for file in files if not file.is_file()]
    if missing:
        raise UserError(f"{missing[0]} is not there, and {STATE} beside it names it. Copy the whole folder.")
    return list(dict.fromkeys(files))


def _files_of(folder: Path) -> list[Path]:
    """The Arrow files of one dataset."""
    try:
        names = [each["filename"] for each in json.loads((folder / STATE).read_bytes())["_data_files"]]
        return [folder / os.path.basename(name) for name in names]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder / STATE} is damaged: {type(error).__name__}: {error}. Save it anew.") from None


def _instead(matches: list[str]) -> str:
    """What a pattern matches in place of a dataset."""
    for match in matches:
        if os.path.isfile(os.path.join(match, SPLITS)):
            names = sorted(path.parent.name for path in Path(match).glob(f"*/{STATE}"))
            if names:
                return f": it holds the splits {', '.join(names)}; name one, as {os.path.join(match, names[0])!r}."
    return f" (a folder with {STATE}). Write it with Dataset.save_to_disk."


def _values(path: Path, column: str, bad: BadRecords) -> Iterator[tuple[str, Any]]:
    """The values of one column of an Arrow file."""
    row = 0
    try:
        for batch in _batches(path):
            if column not in batch.schema.names:
                raise UserError(f"{path}: {unknown_column(column, batch.schema.names)}")
            for value in batch.column(column):
                row += 1
                yield f"{path}, row {row}", plain_value(value)
    except (ValueError, OSError) as error:
        if getattr(error, "errno", None) is not None or isinstance(error, UserError):
            raise
        reason = f"what follows cannot be read: {' '.join(str(error).split()).rstrip('.')}."
        bad.leave_out(f"{path}, after row {row}", reason)


def _arrays(patterns: tuple[str, ...], key: str) -> tuple[dict[str, np.ndarray], list[str]]:
    """Every column that holds numbers, over all files; and the names of the others."""
    parts: dict[str, list[np.ndarray]] = {}
    left_out: dict[str, None] = {}
    for path in _files(patterns, key):
        try:
            batches = [*_batches(path)]
        except (ValueError, OSError) as error:
            if getattr(error, "errno", None) is not None or isinstance(error, UserError):
                raise
            raise UserError(
                f"{path}: it cannot be read as Arrow: {' '.join(str(error).split())}. Save it anew."
            ) from None
        for batch in batches:
            for name in batch.schema.names:
                array = _numbers(batch.column(name), f"{path}: column {name!r}")
                if array is None:
                    left_out[name] = None
                else:
                    parts.setdefault(name, []).append(array)
    if not parts:
        raise UserError(f"{key}: no column holds numbers; for texts and token ids, leave data.records out.")
    return {name: _joined(arrays, name) for name, arrays in parts.items()}, list(left_out)


def _batches(path: Path) -> Iterator[Any]:
    """The batches of an Arrow stream, mapped into memory."""
    try:
        import pyarrow
    except ModuleNotFoundError as error:
        raise UserError(
            "data.source=huggingface needs pyarrow, which is not installed: pip install 'spmdkit[parquet]'"
        ) from error
    with pyarrow.memory_map(str(path)) as file, pyarrow.ipc.open_stream(file) as stream:
        yield from stream


def _numbers(column: Any, where: str) -> np.ndarray | None:
    """An Arrow array as a NumPy one, lists of lists as further dims; None of texts and the like."""
    if column.null_count:
        raise UserError(
            f"{where} holds {column.null_count} null of {len(column)} rows; an example has all its numbers."
        )
    if hasattr(column, "flatten") and hasattr(column, "value_lengths"):
        inner = _numbers(column.flatten(), where)
        lengths = set(column.value_lengths().to_pylist())
        if inner is not None and len(lengths) > 1:
            raise UserError(
                f"{where} holds lists of the lengths {sorted(lengths)[:5]}; all rows need the same. Pad them, or for "
                "token ids leave data.records out."
            )
        return None if inner is None else inner.reshape(len(column), *lengths, *inner.shape[1:])
    array = column.to_numpy(zero_copy_only=False)
    return array if array.dtype.kind in "biuf" else None


def _joined(arrays: list[np.ndarray], name: str) -> np.ndarray:
    shapes = {array.shape[1:] for array in arrays}
    if len(shapes) > 1:
        raise UserError(f"rows of column {name!r} have the shapes {sorted(shapes)}; all need the same. Pad them.")
    return np.concatenate(arrays)

"""Hugging Face datasets saved with `Dataset.save_to_disk`, read with the `datasets` library.

    data.records: documents    one column: texts (as bytes) or lists of token ids, each row a document
    data.records: arrays       every column of numbers is an array of its name, each row an example

Rows are read into memory. To leave a large dataset in its files, give `datasets.load_from_disk(...)` to
`spmdkit.data.from_dataset`.
"""

import glob
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ...mesh.errors import UserError
from ..config import DataConfig
from ..source import Splits
from .arrays import from_arrays, held_out_rows
from .columns import plain_value, read_columns, unknown_column
from .source_files import BadRecords, explain_missing, raise_system_error, reason_of
from .texts import Corpus


def read_saved(patterns: tuple[str, ...], config: DataConfig, key: str) -> Corpus:
    """Reads one column of saved datasets.

    Args:
        patterns: Directories written by `save_to_disk`, or globs of them.
        config: `column`, the column to read; `bad_records`, the maximum number of rows to leave out.
        key: Config key of the patterns, for messages.

    Raises:
        UserError: A pattern does not match any saved dataset, the column is missing or has neither text nor ids, a file
            is corrupt, or `datasets` is not installed.
    """
    return read_columns(_find(patterns, key), _values, config, key, "saved dataset")


def read_saved_arrays(config: DataConfig) -> Splits:
    """Reads the columns of numbers of saved datasets into memory.

    Args:
        config: `files`, and `eval_files` or `eval_fraction` (rows are held out by the hash of their number).

    Raises:
        UserError: See `read_saved`; or the rows of a column have different shapes.
        BadDataError: See `from_arrays`.
    """
    (arrays, left_out), vocabulary = _arrays(config.files, "data.files"), config.vocabulary or None
    if config.eval_files:
        evaluation, _ = _arrays(config.eval_files, "data.eval_files")
        splits = from_arrays(arrays, evaluation, vocabulary=vocabulary)
    else:
        splits = held_out_rows(arrays, config.eval_fraction, vocabulary)
    without = f"; without {', '.join(left_out)} (not numbers)" if left_out else ""
    return splits._replace(description=f"huggingface: {splits.description}{without}")


def _find(patterns: tuple[str, ...], key: str) -> list[Path]:
    """Returns the directories of all datasets that the patterns match."""
    found: dict[Path, None] = {}
    for pattern in patterns:
        matches = [Path(match) for match in sorted(glob.glob(os.path.expanduser(pattern), recursive=True))]
        saved = [path for path in matches if (path / "state.json").is_file()]
        if not saved:
            splits = sorted(file.parent for path in matches for file in path.glob("*/state.json"))
            fix = f"Give one of its splits, such as {str(splits[0])!r}" if splits else "Write it with save_to_disk"
            raise UserError(f"{key}: no dataset saved on disk matches {pattern!r}. {fix}.")
        found |= dict.fromkeys(saved)
    return list(found)


def _load(directory: Path) -> Any:
    """Returns a saved dataset, mapped into memory."""
    with explain_missing("data.source=huggingface", "datasets", "datasets"):
        import datasets
    try:
        return datasets.load_from_disk(str(directory))
    except Exception as error:  # the library raises errors of Arrow, JSON and its own
        if not isinstance(error, FileNotFoundError):
            raise_system_error(error)
        raise UserError(f"{directory} cannot be read as a saved dataset: {reason_of(error)}. Save it again.") from error


def _values(path: Path, column: str, bad: BadRecords) -> Iterator[tuple[str, Any]]:
    """Yields the values of one column of a saved dataset."""
    del bad
    dataset = _load(path)
    if column not in dataset.column_names:
        raise UserError(f"{path}: {unknown_column(column, dataset.column_names)}")
    for row, value in enumerate(dataset.data.column(column), 1):
        yield f"{path}, row {row}", plain_value(value)


def _arrays(patterns: tuple[str, ...], key: str) -> tuple[dict[str, np.ndarray], list[str]]:
    """Returns every column of numbers, over all datasets, and the names of the other columns."""
    parts: dict[str, list[np.ndarray]] = {}
    left_out: dict[str, None] = {}
    for path in _find(patterns, key):
        dataset = _load(path)
        for name in dataset.column_names:
            for chunk in dataset.data.column(name).chunks:
                array = _numbers(chunk, f"{path}: column {name!r}")
                if array is None:
                    left_out[name] = None
                else:
                    parts.setdefault(name, []).append(array)
    if not parts:
        raise UserError(f"{key}: no column contains numbers; for texts and token ids, leave data.records out.")
    return {name: _join(arrays, name) for name, arrays in parts.items()}, list(left_out)


def _numbers(column: Any, where: str) -> np.ndarray | None:
    """Returns an Arrow array as a NumPy array, with lists of lists as further dims; None if it is not numeric."""
    is_list = hasattr(column, "value_lengths")
    inner = _numbers(column.flatten(), where) if is_list else column.to_numpy(zero_copy_only=False)
    if inner is None or (not is_list and inner.dtype.kind not in "biuf"):
        return None
    if column.null_count:
        raise UserError(
            f"{where}: {column.null_count} of {len(column)} rows are null; an example must have all its numbers."
        )
    if not is_list:
        return inner
    lengths = set(column.value_lengths().to_pylist())
    if len(lengths) > 1:
        raise UserError(
            f"{where} has lists of the lengths {sorted(lengths)[:5]}; all rows must have the same. Pad them, or for "
            "token ids leave data.records out."
        )
    return inner.reshape(len(column), *lengths, *inner.shape[1:])


def _join(arrays: list[np.ndarray], name: str) -> np.ndarray:
    shapes = {array.shape[1:] for array in arrays}
    if len(shapes) > 1:
        raise UserError(f"rows of column {name!r} have the shapes {sorted(shapes)}; all must have the same. Pad them.")
    return np.concatenate(arrays)

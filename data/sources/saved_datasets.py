"""Hugging Face datasets saved with `Dataset.save_to_disk`, read with the `datasets` library.

    data.records: documents    one column: texts (as bytes) or lists of token ids, each row a document
    data.records: arrays       every column of numbers is an array of its name, each row an example

Documents are read into memory. Examples stay in their files and are read when batches need them.
"""

import glob
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ...mesh.errors import UserError
from ..config import DataConfig
from ..examples import is_numeric
from ..source import Splits
from .columns import plain_value, read_columns, unknown_column
from .datasets import from_dataset
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
    """Opens saved datasets whose columns of numbers are the arrays of examples.

    Args:
        config: `files`, and `eval_files` or `eval_fraction` (rows are held out by the hash of their number).

    Raises:
        UserError: See `read_saved`; or no column contains numbers.
    """
    train = _open_numbers(config.files, "data.files")
    evaluation = _open_numbers(config.eval_files, "data.eval_files") if config.eval_files else None
    splits = from_dataset(train, evaluation, eval_fraction=config.eval_fraction, vocabulary=config.vocabulary or None)
    columns = ", ".join(train.column_names)
    return splits._replace(description=f"huggingface: {splits.description} with the columns {columns}")


def _open_numbers(patterns: tuple[str, ...], key: str) -> Any:
    """Returns the rows of all datasets, with the columns of numbers as NumPy arrays."""
    import datasets

    try:
        dataset = datasets.concatenate_datasets([_load(path) for path in _find(patterns, key)]).with_format("numpy")
    except ValueError as error:
        raise UserError(f"{key}: the datasets do not fit together: {reason_of(error)}.") from error
    first = dataset[0] if len(dataset) else {}
    numeric = [name for name, value in first.items() if is_numeric(np.asarray(value).dtype)]
    if not numeric:
        raise UserError(f"{key}: no column contains numbers; for texts and token ids, leave data.records out.")
    return dataset.select_columns(numeric)


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

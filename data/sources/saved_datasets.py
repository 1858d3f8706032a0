"""Hugging Face datasets saved with `Dataset.save_to_disk`, read with the `datasets` library.

    data.records: documents    one column: texts (as bytes) or lists of token ids, each row a document
    data.records: arrays       every column of numbers is an array of its name, each row an example

Documents are read into memory. Examples stay in their files and are read when batches need them.
"""

import glob
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ...mesh.errors import UserError, hub_hint
from ..config import DataConfig
from ..source import Splits, spread_indices
from ..value_ranges import Limit, Limits, checked
from .columns import plain_value, read_columns, unknown_column
from .datasets import SAMPLED, from_dataset
from .source_files import BadRecords, explain_missing, raise_system_error, reason_of
from .texts import Corpus

NUMBER = re.compile(r"bool|u?int\d+|float\d+")
"""The types of numbers, as `datasets` names them."""


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
    """Opens saved datasets; their columns of numbers are the arrays of examples.

    Args:
        config: `files`, and `eval_files` or `eval_fraction` (rows are held out by the hash of their number).

    Raises:
        UserError: See `read_saved`; or no column contains numbers, numbers are missing (null), or the rows of a column
            have different shapes.
        BadDataError: A number of the sampled rows is not finite, or not a token id of the vocabulary.
    """
    train, left_out = _open_numbers(config.files, "data.files")
    evaluation = _open_numbers(config.eval_files, "data.eval_files")[0] if config.eval_files else None
    vocabulary = config.vocabulary or None
    splits = from_dataset(train, evaluation, eval_fraction=config.eval_fraction, vocabulary=vocabulary)
    limits = Limits(inputs=Limit("vocabulary", vocabulary) if vocabulary else None)
    for name, source in splits.by_name().items():
        checked(source, limits, name)(np.array(spread_indices(len(source), SAMPLED)))
    columns = ", ".join(train.column_names)
    without = f"; without {', '.join(left_out)} (not numbers)" if left_out else ""
    return splits._replace(description=f"huggingface: {splits.description} with the columns {columns}{without}")


def _open_numbers(patterns: tuple[str, ...], key: str) -> tuple[Any, list[str]]:
    """Returns the rows of all datasets, with the columns of numbers as NumPy arrays, and the names of the others."""
    paths = _find(patterns, key)
    parts = [_load(path) for path in paths]
    import datasets

    try:
        dataset = datasets.concatenate_datasets(parts).with_format("numpy")
    except ValueError as error:
        raise UserError(f"{key}: the datasets do not fit together: {reason_of(error)}.") from error
    numeric = [name for name, feature in dataset.features.items() if _is_numeric(feature)]
    if not numeric:
        raise UserError(f"{key}: no column contains numbers; for texts and token ids, leave data.records out.")
    for name in numeric:
        shapes = set()
        for path, part in zip(paths, parts, strict=True):
            where = f"{path}: column {name!r}"
            shapes |= {_row_shape(chunk, where) for chunk in part.data.column(name).chunks if len(chunk)}
        if len(shapes) > 1:
            raise UserError(f"{key}: column {name!r} has rows of the shapes {sorted(shapes)}; pad them to one.")
    return dataset.select_columns(numeric), [name for name in dataset.column_names if name not in numeric]


def _is_numeric(feature: Any) -> bool:
    """Returns whether a column's type is a number, or lists or arrays of numbers."""
    inner = getattr(feature, "feature", None)
    return _is_numeric(inner) if inner is not None else bool(NUMBER.fullmatch(str(getattr(feature, "dtype", ""))))


def _row_shape(column: Any, where: str) -> tuple[int, ...]:
    """Returns the shape of all rows of an Arrow array of numbers, or of lists of them, which must not be null."""
    column = getattr(column, "storage", column)
    if column.null_count:
        raise UserError(f"{where}: {column.null_count} of {len(column)} rows are null; examples must be complete.")
    if not hasattr(column, "flatten") or not column.type.num_fields:
        return ()
    inner = column.flatten()
    lengths = set(column.value_lengths().to_pylist())
    if len(lengths) > 1:
        raise UserError(
            f"{where} has lists of the lengths {sorted(lengths)[:5]}; all rows must have the same. Pad them, or for "
            "token ids leave data.records out."
        )
    return (*lengths, *_row_shape(inner, where))


def _find(patterns: tuple[str, ...], key: str) -> list[Path]:
    """Returns the directories of all datasets that the patterns match."""
    found: dict[Path, None] = {}
    for pattern in patterns:
        matches = [Path(match) for match in sorted(glob.glob(os.path.expanduser(pattern), recursive=True))]
        saved = [path for path in matches if (path / "state.json").is_file()]
        if not saved:
            splits = sorted(file.parent for path in matches for file in path.glob("*/state.json"))
            fix = f"Give one of its splits, such as {str(splits[0])!r}" if splits else "Write it with save_to_disk"
            hint = hub_hint(pattern, "dataset")
            raise UserError(f"{key}: no dataset saved on disk matches {pattern!r}. {fix}.{hint}")
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


def _values(path: Path, column: str, _: BadRecords) -> Iterator[tuple[str, Any]]:
    """Yields the values of one column of a saved dataset."""
    dataset = _load(path)
    if column not in dataset.column_names:
        raise UserError(f"{path}: {unknown_column(column, dataset.column_names)}")
    for row, value in enumerate(dataset.data.column(column), 1):
        yield f"{path}, row {row}", plain_value(value)

"""Rows of CSV and Parquet files as examples: columns of numbers are the inputs, one column is the target.

    inputs     float32 (columns,)    data.columns, in their order; by default every column but the target
    targets    float32 () for a column of floats; int32 () for integers, booleans, and texts (numbered in sorted order)

The tables are read into memory with pyarrow.
"""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from ...mesh.errors import UserError, counted, unknown_name
from ..config import DataConfig
from ..source import BadDataError, Splits
from .arrays import ArraySource, Origin, divide_source, make_splits, origin_in
from .source_files import explain_missing, find_files, reason_of

SUFFIXES = {"csv": (".csv", ".tsv"), "parquet": (".parquet", ".pq")}


def read_table(config: DataConfig) -> Splits:
    """Reads tables with an example in each row.

    Args:
        config: `source` (csv or parquet), `target`, `columns`, `files`, and `eval_files` or `eval_fraction` (rows are
            held out by the hash of their number).

    Raises:
        UserError: A pattern does not match any file, a file cannot be parsed, a column is missing or contains texts, a
            split would have no rows, or pyarrow is not installed.
        BadDataError: A column has empty cells, or numbers that are not finite.
    """
    tables = [_read(config.files, config, "data.files")]
    if config.eval_files:
        tables.append(_read(config.eval_files, config, "data.eval_files"))
    columns = _input_columns(tables[0][0], config)
    targets = [_values(table, config.target, origin) for table, origin in tables]
    classes: list[str] = []
    if any(column.dtype.kind in "OU" for column in targets):
        classes = sorted(set(map(str, chain.from_iterable(targets))))
        targets = [np.searchsorted(classes, column.astype(str)) for column in targets]
    floating = any(column.dtype.kind == "f" for column in targets)
    sources = []
    for (table, origin), target in zip(tables, targets, strict=True):
        inputs = np.stack([_numbers(table, name, columns, origin) for name in columns], axis=1)
        target = target.astype(np.float32 if floating else _integer_type(target))
        sources.append(ArraySource({"inputs": inputs, "targets": target}, origin))
    splits = make_splits(sources) if config.eval_files else divide_source(sources[0], config.eval_fraction)
    sizes = " and ".join(f"{len(split):,}" for split in (splits.train, splits.evaluation) if split is not None)
    target = f"{config.target!r} ({len(classes)} classes)" if classes else repr(config.target)
    described = f"{config.source}: {counted(len(columns), 'input column')}, target {target}; {sizes} examples"
    return splits._replace(description=described)


def _read(patterns: tuple[str, ...], config: DataConfig, key: str) -> tuple[Any, Origin]:
    """Reads the tables of all files into one, with the number of rows of each file."""
    paths = [file.path for file in find_files(patterns, key=key, suffixes=SUFFIXES[config.source])]
    tables = [_read_file(path, config.source, key) for path in paths]
    for path, table in zip(paths, tables, strict=True):
        if set(table.column_names) != set(tables[0].column_names):
            raise UserError(
                f"{key}: {path} has the columns {', '.join(table.column_names)}, but {paths[0]} has "
                f"{', '.join(tables[0].column_names)}. All files need the same columns."
            )
    import pyarrow

    rows = [(str(path), table.num_rows) for path, table in zip(paths, tables, strict=True)]
    try:
        return pyarrow.concat_tables(tables, promote_options="permissive"), origin_in(rows)
    except pyarrow.ArrowException as error:
        raise UserError(f"{key}: the files do not fit together: {reason_of(error)}.") from None


def _read_file(path: Path, source: str, key: str) -> Any:
    """Reads one file as a pyarrow table."""
    with explain_missing(f"data.source={source}", "pyarrow", "parquet"):
        import pyarrow
        from pyarrow import csv, parquet
    try:
        if source == "parquet":
            return parquet.read_table(path)
        options = csv.ParseOptions(delimiter="\t" if path.suffix == ".tsv" else ",")
        return csv.read_csv(path, parse_options=options)
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise UserError(f"{key}: {path} cannot be read as {source}: {reason_of(error)}.") from None


def _input_columns(table: Any, config: DataConfig) -> Sequence[str]:
    """Returns the names of the input columns, after checking that all columns exist."""
    names = table.column_names
    for key, columns in (("data.target", (config.target,)), ("data.columns", config.columns)):
        for name in columns:
            if name not in names:
                raise UserError(f"{key}: {unknown_name('column', name, names)}")
    columns = config.columns or tuple(name for name in names if name != config.target)
    if config.target in columns:
        raise UserError(f"data.columns includes data.target={config.target!r}: the model would read its own target.")
    if not columns:
        raise UserError(f"data.target={config.target!r} is the only column, and the model needs inputs.")
    return columns


def _integer_type(values: np.ndarray) -> type[np.integer]:
    """Returns int32 if all values fit; otherwise int64, which the check of the values rejects with the row."""
    fits = not len(values) or (values.min() >= -(2**31) and values.max() < 2**31)
    return np.int32 if fits else np.int64


def _numbers(table: Any, name: str, columns: Sequence[str], origin: Origin) -> np.ndarray:
    """Returns one input column as float32 (rows,)."""
    values = _values(table, name, origin)
    if values.dtype.kind not in "biuf":
        numeric = [column for column in columns if _values(table, column, origin).dtype.kind in "biuf"]
        raise UserError(
            f"data.columns: column {name!r} contains {table.schema.field(name).type}, not numbers. Encode it as "
            f"numbers, or choose the inputs: data.columns: [{', '.join(numeric)}]."
        )
    return values.astype(np.float32)


def _values(table: Any, name: str, origin: Origin) -> np.ndarray:
    """Returns one column as an array, after checking that no cell is empty."""
    column = table.column(name)
    if column.null_count:
        first = column.is_null().index(True).as_py()
        raise BadDataError(
            f"{origin(first)}: column {name!r} is empty ({column.null_count:,} of {len(column):,} cells are). "
            "Fill in or remove these rows, or leave the column out of data.columns."
        )
    return column.to_numpy()

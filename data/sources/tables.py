"""Rows of CSV and Parquet files as examples: columns of numbers are the inputs, one column is the target.

    inputs     float32 (columns,)    data.columns, in their order; by default every column but the target
    targets    float32 () for a column of floats; int32 () for integers, booleans, and texts (numbered in sorted order)

The tables are read into memory with pyarrow.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...mesh.errors import UserError, counted, did_you_mean
from ..config import DataConfig
from ..source import BadDataError, Splits
from .arrays import Origin, held_out_rows, make_splits
from .source_files import explain_missing, find_files, reason_of

SUFFIXES = {"csv": (".csv", ".tsv"), "parquet": (".parquet", ".pq")}


def read_table(config: DataConfig) -> Splits:
    """Reads tables whose rows are examples.

    Args:
        config: `source` (csv or parquet), `target`, `columns`, `files`, and `eval_files` or `eval_fraction` (rows are
            held out by the hash of their number).

    Raises:
        UserError: A pattern does not match any file, a file cannot be parsed, a column is missing or contains texts, a
            split would have no rows, or pyarrow is not installed.
        BadDataError: A column has empty cells, or numbers that are not finite.
    """
    table, origin = _read(config.files, config, "data.files")
    columns = _input_columns(table, config)
    if not config.eval_files:
        arrays, classes = _arrays([table], columns, config, [origin])
        splits = held_out_rows(arrays[0], config.eval_fraction, origin=origin)
    else:
        held_out, eval_origin = _read(config.eval_files, config, "data.eval_files")
        arrays, classes = _arrays([table, held_out], columns, config, [origin, eval_origin])
        splits = make_splits(arrays[0], arrays[1], origins=(origin, eval_origin))
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
        return pyarrow.concat_tables(tables, promote_options="permissive"), Origin(rows)
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
    for key, wanted in (("data.target", (config.target,)), ("data.columns", config.columns)):
        for name in wanted:
            if name not in names:
                raise UserError(
                    f"{key}: unknown column {name!r}. The table has {', '.join(names)}.{did_you_mean(name, names)}"
                )
    columns = config.columns or tuple(name for name in names if name != config.target)
    if config.target in columns:
        raise UserError(f"data.columns includes data.target={config.target!r}: the model would read its own target.")
    if not columns:
        raise UserError(f"data.target={config.target!r} is the only column, and the model needs inputs.")
    return columns


def _arrays(
    tables: Sequence[Any], columns: Sequence[str], config: DataConfig, origins: Sequence[Origin]
) -> tuple[list[dict[str, np.ndarray]], list[str]]:
    """Returns inputs and targets of each table, and the sorted classes if the target is a column of texts."""
    pairs = [*zip(tables, origins, strict=True)]
    texts = [_values(table, config.target, origin) for table, origin in pairs]
    classes: list[str] = []
    if any(text.dtype.kind in "OU" for text in texts):
        classes = sorted({str(value) for text in texts for value in text})
        texts = [np.searchsorted(classes, text.astype(str)) for text in texts]
    floating = any(text.dtype.kind == "f" for text in texts)
    targets = [text.astype(np.float32 if floating else _integer_type(text)) for text in texts]
    inputs = [np.stack([_numbers(table, name, columns, origin) for name in columns], axis=1) for table, origin in pairs]
    return [{"inputs": each, "targets": target} for each, target in zip(inputs, targets, strict=True)], classes


def _integer_type(values: np.ndarray) -> type[np.integer]:
    """Returns int32 if all values fit; otherwise int64, which the check of the values rejects with the row."""
    fits = not len(values) or (values.min() >= -(2**31) and values.max() < 2**31)
    return np.int32 if fits else np.int64


def _numbers(table: Any, name: str, columns: Sequence[str], origin: Origin) -> np.ndarray:
    """Returns one input column as float32 (rows,)."""
    values = _values(table, name, origin)
    if values.dtype.kind not in "biuf":
        numeric = [each for each in columns if table.schema.field(each).type not in _text_types()]
        raise UserError(
            f"data.columns: column {name!r} contains {table.schema.field(name).type}, not numbers. Encode it as "
            f"numbers, or choose the inputs: data.columns: [{', '.join(numeric)}]."
        )
    return values.astype(np.float32)


def _text_types() -> tuple[Any, ...]:
    import pyarrow

    return pyarrow.string(), pyarrow.large_string(), pyarrow.null(), pyarrow.binary()


def _values(table: Any, name: str, origin: Origin) -> np.ndarray:
    """Returns one column as an array, after checking that no cell is empty."""
    column = table.column(name)
    if column.null_count:
        first = column.is_null().index(True).as_py()
        raise BadDataError(
            f"{origin.describe(first)}: column {name!r} is empty ({column.null_count:,} of {len(column):,} cells are). "
            "Fill in or remove these rows, or leave the column out of data.columns."
        )
    return column.to_numpy()

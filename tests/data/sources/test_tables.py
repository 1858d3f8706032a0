"""Rows of CSV and Parquet tables as examples."""

from pathlib import Path

import numpy as np
import pytest
from spmdkit.data import BadDataError, DataConfig, open_splits

ROWS = 200


def write_csv(path: Path, rows: int = ROWS) -> Path:
    """A table of two columns of numbers, a column of texts, and two possible targets."""
    lines = [f"{row},{row / 2},town-{row % 3},{['no', 'yes'][row % 2]},{row / 4}" for row in range(rows)]
    path.write_text("\n".join(["rooms,area,town,sold,price", *lines]) + "\n")
    return path


def config(path: Path, **options) -> DataConfig:
    return DataConfig(
        **{"source": "csv", "files": (str(path),), "target": "price", "columns": ("rooms", "area")} | options
    )


def all_examples(splits):
    parts = [part for part in (splits.train, splits.evaluation) if part is not None]
    return [part[index] for part in parts for index in range(len(part))]


def test_splits_rows_into_inputs_and_a_target(tmp_path):
    splits = open_splits(config(write_csv(tmp_path / "homes.csv"), eval_fraction=0.2))
    assert splits.evaluation is not None
    assert len(splits.evaluation) == pytest.approx(ROWS / 5, abs=15)
    examples = sorted(all_examples(splits), key=lambda each: float(each["targets"]))
    assert [each["inputs"].tolist() for each in examples] == [[row, row / 2] for row in range(ROWS)]
    assert [float(each["targets"]) for each in examples] == [row / 4 for row in range(ROWS)]
    assert {(each["inputs"].dtype.name, each["targets"].dtype.name) for each in examples} == {("float32", "float32")}
    assert splits.description.startswith("csv: 2 input columns, target 'price'; ")


def test_numbers_texts_as_classes_in_sorted_order(tmp_path):
    splits = open_splits(config(write_csv(tmp_path / "homes.csv"), target="sold", eval_fraction=0.0))
    assert splits.evaluation is None
    assert [int(splits.train[row]["targets"]) for row in range(4)] == [0, 1, 0, 1]
    assert splits.train[0]["targets"].dtype == np.int32
    assert "target 'sold' (2 classes)" in splits.description


@pytest.mark.parametrize(
    ("rows", "held_out", "dtype", "targets"),
    [("1,cat\n2,dog\n", "3,dog\n4,ant\n", "int32", [1, 2, 2, 0]), ("1,2\n", "3,2.5\n", "float32", [2.0, 2.5])],
)
def test_targets_of_both_files_have_one_numbering_and_dtype(rows, held_out, dtype, targets, tmp_path):
    (tmp_path / "train.csv").write_text(f"x,y\n{rows}")
    (tmp_path / "held-out.csv").write_text(f"x,y\n{held_out}")
    options = {"eval_files": (str(tmp_path / "held-out.csv"),), "target": "y", "columns": ()}
    found = [each["targets"] for each in all_examples(open_splits(config(tmp_path / "train.csv", **options)))]
    assert [(each.dtype.name, float(each)) for each in found] == [(dtype, target) for target in targets]


def test_large_integers_are_not_wrapped(tmp_path):
    (tmp_path / "train.csv").write_text(f"x,y\n1,{2**31}\n")
    with pytest.raises(BadDataError, match="2147483648, which does not fit int32"):
        open_splits(config(tmp_path / "train.csv", target="y", columns=(), eval_fraction=0.0))


def test_reads_the_same_from_parquet_and_tsv(tmp_path):
    from pyarrow import csv, parquet

    path = write_csv(tmp_path / "homes.csv")
    parquet.write_table(csv.read_csv(path), tmp_path / "homes.parquet")
    (tmp_path / "homes.tsv").write_text(path.read_text().replace(",", "\t"))
    expected = open_splits(config(path))
    for source, name in (("parquet", "homes.parquet"), ("csv", "homes.tsv")):
        found = open_splits(config(tmp_path / name, source=source))
        assert found.fingerprint == expected.fingerprint


def test_the_column_order_of_a_second_file_does_not_matter(tmp_path):
    (tmp_path / "a.csv").write_text("x,y\n1,10\n")
    (tmp_path / "b.csv").write_text("y,x\n20.5,2\n")
    splits = open_splits(config(tmp_path / "*.csv", target="y", columns=(), eval_fraction=0.0))
    assert [(each["inputs"].tolist(), float(each["targets"])) for each in all_examples(splits)] == [
        ([1], 10),
        ([2], 20.5),
    ]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("x,y\n1,2\n", {"target": "z"}, r"data\.target: Unknown column 'z'; known: x, y"),
        ("x,y\n1,2\n", {"columns": ("xx",)}, r"data\.columns: Unknown column 'xx'.*Did you mean 'x'\?"),
        ("x,y\n1,2\n", {"columns": ("x", "y")}, "the model would read its own target"),
        ("y\n2\n", {}, "is the only column, and the model needs inputs"),
        ("x,t,y\n1,a,2\n", {}, r"column 't' contains string, not numbers\. Encode .* data\.columns: \[x\]"),
        ("x,y\n1,2\n1,2,3\n", {}, "cannot be read as csv: .*Expected 2 columns, got 3"),
        ("", {}, "cannot be read as csv: Empty CSV file"),
        ("x,y\n1,2\n,3\n2,3\n", {}, r"row 1 of .*table\.csv: column 'x' is empty \(1 of 3 cells are\)"),
        ("x,y\n1,2\nnan,3\n2,3\n", {}, r"row 1 of .*table\.csv: column 'x' is empty"),
        ("x,y\n1,2\ninf,3\n2,3\n", {}, r"row 1 of .*table\.csv\) at \[0\] is inf: not a finite number"),
    ],
)
def test_rejects_invalid_tables(text, options, message, tmp_path):
    """A bad cell is bad data, exit code 3."""
    (tmp_path / "table.csv").write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        open_splits(config(tmp_path / "table.csv", **{"target": "y", "columns": (), "eval_fraction": 0.0} | options))
    assert isinstance(caught.value, BadDataError) == message.startswith("row 1")


def test_rejects_files_with_other_columns(tmp_path):
    (tmp_path / "a.csv").write_text("x,y\n1,10\n")
    (tmp_path / "b.csv").write_text("x,z\n1,10\n")
    with pytest.raises(ValueError, match=r"b\.csv has the columns x, z, but .*a\.csv has x, y"):
        open_splits(config(tmp_path / "*.csv", target="y", columns=()))

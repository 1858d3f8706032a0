"""Documents in one example are told apart, from every source of tokens."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from spmdkit.data import DataConfig, open_splits
from spmdkit.data.packing import mark_documents
from spmdkit.data.source import take


def rows_of(marks):
    return {name: rows[0].tolist() for name, rows in marks.items()}


def test_documents_in_an_example():
    assert rows_of(mark_documents(np.array([[5, 6, 0, 7, 8, 0, 9]], np.int32), 0)) == {
        "segments": [0, 0, 0, 1, 1, 1, 2],
        "positions": [0, 1, 2, 0, 1, 2, 0],
        "weights": [1, 1, 0, 1, 1, 0, 1],
    }


def test_an_example_of_one_document_and_one_of_ends_alone():
    inputs = np.array([[5, 6, 7], [0, 0, 0], [5, 6, 0]], np.int32)
    marks = mark_documents(inputs, 0)
    assert marks["segments"].tolist() == [[0, 0, 0], [0, 1, 2], [0, 0, 0]]
    assert marks["positions"].tolist() == [[0, 1, 2], [0, 0, 0], [0, 1, 2]]
    assert marks["weights"].tolist() == [[1, 1, 1], [0, 0, 0], [1, 1, 0]]
    assert {name: str(rows.dtype) for name, rows in marks.items()} == {
        "segments": "int32",
        "positions": "int32",
        "weights": "float32",
    }


TEXTS = ["ab", "cde", "f"]
IDS = [[7, 8], [9, 10, 11], [12]]


def make(tmp_path, kind):
    """A source whose stream is two tokens, an end, three, an end, one, an end."""
    path, options = tmp_path / kind.replace(" ", "."), {"eval_fraction": 0.0, "length": 7}
    if kind == "text":
        for number, text in enumerate(TEXTS):
            (tmp_path / f"{number}.txt").write_text(text)
        return options | {"source": "text", "files": (f"{tmp_path}/*.txt",)}
    if kind == "tokens":
        np.save(f"{path}.npy", np.array([7, 8, 99, 9, 10, 11, 99, 12, 99], np.uint16))
        return options | {"source": "tokens", "files": (f"{path}.npy",), "separator": 99}
    rows = [{"text": value} for value in (TEXTS if kind.startswith("texts") else IDS)]
    if kind.endswith("jsonl"):
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        parquet.write_table(pa.Table.from_pylist(rows), path)
    separator = {} if kind.startswith("texts") else {"separator": 99}
    return options | {"source": kind.split()[1], "files": (str(path),), **separator}


KINDS = ["text", "tokens", "texts jsonl", "texts parquet", "ids jsonl", "ids parquet"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_source_tells_documents_apart(tmp_path, kind):
    splits = open_splits(DataConfig(**make(tmp_path, kind), packed=True))
    example = splits.train[0]
    assert example["segments"].tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert example["positions"].tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert example["weights"].tolist() == [1, 1, 0, 1, 1, 1, 0]
    end = 99 if "separator" in make(tmp_path, kind) else 0
    assert (example["inputs"] == end).tolist() == [False, False, True, False, False, False, True]
    assert (splits.vocabulary or 0) > end


@pytest.mark.parametrize("kind", KINDS)
def test_unless_told_so_examples_are_as_ever(tmp_path, kind):
    splits = open_splits(DataConfig(**make(tmp_path, kind)))
    assert sorted(splits.train[0]) == ["inputs", "targets", "weights"]
    assert splits.train[0]["weights"].all()
    assert splits.fingerprint != open_splits(DataConfig(**make(tmp_path, kind), packed=True)).fingerprint


def test_the_standard_librarys_files():
    splits = open_splits(DataConfig(packed=True, length=4096))
    batch = take(splits.train, np.arange(64))
    assert batch["segments"].max() >= 1
    assert np.array_equal(batch["weights"] == 0, batch["inputs"] == 0)
    assert np.array_equal(np.diff(batch["segments"], axis=1) == 1, batch["positions"][:, 1:] == 0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"separator": 3},
            r"data\.separator=3: data\.source=stdlib ends each text with byte 0; leave data\.separator out",
        ),
        ({"source": "synthetic", "packed": True}, r"data\.packed=True: data\.source=synthetic holds no documents"),
        ({"source": "tokens", "files": ("a",), "packed": True}, r"set data\.separator to the token id that ends"),
        ({"source": "tokens", "files": ("a",), "separator": -2}, r"data\.separator=-2: it is a token id, from 0"),
        (
            {"source": "tokens", "files": ("a",), "separator": 9, "vocabulary": 9},
            r"data\.separator=9: data\.vocabulary=9 has the ids 0 to 8 alone",
        ),
    ],
)
def test_what_cannot_be_packed(values, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**values)


def test_rows_of_ids_need_a_separator_and_rows_of_texts_have_one(tmp_path):
    ids, texts = make(tmp_path, "ids jsonl"), make(tmp_path, "texts jsonl")
    with pytest.raises(ValueError, match=r"data\.packed=True: the token id rows .* set data\.separator to an id"):
        open_splits(DataConfig(**(ids | {"separator": -1}), packed=True))
    with pytest.raises(ValueError, match=r"data\.separator=5: data\.column='text' holds texts, which end with byte 0"):
        open_splits(DataConfig(**texts, separator=5))

"""Windows tile streams: every token but a stream's first is a target once, and nothing is copied before it is read."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from spmdkit.data import DataConfig, open_splits
from spmdkit.data.source import BadDataError
from spmdkit.data.sources.texts import Document
from spmdkit.data.windows import WindowSource, mark_documents


def source(*sizes, length=4, vocabulary=None):
    streams = [Document(b"", np.arange(size, dtype=np.uint16) + 1000 * i, f"s{i}") for i, size in enumerate(sizes)]
    return WindowSource(streams, length, vocabulary)


@pytest.mark.parametrize(("size", "windows"), [(0, 0), (4, 0), (5, 1), (8, 1), (9, 2), (101, 25)])
def test_number_of_windows(size, windows):
    assert len(source(size)) == windows


def test_an_example():
    example = source(9)[1]
    assert example["inputs"].tolist() == [4, 5, 6, 7]
    assert example["targets"].tolist() == [5, 6, 7, 8]
    assert {name: (str(value.dtype), value.shape) for name, value in example.items()} == {
        "inputs": ("int32", (4,)),
        "targets": ("int32", (4,)),
        "weights": ("float32", (4,)),
    }


def test_every_token_is_a_target_once():
    windows = source(41)
    assert np.concatenate([windows[i]["targets"] for i in range(len(windows))]).tolist() == list(range(1, 41))


def test_windows_never_span_streams():
    windows = source(9, 3, 6)  # 2, 0 and 1 windows
    batch = windows.take(np.arange(3))
    assert batch["inputs"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [2000, 2001, 2002, 2003]]
    assert batch["targets"][2].tolist() == [2001, 2002, 2003, 2004]


def test_take_is_the_stack_of_examples():
    windows = source(90, 5, 33)
    indices = np.array([25, 3, 21, 3, 22])
    batch = windows.take(indices)
    for name, rows in batch.items():
        assert np.array_equal(rows, np.stack([windows[int(i)][name] for i in indices]))
        assert rows.flags.c_contiguous


@pytest.mark.parametrize("index", [-1, 2])
def test_no_example_outside(index):
    with pytest.raises(IndexError, match=f"example {index} of 2"):
        source(9)[index]


def test_rejects_ids_outside_vocabulary():
    windows = source(90, 33, vocabulary=1000)
    windows.take(np.arange(22))
    with pytest.raises(BadDataError, match=r"s1 contains token id 1004; data\.vocabulary=1000 allows 0 \.\. 999"):
        windows.take(np.array([0, 22]))
    with pytest.raises(BadDataError, match=r"It is token 4 of this split's part of the file, in example 22\."):
        windows.take(np.array([22]))


@pytest.mark.parametrize(("dtype", "value"), [(np.int64, -1), (np.int64, 2**32 + 1), (np.uint32, 2**31 + 1)])
def test_ids_that_do_not_fit_int32_are_loud(dtype, value):
    ids = np.ones(10, dtype)
    ids[3] = value
    with pytest.raises(BadDataError, match=f"token id {value};"):
        WindowSource([Document(b"", ids, "s")], 4, vocabulary=2**31 - 1)[0]


def test_marks_documents():
    inputs = np.array([[5, 6, 0, 7, 8, 0, 9], [5, 6, 7, 8, 9, 5, 6], [0, 0, 0, 5, 6, 7, 0]], np.int32)
    marks = mark_documents(inputs, 0)
    assert marks["segments"].tolist() == [[0, 0, 0, 1, 1, 1, 2], [0] * 7, [0, 1, 2, 3, 3, 3, 3]]
    assert marks["positions"].tolist() == [[0, 1, 2, 0, 1, 2, 0], [*range(7)], [0, 0, 0, 0, 1, 2, 3]]
    assert marks["weights"].tolist() == [[1, 1, 0, 1, 1, 0, 1], [1] * 7, [0, 0, 0, 1, 1, 1, 0]]
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
    plain = open_splits(DataConfig(**make(tmp_path, kind)))
    assert sorted(plain.train[0]) == ["inputs", "targets", "weights"]
    assert plain.train[0]["weights"].all()
    assert plain.fingerprint != splits.fingerprint


def test_id_0_can_end_documents(tmp_path):
    np.save(tmp_path / "ids.npy", np.array([7, 8, 0, 9, 10, 11, 0, 12, 0], np.uint16))
    given = {"source": "tokens", "files": (f"{tmp_path}/ids.npy",), "eval_fraction": 0.0, "length": 7}
    example = open_splits(DataConfig(**given, separator=0, packed=True)).train[0]
    assert example["segments"].tolist() == [0, 0, 0, 1, 1, 1, 1]


def test_rows_of_ids_need_a_separator_and_rows_of_texts_have_one(tmp_path):
    ids, texts = make(tmp_path, "ids jsonl"), make(tmp_path, "texts jsonl")
    with pytest.raises(ValueError, match=r"data\.packed=True: the token id rows .* set data\.separator"):
        open_splits(DataConfig(**(ids | {"separator": -1}), packed=True))
    with pytest.raises(ValueError, match=r"data\.separator=5: texts end with byte 0"):
        open_splits(DataConfig(**texts, separator=5))

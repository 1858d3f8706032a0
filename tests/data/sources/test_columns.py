"""Columns of JSONL and Parquet: texts as bytes, or lists of token ids."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from spmdkit.data import DataConfig, open_splits

TEXTS = ["first text", "", "zweiter, mit Ünicode", "third"]
TOKENS = [[1, 2, 3], [], [70000, 5], [6, 7, 8, 9]]


def write(path, rows):
    if path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n", encoding="utf-8")
    return str(path)


def open_columns(path, **options):
    source = "parquet" if path.endswith("parquet") else "jsonl"
    return open_splits(DataConfig(source=source, files=(path,), **({"length": 4, "eval_fraction": 0.0} | options)))


def ids_of(source):
    inputs = [source[i]["inputs"] for i in range(len(source))]
    return np.concatenate([*inputs, source[len(source) - 1]["targets"][-1:]])


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_reads_texts_and_token_ids(tmp_path, name):
    rows = zip([*TEXTS, None], [*TOKENS, None], strict=True)
    path = write(tmp_path / name, [{"text": text, "ids": ids} for text, ids in rows])
    texts, tokens = open_columns(path, length=1), open_columns(path, column="ids", length=1)
    assert ids_of(texts.train).astype(np.uint8).tobytes() == b"".join(t.encode() + b"\0" for t in TEXTS if t)
    assert ids_of(tokens.train).tolist() == [1, 2, 3, 70000, 5, 6, 7, 8, 9]
    assert (texts.vocabulary, tokens.vocabulary) == (256, 70001)


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_kinds_of_parquet_columns(tmp_path, kind):
    column = pa.array([b"some" if kind == pa.binary() else "some", None]).cast(kind)
    parquet.write_table(pa.table({"text": column}), tmp_path / "t.parquet")
    splits = open_columns(str(tmp_path / "t.parquet"), length=1)
    assert ids_of(splits.train).astype(np.uint8).tobytes() == b"some\0"


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_rows_are_split_by_content(tmp_path, name):
    rows = [{"text": f"row number {i % 400:03}"} for i in range(800)]  # every row twice
    there = open_columns(write(tmp_path / name, rows), length=15, eval_fraction=0.1)
    back = open_columns(write(tmp_path / ("back" + name), rows[::-1]), length=15, eval_fraction=0.1)

    def texts(source):
        return {bytes(source[i]["inputs"].astype(np.uint8)) for i in range(len(source))}

    assert texts(there.evaluation) == texts(back.evaluation)
    assert not texts(there.evaluation) & texts(there.train)
    assert len(texts(there.evaluation)) == pytest.approx(40, abs=15)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_unknown_column(tmp_path, name):
    path = write(tmp_path / name, [{"texts": "a", "id": 1}])
    with pytest.raises(
        ValueError, match=r"rows.*unknown column 'text' \(data\.column\); the columns are texts, id\. Did you mean"
    ):
        open_columns(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": [1, -2]}', r"row 2: expected .*got '\[1, -2\]'"),
        (b'{"text": [1.5]}', r"row 2: expected .*got '\[1\.5\]'"),
        (b'{"text": [1, [2]]}', r"row 2: expected .*got '\[1, \[2\]\]'"),
        (b'{"text": [1, 2]}', r"data\.column='text' has texts in some rows and token ids in others"),
    ],
)
def test_bad_lines(tmp_path, line, message):
    (tmp_path / "rows.jsonl").write_bytes(b'{"text": "good"}\n' + line + b"\n")
    with pytest.raises(ValueError, match=message):
        open_columns(str(tmp_path / "rows.jsonl"))


def test_bad_parquet(tmp_path):
    (tmp_path / "rows.parquet").write_bytes(b"no parquet at all")
    with pytest.raises(ValueError, match=r"rows\.parquet: it cannot be read as Parquet"):
        open_columns(str(tmp_path / "rows.parquet"))
    write(tmp_path / "rows.parquet", [{"text": 1.5}])
    with pytest.raises(ValueError, match=r"row 1: expected a text or a list of token ids .*got '1\.5'"):
        open_columns(str(tmp_path / "rows.parquet"))

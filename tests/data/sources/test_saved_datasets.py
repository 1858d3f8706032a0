"""Datasets saved on disk; `saved/` was written by Hugging Face datasets 5, `Dataset.save_to_disk`.

Its five rows: text, ids (lists of token ids), vector (two numbers) and label. `saved/dict` holds the splits train and
test, the latter three rows of a shuffled and selected dataset.
"""

import builtins
import shutil
from pathlib import Path

import numpy as np
import pytest
from spmdkit.data import BadDataError, DataConfig, open_splits

SAVED = Path(__file__).parent / "saved"


def open_saved(*folders, **options):
    files = tuple(str(SAVED / folder) for folder in folders)
    given = {"length": 1, "eval_fraction": 0.0, "files": files} | options
    return open_splits(DataConfig(source="huggingface", **given))


def ids_of(source):
    inputs = [source[i]["inputs"] for i in range(len(source))]
    return np.concatenate([*inputs, source[len(source) - 1]["targets"][-1:]])


@pytest.mark.parametrize("folder", ["sharded", "dict/train"])
def test_texts(folder):
    splits = open_saved(folder)
    assert ids_of(splits.train).astype(np.uint8).tobytes().decode() == "first text\0zweiter, mit Ünicode\0third\0"
    assert splits.vocabulary == 256


def test_a_selection_in_its_order():
    assert ids_of(open_saved("dict/test").train).astype(np.uint8).tobytes().decode() == "zweiter, mit Ünicode\0third\0"


def test_token_ids():
    assert ids_of(open_saved("sharded", column="ids").train).tolist() == [1, 2, 3, 70000, 5, 6, 7, 8, 9]


def test_columns_of_numbers():
    with pytest.raises(ValueError, match=r"column 'ids'.* lists of the lengths \[0, 2, 3\]"):
        open_saved("sharded", records="arrays")


@pytest.fixture
def numbers(tmp_path):
    """A dataset of columns of numbers, in the same form."""
    import pyarrow as pa

    def write(folder, /, **columns):
        (tmp_path / folder).mkdir()
        table = pa.table(columns)
        with (
            pa.OSFile(str(tmp_path / folder / "data.arrow"), "wb") as file,
            pa.ipc.new_stream(file, table.schema) as out,
        ):
            out.write_table(table, max_chunksize=2)
        (tmp_path / folder / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
        return str(tmp_path / folder)

    return write


def test_arrays_of_every_column_that_holds_numbers(numbers):
    import pyarrow as pa

    nested = pa.array([[[1, 2], [3, 4]], [[5, 6], [7, 8]], [[0, 0], [9, 9]]])
    folder = numbers("n", image=nested, label=pa.array([1, 0, 1], pa.int8()), name=pa.array(["a", "b", "c"]))
    splits = open_saved(files=(folder,), records="arrays")
    assert set(splits.train[0]) == {"image", "label", "weights"}
    assert splits.description == (
        "huggingface: arrays image, label in memory: 3 examples, none for evaluation; no numbers in name, left out"
    )
    assert splits.train[2]["image"].tolist() == [[0, 0], [9, 9]]
    assert splits.train[2]["label"].dtype == np.int8
    both = open_saved(files=(folder,), eval_files=(folder,), records="arrays")
    assert len(both.evaluation) == 3


def test_numbers_that_are_missing_or_wrong(numbers):
    import pyarrow as pa

    with pytest.raises(ValueError, match=r"column 'label' holds 1 null of 2 rows"):
        open_saved(files=(numbers("a", label=pa.array([1, None])),), records="arrays")
    with pytest.raises(BadDataError, match="is inf"):
        open_saved(files=(numbers("b", inputs=pa.array([1.0, float("inf")])),), records="arrays")
    with pytest.raises(ValueError, match="no column holds numbers"):
        open_saved(files=(numbers("c", text=pa.array(["a"])),), records="arrays")


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("dict", r"matches no dataset saved on disk: it holds the splits test, train; name one, as '.*dict/test'"),
        ("nothing", r"matches no dataset saved on disk \(a folder with state\.json\)\. Write it with"),
        ("sharded/state.json", "matches no dataset saved on disk"),
    ],
)
def test_folders_that_are_none(folder, message):
    with pytest.raises(ValueError, match=message):
        open_saved(folder)


def test_a_column_that_is_not_there():
    with pytest.raises(ValueError, match=r"no column 'texts'.*columns are text, ids, vector, label.*mean .*text\?"):
        open_saved("sharded", column="texts")


def test_damage_names_the_file(tmp_path):
    shutil.copytree(SAVED / "sharded", tmp_path / "d")
    (tmp_path / "d" / "data-00001-of-00002.arrow").write_bytes(b"\xff" * 500)
    with pytest.raises(ValueError, match=r"data-00001-of-00002\.arrow, after row 0: what follows cannot be read"):
        open_saved(files=(str(tmp_path / "d"),))
    kept = open_saved(files=(str(tmp_path / "d"),), bad_records=1)
    assert ids_of(kept.train).astype(np.uint8).tobytes().decode() == "first text\0zweiter, mit Ünicode\0"
    (tmp_path / "d" / "data-00000-of-00002.arrow").unlink()
    with pytest.raises(
        ValueError, match=r"data-00000-of-00002\.arrow is not there, and state\.json beside it names it"
    ):
        open_saved(files=(str(tmp_path / "d"),))
    (tmp_path / "d" / "state.json").write_text("{")
    with pytest.raises(ValueError, match=r"state\.json is damaged"):
        open_saved(files=(str(tmp_path / "d"),))


def test_pyarrow_that_is_missing(monkeypatch):
    real = builtins.__import__

    def missing(name, *arguments, **options):
        if name.startswith("pyarrow"):
            raise ModuleNotFoundError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ValueError, match=r"needs pyarrow, which is not installed: pip install 'spmdkit\[parquet\]'"):
        open_saved("sharded")

"""Datasets saved with `save_to_disk`: documents, arrays, and invalid directories.

`saved/` was written by Hugging Face datasets 5: five rows with text, ids (lists of token ids), vector (two numbers) and
label. `saved/dict` has the splits train and test; test has three rows of a shuffled and selected dataset.
"""

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from spmdkit.data import DataConfig, open_splits
from spmdkit.data.source import BadDataError

datasets = pytest.importorskip("datasets")
SAVED = Path(__file__).parent / "saved"


def open_saved(*directories, **options):
    files = tuple(str(SAVED / directory) for directory in directories)
    given = {"length": 1, "eval_fraction": 0.0, "files": files} | options
    return open_splits(DataConfig(source="huggingface", **given))


def ids_of(source):
    inputs = [source[i]["inputs"] for i in range(len(source))]
    return np.concatenate([*inputs, source[len(source) - 1]["targets"][-1:]])


@pytest.mark.parametrize(
    ("directory", "expected"),
    [
        ("sharded", "first text\0zweiter, mit Ünicode\0third\0"),
        ("dict/train", "first text\0zweiter, mit Ünicode\0third\0"),
        ("dict/test", "zweiter, mit Ünicode\0third\0"),
    ],
)
def test_reads_texts_in_order(directory, expected):
    splits = open_saved(directory)
    assert ids_of(splits.train).astype(np.uint8).tobytes().decode() == expected
    assert splits.vocabulary == 256


def test_reads_token_ids():
    assert ids_of(open_saved("sharded", column="ids").train).tolist() == [1, 2, 3, 70000, 5, 6, 7, 8, 9]


@pytest.fixture
def save(tmp_path):
    def write(directory, /, **columns):
        datasets.Dataset.from_dict(columns).save_to_disk(str(tmp_path / directory))
        return str(tmp_path / directory)

    return write


def test_reads_every_column_of_numbers(save):
    images = [[[1, 2], [3, 4]], [[5, 6], [7, 8]], [[0, 0], [9, 9]]]
    directory = save("n", image=images, label=[1, 0, 1], name=["a", "b", "c"])
    splits = open_saved(files=(directory,), records="arrays")
    assert set(splits.train[0]) == {"image", "label", "weights"}
    assert (
        splits.description
        == "huggingface: Dataset: 3 examples with the columns image, label; without name (not numbers)"
    )
    assert splits.train[2]["image"].tolist() == [[0, 0], [9, 9]]
    held_out = save("held-out", image=images[:1], label=[5])
    both = open_saved(files=(directory,), eval_files=(held_out,), records="arrays")
    assert (len(both.evaluation), both.evaluation[0]["label"]) == (1, 5)


@pytest.mark.parametrize(
    ("columns", "error", "message"),
    [
        ({"label": [1, None]}, ValueError, "d: column 'label': 1 of 2 rows are null"),
        ({"label": [None, 1]}, ValueError, "d: column 'label': 1 of 2 rows are null"),
        ({"ids": [[1, None], [1, 2]]}, ValueError, "d: column 'ids': 1 of 4 rows are null"),
        ({"inputs": [1.0, float("inf")]}, BadDataError, "is inf"),
        ({"inputs": [[1, 2], [1, 300]]}, BadDataError, "300"),
        ({"text": ["a"]}, ValueError, "no column contains numbers"),
        ({"ids": [[1], [1, 2]]}, ValueError, r"column 'ids' has lists of the lengths \[1, 2\].*Pad them"),
    ],
)
def test_rejects_invalid_numbers(columns, error, message, save):
    with pytest.raises(error, match=message):
        open_saved(files=(save("d", **columns),), records="arrays", vocabulary=100 if message == "300" else 0)


def test_rejects_datasets_of_other_shapes(save):
    files = (save("d", ids=[[1]]), save("e", ids=[[1, 2]]))
    with pytest.raises(ValueError, match=r"'ids' has rows of the shapes \[\(1,\), \(2,\)\]; pad them to one"):
        open_saved(files=files, records="arrays")


@pytest.mark.parametrize(
    ("directory", "message"),
    [
        ("dict", r"no dataset saved on disk matches .* Give one of its splits, such as '.*dict/test'"),
        ("nothing", r"no dataset saved on disk matches .* Write it with"),
        ("sharded/state.json", "no dataset saved on disk matches"),
    ],
)
def test_rejects_other_directories(directory, message):
    with pytest.raises(ValueError, match=message):
        open_saved(directory)


def test_rejects_unknown_columns():
    with pytest.raises(ValueError, match=r"unknown column 'texts'.*columns are text, ids, .*mean .*text\?"):
        open_saved("sharded", column="texts")


@pytest.mark.parametrize("damage", ["corrupt", "missing", "state"])
def test_names_corrupt_datasets(damage, tmp_path):
    shutil.copytree(SAVED / "sharded", tmp_path / "d")
    if damage == "corrupt":
        (tmp_path / "d" / "data-00001-of-00002.arrow").write_bytes(b"\xff" * 500)
    elif damage == "missing":
        (tmp_path / "d" / "data-00000-of-00002.arrow").unlink()
    else:
        (tmp_path / "d" / "state.json").write_text("{")
    with pytest.raises(ValueError, match=r"d cannot be read as a saved dataset: .*Save it again"):
        open_saved(files=(str(tmp_path / "d"),))


def test_missing_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"needs datasets, which is not installed: pip install 'spmdkit\[datasets\]'"):
        open_saved("sharded")

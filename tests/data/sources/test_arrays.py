"""Arrays in memory and in .npz files."""

import numpy as np
import pytest
from spmdkit.data import DataConfig, from_arrays, open_splits


def arrays(rows=6, features=3):
    return {"inputs": np.arange(rows * features, dtype=np.float32).reshape(rows, features), "targets": np.arange(rows)}


def test_weights_are_added():
    splits = from_arrays(arrays())
    assert len(splits.train) == 6
    example = splits.train[2]
    assert example["inputs"].tolist() == [6, 7, 8]
    assert (example["targets"], example["weights"], example["weights"].dtype) == (2, 1, np.float32)
    assert all(isinstance(array, np.ndarray) for array in example.values())
    assert splits.evaluation is None


def test_arrays_are_not_copied_until_read():
    given = arrays()
    splits = from_arrays(given)
    given["targets"][3] = 77
    assert splits.train[3]["targets"] == 77
    taken = splits.train.take(np.array([3]))
    assert not np.shares_memory(taken["targets"], given["targets"])


@pytest.mark.parametrize(
    ("train", "options", "message"),
    [
        ({}, {}, "one row per example on dim 0"),
        ({"inputs": np.zeros((3, 2)), "targets": np.zeros(4)}, {}, r"these have \{'inputs': 3, 'targets': 4\}"),
        ({"inputs": np.zeros((0, 3))}, {}, "is empty"),
        ({"inputs": np.zeros(())}, {}, r"\{'inputs': 'no dim'\}"),
        ({"inputs": np.array(["a", "b"])}, {}, r"'inputs' contains <U1\. Convert or remove them"),
        ({"inputs": np.array([None, 1]), "ids": np.zeros(2)}, {}, "'inputs' contains object"),
        ({"when": np.zeros(3, "datetime64[s]")}, {}, r"'when' contains datetime64\[s\]"),
        (arrays(4), {"evaluation": arrays(4, 2)}, r"training examples are .*\(3,\).*evaluation examples are .*\(2,\)"),
        (arrays(4), {"evaluation": {"inputs": np.zeros((4, 3), np.float32)}}, "must be the same"),
        (arrays(), {"eval_fraction": "x"}, "must be a number from 0 to below 1"),
        (arrays(), {"eval_fraction": 1.0}, "must be a number from 0 to below 1"),
        (arrays(), {"eval_fraction": float("nan")}, "must be a number from 0 to below 1"),
        (arrays(), {"evaluation": arrays(), "eval_fraction": 0.5}, "not both"),
        (arrays(), {"eval_fraction": 1e-9}, "both splits need rows"),
    ],
)
def test_rejects_invalid_arrays(train, options, message):
    with pytest.raises(ValueError, match=message):
        from_arrays(train, **options)


def test_npz_files(tmp_path):
    for name, first in (("b", 300), ("a", 0)):
        np.savez(tmp_path / f"{name}.npz", inputs=np.arange(300.0) + first, targets=np.arange(first, first + 300))
    config = DataConfig(source="arrays", files=(f"{tmp_path}/*.npz",), eval_fraction=0.1)
    splits = open_splits(config)
    assert splits.evaluation is not None
    assert len(splits.evaluation) == pytest.approx(60, abs=20)
    rows = [int(split[i]["targets"]) for split in (splits.train, splits.evaluation) for i in range(len(split))]
    assert sorted(rows) == list(range(600))
    assert open_splits(config).fingerprint == splits.fingerprint


def test_npz_files_for_evaluation(tmp_path):
    np.savez(tmp_path / "train.npz", **arrays(5))
    np.savez(tmp_path / "test.npz", **arrays(4))
    config = DataConfig(source="arrays", files=(f"{tmp_path}/train.npz",), eval_files=(f"{tmp_path}/test.npz",))
    splits = open_splits(config)
    assert splits.evaluation is not None
    assert (len(splits.train), len(splits.evaluation)) == (5, 4)


def test_npz_files_that_do_not_fit(tmp_path):
    np.savez(tmp_path / "a.npz", **arrays())
    np.savez(tmp_path / "b.npz", images=np.zeros(3))
    with pytest.raises(ValueError, match=r"rows of .*b\.npz are \{'images': \(\)\}, but those of .*a\.npz are"):
        open_splits(DataConfig(source="arrays", files=(f"{tmp_path}/*.npz",)))
    np.savez(tmp_path / "a.npz", images=np.zeros(3), labels=np.zeros(2))
    with pytest.raises(ValueError, match=r"^data\.files: .*a\.npz: "):
        open_splits(DataConfig(source="arrays", files=(f"{tmp_path}/a.npz",)))


def test_from_arrays_reports_a_missing_evaluation_split():
    assert from_arrays(arrays()).description.endswith("6 examples, none for evaluation")
    assert from_arrays(arrays(), arrays()).description.endswith("6 and 6 examples")

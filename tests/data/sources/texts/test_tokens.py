"""Token arrays are memory-mapped, checked, and read back as they were written."""

import numpy as np
import pytest
from spmdkit.data import BadDataError, DataConfig, open_splits
from spmdkit.data.sources.texts.tokens import read_tokens


def write(path, ids):
    np.save(path, ids) if path.suffix == ".npy" else ids.tofile(path)
    return str(path)


def config(*files, **options):
    return DataConfig(**({"source": "tokens", "files": files, "length": 10, "eval_fraction": 0.0} | options))


@pytest.mark.parametrize(
    ("name", "dtype", "declared"),
    [
        ("t.npy", np.uint16, ""),
        ("t.npy", np.int64, ""),
        ("t.npy", np.uint32, "uint32"),
        ("t.bin", np.uint16, "uint16"),
        ("t.raw", np.uint32, "uint32"),
        ("t.dat", np.uint8, "uint8"),
    ],
)
def test_round_trip(tmp_path, name, dtype, declared):
    ids = np.random.default_rng(0).integers(0, 200, size=1001).astype(dtype)
    splits = open_splits(config(write(tmp_path / name, ids), dtype=declared))
    read = np.concatenate([splits.train[i]["targets"] for i in range(len(splits.train))])
    assert np.array_equal(read, ids[1:])
    assert splits.vocabulary == ids.max() + 1


def is_mapped(array):
    while array is not None and not isinstance(array, np.memmap):
        array = array.base
    return array is not None


@pytest.mark.parametrize("name", ["t.npy", "t.bin"])
def test_nothing_is_loaded(tmp_path, name):
    path = write(tmp_path / name, np.zeros(1000, np.uint16))
    (document,) = read_tokens((path,), config(path, dtype="uint16"), "data.files").documents
    assert is_mapped(document.ids)
    splits = open_splits(config(path, dtype="uint16", eval_fraction=0.2))
    assert splits.evaluation is not None
    for source in (splits.train, splits.evaluation):
        assert is_mapped(source._windows[0])


def test_a_sparse_file_larger_than_memory_opens(tmp_path):
    path = tmp_path / "huge.bin"
    with path.open("wb") as file:
        file.truncate(1 << 42)
    splits = open_splits(config(str(path), dtype="uint16", vocabulary=100, eval_fraction=0.1))
    assert len(splits.train) == int((1 << 41) * 0.9) // 10
    assert splits.train[len(splits.train) - 1]["inputs"].tolist() == [0] * 10


def test_one_file_is_held_out_at_its_end(tmp_path):
    splits = open_splits(config(write(tmp_path / "t.npy", np.arange(1000, dtype=np.uint16)), eval_fraction=0.1))
    assert splits.evaluation is not None
    assert splits.evaluation[0]["inputs"][0] == 900
    assert splits.vocabulary == 1000


def test_a_vocabulary_that_is_given_is_checked_while_reading(tmp_path):
    splits = open_splits(config(write(tmp_path / "t.npy", np.arange(1000, dtype=np.uint16)), vocabulary=500))
    assert splits.vocabulary == 500
    with pytest.raises(BadDataError, match=r"t\.npy holds token id 500; data\.vocabulary=500"):
        splits.train[49]


@pytest.mark.parametrize(
    ("name", "ids", "options", "message"),
    [
        ("t.bin", np.zeros(100, np.uint16), {}, r"t\.bin: a raw file does not know its type; set data\.dtype"),
        ("t.bin", np.zeros(101, np.uint8), {"dtype": "uint16"}, r"101 % 2 = 1\. Check data\.dtype"),
        ("t.npy", np.zeros(100, np.uint16), {"dtype": "uint32"}, r"holds uint16, but data\.dtype=uint32"),
        ("t.npy", np.zeros((10, 10), np.uint16), {}, r"uint16 of shape \(10, 10\).*Save ids\.reshape\(-1\)"),
        ("t.npy", np.zeros(100, np.float32), {}, r"it holds float32 of shape"),
        ("t.npy", np.zeros(10, np.uint16), {}, r"its 10 tokens are too few for one example: data\.length \+ 1 = 11"),
        ("t.bin", np.zeros(0, np.uint16), {"dtype": "uint16"}, r"its 0 tokens are too few"),
        ("t.npy", np.full(100, -1), {}, r"t\.npy holds values from -1 to -1; token ids are at least 0"),
        ("t.npy", np.full(100, 2**31), {}, r"t\.npy holds values from 2147483648 to"),
        ("t.tokens", np.zeros(100, np.uint16), {}, r"has the extension '\.tokens'; this source reads \.npy, \.bin"),
    ],
)
def test_says_what_is_wrong_with_a_file(tmp_path, name, ids, options, message):
    with pytest.raises(ValueError, match=message):
        open_splits(config(write(tmp_path / name, ids), **options))


@pytest.mark.parametrize("content", [b"", b"not an array"])
def test_damaged_npy_files(tmp_path, content):
    (tmp_path / "t.npy").write_bytes(content)
    with pytest.raises(ValueError, match=r"data\.files: .*t\.npy: "):
        open_splits(config(str(tmp_path / "t.npy")))


def test_problems_of_all_files_at_once(tmp_path):
    for name in "abc":
        write(tmp_path / f"{name}.npy", np.zeros(3, np.uint16))
    with pytest.raises(ValueError) as caught:
        open_splits(config(f"{tmp_path}/*.npy"))
    assert [line.split(": ")[1][-5:] for line in str(caught.value).splitlines()] == ["a.npy", "b.npy", "c.npy"]

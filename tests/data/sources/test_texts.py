"""Splits by hash: stable, near the fraction, never overlapping; streams keep memory maps apart."""

import os

import numpy as np
import pytest
from spmdkit.data import BadDataError, DataConfig, open_splits
from spmdkit.data.source import hash_fraction, memory_map_of
from spmdkit.data.sources import texts
from spmdkit.data.sources.arrays import from_arrays
from spmdkit.data.sources.texts import (
    MIN_HELD_OUT,
    SEPARATOR,
    Document,
    join,
    read_tokens,
    split_documents,
    stdlib_files,
)
from spmdkit.mesh.errors import UserError


def documents(count, size=10):
    return [Document(f"{i}.txt".encode(), np.full(size, i % 250 + 1, np.uint8), f"{i}.txt") for i in range(count)]


def test_the_hash_never_changes():
    assert hash_fraction(b"os.py") == 0.24913519448671906
    assert hash_fraction(b"") == 0.8666040914613156


def test_the_split_does_not_depend_on_the_order_or_on_other_documents():
    train, evaluation = split_documents(documents(400), 0.1)
    assert {d.key for d in train} | {d.key for d in evaluation} == {d.key for d in documents(400)}
    assert len(evaluation) == pytest.approx(40, abs=15)
    again = split_documents(documents(400)[::-1], 0.1)
    assert {d.key for d in again[1]} == {d.key for d in evaluation}
    fewer = split_documents(documents(400)[:300], 0.1)
    assert {d.key for d in fewer[1]} == {d.key for d in evaluation} & {d.key for d in documents(300)}


def test_a_few_documents_are_split_at_their_ends():
    train, evaluation = split_documents(documents(3, size=100), 0.1)
    assert [len(d.ids) for d in train] == [90] * 3
    assert [len(d.ids) for d in evaluation] == [10] * 3
    assert np.shares_memory(train[0].ids, train[0].ids.base)


def test_a_few_held_out_documents_are_enough():
    train, evaluation = split_documents(documents(400), 0.1)
    held_out = evaluation[:MIN_HELD_OUT]
    assert [d.key for d in split_documents([*held_out, *train[:50]], 0.1)[1]] == [d.key for d in held_out]


def test_small_documents_become_one_stream_with_separators():
    (stream,) = join([*documents(2, size=3), Document(b"", np.zeros(0, np.uint8), "empty")], SEPARATOR)
    assert stream.ids.tolist() == [1, 1, 1, 0, 2, 2, 2, 0]
    (tokens,) = join(documents(2, size=3), None)
    assert tokens.ids.tolist() == [1, 1, 1, 2, 2, 2]


def test_mapped_documents_stay_alone_and_are_not_copied():
    mapped = Document(b"big", np.arange(9, dtype=np.uint8), "big.txt", mapped=True)
    streams = join([mapped, *documents(1, size=2)], SEPARATOR)
    assert [stream.name for stream in streams] == ["documents", "big.txt"]
    assert streams[1].ids is mapped.ids


def test_round_trip_text(corpus):
    splits = open_splits(DataConfig(source="text", files=(f"{corpus}/**/*.txt",), length=20, eval_fraction=0.0))
    read = b"".join(splits.train[i]["inputs"].astype(np.uint8).tobytes() for i in range(len(splits.train)))
    paths = sorted(corpus.rglob("*.txt"), key=lambda path: path.relative_to(corpus).as_posix())
    written = b"".join(path.read_bytes() + b"\0" for path in paths)
    assert read == written[: len(read)]
    assert len(written) - len(read) <= 20
    assert splits.vocabulary == 256
    assert splits.evaluation is None


@pytest.mark.parametrize(
    ("name", "begin", "fix"),
    [
        ("rows.parquet", b"PAR1\x15\x04", "is not text but a Parquet file: set data.source: parquet."),
        ("ids.npy", b"\x93NUMPY\x01\x00", "is not text but a NumPy array: set data.source: tokens."),
        ("a.txt.gz", b"\x1f\x8b\x08\x00", "is not text but compressed with gzip: decompress it first, with gunzip."),
    ],
)
def test_rejects_files_of_other_formats(tmp_path, name, begin, fix):
    (tmp_path / "a.txt").write_text("text " * 100)
    (tmp_path / name).write_bytes(begin + bytes(1000))
    with pytest.raises(UserError) as caught:
        open_splits(DataConfig(source="text", files=(f"{tmp_path}/*",), length=20))
    assert str(caught.value) == f"data.files: {tmp_path / name} {fix}"


def test_big_files_are_mapped_and_never_joined(corpus, monkeypatch):
    monkeypatch.setattr(texts, "MAPPED_BYTES", 250)
    config = DataConfig(source="text", files=(f"{corpus}/**/*.txt",), length=99, eval_fraction=0.0)
    splits = open_splits(config)
    assert len(splits.train) == 200 * 3  # 300 bytes are 3 windows of 99 + 1 each, and files are not joined
    first = sorted(corpus.rglob("*.txt"))[0].read_bytes()
    assert splits.train[0]["inputs"].astype(np.uint8).tobytes() == first[:99]


def test_files_of_the_evaluation_split(corpus):
    config = DataConfig(
        source="text", files=(f"{corpus}/part0/*.txt",), eval_files=(f"{corpus}/part1/*.txt",), length=30
    )
    splits = open_splits(config)
    first = sorted((corpus / "part1").glob("*.txt"))[0].read_bytes()
    assert splits.evaluation is not None
    assert splits.evaluation[0]["inputs"].astype(np.uint8).tobytes() == first[:30]


def test_a_larger_vocabulary_may_be_asked_for(corpus):
    config = {"source": "text", "files": (f"{corpus}/**/*.txt",), "length": 30}
    assert open_splits(DataConfig(**config, vocabulary=512)).vocabulary == 512
    with pytest.raises(ValueError, match=r"data\.vocabulary=100 must be at least 256"):
        open_splits(DataConfig(**config, vocabulary=100))


SKIPPED = ["json/tests/a.py", "config-3.11/a.py", "_sysconfigdata_x86.py", "readme.txt", "lib.so"]
SKIPPED += [f"{name}.py" for name in ("sitecustomize", "usercustomize", "_sysconfig_vars", "__phello__.foo")]
DIRECTORIES = "test site-packages dist-packages __pycache__ __phello__ encodings pydoc_data idlelib lib2to3 distutils"
SKIPPED += [f"{name}/a.py" for name in (*DIRECTORIES.split(), "ensurepip", "tkinter", "turtledemo")]


def test_which_files_belong_to_it(tmp_path):
    kept = ["abc.py", "json/__init__.py", "json/tool.py", "zipfile.py"]
    for name in [*SKIPPED, *kept]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("pass\n")
    assert [file.name for file in stdlib_files(tmp_path)] == kept


def test_it_opens_as_real_text():
    splits = open_splits(DataConfig(length=64))
    assert splits.evaluation is not None
    tokens = 64 * (len(splits.train) + len(splits.evaluation))
    assert 6_000_000 < tokens < 12_000_000
    assert len(splits.evaluation) / len(splits.train) == pytest.approx(0.06, abs=0.04)
    text = b"".join(splits.train[i]["inputs"].astype(np.uint8).tobytes() for i in range(2000))
    assert text.count(b"def ") >= 100
    assert splits.description.startswith("stdlib: source of Python 3.")


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
def test_round_trip_tokens(tmp_path, name, dtype, declared):
    ids = np.random.default_rng(0).integers(0, 200, size=1001).astype(dtype)
    splits = open_splits(config(write(tmp_path / name, ids), dtype=declared))
    read = np.concatenate([splits.train[i]["targets"] for i in range(len(splits.train))])
    assert np.array_equal(read, ids[1:])
    assert splits.vocabulary == ids.max() + 1


@pytest.mark.parametrize("name", ["t.npy", "t.bin"])
def test_nothing_is_loaded(tmp_path, name):
    path = write(tmp_path / name, np.zeros(1000, np.uint16))
    (document,) = read_tokens((path,), config(path, dtype="uint16"), "data.files").documents
    assert memory_map_of(document.ids) is not None
    splits = open_splits(config(path, dtype="uint16", eval_fraction=0.2))
    assert splits.evaluation is not None
    for source in (splits.train, splits.evaluation):
        assert memory_map_of(source._windows[0]) is not None


@pytest.mark.slow
def test_a_sparse_file_larger_than_memory_opens(tmp_path):
    path = tmp_path / "huge.bin"
    with path.open("wb") as file:
        file.truncate(1 << 42)
    splits = open_splits(config(str(path), dtype="uint16", vocabulary=100, eval_fraction=0.1))
    assert len(splits.train) == int((1 << 41) * 0.9) // 10
    assert splits.train[len(splits.train) - 1]["inputs"].tolist() == [0] * 10


def test_a_vocabulary_that_is_given_is_checked_while_reading(tmp_path):
    splits = open_splits(config(write(tmp_path / "t.npy", np.arange(1000, dtype=np.uint16)), vocabulary=500))
    assert splits.vocabulary == 500
    with pytest.raises(BadDataError, match=r"t\.npy contains token id 500; data\.vocabulary=500"):
        splits.train[49]


@pytest.mark.parametrize(
    ("name", "ids", "options", "message"),
    [
        ("t.bin", np.zeros(100, np.uint16), {}, r"t\.bin: a raw file does not state its dtype; set data\.dtype"),
        ("t.bin", np.zeros(101, np.uint8), {"dtype": "uint16"}, r"101 % 2 = 1\. Check data\.dtype"),
        ("t.npy", np.zeros(100, np.uint16), {"dtype": "uint32"}, r"it has uint16, but data\.dtype=uint32"),
        ("t.npy", np.zeros((10, 10), np.uint16), {}, r"shape \(10, 10\)\. Save ids\.astype\(np\.uint32\)\.reshape"),
        ("t.npy", np.zeros(100, np.float32), {}, r"token ids must be integers with one dim, got float32 of shape"),
        (
            "t.npy",
            np.zeros(10, np.uint16),
            {},
            r"files: .*t\.npy: its 10 tokens are too few .*: data\.length \+ 1 = 11",
        ),
        ("t.bin", np.zeros(0, np.uint16), {"dtype": "uint16"}, r"its 0 tokens are too few"),
        ("t.npy", np.full(100, -1), {}, r"t\.npy contains values from -1 to -1; token ids must be at least 0"),
        ("t.npy", np.full(100, 2**31), {}, r"t\.npy contains values from 2147483648 to"),
        ("t.tokens", np.zeros(100, np.uint16), {}, r"t\.tokens: invalid extension; this source reads \.npy, \.bin"),
    ],
)
def test_rejects_invalid_token_files(tmp_path, name, ids, options, message):
    with pytest.raises(ValueError, match=message):
        open_splits(config(write(tmp_path / name, ids), **options))


def test_problems_of_all_files_at_once(tmp_path):
    for name in "abc":
        write(tmp_path / f"{name}.npy", np.zeros(3, np.uint16))
    with pytest.raises(ValueError) as caught:
        open_splits(config(f"{tmp_path}/*.npy"))
    assert [line.split(": ")[1][-5:] for line in str(caught.value).splitlines()] == ["a.npy", "b.npy", "c.npy"]


def test_a_token_file_that_is_cut_during_a_run_is_named(tmp_path):
    """Reading its lost part would end the process with SIGBUS."""
    path = tmp_path / "tokens.npy"
    np.save(path, np.arange(100_000, dtype=np.uint16))
    source = open_splits(DataConfig(source="tokens", files=(str(path),), length=16)).train
    before = source.take(np.arange(4))
    os.truncate(path, 8192)
    with pytest.raises(
        BadDataError, match=rf"{path} has 8,192 bytes now, but had at least 200,128 when this run opened"
    ):
        source.take(np.arange(4))
    path.unlink()
    with pytest.raises(BadDataError, match="has 0 bytes now"):
        source.take(np.arange(4))
    assert before["inputs"].shape == (4, 16)


def test_a_mapped_array_that_is_cut_is_named(tmp_path):
    path = tmp_path / "rows.npy"
    np.save(path, np.zeros((1000, 64), np.float32))
    source = from_arrays({"inputs": np.load(path, mmap_mode="r")}).train
    assert source.take(np.arange(2))["inputs"].shape == (2, 64)
    os.truncate(path, 4096)
    with pytest.raises(BadDataError, match="was cut or written again while the run reads it"):
        source.take(np.arange(2))

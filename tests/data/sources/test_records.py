"""ArrayRecord: texts, token ids and examples; damaged records are named, and left out where that is allowed."""

import errno
import io
from pathlib import Path

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from spmdkit.data import BadDataError, DataConfig, eval_batches, open_splits, train_batches
from spmdkit.data.source import take

NUMBER = 12


def write(path, records):
    writer = ArrayRecordWriter(str(path), "group_size:1,uncompressed")
    for record in records:
        writer.write(record)
    writer.close()
    return str(path)


def packed(**arrays):
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def example(row):
    return {"inputs": np.full(3, row, np.float32), "targets": np.int32(row % 4)}


def damage(path, what, times=1):
    """Flips a byte of the first places where the file holds `what`."""
    data = bytearray(Path(path).read_bytes())
    for _ in range(times):
        data[data.index(what)] ^= 0xFF
    Path(path).write_bytes(data)


@pytest.fixture
def examples(tmp_path):
    return [write(tmp_path / "a.array_record", [packed(**example(row)) for row in range(NUMBER)])]


def open_records(files, **options):
    given = {"eval_fraction": 0.0, "records": "arrays"} | options
    return open_splits(DataConfig(source="arrayrecord", files=tuple(files), **given))


def test_texts(tmp_path):
    path = write(tmp_path / "t.arrayrecord", [b"first", b"", "zweiter Ü".encode()])
    splits = open_records([path], records="documents", length=1)
    found = [splits.train[i]["inputs"][0] for i in range(len(splits.train))]
    assert bytes(found).decode() == "first\0zweiter Ü"
    assert splits.vocabulary == 256
    assert splits.description.startswith("arrayrecord: text rows (2 rows of 1 arrayrecord file); ")


def test_token_ids(tmp_path):
    path = write(tmp_path / "t.array_record", [np.array(ids, np.uint16).tobytes() for ids in ([1, 2, 3], [500, 4])])
    splits = open_records([path], records="documents", dtype="uint16", separator=9, length=2)
    assert take(splits.train, np.arange(3))["inputs"].tolist() == [[1, 2], [3, 9], [500, 4]]
    assert splits.vocabulary == 501


def test_examples_are_read_where_they_are_needed(examples, tmp_path, sharding):
    more = write(tmp_path / "b.array_record", [packed(**example(row)) for row in range(NUMBER, 20)])
    splits = open_records([*examples, more])
    assert splits.description == "arrayrecord: inputs, targets, weights; 20 examples in 2 files"
    assert splits.train[13]["inputs"].tolist() == [13] * 3
    assert splits.train.origin(13) == f"{more}, record 1"
    (batch,) = train_batches(splits.train, sharding, global_batch=8, seed=0, start_step=1, num_steps=1)
    assert np.array_equal(np.asarray(batch["inputs"])[:, 0] % 4, np.asarray(batch["targets"]))


def test_some_are_held_out(examples):
    splits = open_records(examples, eval_fraction=0.4)
    rows = [[int(each[i]["inputs"][0]) for i in range(len(each))] for each in (splits.train, splits.evaluation)]
    assert sorted(rows[0] + rows[1]) == list(range(NUMBER))
    assert splits.fingerprint == open_records(examples, eval_fraction=0.4).fingerprint
    assert splits.fingerprint != open_records(examples, eval_fraction=0.2).fingerprint


def test_other_files_for_evaluation(examples, tmp_path):
    held_out = write(tmp_path / "e.array_record", [packed(**example(99))])
    splits = open_records(examples, eval_files=(held_out,))
    assert splits.evaluation[0]["inputs"].tolist() == [99] * 3
    assert [len(each) for each in (splits.train, splits.evaluation)] == [NUMBER, 1]
    other = write(tmp_path / "o.array_record", [packed(inputs=np.zeros(4))])
    with pytest.raises(ValueError, match=r"training records are .*, but evaluation records "):
        open_records(examples, eval_files=(other,))


def test_a_damaged_record_is_named_with_its_place(examples):
    source = open_records(examples).train
    damage(examples[0], np.full(3, 5, np.float32).tobytes())
    message = r"a\.array_record, record 5: it cannot be read: .*chunk at \d+ .*at byte \d+"
    with pytest.raises(BadDataError, match=message):
        source[5]
    assert source[6]["inputs"].tolist() == [6] * 3  # those after it are read as before
    with pytest.raises(BadDataError, match=message):  # a sampled record
        open_records(examples)


def test_a_damaged_record_counts_for_nothing_where_that_is_allowed(examples, sharding, capsys):
    damage(examples[0], np.full(3, 5, np.float32).tobytes())
    splits = open_records(examples, bad_records=1)
    batches = [*eval_batches(splits.train, sharding, global_batch=8)] * 2
    rows = {name: np.concatenate([np.asarray(batch[name]) for batch in batches[:2]]) for name in ("inputs", "weights")}
    assert rows["weights"][:NUMBER].tolist() == [1] * 5 + [0] + [1] * 6
    assert rows["inputs"][:NUMBER, 0].tolist() == [0, 1, 2, 3, 4, 0, *range(6, NUMBER)]
    [*eval_batches(splits.train, sharding, global_batch=8)]
    (said,) = capsys.readouterr().err.splitlines()  # once, however often it is read
    assert said.startswith(f"data: left out {examples[0]}, record 5: it cannot be read: ")
    assert said.endswith("(1 bad record so far, data.bad_records=1)")


def test_an_error_of_the_machine_is_not_a_bad_record(examples, monkeypatch):
    source = open_records(examples, bad_records=1).train

    def fail(index):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(source, "_records", source._records._replace(read=fail))
    with pytest.raises(OSError, match="Input/output error"):
        source[3]


def test_the_form_is_that_of_the_first_record_that_can_be_read(examples):
    damage(examples[0], np.full(3, 0, np.float32).tobytes() + b"PK")
    with pytest.raises(BadDataError, match="record 0: it cannot be read"):
        open_records(examples)
    assert open_records(examples, bad_records=1).train[0]["weights"] == 0


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (b"text", r"record 1: it cannot be read: it is not an archive of arrays\. Write it with np\.savez"),
        (packed(inputs=np.zeros(4)), r"record 1: it has .*but the first record has .*'inputs': \('float32', \(3,\)\)"),
        (packed(inputs=np.array(["a"])), "record 1: it cannot be read: 'inputs' contains <U1"),
        (
            packed(inputs=np.array([None], object)),
            "record 1: .*its arrays cannot be read: Object arrays cannot be loaded",
        ),
        (packed(**example(0))[:-30], "record 1: .*its arrays cannot be read"),
    ],
)
def test_rejects_invalid_records(record, message, tmp_path):
    path = write(tmp_path / "x.array_record", [packed(**example(0)), record])
    with pytest.raises(BadDataError, match=message):
        open_records([path])


@pytest.mark.parametrize(
    ("options", "record", "message"),
    [
        ({}, packed(**example(0)), r"record 1: .*it is an archive of arrays, not a text; set data\.records: arrays"),
        ({"dtype": "uint16"}, b"abc", r"3 bytes must be a multiple of the size of uint16; check data\.dtype"),
    ],
)
def test_rejects_invalid_documents(options, record, message, tmp_path, capsys):
    path = write(tmp_path / "x.array_record", [b"abcdef", record, b"ghijkl"])
    with pytest.raises(ValueError, match=message):
        open_records([path], records="documents", length=1, **options)
    splits = open_records([path], records="documents", length=1, bad_records=1, **options)
    assert "1 bad record left out" in splits.description


@pytest.mark.parametrize("left", [0, 100, 70_000])
def test_files_that_are_not_whole(examples, tmp_path, left):
    (tmp_path / "half.array_record").write_bytes(Path(examples[0]).read_bytes()[:left])
    with pytest.raises(ValueError, match=r"half\.array_record: it cannot be read as ArrayRecord: .*is complete"):
        open_records([*examples, str(tmp_path / "half.array_record")])


def test_rejects_files_without_examples(tmp_path):
    empty = write(tmp_path / "none.array_record", [])
    with pytest.raises(ValueError, match="of 0 rows holds out 0"):
        open_records([empty])

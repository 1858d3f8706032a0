"""Globs give each file once, in an order and under names that do not depend on the machine."""

import json

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from spmdkit.data import BadDataError, DataConfig, open_splits
from spmdkit.data.sources.source_files import BadRecords, find_files


@pytest.fixture
def folder(tmp_path):
    for name in ("b.txt", "a.txt", "sub/c.txt", "sub/deep/d.txt", "notes.md"):
        (tmp_path / "texts" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "texts" / name).write_text(name)
    return tmp_path / "texts"


def names(*patterns, **options):
    return [file.name for file in find_files(tuple(map(str, patterns)), key="data.files", **options)]


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["texts/*.txt"], ["a.txt", "b.txt"]),
        (["texts/**/*.txt"], ["a.txt", "b.txt", "sub/c.txt", "sub/deep/d.txt"]),
        (["texts/s*/**/*.txt"], ["sub/c.txt", "sub/deep/d.txt"]),  # relative to the folder before the first wildcard
        (["texts/b.txt", "texts/a.txt"], ["a.txt", "b.txt"]),  # sorted whatever the order given
        (["texts/*.txt", "texts/a.txt"], ["a.txt", "b.txt"]),  # matched twice, read once
    ],
)
def test_names_and_order(folder, monkeypatch, patterns, expected):
    monkeypatch.chdir(folder.parent)
    assert names(*patterns) == expected
    assert names(*(folder.parent / pattern for pattern in patterns)) == expected


def test_a_file_under_two_paths_is_read_once(folder, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "linked").symlink_to("sub")
    assert names("a.txt", folder / "a.txt", "sub/c.txt", "linked/c.txt") == ["a.txt", "c.txt"]


def test_a_file_with_a_wildcard_in_its_name_is_found_as_it_is(tmp_path):
    (tmp_path / "a[1].txt").write_text("x")
    assert names(tmp_path / "a[1].txt") == ["a[1].txt"]


def test_home_folder(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    assert names("~/*.md") == ["notes.md"]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("texts/*.csv", r"data\.files: no file matches '.*texts/\*\.csv'\. .*texts does not contain \*\.csv\."),
        ("text/*.txt", r"does not contain text\. Did you mean texts\? Paths in a YAML file start from its directory"),
        ("texts", r"It is a directory; to read the files below it, write '.*texts/\*\*/\*'"),
    ],
)
def test_explains_patterns_without_a_match(folder, pattern, message):
    with pytest.raises(ValueError, match=message):
        names(folder.parent / pattern)


def test_collects_problems_of_all_patterns(folder):
    with pytest.raises(ValueError) as caught:
        names(folder / "*.a", folder / "*.md", "nowhere/*.c", suffixes=(".npy",))
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(f"data.files: no file matches '{folder}/*.a'.")
    assert lines[1].startswith("data.files: no file matches 'nowhere/*.c'.")
    assert lines[2].startswith(f"data.files: {folder}/notes.md: invalid extension; this source reads .npy")


def test_lists_only_the_first_of_many_problems(folder):
    with pytest.raises(ValueError) as caught:
        names(*(folder / "gone" / f"{number}.npy" for number in range(100)), suffixes=(".npy",))
    assert str(caught.value).splitlines()[5:] == ["... and 95 more"]
    for number in range(100):
        (folder / f"{number}.csv").touch()
    with pytest.raises(ValueError, match=r"12\.csv, \.\.\.: invalid extension"):
        names(folder / "*.csv", suffixes=(".npy",))


GOOD = [json.dumps({"text": f"text number {number}"}) for number in range(6)]


def test_none_is_allowed_by_default():
    with pytest.raises(BadDataError, match=r"^f, line 3: no JSON\.$"):
        BadRecords(0, BadDataError).leave_out("f, line 3", "no JSON.")


def test_each_is_said_and_counted_once(capsys):
    bad = BadRecords(3)
    bad.leave_out("f, line 3", "no JSON.")
    bad.leave_out("f, line 3", "no JSON.")
    bad.leave_out("g, rows 1 to 2", "damaged.", 2)
    assert capsys.readouterr().err.splitlines() == [
        "data: left out f, line 3: no JSON. (1 bad record so far, data.bad_records=3)",
        "data: left out g, rows 1 to 2: damaged. (3 bad records so far, data.bad_records=3)",
    ]
    assert bad.description() == ", 3 bad records left out"
    with pytest.raises(
        ValueError, match=r"f, line 9: no JSON\. That makes 4 bad records so far, data\.bad_records=3\."
    ):
        bad.leave_out("f, line 9", "no JSON.")


BAD = {
    "no JSON": ("{not json}", r"line 3: it cannot be read as JSON: "),
    "no text": (b'{"text": "\xff"}', r"line 3: it cannot be read as JSON: "),
    "no object": ("[1, 2]", "line 3: each line must be a JSON object, got a list"),
    "no such key": ('{"title": "x"}', "line 3: unknown column 'text'"),
    "neither text nor ids": ('{"text": 3}', "row 3: expected a text or a list of token ids .*got '3'"),
    "half a character": (r'{"text": "\ud800"}', "row 3: the text contains an unpaired surrogate"),
}


@pytest.mark.parametrize("kind", BAD)
def test_lines_that_cannot_be_read(kind, tmp_path, capsys):
    line, message = BAD[kind]
    lines = [each if isinstance(each, bytes) else each.encode() for each in (*GOOD[:2], line, *GOOD[2:])]
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join(lines))

    def opened(bad_records):
        files = (str(tmp_path / "rows.jsonl"),)
        return open_splits(DataConfig(source="jsonl", files=files, length=1, bad_records=bad_records))

    with pytest.raises(ValueError, match=message):
        opened(0)
    splits = opened(1)
    assert "(6 rows of 1 jsonl file, 1 bad record left out)" in splits.description
    assert capsys.readouterr().err.startswith(f"data: left out {tmp_path}/rows.jsonl, ")
    (tmp_path / "rows.jsonl").write_text("\n".join(GOOD))
    assert opened(0).fingerprint == splits.fingerprint  # what is left is what would be there without it


def test_row_groups_that_cannot_be_read(tmp_path, capsys):
    path = tmp_path / "rows.parquet"
    texts = [f"text number {number}" for number in range(12)]
    parquet.write_table(pa.table({"text": texts}), path, row_group_size=4, compression="none", use_dictionary=False)
    data = bytearray(path.read_bytes())
    place = data.index(b"text number 5")
    data[place - 4 : place] = b"\xff\xff\xff\x7f"  # the length of the text
    path.write_bytes(data)

    def opened(bad_records):
        return open_splits(DataConfig(source="parquet", files=(str(path),), length=1, bad_records=bad_records))

    with pytest.raises(ValueError, match=r"rows\.parquet, rows 5 to 8: row group 1 cannot be read: "):
        opened(3)
    splits = opened(4)
    assert "(8 rows of 1 parquet file, 4 bad records left out)" in splits.description
    assert "(4 bad records so far, data.bad_records=4)" in capsys.readouterr().err


def test_pages_with_checksums_are_held_to_them(tmp_path):
    texts, path = [f"text number {number}" for number in range(12)], tmp_path / "rows.parquet"
    options = {"row_group_size": 4, "compression": "none", "use_dictionary": False, "write_statistics": False}
    parquet.write_table(pa.table({"text": texts}), path, write_page_checksum=True, **options)
    path.write_bytes(path.read_bytes().replace(b"text number 5", b"text NUMBER 5"))  # would be read without a word
    with pytest.raises(ValueError, match=r"rows\.parquet, rows 5 to 8: row group 1 cannot be read: .*checksum"):
        open_splits(DataConfig(source="parquet", files=(str(path),), length=1))


def test_ids_outside_the_vocabulary_are_no_damage(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": [1, 2, 300]}')
    files = (str(tmp_path / "rows.jsonl"),)
    with pytest.raises(BadDataError, match="invalid token id 300"):
        open_splits(DataConfig(source="jsonl", files=files, length=1, vocabulary=256, bad_records=5))


def test_an_error_of_the_file_system_is_none_of_the_file(tmp_path, monkeypatch):
    def broken(*arguments, **options):
        raise OSError(5, "Input/output error")

    parquet.write_table(pa.table({"text": ["abc"]}), tmp_path / "rows.parquet")
    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", broken)
    with pytest.raises(OSError, match="Input/output error"):
        open_splits(DataConfig(source="parquet", files=(str(tmp_path / "rows.parquet"),), bad_records=9))

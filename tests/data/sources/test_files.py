"""Globs give each file once, in an order and under names that do not depend on the machine."""

import os

import pytest
from spmdkit.data.sources.files import find_files


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


def test_names_do_not_depend_on_where_the_folder_is(folder, tmp_path):
    before = names(folder / "**/*.txt")
    os.rename(folder, tmp_path / "elsewhere")
    assert names(tmp_path / "elsewhere/**/*.txt") == before


def test_a_file_with_a_wildcard_in_its_name_is_found_as_it_is(tmp_path):
    (tmp_path / "a[1].txt").write_text("x")
    assert names(tmp_path / "a[1].txt") == ["a[1].txt"]


def test_home_folder(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    assert names("~/*.md") == ["notes.md"]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (
            "texts/*.csv",
            r"data\.files: '.*texts/\*\.csv' matches no file\. The folder .*texts exists and holds 4 entries: ",
        ),
        ("text/*.txt", r"does not exist; .* holds 1 entry: texts\. Did you mean 'texts' for 'text'\?"),
        ("texts", r"It is a folder; to read the files below it, write '.*texts/\*\*/\*'"),
        ("empty/*.txt", r"The folder .*empty exists and holds nothing"),
    ],
)
def test_says_why_nothing_matches(folder, pattern, message):
    (folder.parent / "empty").mkdir(exist_ok=pattern.startswith("empty"))
    if not pattern.startswith("empty"):
        (folder.parent / "empty").rmdir()
    with pytest.raises(ValueError, match=message):
        names(folder.parent / pattern)


def test_collects_problems_of_all_patterns(folder):
    with pytest.raises(ValueError) as caught:
        names(folder / "*.a", folder / "*.b", folder / "*.md", "nowhere/*.c", suffixes=(".npy",))
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(f"data.files: '{folder}/*.a', '{folder}/*.b' match no file. The folder {folder} exists")
    assert lines[1].startswith("data.files: 'nowhere/*.c' matches no file.")
    assert "notes.md' has the extension '.md'; this source reads .npy" in lines[2]
    assert len(lines) == 3


def test_one_cause_is_told_once(folder):
    """Of a hundred files whose folder is not there, of a hundred that this source cannot read."""
    with pytest.raises(ValueError) as caught:
        names(*(folder / "gone" / f"{number}.npy" for number in range(100)), suffixes=(".npy",))
    (line,) = str(caught.value).splitlines()
    assert "4.npy' and 95 more match no file. The folder" in line
    for number in range(100):
        (folder / f"{number}.csv").touch()
    with pytest.raises(ValueError) as caught:
        names(folder / "*.csv", suffixes=(".npy",))
    (line,) = str(caught.value).splitlines()
    assert "12.csv' and 95 more have the extension '.csv'; this source reads .npy" in line

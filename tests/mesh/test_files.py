"""Absolute paths without `..`, and files that are complete or unchanged."""

import errno
import os

import pytest
from spmdkit.mesh.errors import UserError
from spmdkit.mesh.files import absolute_path, atomic_write, below_root, is_url, write_text


def test_resolves_parent_directories_as_the_file_system_does(tmp_path, monkeypatch):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "a" / "b")
    monkeypatch.chdir(tmp_path / "a")
    assert absolute_path("../runs/one") == tmp_path / "runs" / "one"
    assert absolute_path(tmp_path / "link" / ".." / "c") == tmp_path / "a" / "c"
    assert absolute_path(tmp_path / "new" / ".." / "c") == tmp_path / "c"
    assert absolute_path(tmp_path / "link" / "c") == tmp_path / "link" / "c", "links keep their names"
    assert absolute_path(tmp_path / "new" / ".." / "link") == tmp_path / "link", "also after .."
    assert absolute_path("../../..") == tmp_path.parent.parent


@pytest.mark.parametrize(
    "url", ["s3://b/x", "gs:/b/x", "az://b", "abfss://c@a/x", "https://h/x", "file:///tmp/x", "hf://o/n", "hf:o/n"]
)
def test_a_url_is_no_path(url):
    """`Path` would make a directory named `gs:` of gs://bucket."""
    assert is_url(url)
    assert below_root(url, "/data") == url
    with pytest.raises(UserError, match=r"must be a path on a mounted file system \(URLs are not supported: mount"):
        absolute_path(url)


@pytest.mark.parametrize("path", ["runs/one", "/a:b/c", "a:b", "C:/x", "~/x", "", "hf/x", "corpus/**/*.txt", "12:/x"])
def test_other_names_are_paths(path):
    assert not is_url(path)


def test_replaces_a_file_when_it_is_complete(tmp_path):
    target = tmp_path / "out"
    target.write_text("before")
    (tmp_path / "out.partial").write_text("left by a process that was killed")
    with atomic_write(target) as partial:
        assert partial.parent == tmp_path
        assert not partial.exists()
        partial.write_text("after")
        assert target.read_text() == "before"
    assert target.read_text() == "after"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    write_text(target, "text \udc80")
    assert target.read_text() == "text ?"


def test_replaces_a_directory_by_a_directory(tmp_path):
    target = tmp_path / "out"
    (target / "old").mkdir(parents=True)
    with atomic_write(target) as partial:
        partial.mkdir()
        (partial / "new").write_text("new")
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["out", "out/new"]


def write_half(target, error):
    with atomic_write(target) as partial:
        partial.write_text("half")
        raise error


def test_leaves_nothing_after_an_error_and_names_the_target(tmp_path):
    with pytest.raises(OSError, match="No space left") as raised:
        write_half(tmp_path / "out", OSError(errno.ENOSPC, "No space left on device"))
    assert raised.value.filename == str(tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        write_half(tmp_path / "out", KeyboardInterrupt())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe"])
def test_rejects_anything_but_a_regular_file(kind, tmp_path):
    other = tmp_path / "other"
    other.write_text("mine")
    target = tmp_path / "out"
    if kind == "pipe":
        os.mkfifo(target)
    else:
        target.symlink_to(other if kind == "link" else tmp_path / "nothing")
    with pytest.raises(UserError, match="only a regular file can be replaced"):
        write_text(target, "page")
    assert other.read_text() == "mine"
    assert os.path.lexists(target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "out"]


def test_never_replaces_a_directory_by_a_file(tmp_path):
    (tmp_path / "report.html").mkdir()
    (tmp_path / "report.html" / "kept").touch()
    with pytest.raises(IsADirectoryError):
        write_text(tmp_path / "report.html", "page")
    assert [path.name for path in tmp_path.rglob("*")] == ["report.html", "kept"]

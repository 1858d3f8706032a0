"""The directory of checkpoints, and the arguments that name one."""

import pytest
from spmdkit.checkpoints.damage import CheckpointError
from spmdkit.checkpoints.directory import DAMAGED, contents, find, set_aside, size_on_disk
from spmdkit.mesh.errors import UserError


def make(folder, *names):
    for name in names:
        (folder / name).mkdir(parents=True)


def test_contents_sorts_directories_by_condition(tmp_path):
    make(tmp_path, "40", "8", "012", "60.orbax-checkpoint-tmp", "damaged-20", "removed-10", "undamaged-20")
    (tmp_path / "50").touch()
    assert contents(tmp_path) == ((8, 40), ("damaged-20",), ("60.orbax-checkpoint-tmp",), ("removed-10",))
    assert contents(tmp_path / "absent") == ((), (), (), ())


def test_set_aside_keeps_existing_names(tmp_path):
    make(tmp_path, "8", "damaged-8", "damaged-8-2", "9")
    assert [path.name for path in set_aside(tmp_path, ["8", "9"], DAMAGED)] == ["damaged-8-3", "damaged-9"]
    assert contents(tmp_path).steps == ()


def test_size_on_disk_counts_all_files(tmp_path):
    make(tmp_path, "a")
    (tmp_path / "a" / "b").write_bytes(bytes(100))
    (tmp_path / "c").write_bytes(bytes(11))
    assert (size_on_disk(tmp_path), size_on_disk(tmp_path / "absent")) == (111, 0)


@pytest.mark.parametrize("given", ["", "checkpoints"])
def test_finds_all_checkpoints_of_a_run(original, given):
    found = find(str(original / given))
    assert (found.run, found.contents.steps, found.chosen) == (original, (10, 20, 30), None)
    assert found.one == original / "checkpoints" / "30"
    assert find(str(original / given), 20).one == original / "checkpoints" / "20"


@pytest.mark.parametrize("given", ["checkpoints/20", "20"])
def test_finds_one_checkpoint(original, given):
    found = find(str(original / given))
    assert (found.checkpoints, found.chosen) == (original / "checkpoints", original / "checkpoints" / "20")
    with pytest.raises(UserError, match=r"--step 10: .* is one checkpoint already"):
        find(str(original / given), 10)


def test_finds_a_run_with_a_number_for_a_name_by_a_relative_path(original, tmp_path, monkeypatch):
    (tmp_path / "7").symlink_to(original)
    monkeypatch.chdir(tmp_path)
    assert find("7").contents.steps == (10, 20, 30)


def test_finds_a_checkpoint_that_was_set_aside(run):
    (run / "checkpoints" / "20").rename(run / "checkpoints" / "damaged-20")
    assert find(str(run / "checkpoints" / "damaged-20")).chosen == run / "checkpoints" / "damaged-20"
    with pytest.raises(CheckpointError, match=r"of step 20 .*; there are: 10, 30\. Besides: damaged-20\."):
        find(str(run), 20)


UNFINISHED = "checkpoints/5.orbax-checkpoint-tmp"


@pytest.mark.parametrize(
    ("directories", "files", "given", "step", "message"),
    [
        ([], [], "no", None, r"There is no /.*/no\. Give the directory of a run"),
        ([], ["file"], "file", None, r"/file is a file\. Give the directory of a run"),
        (["x"], [], "x", None, r"/x is neither a run nor a directory of checkpoints"),
        ([], ["config.yaml"], "", None, r"holds a run that has saved no checkpoint yet\. Wait"),
        (["checkpoints"], [], "", None, r"No complete checkpoint in /.*/checkpoints\.$"),
        ([UNFINISHED], [], "", None, r"No complete checkpoint in /.*\. Besides: 5\.orbax-checkpoint-tmp\."),
        ([UNFINISHED], [], UNFINISHED, None, r"is unfinished: its save never ended"),
        ([UNFINISHED], [], "", 5, r"No checkpoint of step 5 .* Besides: 5\.orbax-checkpoint-tmp\."),
    ],
)
def test_rejects_a_path_without_a_checkpoint(directories, files, given, step, message, tmp_path):
    make(tmp_path, *directories)
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=message) as raised:
        find(str(tmp_path / given), step).one  # noqa: B018
    assert raised.value.exit_code == 2

"""Every way to name a checkpoint finds it; what is none gets one message."""

import os
import re
import shutil

import pytest
from spmdkit.launch.inspection.finding import find
from spmdkit.mesh.errors import UserError
from spmdkit.training.checkpointing.errors import CheckpointError


@pytest.mark.parametrize("given", ["", "checkpoints"])
def test_a_run_and_its_folder_mean_all_and_the_newest(original, given):
    found = find(str(original / given))
    assert found.run == original
    assert found.contents.steps == (10, 20, 30)
    assert found.chosen is None
    assert found.one == original / "checkpoints" / "30"
    assert find(str(original / given), 20).one == original / "checkpoints" / "20"


@pytest.mark.parametrize("given", ["checkpoints/20", "20"])
def test_one_checkpoint(original, given):
    found = find(str(original / given))
    assert found.chosen == original / "checkpoints" / "20"
    assert found.checkpoints == original / "checkpoints"
    with pytest.raises(UserError, match=r"--step 10: .* is one checkpoint already"):
        find(str(original / given), 10)


def test_a_run_whose_name_is_a_number(original, tmp_path):
    run = tmp_path / "7"
    run.symlink_to(original)
    assert find(str(run)).contents.steps == (10, 20, 30)


def test_a_name_that_is_no_text_is_no_damage(original, tmp_path):
    """TensorStore takes no such path, and what it says of that read as if the checkpoint were damaged."""
    folder = tmp_path / os.fsdecode(b"r\xffn")
    shutil.copytree(original, folder)
    with pytest.raises(
        UserError, match=r"the name is no text in UTF-8, and under such a name .* Rename the folder\."
    ) as info:
        find(str(folder))
    assert not isinstance(info.value, CheckpointError)


def test_an_empty_name_is_not_the_working_directory(original, monkeypatch):
    """`spmdkit checkpoint verify "$RUN"` if that variable is not set."""
    monkeypatch.chdir(original)
    with pytest.raises(UserError, match=r"The name of a run is empty\. Give its folder"):
        find("")


def test_a_relative_path(original, monkeypatch):
    monkeypatch.chdir(original.parent)
    assert find(original.name).one == original / "checkpoints" / "30"


def test_one_that_is_set_aside_can_be_named(run):
    (run / "checkpoints" / "20").rename(run / "checkpoints" / "damaged-20")
    found = find(str(run / "checkpoints" / "damaged-20"))
    assert found.chosen == run / "checkpoints" / "damaged-20"
    with pytest.raises(CheckpointError, match=r"of step 20 .*; there are: 10, 30\. Besides: damaged-20\."):
        find(str(run), 20)


@pytest.mark.parametrize(
    ("make", "given", "message"),
    [
        (lambda folder: None, "no", r"There is no /.*/no\. Give the folder of a run"),
        (lambda folder: (folder / "file").touch(), "file", r"/file is a file\. Give the folder of a run"),
        (lambda folder: (folder / "x").mkdir(), "x", r"/x is no run, and no folder of checkpoints"),
        (lambda folder: (folder / "config.yaml").touch(), "", r"holds a run that has saved no checkpoint yet\. Wait"),
        (lambda folder: (folder / "checkpoints").mkdir(), "", r"There is no complete checkpoint in /.*/checkpoints\.$"),
        (
            lambda folder: (folder / "checkpoints" / "5.orbax-checkpoint-tmp").mkdir(parents=True),
            "",
            r"no complete checkpoint in /.*/checkpoints\. Besides: 5\.orbax-checkpoint-tmp\.",
        ),
        (
            lambda folder: (folder / "checkpoints" / "5.orbax-checkpoint-tmp").mkdir(parents=True),
            "checkpoints/5.orbax-checkpoint-tmp",
            r"is unfinished: its save never came to an end",
        ),
    ],
)
def test_what_is_none_is_told(make, given, message, tmp_path):
    make(tmp_path)
    with pytest.raises(CheckpointError, match=message) as raised:
        find(str(tmp_path / given)).one  # noqa: B018
    assert raised.value.exit_code == 2


def test_an_unfinished_step_is_told(run):
    (run / "checkpoints" / "40.orbax-checkpoint-tmp").mkdir()
    with pytest.raises(CheckpointError, match=re.escape("40.orbax-checkpoint-tmp is unfinished")):
        find(str(run), 40)

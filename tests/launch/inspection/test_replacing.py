import errno

import pytest
from spmdkit.launch.inspection.replacing import check_target, replacing
from spmdkit.mesh.errors import UserError


def test_a_file_has_its_name_when_all_is_written(tmp_path):
    target = tmp_path / "out"
    target.write_text("before")
    with replacing(target) as partial:
        partial.write_text("after")
        assert target.read_text() == "before"
    assert target.read_text() == "after"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_replaces_a_folder(tmp_path):
    target = tmp_path / "out"
    (target / "old").mkdir(parents=True)
    with replacing(target) as partial:
        partial.mkdir()
        (partial / "new").write_text("new")
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["out", "out/new"]


def test_an_error_leaves_nothing_and_names_the_target(tmp_path):
    def write():
        with replacing(tmp_path / "out") as partial:
            partial.write_text("half")
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left") as raised:
        write()
    assert raised.value.filename == str(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_what_is_in_the_way_is_told(tmp_path):
    check_target(tmp_path / "out", force=False)
    (tmp_path / "out").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match="is there already"):
        check_target(tmp_path / "out", force=False)
    check_target(tmp_path / "out", force=True)
    with pytest.raises(UserError, match="There is no folder"):
        check_target(tmp_path / "no" / "out", force=True)

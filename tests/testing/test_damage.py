import pytest
from spmdkit.mesh.errors import UserError

from spmdkit.testing.damage import damage, newest


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "checkpoints" / "12"
    for name in ("state/d/one", "state/ocdbt.process_0/d/two", "_CHECKPOINT_METADATA", "state/_METADATA"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"0123456789")
    (tmp_path / "checkpoints" / "8").mkdir()
    (tmp_path / "checkpoints" / "removed-16").mkdir()
    return folder


def contents(folder) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("how", "left", "data"),
    [
        ("flip", 4, b"01234\x316789"),
        ("truncate", 4, b"01234"),
        ("remove", 2, None),
        ("metadata", 2, b"0123456789"),
        ("empty", 0, None),
    ],
)
def test_damage(how, left, data, checkpoint):
    damage(checkpoint, how)
    found = contents(checkpoint)
    assert len(found) == left
    assert found.get("state/d/one") == data
    assert checkpoint.is_dir()


def test_the_newest(checkpoint, tmp_path):
    assert newest(checkpoint.parent) == checkpoint
    assert newest(tmp_path / "none") is None


def test_nothing_to_damage(tmp_path):
    with pytest.raises(UserError, match="holds no files to damage"):
        damage(tmp_path, "flip")

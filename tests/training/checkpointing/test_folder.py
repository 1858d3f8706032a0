from spmdkit.training.checkpointing.folder import DAMAGED, contents, set_aside, size_on_disk


def test_what_a_folder_holds(tmp_path):
    for name in ("40", "8", "012", "60.orbax-checkpoint-tmp", "damaged-20", "removed-10", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "50").touch()
    held = contents(tmp_path)
    assert held == ((8, 40), ("damaged-20",), ("60.orbax-checkpoint-tmp",), ("removed-10",))
    assert contents(tmp_path / "absent") == ((), (), (), ())


def test_names_that_are_taken_are_left(tmp_path):
    for name in ("8", "damaged-8", "damaged-8-2", "9"):
        (tmp_path / name).mkdir()
    moved = set_aside(tmp_path, ["8", "9"], DAMAGED)
    assert [path.name for path in moved] == ["damaged-8-3", "damaged-9"]
    assert contents(tmp_path).steps == ()


def test_size_counts_all_files(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_bytes(bytes(100))
    (tmp_path / "c").write_bytes(bytes(11))
    assert size_on_disk(tmp_path) == 111
    assert size_on_disk(tmp_path / "absent") == 0

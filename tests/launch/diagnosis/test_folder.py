import os
import socket

import pytest
from spmdkit.launch.diagnosis import folder as room
from spmdkit.launch.diagnosis.folder import clock, folder, kind_of, probe, shared, skew


def test_a_folder_that_can_be_used(tmp_path):
    found = folder(tmp_path / "not" / "there", several_hosts=False)
    assert [(finding.name, finding.level) for finding in found] == [("run.dir", "ok"), ("clock", "ok")]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot(tmp_path):
    (tmp_path / "file").write_text("")
    (found,) = folder(tmp_path / "file" / "run", several_hosts=False)
    assert found.level == "wrong"
    assert "is a file" in found.found


def test_no_room(tmp_path, monkeypatch):
    monkeypatch.setattr(room, "LEAST_ROOM", 2**62)
    found = folder(tmp_path, several_hosts=False)[0]
    assert (found.level, found.fix) == ("wrong", "make room, or set run.dir to another file system")


@pytest.mark.parametrize(
    ("kind", "several", "level"), [("tmpfs", True, "wrong"), ("tmpfs", False, "ok"), ("nfs4", True, "ok")]
)
def test_a_file_system_of_one_host(kind, several, level, tmp_path, monkeypatch):
    monkeypatch.setattr(room, "kind_of", lambda path: kind)
    found = folder(tmp_path, several)[0]
    assert found.level == level
    assert kind in found.found


def test_kind_of_a_file_system(tmp_path):
    mounts = tmp_path / "mounts"
    mounts.write_text(f"root / ext4 rw 0 0\nserver:/x {tmp_path} nfs4 rw 0 0\n")
    assert kind_of(tmp_path / "mounts", mounts) == "nfs4"
    assert kind_of(tmp_path.parent, mounts) == "ext4"
    assert kind_of(tmp_path, tmp_path / "none") == ""


@pytest.mark.parametrize(("seconds", "found"), [(60, "60 s ahead of"), (-60, "60 s behind"), (0.5, None)])
def test_skew(seconds, found):
    finding = skew(seconds, "n2")
    assert finding.level == ("wrong" if found else "ok")
    assert (found or "agrees with n2") in finding.found


def test_a_file_system_with_another_clock(tmp_path, monkeypatch):
    stat = os.stat

    def later(path, **options):
        found = stat(path, **options)
        return os.stat_result([*found[:8], found.st_mtime + 100, *found[9:10]])

    assert clock(tmp_path).level == "ok"
    monkeypatch.setattr(room.os, "stat", later)
    assert "100 s ahead of" in clock(tmp_path).found


def test_probes(tmp_path):
    with probe(tmp_path / "run", 0) as one, probe(tmp_path / "run", 1) as other:
        assert shared(tmp_path / "run", [one, other], ["a", "b"]).level == "ok"
        found = shared(tmp_path / "run", [one, "another"], ["a", "b"], seconds=0.2)
        assert found.level == "wrong"
        assert f"files that b wrote to {tmp_path} are not to be seen on {socket.gethostname()}" in found.found
    assert list(tmp_path.iterdir()) == []

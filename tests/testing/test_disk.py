import errno
import os

import pytest

from spmdkit.testing import small_disk

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system: run this as root"),
]


def test_a_small_disk_is_full_and_has_room_again(tmp_path):
    with small_disk(tmp_path / "disk", megabytes=1) as disk:
        disk.fill(leave=8192)
        (disk.path / "small").write_bytes(b"1" * 4096)
        disk.fill()
        with pytest.raises(OSError) as caught:
            (disk.path / "more").write_bytes(b"1" * 4096)
        assert caught.value.errno == errno.ENOSPC
        disk.make_room()
        (disk.path / "more").write_bytes(b"1" * 4096)
    assert list((tmp_path / "disk").iterdir()) == []


def test_a_small_disk_that_may_not_be_written_to(tmp_path):
    with small_disk(tmp_path / "disk") as disk:
        disk.read_only()
        with pytest.raises(OSError) as caught:
            (disk.path / "file").write_text("1")
        assert caught.value.errno == errno.EROFS
        disk.read_only(False)
        (disk.path / "file").write_text("1")

import os
import threading

import pytest
from spmdkit.launch.supervision.logs import Log


@pytest.fixture
def said():
    return []


def test_appends_bytes_as_they_are(tmp_path, said):
    path = tmp_path / "rank-0.log"
    path.write_bytes(b"before\n")
    log = Log(path, said.append)
    for data in (b"one", b"\xff\x00", b"", b"\n"):
        log.write(data)
    log.close()
    assert path.read_bytes() == b"before\none\xff\x00\n"
    assert said == []


def test_nothing_is_made_before_the_first_byte(tmp_path, said):
    Log(tmp_path / "a.log", said.append).close()
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["folder", "pipe", "nothing above it"])
def test_what_is_no_file_is_said_once(kind, tmp_path, said):
    path = tmp_path / "a.log"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path = tmp_path / "missing" / "a.log"
    log = Log(path, said.append)
    for _ in range(3):
        log.write(b"line\n")
    log.close()
    (line,) = said
    assert line.startswith(f"{path} cannot be written: ")
    assert line.endswith("The run goes on; its output is only here.")


def test_it_goes_on_where_that_is_possible_again(tmp_path, said):
    path = tmp_path / "logs" / "a.log"
    log = Log(path, said.append)
    log.write(b"lost\n")
    log.write(b"lost too\n")
    path.parent.mkdir()
    log.write(b"kept\n")
    log.write(b"and this\n")
    log.close()
    assert path.read_bytes() == b"\n--- 14 bytes are missing here ---\nkept\nand this\n"
    assert len(said) == 1


def test_two_threads(tmp_path, said):
    log = Log(tmp_path / "a.log", said.append)
    threads = [threading.Thread(target=lambda: [log.write(b"whole line\n") for _ in range(500)]) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    assert (tmp_path / "a.log").read_bytes() == b"whole line\n" * 1000

"""What is kept is what was given, or nothing."""

import os
import subprocess
import sys
import time

import pytest
from spmdkit.launch.compiling.store import RECENT_SECONDS, ProgramLost, ProgramStore


@pytest.fixture
def said():
    return []


@pytest.fixture
def store(tmp_path, said):
    return ProgramStore(tmp_path, said.append)


def test_what_was_put_is_found_by_another_process_of_the_folder(store, tmp_path, said):
    assert store.get("step-1") is None
    store.put("step-1", b"program")
    assert ProgramStore(tmp_path, said.append).get("step-1") == b"program"
    assert [path.name for path in tmp_path.iterdir()] == ["step-1.program"]
    assert not said


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_a_damaged_program_is_not_there_and_is_replaced(damage, store, tmp_path, said):
    store.put("step-1", b"program" * 100)
    path = tmp_path / "step-1.program"
    whole = path.read_bytes()
    flipped = whole[:50] + bytes([whole[50] ^ 1]) + whole[51:]
    path.write_bytes({"cut": whole[:-1], "flipped": flipped, "empty": b""}[damage])
    assert store.get("step-1") is None
    assert said == [f"compilation: {path} is damaged; the program is compiled anew, and the file replaced."]
    store.put("step-1", b"program" * 100)
    assert path.read_bytes() == whole


def age(path, seconds):
    then = time.time() - seconds
    os.utime(path, (then, then))


def test_the_programs_read_last_stay_below_the_size(tmp_path, said):
    store = ProgramStore(tmp_path, said.append, most_bytes=3 * (32 + 10))
    for number in range(3):
        store.put(str(number), bytes(10))
        age(tmp_path / f"{number}.program", RECENT_SECONDS + 100 - number)
    assert store.get("0") is not None  # now it is the one read last
    store.put("3", bytes(10))
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["0", "2", "3"]
    assert store.size() == (3, 3 * 42)


def test_what_killed_processes_left_goes_a_day_later(store, tmp_path):
    for name in ("old.partial", "old.mark", "new.partial"):
        (tmp_path / name).write_bytes(b"half")
        age(tmp_path / name, 90_000 if name.startswith("old") else 60)
    store.put("step-1", b"program")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.partial", "step-1.program"]


def test_what_a_run_that_starts_may_read_stays_above_the_size(tmp_path, said):
    store = ProgramStore(tmp_path, said.append, most_bytes=50)
    for number in range(3):
        store.put(str(number), bytes(10))
    assert store.keys() == {"0", "1", "2"}


def test_of_several_processes_each_reads_what_all_see_and_nothing_else(store, tmp_path, said):
    store.put("seen by all", b"program")
    store.put("added since", b"program")
    one = ProgramStore(tmp_path, said.append, shared=frozenset({"seen by all"}))
    assert one.get("seen by all") == b"program"
    assert one.get("added since") is None
    assert not said


@pytest.mark.parametrize("what", ["gone", "damaged"])
def test_a_program_that_the_others_may_have_read_ends_the_process(what, store, tmp_path, said):
    """An Exception would be a warning of JAX, which then compiles: on GPUs that waits for ever."""
    store.put("1", b"program")
    path = tmp_path / "1.program"
    one = ProgramStore(tmp_path, said.append, shared=store.keys())
    path.unlink() if what == "gone" else path.write_bytes(b"half")
    with pytest.raises(ProgramLost, match=r"1\.program was there when this run started") as lost:
        one.get("1")
    assert lost.value.exit_code == 75
    assert not isinstance(lost.value, Exception)
    assert store.keys() == set()  # the next start compiles it


def test_a_folder_that_is_gone_is_said_once(store, tmp_path, said):
    store.put("1", b"")
    for path in tmp_path.iterdir():
        path.unlink()
    tmp_path.rmdir()
    store.put("1", b"")
    store.put("2", b"")
    assert store.get("1") is None
    assert len(said) == 1
    assert "cannot be written to (No such file or directory)" in said[0]
    assert "Set run.cache to another folder, or to none" in said[0]


FULL = """
import resource, sys
from pathlib import Path
from spmdkit.launch.compiling.store import ProgramStore
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
store = ProgramStore(Path(sys.argv[1]), print)
store.put("large", bytes(1000))
assert store.get("large") is None
store.put("small", bytes(10))
assert store.get("small") == bytes(10)
"""


def test_a_file_that_does_not_fit_leaves_nothing(tmp_path):
    ended = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "cannot be written to (File too large)" in ended.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["small.program"]

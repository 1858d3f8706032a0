"""A run directory has one owner; whoever is gone loses it, whoever is there keeps it."""

import fcntl
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from spmdkit.runtime import ownership
from spmdkit.runtime.ownership import NAME, DirectoryInUse, Ownership, OwnershipLost, refuse_if_in_use
from support.interleaving import Killed, interleave, pass_turn
from support.processes import process_state, wait_for
from support.runs import command, environment, trained, write_config

ELSEWHERE = {"host": "other", "place": "other boot pid:[1]", "pid": 7, "started": "1", "since": "then", "token": "t"}


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    monkeypatch.setattr(ownership, "STALE_SECONDS", 0.6)
    monkeypatch.setattr(ownership, "TOUCH_SECONDS", 0.05)


def given(folder, **changes):
    """Writes the file of another owner."""
    (folder / NAME).write_text(json.dumps({**ELSEWHERE, **changes}))


def of_this_machine(**changes):
    return {**ownership.this_process()._asdict(), "token": "t", **changes}


def taken(folder) -> bool:
    said = []
    with Ownership(folder, said.append) as own:
        own.take()
        mine = ownership.read_owner(folder)
        own.check()
    assert mine is not None
    assert mine.pid == os.getpid()
    assert list(folder.iterdir()) == [], "released, and nothing left beside it"
    return bool(said)


def test_a_free_directory_is_taken_touched_and_released(tmp_path):
    with Ownership(tmp_path) as own:
        assert list(tmp_path.iterdir()) == []
        own.take()
        before = (tmp_path / NAME).stat().st_mtime_ns
        time.sleep(0.3)
        assert (tmp_path / NAME).stat().st_mtime_ns > before
    assert list(tmp_path.iterdir()) == []


def test_a_process_of_this_machine_that_is_there_keeps_it(tmp_path):
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        given(tmp_path, **of_this_machine(pid=sleeper.pid, started=ownership.start_of(sleeper.pid), since="noon"))
        before = time.monotonic()
        with pytest.raises(DirectoryInUse, match=rf"in use by another job: process {sleeper.pid} on .*, since noon"):
            refuse_if_in_use(tmp_path)
        with pytest.raises(DirectoryInUse, match="overwrite each other's checkpoints"), Ownership(tmp_path) as own:
            own.take()
        assert time.monotonic() - before < 0.5, "nobody waits for what is known"
    finally:
        sleeper.kill()
        wait_for(lambda: not process_state(sleeper.pid), 10)
        refuse_if_in_use(tmp_path)  # a zombie
        sleeper.wait()
    refuse_if_in_use(tmp_path)
    assert not taken(tmp_path)


def test_another_process_of_the_same_number_is_not_the_owner(tmp_path):
    given(tmp_path, **of_this_machine(started="0"))
    assert not taken(tmp_path)


def test_a_silent_owner_on_another_machine_loses_it_after_a_while(tmp_path):
    given(tmp_path)
    refuse_if_in_use(tmp_path)  # not known to be there
    before = time.monotonic()
    assert taken(tmp_path)
    assert time.monotonic() - before > 0.5


def test_an_owner_on_another_machine_that_touches_its_file_keeps_it(tmp_path):
    given(tmp_path)
    end = threading.Event()

    def touch():
        while not end.wait(0.1):
            os.utime(tmp_path / NAME)

    thread = threading.Thread(target=touch)
    thread.start()
    try:
        with pytest.raises(DirectoryInUse, match="process 7 on other, since then"), Ownership(tmp_path) as own:
            own.take()
    finally:
        end.set()
        thread.join()
    assert json.loads((tmp_path / NAME).read_text()) == ELSEWHERE


@pytest.mark.parametrize("text", ["", '{"pid": 1}'])
def test_a_file_that_says_nothing_counts_by_its_changes(tmp_path, text):
    (tmp_path / NAME).write_text(text)
    assert taken(tmp_path)


@pytest.mark.parametrize("target", [NAME, "nothing"])
def test_a_file_that_cannot_be_read_is_an_error_and_not_waited_for(target, tmp_path):
    (tmp_path / NAME).symlink_to(target)
    with pytest.raises(OSError, match=NAME), Ownership(tmp_path) as own:
        own.take()
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_whoever_stood_still_finds_out_before_it_writes(tmp_path):
    with Ownership(tmp_path) as own:
        own.take()
        given(tmp_path)
        gone = r"now belongs to process 7 on other.*continues the run\..* ends without writing"
        with pytest.raises(OwnershipLost, match=gone) as raised:
            own.check()
        assert raised.value.exit_code == 75
    assert json.loads((tmp_path / NAME).read_text()) == ELSEWHERE, "it is not removed: it is another's"


def test_whose_folder_was_emptied_is_told_so(tmp_path):
    with Ownership(tmp_path) as own:
        own.take()
        (tmp_path / NAME).unlink()
        emptied = r"was emptied or replaced .*\. Start the same command again: .*ends without writing"
        with pytest.raises(OwnershipLost, match=emptied):
            own.check()


TAKE = """
import sys, time
from pathlib import Path
from spmdkit.runtime.ownership import DirectoryInUse, Ownership
print("ready", flush=True)
sys.stdin.readline()
try:
    with Ownership(Path(sys.argv[1])) as own:
        own.take()
        print("owner", flush=True)
        sys.stdin.readline()
        own.check()
except DirectoryInUse:
    print("refused", flush=True)
"""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_one_of_several_processes_takes_an_abandoned_directory(tmp_path):
    given(tmp_path, **of_this_machine(pid=2**22 + 1))
    command = [sys.executable, "-c", TAKE, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipes) for _ in range(4)]
    outputs = [process.stdout for process in processes]
    assert [output.readline() for output in outputs] == ["ready\n"] * 4
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    assert sorted(output.readline() for output in outputs) == ["owner\n"] + ["refused\n"] * 3
    assert [process.communicate("\n", timeout=60)[0] for process in processes] == [""] * 4
    assert [process.returncode for process in processes] == [0] * 4


@pytest.mark.long
@pytest.mark.slow
def test_the_second_of_two_jobs_is_refused_and_the_first_ends_well(tmp_path):
    """Both want one directory; the metrics and checkpoints of the first are its own."""
    config = write_config(tmp_path, train={"steps": 4000, "global_batch": 16})
    first = subprocess.Popen(command("train", config), env=environment(), stdout=subprocess.DEVNULL)
    try:
        while not (tmp_path / "run" / NAME).exists():
            assert first.poll() is None
            time.sleep(0.1)
        second = subprocess.run(command("train", config), env=environment(), capture_output=True, text=True)
        assert (second.returncode, first.poll()) == (2, None)
        assert f"in use by another job: process {first.pid} on" in second.stderr
    finally:
        first.kill()
        first.wait()
    trained("train", config, "train.steps=12", "--fresh")
    assert not (tmp_path / "run" / NAME).exists()


ORDERS = 40
GONE = {"host": "here", "place": "here", "pid": 0, "started": "1", "since": "then", "token": "left"}


def flock_in_turns(file, operation: int, lock=fcntl.flock) -> None:
    """Locks a file; whoever has to wait lets others go on."""
    while True:
        try:
            return lock(file, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            pass_turn()


class Contest:
    """Processes that take a directory, hold it and release it; their numbers mean something here alone."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.alive: set[int] = set()
        self.holders: set[int] = set()
        self.most = 0
        self._this = threading.local()
        token = lambda: f"{folder.name} {self._this.pid}"  # noqa: E731
        this = lambda: ownership.Owner("here", "here", self._this.pid, "1", "now", token())  # noqa: E731
        monkeypatch.setattr(ownership, "this_process", this)
        monkeypatch.setattr(ownership, "this_place", lambda: "here")
        monkeypatch.setattr(ownership, "start_of", lambda pid: "1" if pid in self.alive else "")
        monkeypatch.setattr(ownership.fcntl, "flock", flock_in_turns)

    def process(self, pid: int) -> Callable[[], None]:
        """One process, from its start to its end."""

        def run() -> None:
            self._this.pid = pid
            self.alive.add(pid)
            own = Ownership(self.folder)
            try:
                own.take()
                self.holders.add(pid)
                self.most = max(self.most, len(self.holders))
                own.check()
                self.holders.remove(pid)
                own.__exit__()
            except (DirectoryInUse, Killed):
                self.holders.discard(pid)
            finally:
                self.alive.remove(pid)
                own._end.set()

        return run


@pytest.mark.parametrize(("processes", "kills"), [(3, 0), (5, 0), (4, 2)])
@pytest.mark.parametrize("left", [True, False], ids=["left", "free"])
def test_there_is_one_owner_in_every_order_of_steps(processes, kills, left, tmp_path, monkeypatch):
    for seed in range(ORDERS):
        folder = tmp_path / str(seed)
        folder.mkdir()
        if left:
            (folder / NAME).write_text(json.dumps(GONE))
        contest = Contest(folder, monkeypatch)
        interleave(folder, [contest.process(pid) for pid in range(1, processes + 1)], random.Random(seed), kills)
        assert contest.most == 1 or (kills and contest.most == 0), f"seed {seed}: {contest.most} owners at once"
        contest.most = 0
        interleave(folder, [contest.process(99)], random.Random(seed), 0)
        assert contest.most == 1, f"seed {seed}: nobody can have it any more"
        left = [] if not kills else [ownership.LOCK, f"{NAME}.partial"]
        assert {path.name for path in folder.iterdir()} <= {*left}, f"seed {seed}"

"""Of several processes that take a directory over at once one gets it, in whatever order their steps come."""

import json
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from interleaving import Killed, interleave
from runs import environment
from spmdkit.launch.run.directory import owner, ownership
from spmdkit.launch.run.directory.owner import NAME, Owner
from spmdkit.launch.run.directory.ownership import DirectoryInUse, Ownership

ORDERS = 60
CONTENDERS = Path(__file__).parent / "contenders.py"
GONE = {"host": "here", "place": "here", "pid": 0, "started": "1", "since": "then", "token": "left"}


class Contest:
    """Processes that take a directory, hold it and release it; their numbers mean something here alone."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.alive: set[int] = set()
        self.holders: set[int] = set()
        self.most = 0
        self._this = threading.local()
        monkeypatch.setattr(
            ownership,
            "this_process",
            lambda: Owner("here", "here", self._this.pid, "1", "now", f"{folder.name} {self._this.pid}"),
        )
        for module in (owner, ownership):
            monkeypatch.setattr(module, "this_place", lambda: "here")
        monkeypatch.setattr(owner, "start_of", lambda pid: "1" if pid in self.alive else "")

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
        assert list(folder.iterdir()) == [], f"seed {seed}"


@pytest.mark.multiprocess
@pytest.mark.slow
def test_real_processes_have_one_owner(tmp_path):
    words = [sys.executable, str(CONTENDERS), str(tmp_path / "run"), "8", "12", "0"]
    ended = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr

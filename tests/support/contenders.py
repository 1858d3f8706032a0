"""Real processes that want one directory, in which a job that is gone has left the file of its ownership.

    python contenders.py FOLDER PROCESSES ROUNDS SEED

In each round all begin at the same moment, and whoever gets the directory stays until all have answered. In every other
round some are killed while they try. Prints a line for each round in which the directory had not one owner, or nobody
could have it afterwards.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

from spmdkit.runtime import ownership
from spmdkit.runtime.ownership import NAME, this_place

STALE = {"host": "here", "place": this_place(), "pid": 1, "started": "0", "since": "then"}
MOMENT = 0.002
"""Seconds, within which processes are killed."""


def contend(folder: Path, rank: int, start: float, gate: int) -> NoReturn:
    """One process: waits for the moment, tries, says how it went, and ends when the gate closes."""
    own = ownership.Ownership(folder)
    while time.monotonic() < start:
        pass
    try:
        own.take()
        own.check()
        answer = "owns"
    except ownership.DirectoryInUse:
        answer = "refused"
    (folder / f"{rank}.part").write_text(answer)
    (folder / f"{rank}.part").rename(folder / f"{rank}")
    os.read(gate, 1)
    os._exit(0)


def answer_of(folder: Path, rank: int, pid: int) -> str:
    """What a process answers; "" where it was killed before."""
    while not (folder / f"{rank}").exists():
        if os.waitpid(pid, os.WNOHANG) != (0, 0):
            return ""
        time.sleep(0.001)
    return (folder / f"{rank}").read_text()


def contest(folder: Path, processes: int, killed: int, chance: random.Random) -> list[str]:
    """Starts processes, kills the first of them, and gives what the others answer."""
    gate, closing = os.pipe()
    start, pids = time.monotonic() + 0.02, []
    for rank in range(processes):
        pid = os.fork()
        if pid == 0:
            os.close(closing)
            contend(folder, rank, start, gate)
        pids.append(pid)
    os.close(gate)
    time.sleep(max(0.0, start + chance.random() * MOMENT - time.monotonic()))
    for pid in pids[:killed]:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    answers = [answer_of(folder, rank, pid) for rank, pid in enumerate(pids) if rank >= killed]
    os.close(closing)
    for pid in pids[killed:]:
        os.waitpid(pid, 0)
    for path in folder.glob("[0-9]*"):
        path.unlink()
    return answers


def main() -> None:
    """Runs the rounds."""
    ownership.STALE_SECONDS = 0.3  # for a file that was cut by a kill
    folder, processes, rounds, seed = Path(sys.argv[1]), *map(int, sys.argv[2:])
    chance = random.Random(seed)
    folder.mkdir()
    for number in range(rounds):
        (folder / NAME).write_text(json.dumps({**STALE, "token": str(number)}))
        killed = number % 2 * processes // 2
        answers = contest(folder, processes, killed, chance)
        if answers.count("owns") > 1 or (not killed and answers.count("owns") != 1):
            print(number, answers)
        if contest(folder, 1, 0, chance) != ["owns"]:
            print(number, "nobody can have it")
        left = [path.name for path in folder.iterdir() if not path.name.startswith(NAME)]
        if left:
            print(number, left)


if __name__ == "__main__":
    main()

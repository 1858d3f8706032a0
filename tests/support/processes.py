"""Processes of a run, started one by one, and processes that a run left behind."""

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from spmdkit.launch.supervision.workers import free_port
from support.runs import command, environment


class Ended(NamedTuple):
    """How one process ended."""

    code: int
    stdout: str
    stderr: str


def begin(words: Sequence[str], variables: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen[str]:
    """Starts a program in the environment of a new process; by default, its errors are apart from its output."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(words, env=environment(**(variables or {})), **{**pipes, **options})


def start(config: Path, overrides: Sequence[Sequence[str]], **options: Any) -> list[subprocess.Popen[str]]:
    """Starts a process for each entry of `overrides`, which trains with those key=value arguments; see `start_each`."""
    return start_each([("train", config, *own) for own in overrides], **options)


def start_each(
    commands: Sequence[Sequence[str | Path]],
    *,
    devices: int = 4,
    variables: Mapping[str, str] | None = None,
    folders: Sequence[Path] | None = None,
    own: Mapping[int, Mapping[str, str]] | None = None,
) -> list[subprocess.Popen[str]]:
    """Starts a process of one run for each command, each in its folder; `own` has the variables of single ranks."""
    address = f"127.0.0.1:{free_port()}"
    common = {"SPMDKIT_JOB_ADDRESSES": address, "SPMDKIT_NUM_PROCESSES": str(len(commands))}
    common |= {"SPMDKIT_SIMULATE": str(devices), **(variables or {})}
    return [
        begin(
            command(*words),
            {"SPMDKIT_PROCESS_ID": str(rank), **common, **(own or {}).get(rank, {})},
            cwd=folders[rank] if folders else None,
        )
        for rank, words in enumerate(commands)
    ]


def wait(processes: Sequence[subprocess.Popen[str]], seconds: float = 120) -> list[Ended]:
    """Waits for the end of all; what is left after that time is killed."""
    deadline = time.monotonic() + seconds
    ended = []
    for process in processes:
        try:
            out, err = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
        ended.append(Ended(process.returncode, out, err))
    return ended


def processes_of(text: str | Path) -> list[int]:
    """The processes of this machine, but this one, with a text among their arguments."""
    wanted, found = str(text).encode(), []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            if wanted in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def process_state(pid: int) -> str:
    """The state letter of a process; "" if it has ended."""
    state, *_ = stat_fields(pid) or [""]
    return "" if state in "ZX" else state


def stat_fields(pid: int) -> list[str]:
    """The fields of a process from its state on; none where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def assert_gone(*pids: int, seconds: float = 20.0) -> None:
    """Processes end; a zombie counts as gone."""
    wait_for(lambda: not any(map(process_state, pids)), seconds)


def wait_for_step(folder: Path, number: int, process: subprocess.Popen, seconds: float = 200.0) -> None:
    """Waits until a step is in the log of the run below a folder."""
    path = folder / "run" / "metrics.jsonl"

    def is_logged() -> bool:
        assert process.poll() is None, process.communicate()[0]
        return path.exists() and len(path.read_text().splitlines()) >= number

    wait_for(is_logged, seconds)


def wait_until_none_of(text: str | Path, seconds: float = 20.0) -> list[int]:
    """Waits until no process has a text among its arguments; gives those that still have."""
    deadline = time.monotonic() + seconds
    while (found := processes_of(text)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def wait_for(condition, seconds: float = 120.0) -> None:
    """Waits until something holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.02)


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler of its own for a signal."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    (mask,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(mask, 16) >> (number - 1) & 1)


def assert_nothing_left(folder: Path, seconds: float = 15.0) -> None:
    """No process of a run is there, or all go within a few seconds."""
    assert wait_until_none_of(folder, seconds) == []

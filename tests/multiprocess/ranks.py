"""Processes of one run, started one by one, so that each can be given something else."""

import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from runs import command, environment
from spmdkit.launch.supervision.ports import free_port


class Ended(NamedTuple):
    """How one process ended."""

    code: int
    stdout: str
    stderr: str


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
    return [
        subprocess.Popen(
            command(*words),
            env=environment(
                **{
                    "SPMDKIT_JOB_ADDRESSES": address,
                    "SPMDKIT_NUM_PROCESSES": str(len(commands)),
                    "SPMDKIT_PROCESS_ID": str(rank),
                    "SPMDKIT_SIMULATE": str(devices),
                    **(variables or {}),
                    **(own or {}).get(rank, {}),
                }
            ),
            cwd=folders[rank] if folders else None,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
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

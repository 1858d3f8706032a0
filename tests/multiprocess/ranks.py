"""Processes of one run, started one by one, so that each can be given something else."""

import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from runs import command, environment
from spmdkit.launch.supervision.ports import free_port


class Ended(NamedTuple):
    """How one process ended."""

    code: int
    stdout: str
    stderr: str


def start(
    config: Path,
    overrides: Sequence[Sequence[str]],
    *,
    devices: int = 4,
    variables: Mapping[str, str] | None = None,
    folders: Sequence[Path] | None = None,
) -> list[subprocess.Popen[str]]:
    """Starts a process for each entry of `overrides`, with those key=value arguments, each in its folder."""
    address = f"127.0.0.1:{free_port()}"
    return [
        subprocess.Popen(
            command("train", config, *own),
            env=environment(
                SPMDKIT_JOB_ADDRESSES=address,
                SPMDKIT_NUM_PROCESSES=str(len(overrides)),
                SPMDKIT_PROCESS_ID=str(rank),
                SPMDKIT_SIMULATE=str(devices),
                **(variables or {}),
            ),
            cwd=folders[rank] if folders else None,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, own in enumerate(overrides)
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

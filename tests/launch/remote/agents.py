"""An agent without ssh: the same script, the same pipes, on this machine."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from spmdkit.launch.remote.client import FRAME, message
from spmdkit.launch.remote.connection import BOOTSTRAP

SSH = [sys.executable, "-c", BOOTSTRAP]
"""In place of ssh with its options and the command that it runs there."""
TOKEN = "0123456789abcdef"


def job(program: str, **more) -> dict:
    """A job that runs a small Python program."""
    return {
        "do": "run",
        "token": TOKEN,
        "command": [sys.executable, "-u", "-c", program],
        "directory": "/",
        "environment": {},
        "without": [],
        "direct": ["gpu1"],
        "silence": 60.0,
        "delay": 0.0,
        **more,
    }


def begin(given: dict, **environment: str) -> subprocess.Popen[bytes]:
    """Starts an agent and reads its first line."""
    process = subprocess.Popen(
        SSH, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **environment}, bufsize=0
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(message(given))
    assert process.stdout.readline() == f"spmdkit agent {TOKEN}\n".encode()
    return process


def frames(process: subprocess.Popen[bytes]) -> dict[bytes, bytes]:
    """All that an agent sends until its end, by kind."""
    found: dict[bytes, bytes] = {}
    assert process.stdout is not None
    while header := process.stdout.read(FRAME.size):
        kind, size = FRAME.unpack(header)
        text = b""
        while len(text) < size:
            text += process.stdout.read(size - len(text))
        found[kind] = found.get(kind, b"") + text
    return found


def answer(process: subprocess.Popen[bytes]) -> dict:
    """What an agent that was asked tells of its host."""
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def wait_for(path: Path, seconds: float = 30.0) -> str:
    """What a file holds as soon as it holds anything."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if path.exists() and (text := path.read_text()):
            return text
        time.sleep(0.02)
    raise AssertionError(f"{path} did not come")


def assert_gone(pid: int, seconds: float = 20.0) -> None:
    """A process ends, or is a zombie whom nobody has waited for."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return
        if state in "ZX":
            return
        time.sleep(0.05)
    raise AssertionError(f"process {pid} is still there")

"""Owns one process of a run on the host it runs on; or looks whether that host can take part in one.

The text of this file is sent over ssh and run there by whatever Python the hosts file names, so it imports the standard
library alone. It reads one line of JSON from stdin, answers with a line that holds MARK, and then:

    do: probe     prints one line of JSON about this host, and ends
    do: run       starts a process in a session of its own and writes frames to stdout: what the process prints, and at
                  last how it ended; reads lines from stdin: `signal 15` is for the process, any other a sign of life

When stdin ends, or no line has come for `silence` seconds, the other side is gone, of whatever: then the process is
killed with all it has started. A child of this one, which nothing else knows of, does the same should this one be
killed itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from typing import Any

MARK = "spmdkit agent "
"""Before the token in the first line of output; what login scripts print comes before it."""
FRAME = struct.Struct(">cI")
"""Kind (o stdout, e stderr, x exit status as text) and number of bytes that follow."""
READ_SECONDS = 2.0
"""How long to wait for the last output of a process that has ended."""
LOST = 75
"""Exit code of an agent whose other side is gone; nobody reads it."""


def main() -> None:
    """Reads what to do, and does it."""
    job = json.loads(sys.stdin.buffer.readline())
    sys.stdout.write(MARK + job["token"] + "\n")
    sys.stdout.flush()
    if job["do"] == "probe":
        print(json.dumps(probe(job)))
    else:
        run(job)


def probe(job: dict) -> dict:
    """Tells what this host has of what a run needs.

    Args:
        job: `directory`, where the run starts; `config`, its file, or "" for a preset; `marker`, a file that the asking
            side has just made beside run.dir; `addresses` of hosts.

    Returns:
        A dict of what was found; None, or no entry, where there is no such thing.
    """
    found = {"python": list(sys.version_info[:3]), "gpus": count_gpus(), "machine": machine()}
    found["spmdkit"] = importlib.util.find_spec("spmdkit") is not None
    found["versions"] = {name: version_of(name) for name in job["versions"]} if sys.version_info >= (3, 8) else {}
    found["addresses"] = {address: resolved(address) for address in job["addresses"]}
    found["port"] = find_port() if found["spmdkit"] else None
    try:
        os.chdir(os.path.expanduser(job["directory"]))
    except OSError as error:
        return dict(found, directory=None, reason=error.strerror)
    found["directory"] = os.getcwd()
    found["marker"] = os.path.isfile(job["marker"])
    found["writable"] = os.access(os.path.dirname(job["marker"]) or ".", os.W_OK | os.X_OK)
    found["config"] = digest(job["config"])
    return found


def digest(path: str) -> str | None:
    """SHA-256 of a file; None where it cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    except OSError:
        return None


def resolved(address: str) -> str | None:
    """What a host's name stands for here, as a number; None where it is not known."""
    try:
        return str(socket.getaddrinfo(address, None)[0][4][0])
    except (OSError, UnicodeError):
        return None


def machine() -> str:
    """Text that two names of one machine have in common."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname()


def version_of(package: str) -> str | None:
    """The version of an installed package; None where it says none."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def find_port() -> int | None:
    """A port that nothing on this host listens on; None where the spmdkit that is here cannot tell."""
    try:
        return importlib.import_module("spmdkit.launch.supervision.ports").free_port()
    except (ImportError, AttributeError, OSError, SyntaxError):
        return None


def count_gpus() -> int:
    """How many NVIDIA GPUs this host shows; 0 also where it has others."""
    devices = [name for name in _names("/dev") if name.startswith("nvidia") and name[len("nvidia") :].isdigit()]
    return max(len(devices), len(_names("/proc/driver/nvidia/gpus")))


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def run(job: dict) -> None:
    """Runs a process until it ends or the other side is gone.

    Args:
        job: `command`; `directory`, where it starts; `environment`, laid over this host's, of which the variables
            `without` are left out; `direct`, hosts that no proxy may stand before; `silence`, seconds without a line
            after which the other side counts as gone.
    """
    guard, tell = start_guard()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)  # the process gets its own; ignored, it would be deaf to them too
    turn = threading.Lock()
    try:
        process = subprocess.Popen(
            [os.path.expanduser(word) if word.startswith("~/") else word for word in job["command"]],
            cwd=os.path.expanduser(job["directory"]),
            env=environment(job),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        send(b"e", f"error: {job['command'][0]} cannot be started: {error.strerror}\n".encode(), turn)
        send(b"x", b"2", turn)
        return
    os.write(tell, b"%d\n" % process.pid)
    relays = [
        threading.Thread(target=relay, args=(pipe, kind, turn), daemon=True)
        for pipe, kind in ((process.stdout, b"o"), (process.stderr, b"e"))
    ]
    for relay_thread in relays:
        relay_thread.start()
    heard = [time.monotonic()]
    threading.Thread(target=listen, args=(process, heard), daemon=True).start()
    threading.Thread(target=mistrust, args=(process, heard, job["silence"]), daemon=True).start()
    code = process.wait()
    tell_group(process.pid, signal.SIGKILL)  # what it has left behind
    deadline = time.monotonic() + READ_SECONDS
    for relay_thread in relays:
        relay_thread.join(max(0.0, deadline - time.monotonic()))
    send(b"x", str(code).encode(), turn)
    os.kill(guard, signal.SIGKILL)  # there is nothing left to kill, and numbers are used again
    os._exit(0)


def environment(job: dict) -> dict[str, str]:
    """This host's environment with the run's laid over it; what speaks of another run is left out."""
    own = {
        name: value for name, value in os.environ.items() if not name.startswith(("KERAS_DISTRIBUTION_", "SPMDKIT_"))
    }
    own.update(job["environment"])
    if any(name.lower().endswith("_proxy") for name in own):
        direct = [own.get("no_proxy") or own.get("NO_PROXY") or "", *job["direct"]]
        own["no_proxy"] = own["NO_PROXY"] = ",".join(filter(None, direct))
    return own


def start_guard() -> tuple[int, int]:
    """Starts a child that kills the process groups it is told of when this process is gone.

    Returns:
        Its number, and the pipe to tell it through.
    """
    read, write = os.pipe()
    child = os.fork()
    if child:
        os.close(read)
        return child, write
    os.setsid()
    os.close(write)
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)  # ssh waits for whoever holds its ends
    told = b""
    while True:
        more = os.read(read, 4096)
        if not more:
            break
        told += more
    for line in told.split():
        tell_group(int(line), signal.SIGKILL)
    os._exit(0)


def relay(pipe: Any, kind: bytes, turn: threading.Lock) -> None:
    """Sends on what a process prints, until it closes the pipe."""
    with pipe:
        while True:
            text = pipe.read1(1 << 16)
            if not text or not send(kind, text, turn):
                return


def send(kind: bytes, text: bytes, turn: threading.Lock) -> bool:
    """Writes one frame; returns whether anybody still reads."""
    try:
        with turn:
            sys.stdout.buffer.write(FRAME.pack(kind, len(text)) + text)
            sys.stdout.buffer.flush()
    except OSError:
        return False
    return True


def listen(process: subprocess.Popen, heard: list[float]) -> None:
    """Reads lines from the other side; at their end kills the process and ends this one."""
    for line in iter(sys.stdin.buffer.readline, b""):
        heard[0] = time.monotonic()
        words = line.split()
        if words[:1] == [b"signal"] and process.poll() is None:
            tell_group(process.pid, int(words[1]))
    give_up(process)


def mistrust(process: subprocess.Popen, heard: list[float], silence: float) -> None:
    """Gives up when nothing was heard for too long: a connection that is cut says nothing at all."""
    while time.monotonic() - heard[0] < silence:
        time.sleep(min(1.0, silence / 4.0))
    give_up(process)


def give_up(process: subprocess.Popen) -> None:
    """Kills the process with all it has started, and ends this one."""
    tell_group(process.pid, signal.SIGKILL)
    os._exit(LOST)


def tell_group(group: int, number: int) -> None:
    """Sends a signal to what is left of a process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


if __name__ == "__main__":
    main()

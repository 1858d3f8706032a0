"""Owns one process of a run on its host, or checks if the host can take part in a run.

The text of this file is sent over ssh and run by the Python of the hosts file, so it imports only the standard library.
It reads a task, one line of JSON, from stdin, answers with a line that contains MARK, and then:

    do: probe     prints one line of JSON about this host, and ends
    do: run       starts a process in its own session and writes frames to stdout: its output, and at last its exit
                  status; reads lines from stdin: `signal 15` is passed to the process, any other is a heartbeat

If stdin ends, or no line arrives for `silence` seconds, the client is lost: then the process is killed with everything
that it has started. A child of this process, the guard, does the same if this process itself is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from typing import Any

MARK = "spmdkit agent "
"""Precedes the token in the first line of output; the output of login scripts comes before it."""
FRAME = struct.Struct(">cI")
"""Kind (o stdout, e stderr, x exit status as text) and number of the following bytes."""
READ_SECONDS = 2.0
"""The time to wait for the last output of a process that has ended."""
LOST = 75
"""The exit code of an agent that has lost its client."""


def main() -> None:
    """Reads the task and runs it."""
    task = json.loads(sys.stdin.buffer.readline())
    sys.stdout.write(MARK + task["token"] + "\n")
    sys.stdout.flush()
    if task["do"] == "probe":
        print(json.dumps(probe(task)))
    else:
        run(task)


def probe(task: dict) -> dict:
    """Returns the properties of this host that a run needs.

    Args:
        task: `directory`, the working directory of the run; `marker`, a file that the client has just created in
            run.dir; `addresses` of hosts.

    Returns:
        The values by name; None if something is missing.
    """
    found = {
        "python": list(sys.version_info[:3]),
        "gpus": count_gpus(),
        "spmdkit": find_spec("spmdkit") is not None,
        "addresses": {address: resolve(address) for address in task["addresses"]},
        "port": find_port(),
    }
    try:
        os.chdir(os.path.expanduser(task["directory"]))
    except OSError as error:
        return dict(found, directory=None, reason=error.strerror)
    found["directory"] = os.getcwd()
    found["marker"] = os.path.isfile(task["marker"])
    return found


def resolve(address: str) -> str | None:
    """Returns the IP address of a host; None if its name cannot be resolved."""
    with contextlib.suppress(OSError, UnicodeError):
        return str(socket.getaddrinfo(address, None)[0][4][0])
    return None


def find_port() -> int:
    """Returns a free port."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def count_gpus() -> int:
    """Returns the number of NVIDIA GPUs; 0 also if there are others."""
    names = os.listdir("/dev")
    return len([name for name in names if name.startswith("nvidia") and name[len("nvidia") :].isdigit()])


def run(task: dict) -> None:
    """Runs a process until it ends or the client is lost.

    Args:
        task: `command`; `directory`, its working directory; `environment`, in addition to that of this host without the
            variables of another run; `silence`, seconds without a line after which the client counts as lost.
    """
    guard, guard_pipe = start_guard()
    # The process gets its own handlers; if signals were ignored here, it would inherit that.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)
    turn = threading.Lock()
    try:
        process = subprocess.Popen(
            [os.path.expanduser(word) if word.startswith("~/") else word for word in task["command"]],
            cwd=os.path.expanduser(task["directory"]),
            env=environment(task),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        send(b"e", f"error: {task['command'][0]} cannot be started: {error.strerror}\n".encode(), turn)
        send(b"x", b"2", turn)
        return
    os.write(guard_pipe, b"%d\n" % process.pid)
    relays = [
        threading.Thread(target=relay, args=(pipe, kind, turn), daemon=True)
        for pipe, kind in ((process.stdout, b"o"), (process.stderr, b"e"))
    ]
    for relay_thread in relays:
        relay_thread.start()
    heard = [time.monotonic()]
    threading.Thread(target=listen, args=(process, heard), daemon=True).start()
    threading.Thread(target=watch_heartbeats, args=(process, heard, task["silence"]), daemon=True).start()
    code = process.wait()
    kill_group(process.pid, signal.SIGKILL)  # processes that it left behind
    deadline = time.monotonic() + READ_SECONDS
    for relay_thread in relays:
        relay_thread.join(max(0.0, deadline - time.monotonic()))
    send(b"x", str(code).encode(), turn)
    os.kill(guard, signal.SIGKILL)  # nothing is left to kill, and the system may reuse process ids
    os._exit(0)


def environment(task: dict) -> dict[str, str]:
    """Returns the environment of this host, without variables of another run, and with those of this run."""
    own = {
        name: value for name, value in os.environ.items() if not name.startswith(("KERAS_DISTRIBUTION_", "SPMDKIT_"))
    }
    return dict(own, **task["environment"])


def start_guard() -> tuple[int, int]:
    """Starts a child that kills the process groups of its pipe when this process ends.

    Returns:
        Its process id, and the pipe.
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
        os.dup2(null, number)  # ssh waits until all copies of its pipes are closed
    for line in os.fdopen(read, "rb").read().split():  # waits until the other process has ended
        kill_group(int(line), signal.SIGKILL)
    os._exit(0)


def relay(pipe: Any, kind: bytes, turn: threading.Lock) -> None:
    """Sends the output of a process until it closes the pipe."""
    with pipe:
        while True:
            text = pipe.read1(1 << 16)
            if not text or not send(kind, text, turn):
                return


def send(kind: bytes, text: bytes, turn: threading.Lock) -> bool:
    """Writes one frame; returns whether the client still reads."""
    with contextlib.suppress(OSError), turn:
        sys.stdout.buffer.write(FRAME.pack(kind, len(text)) + text)
        sys.stdout.buffer.flush()
        return True
    return False


def listen(process: subprocess.Popen, heard: list[float]) -> None:
    """Reads lines from the client; at their end, kills the process and ends this one."""
    for line in iter(sys.stdin.buffer.readline, b""):
        heard[0] = time.monotonic()
        words = line.split()
        if words[:1] == [b"signal"] and process.poll() is None:
            kill_group(process.pid, int(words[1]))
    give_up(process)


def watch_heartbeats(process: subprocess.Popen, heard: list[float], silence: float) -> None:
    """Gives up if no line arrived for too long: a broken connection gives no sign."""
    while time.monotonic() - heard[0] < silence:
        time.sleep(min(1.0, silence / 4.0))
    give_up(process)


def give_up(process: subprocess.Popen) -> None:
    """Kills the process with everything that it has started, and ends this one."""
    kill_group(process.pid, signal.SIGKILL)
    os._exit(LOST)


def kill_group(group: int, number: int) -> None:
    """Sends a signal to a process group, if it still exists."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


if __name__ == "__main__":
    main()

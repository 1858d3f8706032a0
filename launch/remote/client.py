"""Stands for one process on another host: `run_processes` starts this script like any other process.

The script starts ssh, which starts `agent.py` on the host, which starts the process. The script prints the output of
the process on the same stream, passes signals on, and ends with its exit code, or 128 + n if signal n killed it, as in
a shell. If this script dies, for any reason, the agent reads the end of its stdin and kills the process.

ssh alone does none of this: its exit code is 255 both for a signal and for a lost connection, and if it is killed, the
remote process continues. Its messages are kept, and printed if the connection is lost.
"""

import json
import os
import random
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import BinaryIO, cast

AGENT = Path(__file__).parent / "agent.py"
VARIABLE = "SPMDKIT_REMOTE"
"""The environment variable with the task: no other user can read it."""
FRAME = struct.Struct(">cI")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
IGNORE_SIGNALS = ("/bin/sh", "-c", "trap '' HUP INT TERM USR1; exec \"$@\"", "sh")
"""The prefix of ssh: it must survive a signal to its process group, which the agent handles."""
LOST = 75
"""TRY_AGAIN of mesh/exit_codes.py, which this script cannot import."""
WAITS = (0.0, 0.5, 1.0, 2.0)
"""Seconds before each attempt to connect: a server accepts only a few connections at a time."""
HELLO_SECONDS = 60.0
"""The time from the connection to the first line of the agent."""
MAX_LINES = 3
"""The number of lines of ssh that are kept."""


class Client:
    """One process on another host."""

    def __init__(self, name: str, command: list[str], task: dict) -> None:
        """Prepares to run a process.

        Args:
            name: The name of the host, for people.
            command: The command line of ssh.
            task: The task of the agent; see `run` in agent.py.
        """
        self._name = name
        self._command = command
        self._task = task
        self._ssh: subprocess.Popen[bytes]
        self._has_begun = False
        self._pending: list[int] = []
        """Signals that have not been passed on yet."""
        self._messages = b""

    def run(self) -> int:
        """Runs the process; returns its exit status, negative if a signal killed it, or LOST."""
        for number in SIGNALS:
            signal.signal(number, lambda got, _: self._pass_on(got))
        time.sleep(self._task["delay"])
        for wait in WAITS:
            time.sleep(wait * random.uniform(1.0, 1.5))
            if self._pending:
                return LOST  # stopped before it began
            if self._begin():
                break
        else:
            return self._lost("does not answer")
        threading.Thread(target=self._send_heartbeats, daemon=True).start()
        code = self._relay()
        return self._lost("was lost") if code is None else code

    def _begin(self) -> bool:
        """Starts ssh and waits for the agent; returns whether it answered."""
        self._ssh = subprocess.Popen(
            [*IGNORE_SIGNALS, *self._command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        threading.Thread(target=self._read_messages, args=(self._ssh.stderr,), daemon=True).start()
        timer = threading.Timer(HELLO_SECONDS, self._ssh.kill)
        timer.start()
        try:
            self._send(message(self._task))
            mark = f"spmdkit agent {self._task['token']}\n".encode()
            line = b""
            while not line.endswith(mark):  # the output of login scripts comes first
                line = cast(BinaryIO, self._ssh.stdout).readline()
                if not line:
                    self._ssh.wait()
                    return False
        finally:
            timer.cancel()
        self._has_begun = True
        self._pass_on()
        return True

    def _relay(self) -> int | None:
        """Prints the output of the process; returns its exit status, or None if the connection is lost."""
        source = cast(BinaryIO, self._ssh.stdout)
        while len(header := source.read(FRAME.size)) == FRAME.size:
            kind, size = FRAME.unpack(header)
            text = source.read(size)
            if len(text) < size:
                return None
            if kind == b"x":
                return int(text)
            stream = sys.stdout.buffer if kind == b"o" else sys.stderr.buffer
            stream.write(text)
            stream.flush()
        return None

    def _send_heartbeats(self) -> None:
        """Sends heartbeats to the agent."""
        while self._send(b"here\n"):
            time.sleep(self._task["silence"] / 6)

    def _send(self, text: bytes) -> bool:
        """Writes to the agent; returns whether it worked. Short writes of several threads do not mix in a pipe."""
        pipe = cast(BinaryIO, self._ssh.stdin).fileno()
        try:
            while text:
                text = text[os.write(pipe, text) :]
        except OSError:
            return False
        return True

    def _pass_on(self, *numbers: int) -> None:
        """Passes signals on as soon as the agent runs."""
        self._pending.extend(numbers)
        while self._has_begun and self._pending:
            self._send(b"signal %d\n" % self._pending.pop(0))

    def _read_messages(self, pipe: BinaryIO) -> None:
        """Keeps the last messages of ssh."""
        for line in pipe:
            self._messages = b"\n".join([*self._messages.splitlines(), line.strip()][-MAX_LINES:])

    def _lost(self, how: str) -> int:
        """Prints that the host cannot be reached, with the messages of ssh."""
        self._ssh.kill()
        self._ssh.wait()
        time.sleep(0.1)  # for its last messages
        messages = "; ".join(dict.fromkeys(self._messages.decode(errors="replace").splitlines()))
        subject = f"the connection to host {self._name}" if how == "was lost" else f"host {self._name}"
        print(f"error: {subject} {how}{f' (ssh: {messages})' if messages else ''}", file=sys.stderr, flush=True)
        return LOST


def message(task: dict) -> bytes:
    """Returns the input of ssh: the size of the agent in bytes, the agent, and the task as one line."""
    agent = AGENT.read_bytes()
    return b"%d\n%s%s\n" % (len(agent), agent, json.dumps(task).encode())


def main() -> None:
    """Runs the task of the environment; the arguments are the name of the host and the command line of ssh."""
    code = Client(sys.argv[1], sys.argv[2:], json.loads(os.environ.pop(VARIABLE))).run()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()

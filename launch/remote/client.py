"""Stands here for one process of a run on another host: `run_processes` starts this script as it starts any other.

The script starts ssh, which starts `agent.py` there, which starts the process. What the process prints comes out here,
on the same stream; a signal that comes here goes there; and the script ends as the process has ended, killed by the
same signal too. When this script is gone, of whatever, the agent sees its stdin end and kills the process.

ssh itself knows none of this: its exit code is 255 for a signal and for a lost connection alike, and when it is killed
the process there would go on. Its own words are kept for the end, should it be lost.
"""

import json
import os
import random
import resource
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
"""Environment variable that holds the job: no other user can read it."""
FRAME = struct.Struct(">cI")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
DEAF = ("/bin/sh", "-c", "trap '' HUP INT TERM USR1; exec \"$@\"", "sh")
"""Before ssh: it lives on when its process group is told to end; what the signal means is the agent's to do."""
LOST = 75
WAITS = (0.0, 0.5, 1.0, 2.0)
"""Seconds before each try to connect: a server takes only so many at once, and nothing has begun yet."""
HELLO_SECONDS = 60.0
"""How long a host may take from the connection to the first word of its agent."""
LAST_LINES = 3
"""Of what ssh said."""


class Client:
    """One process on another host."""

    def __init__(self, name: str, command: list[str], job: dict) -> None:
        """Prepares to run a job.

        Args:
            name: Of the host, for people.
            command: Of ssh, up to the command that it runs there.
            job: What the agent is told, with `token` and `silence`.
        """
        self._name = name
        self._command = command
        self._job = job
        self._ssh: subprocess.Popen[bytes] | None = None
        self._begun = False
        self._pending: list[int] = []
        """Signals that the agent is yet to be told of."""
        self._words = b""

    def run(self) -> int:
        """Runs the process there; returns its exit status, negative where a signal has killed it, or LOST."""
        for number in SIGNALS:
            signal.signal(number, lambda got, _: self._pass_on(got))
        time.sleep(self._job["delay"])
        for wait in WAITS:
            time.sleep(wait * random.uniform(1.0, 1.5))
            if self._pending:
                return LOST  # told to stop before it began
            if self._begin():
                break
        else:
            return self._lost("does not answer")
        threading.Thread(target=self._live, daemon=True).start()
        code = self._relay()
        return self._lost("was lost") if code is None else code

    def _begin(self) -> bool:
        """Starts ssh and waits for the agent; returns whether it came."""
        self._ssh = subprocess.Popen(
            [*DEAF, *self._command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        threading.Thread(target=self._listen, args=(self._ssh.stderr,), daemon=True).start()
        timer = threading.Timer(HELLO_SECONDS, self._ssh.kill)
        timer.start()
        try:
            self._tell(message(self._job))
            mark = f"spmdkit agent {self._job['token']}\n".encode()
            line = b""
            while not line.endswith(mark):  # what login scripts print comes first
                line = cast(BinaryIO, self._ssh.stdout).readline()
                if not line:
                    self._ssh.wait()
                    return False
        finally:
            timer.cancel()
        self._begun = True
        self._pass_on()
        return True

    def _relay(self) -> int | None:
        """Writes what the process prints, until it ends; returns its exit status, or None where nobody knows."""
        assert self._ssh is not None
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

    def _live(self) -> None:
        """Tells the agent now and then that this side is there."""
        while self._tell(b"here\n"):
            time.sleep(self._job["silence"] / 6)

    def _tell(self, text: bytes) -> bool:
        """Writes to the agent; returns whether it could be. Short texts of several threads do not mix in a pipe."""
        assert self._ssh is not None
        pipe = cast(BinaryIO, self._ssh.stdin).fileno()
        try:
            while text:
                text = text[os.write(pipe, text) :]
        except OSError:
            return False
        return True

    def _pass_on(self, *numbers: int) -> None:
        """Tells the agent of signals, as soon as there is one."""
        self._pending.extend(numbers)
        while self._begun and self._pending:
            self._tell(b"signal %d\n" % self._pending.pop(0))

    def _listen(self, pipe: BinaryIO) -> None:
        """Keeps what ssh says."""
        for line in pipe:
            self._words = b"\n".join([*self._words.splitlines(), line.strip()][-LAST_LINES:])

    def _lost(self, what: str) -> int:
        """Says that the host cannot be reached, and what ssh said."""
        if self._ssh is not None:
            self._ssh.kill()
            self._ssh.wait()
        time.sleep(0.1)  # for its last words
        words = "; ".join(dict.fromkeys(self._words.decode(errors="replace").splitlines()))
        said = f" (ssh: {words})" if words else ""
        subject = f"the connection to host {self._name}" if what == "was lost" else f"host {self._name}"
        print(f"error: {subject} {what}{said}", file=sys.stderr, flush=True)
        return LOST


def message(job: dict) -> bytes:
    """What is written to ssh: the agent with its size in bytes before it, then the job as one line."""
    agent = AGENT.read_bytes()
    return b"%d\n%s%s\n" % (len(agent), agent, json.dumps(job).encode())


def end_as(code: int) -> None:
    """Ends this process as another has ended.

    Args:
        code: Exit status; the negative number of a signal that killed it.
    """
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)


def main() -> None:
    """Runs the job of the environment through the ssh of the arguments: name of the host, then the command line."""
    job = json.loads(os.environ.pop(VARIABLE))
    code = Client(sys.argv[1], sys.argv[2:], job).run()
    sys.stdout.flush()
    sys.stderr.flush()
    end_as(code)


if __name__ == "__main__":
    main()

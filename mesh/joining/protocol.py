"""What the processes of a run say to each other when they meet: lines of JSON over TCP.

A process says who it is (`Hello`); the coordinator welcomes it, tells it once a second who is missing, and at the end
lets all go, or says why not.
"""

import json
import os
import socket
from typing import Any, NamedTuple, Self

MAGIC = "spmdkit-rendezvous-1"
FAILED = "failed"
"""The key of a note that holds why its process cannot start."""
LONGEST = 2**24
"""Bytes of a line; whoever sends more is none of ours."""


class Hello(NamedTuple):
    """Who a process is.

    Attributes:
        identity: Of the attempt of the job that it belongs to; "" where its launcher gives none.
        run: What it is about to run, such as its run.dir; equal in all processes.
        num_processes: How many it says there are.
        rank: Which one it is.
        host: Name of its host.
        pid: Its number there.
        note: What it wants the others to know.
    """

    identity: str
    run: str
    num_processes: int
    rank: int
    host: str
    pid: int
    note: dict[str, Any]

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    @classmethod
    def mine(cls, identity: str, run: str, num_processes: int, rank: int, note: dict[str, Any]) -> Self:
        """That of this process."""
        return cls(identity, run, num_processes, rank, socket.gethostname(), os.getpid(), note)


def line(**values: Any) -> bytes:
    """A message."""
    return json.dumps({"is": MAGIC, **values}).encode() + b"\n"


def read_line(text: bytes) -> dict[str, Any] | None:
    """Reads a message; None of what is none."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) and values.get("is") == MAGIC else None


def hello_line(hello: Hello) -> bytes:
    """A hello as a message."""
    return line(hello=hello._asdict())


def read_hello(values: dict[str, Any]) -> Hello | None:
    """Reads a hello; None of what is none."""
    fields = values.get("hello")
    if not isinstance(fields, dict) or set(fields) != set(Hello._fields):
        return None
    hello = Hello(**fields)
    texts = isinstance(hello.identity, str) and isinstance(hello.run, str) and isinstance(hello.host, str)
    numbers = [hello.num_processes, hello.rank, hello.pid]
    return hello if texts and isinstance(hello.note, dict) and all(type(number) is int for number in numbers) else None


class Lines:
    """A socket that was connected, read line by line; waits as long as the socket's own time limit says."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._rest = b""
        self.is_closed = False
        self.is_foreign = False

    def read(self) -> list[dict[str, Any]]:
        """The messages that have come since; what is no message marks the peer as foreign."""
        try:
            got = self.socket.recv(2**16)
        except (BlockingIOError, InterruptedError, TimeoutError):
            return []
        except OSError:
            got = b""
        if not got:
            self.is_closed = True
            return []
        *texts, self._rest = (self._rest + got).split(b"\n")
        messages = [read_line(text) for text in texts]
        self.is_foreign = self.is_foreign or None in messages or len(self._rest) > LONGEST
        self.is_foreign = self.is_foreign or not b'{"is": "'.startswith(self._rest[:8])
        return [message for message in messages if message is not None]

    def send(self, text: bytes) -> None:
        """Sends a message, as far as its peer takes it within a second."""
        try:
            self.socket.settimeout(1.0)
            self.socket.sendall(text)
        except OSError:
            self.is_closed = True
        finally:
            if self.socket.fileno() >= 0:
                self.socket.setblocking(False)

    def close(self) -> None:
        """Ends the connection."""
        self.is_closed = True
        self.socket.close()

"""The messages of the rendezvous: lines of JSON over TCP.

A process introduces itself (`Hello`). The coordinator welcomes it, sends the missing ranks once a second, and at the
end releases all processes or sends the reason of a refusal.
"""

import json
import os
import socket
from typing import Any, NamedTuple, Self

MAGIC = "spmdkit-rendezvous-1"
FAILED = "failed"
"""The key of a note with the reason why its process cannot start."""
MAX_BYTES = 2**24
"""The maximum length of a line; a peer that sends more is foreign."""


class Hello(NamedTuple):
    """The introduction of a process.

    Attributes:
        identity: The attempt of its job, or "".
        run: The run, such as its run.dir; equal in all processes.
        num_processes: The number of processes.
        rank: Its rank.
        host: The name of its host.
        pid: Its process ID.
        note: Its message to the other processes.
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
        """Returns the introduction of this process."""
        return cls(identity, run, num_processes, rank, socket.gethostname(), os.getpid(), note)


def encode(**values: Any) -> bytes:
    """Returns a message as a line."""
    return json.dumps({"is": MAGIC, **values}).encode() + b"\n"


def decode(text: bytes) -> dict[str, Any] | None:
    """Parses a line; returns None if it is not a message."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) and values.get("is") == MAGIC else None


def parse_hello(values: dict[str, Any]) -> Hello | None:
    """Parses the introduction in a message; returns None if it is invalid."""
    fields = values.get("hello")
    if not isinstance(fields, dict) or set(fields) != set(Hello._fields):
        return None
    hello = Hello(**fields)
    strings = [hello.identity, hello.run, hello.host]
    integers = [hello.num_processes, hello.rank, hello.pid]
    valid = all(isinstance(each, str) for each in strings) and all(type(each) is int for each in integers)
    return hello if valid and isinstance(hello.note, dict) else None


class Connection:
    """A connected socket, read line by line; reads wait as long as the socket's timeout."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._rest = b""
        self.is_closed = False
        self.is_foreign = False

    def read(self) -> list[dict[str, Any]]:
        """Returns the messages received since the last call; anything else marks the peer as foreign."""
        try:
            received = self.socket.recv(2**16)
        except (BlockingIOError, InterruptedError, TimeoutError):
            return []
        except OSError:
            received = b""
        if not received:
            self.is_closed = True
            return []
        *texts, self._rest = (self._rest + received).split(b"\n")
        messages = [decode(text) for text in texts]
        self.is_foreign = self.is_foreign or None in messages or len(self._rest) > MAX_BYTES
        self.is_foreign = self.is_foreign or not b'{"is": "'.startswith(self._rest[:8])
        return [message for message in messages if message is not None]

    def send(self, text: bytes) -> None:
        """Sends a message, with a timeout of one second."""
        try:
            self.socket.settimeout(1.0)
            self.socket.sendall(text)
        except OSError:
            self.is_closed = True
        finally:
            if self.socket.fileno() >= 0:
                self.socket.setblocking(False)

    def close(self) -> None:
        """Closes the connection."""
        self.is_closed = True
        self.socket.close()

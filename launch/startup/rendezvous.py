"""The rendezvous: the processes of a run meet at the coordinator's address before JAX starts there.

JAX's own start waits silently, and aborts the process if a rank does not start, the port is in use, the host name is
unknown, or a process of another run has the same address. The rendezvous reports all of these, within
`timeouts.rendezvous`:

    rank 0     listens at the address; accepts processes of this run and refuses others; reports missing ranks; refuses
               all of them if one cannot start, or has another number of processes
    others     connect until rank 0 answers, then wait until it releases them

When all processes are there, rank 0 has their notes and can still refuse all of them. Then it closes its socket, and
JAX's coordinator binds to the same address.
"""

import json
import os
import resource
import selectors
import socket
import time
from collections.abc import Callable, Collection
from contextlib import closing, suppress
from typing import Any, NamedTuple, NoReturn, cast

from pydantic import TypeAdapter, ValidationError

from ...layouts.paths import some
from ...mesh.errors import UserError
from ...mesh.processes import PROGRESS_SECONDS, ProcessesMissing, print_progress, ranks
from .addresses import Address, Listening, PortTaken, listen
from .variables import Job

STATUS_SECONDS = 1.0
SILENT_SECONDS = 15.0
"""The silence of rank 0 after which its connection counts as lost."""
FOREIGN_SECONDS = 10.0
"""The time for which another program may answer at the address, such as a run that has just ended, or be connected."""
REFUSING_SECONDS = 30.0
"""The time for which a process that cannot start waits for the others, to notify them."""
UNSURE_SECONDS = 3.0
"""The same for ranks that only some of the processes expect."""
UNKNOWN_SECONDS = 10.0
"""The time for which a name may be unknown, outside Kubernetes, where a pod has no name before it runs."""
RETRY_SECONDS = 0.1
SPARE_FILES = 512
READ_SECONDS = 1.0
"""The time for an introduction that a peer has begun, and to send a message."""
MAGIC = "spmdkit-rendezvous-1"
FAILED = "failed"
"""The key of a note with the reason why its process cannot start."""
CHUNK_BYTES = 2**16
MAX_BYTES = 2**24
"""The maximum length of a line; a peer that sends more is foreign."""
MAX_HOSTS = 8
"""Hosts listed in one message."""
UNROUTED = "192.0.2.1"
"""An address on no network (RFC 5737), in place of hosts with unknown names."""

Say = Callable[[str], None]


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


HELLO = TypeAdapter(Hello)


def encode(**values: Any) -> bytes:
    """Returns a message: a line of JSON."""
    return json.dumps({"is": MAGIC, **values}).encode() + b"\n"


def decode(text: bytes | bytearray) -> dict[str, Any] | None:
    """Parses a line; returns None if it is not a message."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) and values.get("is") == MAGIC else None


def send(connection: socket.socket, **values: Any) -> None:
    """Sends a message; a process that has left is detected when its connection is read."""
    with suppress(OSError):
        connection.sendall(encode(**values))


def read_hello(connection: socket.socket) -> Hello | None:
    """Reads the introduction of a process; returns None if the peer is foreign, has left or is too slow."""
    text, deadline = bytearray(), time.monotonic() + READ_SECONDS
    with suppress(OSError, ValidationError):
        while b"\n" not in text[-CHUNK_BYTES:]:
            left = deadline - time.monotonic()
            if left <= 0 or len(text) > MAX_BYTES:
                return None
            connection.settimeout(left)
            received = connection.recv(CHUNK_BYTES)
            if not received:
                return None
            text += received
        connection.settimeout(READ_SECONDS)
        message = decode(text.partition(b"\n")[0]) or {}
        return HELLO.validate_python(message.get("hello"), strict=True)
    return None


class Rendezvous(NamedTuple):
    """The processes of the run. Complete in rank 0; in other ranks only if rank 0 shares it.

    Attributes:
        hosts: The host name of each process, by rank.
        notes: The note of each process, by rank.
        bind: The address that JAX's coordinator binds to; None except in rank 0.
    """

    hosts: list[str]
    notes: list[dict[str, Any]]
    bind: Address | None


Check = Callable[[Rendezvous], None]


def join_rendezvous(
    job: Job,
    *,
    seconds: float,
    run: str = "",
    note: dict[str, Any] | None = None,
    check: Check = lambda rendezvous: None,
    share: bool = False,
    say: Say = print_progress,
) -> Rendezvous:
    """Waits until all processes of a run are there.

    Args:
        job: The job, of several processes.
        seconds: The timeout.
        run: The run, such as its run.dir; a process with another value belongs to another run.
        note: A message to the other processes, of JSON types.
        check: Called in rank 0 when all are there; a UserError that it raises is sent to all processes.
        share: Sends the notes of all processes to all, which grows with the square of their number.
        say: Called now and then with a line about missing and refused processes.

    Raises:
        ProcessesMissing: Some ranks did not come in time.
        PortTaken: Another program listens at the coordinator's address.
        UserError: The address is unknown, this process does not belong to the run, or `check` failed.
    """
    host, pid = socket.gethostname(), os.getpid()
    mine = Hello(job.identity, run, job.num_processes, job.process_id, host, pid, note or {})
    if job.process_id:
        return Participant(job, mine, seconds, say).join()
    listening = _listen(job, seconds)
    with closing(listening.socket):
        return Coordinator(job, mine, listening, seconds, say).gather(check, share)


def announce_failure(job: Job, reason: str, *, say: Say) -> None:
    """Notifies the other processes of a run that this one cannot start, so that they do not wait for it."""
    with suppress(UserError, ProcessesMissing, PortTaken, OSError):
        join_rendezvous(job, seconds=REFUSING_SECONDS, note={FAILED: reason}, say=say)


def _listen(job: Job, seconds: float) -> Listening:
    """Listens at the address of the job; in Kubernetes, waits until its name resolves."""
    assert job.address is not None
    begin = time.monotonic()
    elsewhere = job.local_processes is not None and job.local_processes < job.num_processes
    others = list(dict.fromkeys([*job.hosts, *job.nodes])) or ([UNROUTED] if elsewhere else [])
    while True:
        try:
            return listen(job.address, others)
        except socket.gaierror as error:
            if time.monotonic() - begin > name_timeout(job, seconds):
                raise _unknown_host(job, error) from error
        time.sleep(RETRY_SECONDS * 2)


def name_timeout(job: Job, seconds: float) -> float:
    """Returns the time for which the name of the coordinator's host may be unknown."""
    in_pod = job.source == "Kubernetes" or "KUBERNETES_SERVICE_HOST" in os.environ
    return seconds if in_pod else min(seconds, UNKNOWN_SECONDS)


def _unknown_host(job: Job, error: OSError) -> UserError:
    assert job.address is not None
    return UserError(
        f"The coordinator's host {job.address.host!r} ({job.variables.get('address', 'job_addresses')}) is unknown on "
        f"{socket.gethostname()}: {error.strerror}. Use a name that every host of the run resolves, or an IP address."
    )


class Participant:
    """A rank other than 0: connects until rank 0 accepts it, and waits until rank 0 releases it."""

    def __init__(self, job: Job, mine: Hello, seconds: float, say: Say) -> None:
        self._job, self._mine, self._seconds, self._say = job, mine, seconds, say
        self._begin = self._reported = time.monotonic()
        self._foreign_since: float | None = None
        self._reason = "it does not answer"

    def join(self) -> Rendezvous:
        """Waits until rank 0 releases all processes; raises as `join_rendezvous` does."""
        while True:
            if connection := self._connect():
                with closing(connection):
                    rendezvous = self._wait(connection)
                if rendezvous is not None:
                    return rendezvous
            now = time.monotonic()
            if now - self._begin > self._seconds:
                raise ProcessesMissing(
                    f"Rank 0 was not reachable at {self._job.address} within {self._seconds:.0f} s "
                    f"(timeouts.rendezvous): {self._reason}. Check that it was started, its log, and that no "
                    f"firewall blocks that port for {socket.gethostname()}."
                )
            if now - self._reported > PROGRESS_SECONDS:
                self._reported = now
                self._say(f"waiting for rank 0 at {self._job.address} ({now - self._begin:.0f} s): {self._reason}")
            time.sleep(RETRY_SECONDS)

    def _connect(self) -> socket.socket | None:
        assert self._job.address is not None
        try:
            return socket.create_connection(self._job.address, timeout=5.0)
        except socket.gaierror as error:
            self._reason = f"its name is unknown here ({error.strerror})"
            if time.monotonic() - self._begin > name_timeout(self._job, self._seconds):
                raise _unknown_host(self._job, error) from error
        except OSError as error:
            self._reason = (error.strerror or str(error)).lower()
        self._foreign_since = None
        return None

    def _wait(self, connection: socket.socket) -> Rendezvous | None:
        """Introduces this process and waits for its release; returns None if the connection is lost."""
        is_welcome = False
        with suppress(OSError), connection.makefile("rb") as lines:
            connection.settimeout(SILENT_SECONDS / 3)
            connection.sendall(encode(hello=self._mine._asdict()))
            while (message := decode(lines.readline(MAX_BYTES))) is not None:
                if "refused" in message:
                    raise UserError(str(message["refused"]))
                if "late" in message:
                    raise ProcessesMissing(str(message["late"]))
                if "go" in message:
                    return Rendezvous(*(message.get(name, []) for name in ("hosts", "notes")), bind=None)
                is_welcome = True
                connection.settimeout(SILENT_SECONDS)
        self._reason = "the connection was lost"
        if not is_welcome:
            self._check_foreign()
        return None

    def _check_foreign(self) -> None:
        """Raises PortTaken if another program has answered for a while."""
        now = time.monotonic()
        self._foreign_since = self._foreign_since or now
        self._reason = "a program that is not rank 0 of this run answers there"
        if now - self._foreign_since > min(FOREIGN_SECONDS, self._seconds):
            raise PortTaken(
                f"The coordinator's address {self._job.address} is in use: {self._reason}, maybe another run. Wait "
                "until it ends, or choose another port for this run."
            )


class Coordinator:
    """Rank 0: accepts the other processes, and releases them when all are there."""

    def __init__(self, job: Job, mine: Hello, listening: Listening, seconds: float, say: Say) -> None:
        self._job, self._mine, self._listening, self._seconds, self._say = job, mine, listening, seconds, say
        self._begin = self._reported = time.monotonic()
        self._status = 0.0
        self._present: dict[int, tuple[Hello, socket.socket | None]] = {0: (mine, None)}
        self._unknown: dict[socket.socket, float] = {}
        self._selector = selectors.DefaultSelector()

    def gather(self, check: Check, share: bool) -> Rendezvous:
        """Waits until all processes are there and releases them; raises as `join_rendezvous` does."""
        allow_connections(self._job.num_processes)
        self._listening.socket.setblocking(False)
        self._selector.register(self._listening.socket, selectors.EVENT_READ)
        try:
            if reason := self._run_problem(self._mine):
                self._refuse_all(reason, {0}, self._job.num_processes)
            while len(self._present) < self._job.num_processes:
                for key, _ in self._selector.select(STATUS_SECONDS / 2):
                    self._receive(cast(socket.socket, key.fileobj))
                self._check_time()
            return self._release(check, share)
        finally:
            for key in [*self._selector.get_map().values()]:
                self._close(cast(socket.socket, key.fileobj))
            self._selector.close()

    def _receive(self, connection: socket.socket) -> None:
        """Accepts a new connection, or reads from one; a process sends only its introduction before it leaves."""
        if connection is self._listening.socket:
            with suppress(OSError):
                accepted, _ = connection.accept()
                self._selector.register(accepted, selectors.EVENT_READ)
                self._unknown[accepted] = time.monotonic()
            return
        self._unknown.pop(connection, None)
        known = [(rank, hello) for rank, (hello, each) in self._present.items() if each is connection]
        hello = None if known else read_hello(connection)
        if hello is not None:
            self._accept(hello, connection)
            return
        self._close(connection)
        for rank, left in known:
            del self._present[rank]
            self._say(f"rank {rank} ({left}) has left before all were there")

    def _close(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        connection.close()

    def _accept(self, hello: Hello, connection: socket.socket) -> None:
        if reason := self._run_problem(hello):
            send(connection, refused=reason)
            self._present.pop(hello.rank, None)
            self._refuse_all(reason, {hello.rank}, hello.num_processes)
        if reason := self._process_problem(hello):
            send(connection, refused=reason)
            self._close(connection)
            self._say(f"refused a process: {reason}")
            return
        send(connection, welcome=True)
        self._present[hello.rank] = (hello, connection)

    def _process_problem(self, hello: Hello) -> str:
        """Returns the reason to refuse one process, or ""."""
        mine = self._mine
        if (hello.identity, hello.run) != (mine.identity, mine.run):
            return (
                f"{hello} belongs to another run ({hello.run} {hello.identity}) than rank 0 at {self._job.address} "
                f"({mine.run} {mine.identity}; {mine}). Give each run its own address."
            )
        if hello.rank in self._present:
            return (
                f"rank {hello.rank} is there twice: {self._present[hello.rank][0]}, and {hello}. Give each process its "
                "own rank, from 0 (SPMDKIT_PROCESS_ID)."
            )
        return ""

    def _run_problem(self, hello: Hello) -> str:
        """Returns the reason why the whole run cannot start, as one of its processes shows, or ""."""
        mine = self._mine
        if hello.identity != mine.identity:
            return ""
        if failed := hello.note.get(FAILED):
            return f"Rank {hello.rank} ({hello}) cannot start, so no process of this run can: {failed}"
        if hello.run == mine.run and hello.num_processes != mine.num_processes:
            return (
                f"Rank {hello.rank} ({hello}) has num_processes={hello.num_processes}, but rank 0 ({mine}) has "
                f"{mine.num_processes}: all processes of a run must have the same number. Set it in all of them "
                "(SPMDKIT_NUM_PROCESSES)."
            )
        return ""

    def _refuse_all(self, reason: str, refused: Collection[int], num_processes: int) -> NoReturn:
        """Refuses the present processes and, for a while, later ones, so that none waits.

        Args:
            reason: The message.
            refused: Ranks that have the message already.
            num_processes: The number of processes according to the refused process.

        Raises:
            UserError: Always.
        """
        self._send(refused=reason)
        known, begin = {*refused, *self._present}, time.monotonic()
        fewer, more = sorted([num_processes, self._job.num_processes])
        self._listening.socket.settimeout(STATUS_SECONDS)
        while missing := {*range(more)} - known:
            if time.monotonic() - begin > (REFUSING_SECONDS if min(missing) < fewer else UNSURE_SECONDS):
                break
            with suppress(OSError):
                accepted, _ = self._listening.socket.accept()
                with closing(accepted):
                    hello = read_hello(accepted)
                    if hello is not None and hello.identity == self._mine.identity:
                        send(accepted, refused=reason)
                        known.add(hello.rank)
        raise UserError(reason)

    def _check_time(self) -> None:
        """Drops idle connections, reports missing ranks, shows that this process is alive; raises after the timeout."""
        now = time.monotonic()
        for connection in [each for each, since in self._unknown.items() if now - since > FOREIGN_SECONDS]:
            del self._unknown[connection]
            self._close(connection)
        missing = [rank for rank in range(self._job.num_processes) if rank not in self._present]
        if not missing:
            return
        if now - self._begin > self._seconds:
            reason = self._timeout_message(missing)
            self._send(late=reason)
            raise ProcessesMissing(reason)
        if now - self._reported > PROGRESS_SECONDS:
            self._reported = now
            self._say(f"waiting for {self._describe(missing)} at {self._job.address} ({now - self._begin:.0f} s)")
        if now - self._status > STATUS_SECONDS:
            self._status = now
            self._send(welcome=True)

    def _describe(self, missing: list[int]) -> str:
        """Returns the missing ranks, with their hosts if known."""
        job = self._job
        if job.hosts:
            return f"{ranks(missing)} on {some(dict.fromkeys(job.hosts[rank] for rank in missing), MAX_HOSTS)}"
        present = {hello.host for hello, _ in self._present.values()}
        silent = [node for node in job.nodes if node not in present]
        nothing = silent and present & set(job.nodes)
        return f"{ranks(missing)} (nothing came from {some(silent, MAX_HOSTS)})" if nothing else ranks(missing)

    def _timeout_message(self, missing: list[int]) -> str:
        return (
            f"{self._describe(missing).capitalize()} did not come within {self._seconds:.0f} s (timeouts.rendezvous); "
            f"{len(self._present)} of {self._job.num_processes} processes did, at {self._job.address}, where process 0 "
            f"listened at {self._listening.bind}. Check that they were started, their logs, and that their hosts reach "
            "this address (SPMDKIT_JOB_ADDRESSES; with --on ssh, `address` in the hosts file)."
        )

    def _send(self, **values: Any) -> None:
        for _, connection in self._present.values():
            if connection:
                send(connection, **values)

    def _release(self, check: Check, share: bool) -> Rendezvous:
        """Closes the socket for JAX's coordinator, then releases all processes."""
        hellos = [self._present[rank][0] for rank in range(self._job.num_processes)]
        hosts, notes = [hello.host for hello in hellos], [hello.note for hello in hellos]
        rendezvous = Rendezvous(hosts, notes, self._listening.bind)
        try:
            check(rendezvous)
        except UserError as error:
            self._send(refused=str(error))
            raise
        self._close(self._listening.socket)
        self._send(go=True, **(rendezvous._replace(bind=None)._asdict() if share else {}))
        return rendezvous


def allow_connections(count: int) -> None:
    """Raises the limit of open files to one connection per process, as far as the host allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + SPARE_FILES if hard == resource.RLIM_INFINITY else min(count + SPARE_FILES, hard)
    if 0 <= soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))

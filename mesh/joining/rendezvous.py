"""The processes of a run meet at the coordinator's address before JAX starts there, and see who is missing.

JAX's own start waits without a word, and where it fails, it aborts the process: a rank that does not come, a port that
is taken, a name that does not resolve, another run's process at the same address. Here all of these are told, and none
is waited for longer than `timeouts.rendezvous`:

    rank 0     listens at the address; takes in who belongs to this run, refuses who does not; says who is missing
    others     knock until rank 0 answers, then wait until it lets them go

When all are there, rank 0 knows of all others what they gave as `note`, and may still refuse all of them. Then it makes
place for JAX's coordinator, which binds to the same address.
"""

import os
import selectors
import socket
import time
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Any, NamedTuple

from ..coordination import SAY_SECONDS, ProcessesMissing, ranks
from ..errors import UserError
from .addresses import Address, Listening, PortTaken, listen
from .detection import Job
from .protocol import Hello, Lines, hello_line, line, read_hello

STATUS_SECONDS = 1.0
SILENT_SECONDS = 15.0
"""Without a word from rank 0, after which its connection counts as lost."""
FOREIGN_SECONDS = 10.0
"""How long something else may answer at the address before that is an error: what ended just now may still listen."""
UNKNOWN_SECONDS = 10.0
"""How long a name may be unknown, outside Kubernetes, where a pod has none before it runs."""
KNOCK_SECONDS = 0.1
HANDOVER_SECONDS = 20.0
SPARE_FILES = 512

Say = Callable[[str], None]


class Meeting(NamedTuple):
    """What a process knows after the processes of its run have met; but in rank 0, only where that shares it.

    Attributes:
        hosts: Name of the host of each process, by rank.
        notes: What each process gave, by rank.
        skews: How much later the clock of each was than that of rank 0, in seconds, by rank.
        bind: What JAX's coordinator binds to; None but in rank 0.
    """

    hosts: list[str]
    notes: list[dict[str, Any]]
    skews: list[float]
    bind: Address | None


def meet(
    job: Job,
    *,
    seconds: float,
    run: str = "",
    note: dict[str, Any] | None = None,
    check: Callable[[Meeting], None] = lambda meeting: None,
    share: bool = False,
    say: Say,
) -> Meeting:
    """Waits until all processes of a run are there.

    Args:
        job: The run, of several processes.
        seconds: How long to wait.
        run: What is run, such as its run.dir: a process that says something else belongs to another run.
        note: What the others should know of this process; what JSON can hold.
        check: Called in rank 0 when all are there; a UserError that it raises goes to all of them.
        share: Whether rank 0 tells the others what it knows of all: that grows with the square of their number.
        say: Gets a line now and then that says who is missing, and whom rank 0 has refused.

    Raises:
        ProcessesMissing: Some did not come in time; they are named.
        PortTaken: Something else listens at the coordinator's address.
        UserError: The address is unknown, this process does not belong to the run that meets there, or `check` says.
    """
    mine = Hello.mine(job.identity, run, job.num_processes, job.process_id, note or {})
    assert job.address is not None
    if job.process_id:
        return _Guest(job, mine, seconds, say).meet()
    listening = _listen(job, seconds)
    with closing(listening.socket):
        return _Host(job, mine, listening, seconds, say).meet(check, share)


def _listen(job: Job, seconds: float) -> Listening:
    """Listens at the address of the job; in Kubernetes, waits until its name is known."""
    assert job.address is not None
    begin = time.monotonic()
    while True:
        try:
            return listen(job.address)
        except socket.gaierror as error:
            if time.monotonic() - begin > _patience(job, seconds):
                raise _unknown(job, error) from error
        time.sleep(KNOCK_SECONDS * 2)


def _patience(job: Job, seconds: float) -> float:
    """How long the name of the coordinator's host may be unknown."""
    in_a_pod = job.source == "Kubernetes" or "KUBERNETES_SERVICE_HOST" in os.environ
    return seconds if in_a_pod else min(seconds, UNKNOWN_SECONDS)


def _unknown(job: Job, error: OSError) -> UserError:
    assert job.address is not None
    return UserError(
        f"The coordinator's host {job.address.host!r} ({job.said.get('address', 'job_addresses')}) is unknown on "
        f"{socket.gethostname()}: {error.strerror}. Give a name that every host of the run resolves, or an IP address."
    )


class _Host:
    """Rank 0: takes the others in."""

    def __init__(self, job: Job, mine: Hello, listening: Listening, seconds: float, say: Say) -> None:
        self._job = job
        self._listening = listening
        self._seconds = seconds
        self._say = say
        self._begin = self._told = time.monotonic()
        self._status = 0.0
        self._unknown: dict[Lines, float] = {}
        self._here: dict[int, tuple[Hello, Lines | None]] = {0: (mine, None)}
        self._skews = {0: 0.0}
        self._refused: set[str] = set()
        self._selector = selectors.DefaultSelector()

    def meet(self, check: Callable[[Meeting], None], share: bool) -> Meeting:
        allow_connections(self._job.num_processes)
        self._listening.socket.setblocking(False)
        self._selector.register(self._listening.socket, selectors.EVENT_READ)
        try:
            while len(self._here) < self._job.num_processes:
                for key, _ in self._selector.select(STATUS_SECONDS / 2):
                    self._hear(key.data)
                self._look_at_the_clock()
            return self._let_go(check, share)
        finally:
            for lines in [*self._unknown, *(lines for _, lines in self._here.values() if lines)]:
                self._end(lines)
            self._selector.close()

    def _hear(self, lines: Lines | None) -> None:
        """Something has come: a connection (None), or words of one."""
        if lines is None:
            with suppress(OSError):
                connection, _ = self._listening.socket.accept()
                connection.setblocking(False)
                lines = Lines(connection)
                self._selector.register(connection, selectors.EVENT_READ, lines)
                self._unknown[lines] = time.monotonic()
            return
        messages = lines.read()
        if lines in self._unknown:
            hello = read_hello(messages[0]) if messages else None
            if hello is not None:
                del self._unknown[lines]
                self._take_in(hello, lines)
            elif lines.is_closed or lines.is_foreign or messages:
                del self._unknown[lines]
                self._end(lines)

    def _end(self, lines: Lines) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(lines.socket)
        lines.close()

    def _take_in(self, hello: Hello, lines: Lines) -> None:
        reason = self._why_not(hello)
        if reason:
            lines.send(line(refused=reason))
            self._end(lines)
            if reason not in self._refused:
                self._refused.add(reason)
                self._say(f"refused a process: {reason}")
            return
        lines.send(line(welcome=True))
        self._here[hello.rank] = (hello, lines)
        sent = hello.note.get("time")
        self._skews[hello.rank] = sent - time.time() if isinstance(sent, int | float) else 0.0

    def _why_not(self, hello: Hello) -> str:
        """Why a process does not belong here; "" where it does."""
        mine, address = self._here[0][0], self._job.address
        if hello.identity != mine.identity or hello.run != mine.run:
            theirs, ours = (
                " ".join(filter(None, (each.run and f"run.dir {each.run}", each.identity and f"job {each.identity}")))
                for each in (hello, mine)
            )
            return (
                f"{hello} belongs to another run ({theirs or 'it does not say which'}) than the one that meets at "
                f"{address} ({ours or 'it does not say which'}; rank 0 is {mine}). Give each run an address of its own."
            )
        if hello.num_processes != mine.num_processes:
            return (
                f"{hello} says that the run has {hello.num_processes} processes, rank 0 ({mine}) says "
                f"{mine.num_processes}. Set the same number in all of them (SPMDKIT_NUM_PROCESSES)."
            )
        if hello.rank in self._here:
            return (
                f"rank {hello.rank} is there twice: {self._here[hello.rank][0]}, and {hello}. Give each process a "
                "number of its own, from 0 (SPMDKIT_PROCESS_ID)."
            )
        return ""

    def _look_at_the_clock(self) -> None:
        now = time.monotonic()
        for lines, since in list(self._unknown.items()):
            if now - since > FOREIGN_SECONDS:
                del self._unknown[lines]
                self._end(lines)
        for rank, (hello, lines) in list(self._here.items()):
            if lines and lines.is_closed:
                del self._here[rank]
                self._end(lines)
                self._say(f"rank {rank} ({hello}) has left before all were there")
        missing = [rank for rank in range(self._job.num_processes) if rank not in self._here]
        if not missing:
            return
        if now - self._begin > self._seconds:
            reason = self._too_late(missing)
            self._send(line(late=reason))
            raise ProcessesMissing(reason)
        if now - self._told > SAY_SECONDS:
            self._told = now
            self._say(f"waiting for {self._named(missing)} at {self._job.address} ({now - self._begin:.0f} s)")
        if now - self._status > STATUS_SECONDS:
            self._status = now
            self._send(line(missing=missing))

    def _named(self, missing: list[int]) -> str:
        """The missing ranks, with their hosts where those are known."""
        job, said = self._job, ranks(missing)
        if job.hosts:
            hosts = list(dict.fromkeys(job.hosts[rank] for rank in missing))
            return f"{said} on {_listed(hosts)}"
        here = {hello.host for hello, _ in self._here.values()}
        silent = [node for node in job.nodes if node not in here]
        return f"{said} (nothing came from {_listed(silent)})" if silent and here & set(job.nodes) else said

    def _too_late(self, missing: list[int]) -> str:
        everywhere = (
            f" {self._job.address} is no address of this host, {socket.gethostname()}: process 0 has to run where it "
            "leads, or the address has to be this host's."
            if self._listening.everywhere
            else ""
        )
        return (
            f"{self._named(missing).capitalize()} did not come within {self._seconds:.0f} s (timeouts.rendezvous); "
            f"{len(self._here)} of {self._job.num_processes} processes did, at {self._job.address}.{everywhere} Look "
            "whether they were started, into their logs, and whether their hosts reach this one."
        )

    def _send(self, text: bytes) -> None:
        for _, lines in list(self._here.values()):
            if lines:
                lines.send(text)

    def _let_go(self, check: Callable[[Meeting], None], share: bool) -> Meeting:
        """Makes place for JAX's coordinator, then tells all that everybody is there."""
        everybody = [self._here[rank][0] for rank in range(self._job.num_processes)]
        hosts, notes = [each.host for each in everybody], [each.note for each in everybody]
        skews = [self._skews[rank] for rank in range(self._job.num_processes)]
        meeting = Meeting(hosts, notes, skews, self._listening.bind)
        try:
            check(meeting)
        except UserError as error:
            self._send(line(refused=str(error)))
            raise
        self._selector.unregister(self._listening.socket)
        self._listening.socket.close()
        self._send(line(go=True, **(meeting._replace(bind=None)._asdict() if share else {})))
        return meeting


class _Guest:
    """A rank but 0: knocks until it is taken in, and waits until it is let go."""

    def __init__(self, job: Job, mine: Hello, seconds: float, say: Say) -> None:
        self._job = job
        self._mine = mine
        self._seconds = seconds
        self._say = say
        self._begin = self._told = time.monotonic()
        self._foreign_since: float | None = None
        self._why = "it does not answer"

    def meet(self) -> Meeting:
        while True:
            connection = self._knock()
            if connection is not None:
                with closing(connection):
                    meeting = self._wait(Lines(connection))
                if meeting is not None:
                    return meeting
            now = time.monotonic()
            if now - self._begin > self._seconds:
                raise ProcessesMissing(
                    f"Rank 0 was not to be reached at {self._job.address} within {self._seconds:.0f} s "
                    f"(timeouts.rendezvous): {self._why}. Look whether it was started, into its log, and whether a "
                    f"firewall lets {socket.gethostname()} reach that port."
                )
            if now - self._told > SAY_SECONDS:
                self._told = now
                self._say(f"waiting for rank 0 at {self._job.address} ({now - self._begin:.0f} s): {self._why}")
            time.sleep(KNOCK_SECONDS)

    def _knock(self) -> socket.socket | None:
        """A connection with what listens at the address."""
        assert self._job.address is not None
        try:
            return socket.create_connection(self._job.address, timeout=5.0)
        except socket.gaierror as error:
            self._why = f"its name is unknown here ({error.strerror})"
            if time.monotonic() - self._begin > _patience(self._job, self._seconds):
                raise _unknown(self._job, error) from error
        except OSError as error:
            self._why = (error.strerror or str(error)).lower()
        self._foreign_since = None
        return None

    def _wait(self, lines: Lines) -> Meeting | None:
        """Says who this is and waits until it may go; None where the connection is lost before."""
        lines.send(hello_line(self._mine._replace(note={**self._mine.note, "time": time.time()})))
        heard, welcome = time.monotonic(), False
        while not lines.is_closed and not lines.is_foreign:
            lines.socket.settimeout(STATUS_SECONDS)
            for message in lines.read():
                heard = time.monotonic()
                if "refused" in message:
                    raise UserError(str(message["refused"]))
                if "late" in message:
                    raise ProcessesMissing(str(message["late"]))
                if "go" in message:
                    return Meeting(message.get("hosts", []), message.get("notes", []), message.get("skews", []), None)
                welcome = True
            if time.monotonic() - heard > (SILENT_SECONDS if welcome else SILENT_SECONDS / 3):
                break
        self._why = "the connection was lost"
        if not welcome:
            self._meets_a_stranger()
        return None

    def _meets_a_stranger(self) -> None:
        """Notes that something else than rank 0 answers; raises once that has been so for a while."""
        now = time.monotonic()
        self._foreign_since = self._foreign_since or now
        self._why = "something answers there that is not rank 0 of this run"
        if now - self._foreign_since > min(FOREIGN_SECONDS, self._seconds):
            raise PortTaken(
                f"At the coordinator's address {self._job.address}, {self._why}: another program has that port, maybe "
                "another run. Wait for its end, or give this run a port of its own."
            )


def allow_connections(count: int) -> None:
    """Lets this process have a connection with each of the others, as far as the host allows."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = count + SPARE_FILES
        if 0 <= soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard) if hard >= 0 else wanted, hard))


def wait_until_listening(address: Address, seconds: float = HANDOVER_SECONDS) -> None:
    """Waits until JAX's coordinator listens; a client of JAX that knocks before that loses a second.

    Args:
        address: Of the coordinator.
        seconds: How long to wait at most; JAX then waits itself.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            socket.create_connection(address, timeout=1.0).close()
        except OSError:
            time.sleep(0.01)
        else:
            return


def _listed(names: list[str]) -> str:
    shown = names[:8] if len(names) > 9 else names
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "")

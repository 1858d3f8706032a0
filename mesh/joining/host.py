"""Rank 0's side of a rendezvous: takes in who belongs to this run, refuses who does not, says who is missing."""

import selectors
import socket
import time
from collections.abc import Callable, Collection
from contextlib import closing, suppress
from typing import NoReturn

from ..coordination import SAY_SECONDS, ProcessesMissing, ranks
from ..errors import UserError
from .addresses import Listening, is_loopback
from .detection import Job
from .meeting import FOREIGN_SECONDS, REFUSING_SECONDS, STATUS_SECONDS, UNSURE_SECONDS, Meeting, Say
from .protocol import FAILED, Hello, Lines, line, read_hello

SPARE_FILES = 512


class Host:
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
        """Waits until all are there, then lets them go; raises as `rendezvous.meet` does."""
        allow_connections(self._job.num_processes)
        self._listening.socket.setblocking(False)
        self._selector.register(self._listening.socket, selectors.EVENT_READ)
        try:
            if reason := self._why_nobody(self._here[0][0]):
                self._refuse_all(reason, {0}, self._job.num_processes)
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
        if reason := self._why_nobody(hello):
            lines.send(line(refused=reason))
            self._end(lines)
            self._here.pop(hello.rank, None)
            self._refuse_all(reason, {hello.rank}, hello.num_processes)
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
        if hello.rank in self._here:
            return (
                f"rank {hello.rank} is there twice: {self._here[hello.rank][0]}, and {hello}. Give each process a "
                "number of its own, from 0 (SPMDKIT_PROCESS_ID)."
            )
        return ""

    def _why_nobody(self, hello: Hello) -> str:
        """Returns why no process of this run can start, as one of them shows; "" if it shows nothing of the kind."""
        mine = self._here[0][0]
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
        """Refuses the processes that are here and, for a while, those that come later, so that none waits.

        Args:
            reason: For people.
            refused: Ranks that know it already.
            num_processes: Processes of the run, as the process that is the reason has it.

        Raises:
            UserError: In any case.
        """
        self._send(line(refused=reason))
        known, begin = {*refused, *self._here}, time.monotonic()
        fewer, more = sorted([num_processes, self._job.num_processes])
        self._listening.socket.settimeout(STATUS_SECONDS)
        while missing := {*range(more)} - known:
            if time.monotonic() - begin > (REFUSING_SECONDS if min(missing) < fewer else UNSURE_SECONDS):
                break
            with suppress(OSError):
                connection, _ = self._listening.socket.accept()
                with closing(connection):
                    connection.settimeout(STATUS_SECONDS)
                    messages = Lines(connection).read()
                    hello = read_hello(messages[0]) if messages else None
                    if hello is not None and hello.identity == self._here[0][0].identity:
                        connection.sendall(line(refused=reason))
                        known.add(hello.rank)
        raise UserError(reason)

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
        listening, announced, elsewhere = self._listening, self._job.address, ""
        assert announced is not None
        if not listening.announced:
            elsewhere = (
                f" Process 0 listened at {listening.bind}, for {announced.host} does not resolve to an address "
                f"of {socket.gethostname()}, its host, that other hosts can reach: give one (SPMDKIT_JOB_ADDRESSES)."
            )
        elif is_loopback(listening.bind.host) and not announced.is_loopback:
            elsewhere = (
                f" {announced.host} resolves to {listening.bind.host} on this host, so only processes of this "
                "host reach process 0. For several hosts, give its IP address (SPMDKIT_JOB_ADDRESSES; with --on ssh, "
                "`address` in the hosts file)."
            )
        return (
            f"{self._named(missing).capitalize()} did not come within {self._seconds:.0f} s (timeouts.rendezvous); "
            f"{len(self._here)} of {self._job.num_processes} processes did, at {self._job.address}.{elsewhere} Look "
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


def allow_connections(count: int) -> None:
    """Lets this process have a connection with each of the others, as far as the host allows."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = count + SPARE_FILES
        if 0 <= soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard) if hard >= 0 else wanted, hard))


def _listed(names: list[str]) -> str:
    shown = names[:8] if len(names) > 9 else names
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "")

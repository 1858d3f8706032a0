"""The side of all other ranks: knock until rank 0 answers, say who this is, wait until it lets all go."""

import socket
import time
from contextlib import closing

from ..coordination import SAY_SECONDS, ProcessesMissing
from ..errors import UserError
from .addresses import PortTaken
from .detection import Job
from .meeting import FOREIGN_SECONDS, KNOCK_SECONDS, SILENT_SECONDS, STATUS_SECONDS, Meeting, Say, patience, unknown
from .protocol import Hello, Lines, hello_line


class Guest:
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
        """Waits until rank 0 lets all go; raises as `rendezvous.meet` does."""
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
            if time.monotonic() - self._begin > patience(self._job, self._seconds):
                raise unknown(self._job, error) from error
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

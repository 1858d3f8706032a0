"""The processes of a run meet at the coordinator's address before JAX starts there, and see who is missing.

JAX's own start waits without a word, and where it fails, it aborts the process: a rank that does not come, a port that
is taken, a name that does not resolve, another run's process at the same address. Here all of these are told, and none
is waited for longer than `timeouts.rendezvous`:

    rank 0     listens at the address; takes in who belongs to this run, refuses who does not; says who is missing;
               refuses all of them if one cannot start, or has another number of processes
    others     knock until rank 0 answers, then wait until it lets them go

When all are there, rank 0 knows of all others what they gave as `note`, and may still refuse all of them. Then it makes
place for JAX's coordinator, which binds to the same address.
"""

import socket
import time
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Any

from ..coordination import ProcessesMissing
from ..errors import UserError
from .addresses import Address, Listening, PortTaken, listen
from .detection import Job
from .guest import Guest
from .host import Host
from .meeting import KNOCK_SECONDS, REFUSING_SECONDS, Meeting, Say, patience, unknown
from .protocol import FAILED, Hello

HANDOVER_SECONDS = 20.0
OUTSIDE = "192.0.2.1"
"""Not on any network (RFC 5737); stands for hosts of the run whose names are not known."""


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
        return Guest(job, mine, seconds, say).meet()
    listening = _listen(job, seconds)
    with closing(listening.socket):
        return Host(job, mine, listening, seconds, say).meet(check, share)


def refuse(job: Job, reason: str, *, say: Say) -> None:
    """Tells the other processes of a run that this one cannot start, so that none waits for it.

    Args:
        job: The run, of several processes.
        reason: Why it cannot, for people.
        say: Gets a line now and then.
    """
    mine = Hello.mine(job.identity, "", job.num_processes, job.process_id, {FAILED: reason})
    with suppress(UserError, ProcessesMissing, PortTaken, OSError):
        if job.process_id:
            Guest(job, mine, REFUSING_SECONDS, say).meet()
        else:
            listening = _listen(job, REFUSING_SECONDS)
            with closing(listening.socket):
                Host(job, mine, listening, REFUSING_SECONDS, say).meet(lambda meeting: None, share=False)


def _listen(job: Job, seconds: float) -> Listening:
    """Listens at the address of the job; in Kubernetes, waits until its name is known."""
    assert job.address is not None
    begin = time.monotonic()
    elsewhere = job.local_processes is not None and job.local_processes < job.num_processes
    others = list(dict.fromkeys([*job.hosts, *job.nodes])) or ([OUTSIDE] if elsewhere else [])
    while True:
        try:
            return listen(job.address, others)
        except socket.gaierror as error:
            if time.monotonic() - begin > patience(job, seconds):
                raise unknown(job, error) from error
        time.sleep(KNOCK_SECONDS * 2)


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

"""What both sides of a rendezvous speak of: the meeting, how long each part of it may take, unknown names."""

import os
import socket
from collections.abc import Callable
from typing import Any, NamedTuple

from ..errors import UserError
from .addresses import Address
from .detection import Job

STATUS_SECONDS = 1.0
SILENT_SECONDS = 15.0
"""Without a word from rank 0, after which its connection counts as lost."""
FOREIGN_SECONDS = 10.0
"""How long something else may answer at the address before that is an error: what ended just now may still listen."""
REFUSING_SECONDS = 30.0
"""How long a process that cannot start waits for the others, to tell them."""
UNSURE_SECONDS = 3.0
"""The same for processes that only some of the others expect."""
UNKNOWN_SECONDS = 10.0
"""How long a name may be unknown, outside Kubernetes, where a pod has none before it runs."""
KNOCK_SECONDS = 0.1

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


def patience(job: Job, seconds: float) -> float:
    """How long the name of the coordinator's host may be unknown."""
    in_a_pod = job.source == "Kubernetes" or "KUBERNETES_SERVICE_HOST" in os.environ
    return seconds if in_a_pod else min(seconds, UNKNOWN_SECONDS)


def unknown(job: Job, error: OSError) -> UserError:
    """The error of a coordinator's name that nobody knows here."""
    assert job.address is not None
    return UserError(
        f"The coordinator's host {job.address.host!r} ({job.said.get('address', 'job_addresses')}) is unknown on "
        f"{socket.gethostname()}: {error.strerror}. Give a name that every host of the run resolves, or an IP address."
    )

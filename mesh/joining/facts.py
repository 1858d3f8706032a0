"""What one source says of a job, and how it is read from variables: numbers, lists, addresses.

A UserError is raised only where a variable is there and cannot be read.
"""

from collections.abc import Mapping
from typing import NamedTuple

from ..errors import UserError
from .addresses import Address, parse_address

Environ = Mapping[str, str]


class Facts(NamedTuple):
    """What one source says.

    Attributes:
        source: Its name, for people.
        address: Of the coordinator, process 0.
        num_processes: How many processes the run has.
        process_id: Which one this is.
        local_rank: Which one of those on its host.
        local_processes: How many there are on its host.
        local_devices: Accelerators of this process, where the launcher itself says.
        hosts: The host of every process, by rank.
        nodes: The hosts, where it is not said who is where.
        identity: Of this attempt of this job; equal in its processes and in no others.
        unusable: Why nothing of it can be used; "" where it can.
        said: Which variable said what, by the names above.
    """

    source: str
    address: Address | None = None
    num_processes: int | None = None
    process_id: int | None = None
    local_rank: int | None = None
    local_processes: int | None = None
    local_devices: tuple[int, ...] | None = None
    hosts: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    identity: str = ""
    unusable: str = ""
    said: Mapping[str, str] = {}

    @property
    def is_whole(self) -> bool:
        """Whether it says who this process is among how many."""
        return self.num_processes is not None and self.process_id is not None


def from_addresses(
    source: str,
    job_addresses: str | None,
    num_processes: int | None,
    process_id: int | None,
    variable: str,
    said: Mapping[str, str],
) -> Facts:
    """What somebody says of a job by the address of its coordinator, or of all its processes.

    Args:
        source: Where it is said.
        job_addresses: Comma-separated "host:port" of every process, the coordinator first; or the coordinator alone.
        num_processes: Number of processes.
        process_id: This process.
        variable: Where the addresses stand, for the messages.
        said: As in `Facts`.

    Raises:
        UserError: An address is none, or their number is not that of the processes.
    """
    texts = job_addresses.split(",") if job_addresses else []
    addresses = [parse_address(text, variable) for text in texts]
    if len(addresses) > 1:
        if num_processes not in (None, len(addresses)):
            shown = [str(address) for address in addresses]
            raise UserError(
                f"The provided job_addresses {shown} has {len(addresses)} jobs, but num_processes is {num_processes}. "
                "Give one address per process, or the coordinator's address alone."
            )
        num_processes, said = len(addresses), {"num_processes": variable, **said}
    return Facts(
        source,
        address=addresses[0] if addresses else None,
        num_processes=num_processes,
        process_id=process_id,
        hosts=tuple(address.host for address in addresses) if len(addresses) > 1 else (),
        said=said,
    )


def numbered(source: str, names: Mapping[str, str], environ: Environ) -> Facts:
    """Facts that are numbers, each in a variable."""
    smallest = {"num_processes": 1, "local_processes": 1}
    values = {fact: number(environ, name, smallest.get(fact, 0)) for fact, name in names.items()}
    return Facts(source, **values, said=present(environ, names) or {})  # pyright: ignore[reportArgumentType]


def present(environ: Environ, names: Mapping[str, str]) -> dict[str, str] | None:
    """Those of the variables that are set to something; None where none is."""
    return {fact: name for fact, name in names.items() if environ.get(name)} or None


def first_set(environ: Environ, *names: str) -> str | None:
    """The first of some variables that is set to something."""
    return next((name for name in names if environ.get(name)), None)


def number(environ: Environ, name: str, smallest: int) -> int | None:
    """A variable as a whole number; None where it is not set.

    Raises:
        UserError: It is none, or less than it can be.
    """
    text = environ.get(name)
    if not text:
        return None
    digits = text.strip()
    if not (digits.isascii() and digits.isdecimal() and len(digits) < 10) or int(digits) < smallest:
        raise UserError(f"Environment variable {name}={text[:60]!r} must be a whole number of at least {smallest}.")
    return int(digits)


def numbers(environ: Environ, name: str) -> tuple[int, ...] | None:
    """A variable as whole numbers between commas; None where it is not set."""
    text = environ.get(name)
    if not text:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and len(part) < 10 for part in parts):
        raise UserError(f"Environment variable {name}={text[:60]!r} must be whole numbers between commas, such as 0,1.")
    return tuple(map(int, parts))

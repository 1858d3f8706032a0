"""Addresses of processes: "host:port", what they resolve to, and where the coordinator listens."""

import errno
import ipaddress
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from ..errors import UserError

LARGEST_PORT = 65535
LOCALHOST = "localhost"


class Address(NamedTuple):
    """Where a process can be reached.

    Attributes:
        host: A name, or an IPv4 or IPv6 address without brackets.
        port: From 1 to 65535.
    """

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only processes of this machine can reach it, as far as its text says."""
        return self.host == LOCALHOST or is_loopback(self.host)


class PortTaken(RuntimeError):
    """Something else listens at the coordinator's address; the same command may work once it is gone."""

    exit_code = 75


def parse_address(text: str, variable: str) -> Address:
    """Reads "host:port" or "[IPv6]:port".

    Args:
        text: The address.
        variable: What it was given by, for the message.

    Raises:
        UserError: The port is missing or no port, or there is no host.
    """
    host, colon, port = text.strip().rpartition(":")
    rule = f"{variable}={text[:200]!r}: an address is host:port, such as host0:8476 or [fd00::1]:8476"
    if not colon or (text.strip().startswith("[") and not host.endswith("]")):
        raise UserError(f"{rule}; here the port is missing. Add one that is free on that host.")
    if not (port.isascii() and port.isdecimal() and 1 <= int(port[:9]) <= LARGEST_PORT):
        raise UserError(f"{rule}; {port[:20]!r} is no port. Give a whole number from 1 to {LARGEST_PORT}.")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise UserError(f"{rule}; an IPv6 address stands in brackets: [{host}]:{port}.")
    if not host or any(character.isspace() or character in "/,@" for character in host):
        raise UserError(f"{rule}; {host[:100]!r} is no host. Give the name or the address of process 0's host.")
    return Address(host, int(port))


def is_loopback(ip: str) -> bool:
    """Tells whether an IP address leads back to the machine it is used on; False of what is no IP address."""
    try:
        return ipaddress.ip_address(ip.partition("%")[0]).is_loopback
    except ValueError:
        return False


def own_ip() -> str:
    """The IP address that this host's own name resolves to, which Gloo listens on; "" where it resolves to none."""
    try:
        return str(socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return ""


class Listening(NamedTuple):
    """The listening socket of the rendezvous, and the address that JAX's coordinator binds to after it.

    Attributes:
        socket: Listens; close it before JAX starts.
        bind: "ip:port", of one interface.
        announced: Whether the announced address resolves to `bind` on this host.
    """

    socket: socket.socket
    bind: Address
    announced: bool


def listen(address: Address, others: Sequence[str] = ()) -> Listening:
    """Listens on one interface: the one that the announced address belongs to.

    Many hosts resolve their own name to a loopback address (127.0.1.1 on Debian). If the processes are on several
    hosts, this one then listens on the interface that the route to another host goes through, otherwise on loopback.
    If the address belongs to something that forwards to this machine, it listens on the interface that faces it.

    Args:
        address: The announced address.
        others: Other hosts of the run, as far as they are known.

    Raises:
        PortTaken: Something else listens on that port.
        UserError: The address is not this machine's, and there is no route to it.
        OSError: The name does not resolve.
    """
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    ips = list(dict.fromkeys(str(each[4][0]) for each in found))
    own = ips if address.is_loopback else [ip for ip in ips if not is_loopback(ip)]
    facing = [] if own else [ip for ip in map(interface_facing, others) if ip and not is_loopback(ip)]
    for ip in own or facing or ips:
        try:
            return Listening(_bound(ip, address), Address(ip, address.port), announced=ip in ips)
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
    for ip in filter(None, map(interface_facing, ips)):
        return Listening(_bound(ip, address), Address(ip, address.port), announced=False)
    raise UserError(
        f"The coordinator's address {address} ({', '.join(ips)}) is not an address of {socket.gethostname()}, where "
        "process 0 runs, and there is no route to it. Give an address of this host (SPMDKIT_JOB_ADDRESSES)."
    )


def interface_facing(host: str) -> str:
    """Returns the IP address of the interface that the route to a host goes through; "" if there is none.

    Nothing is sent: connecting a datagram socket only looks up the route.
    """
    with suppress(OSError):
        for family, kind, protocol, _, where in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(where)
                return str(probe.getsockname()[0])
    return ""


def _bound(ip: str, address: Address) -> socket.socket:
    """A socket that listens exclusively.

    JAX's coordinator shares its port with whoever asks (SO_REUSEPORT), and two runs on one port abort each other. This
    socket does not share: where anything listens there already, it fails.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what an ended run left in TIME_WAIT is no user
        listener.bind((ip, address.port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortTaken(
                f"The port of the coordinator's address {address} is in use on {socket.gethostname()}: another program "
                "listens there, maybe another run. Wait for its end, or give this run a port of its own."
            ) from error
        if error.errno == errno.EACCES:
            raise UserError(
                f"The coordinator may not listen at {address}: {error.strerror}. Choose a port from 1024 on."
            ) from error
        raise
    return listener

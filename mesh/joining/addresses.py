"""Addresses of processes: "host:port", what they resolve to, and where the coordinator listens."""

import errno
import ipaddress
import socket
from typing import NamedTuple

from ..errors import UserError

LARGEST_PORT = 65535
EVERYWHERE = ("::", "0.0.0.0")
"""All interfaces: with IPv6, which takes IPv4 too, or where the machine has none, without."""
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
    """The listening socket of the rendezvous, and what JAX's coordinator binds to after it.

    Attributes:
        socket: Listens; close it before JAX starts.
        bind: "ip:port".
        everywhere: Whether the announced address is none of this machine's, so that all interfaces are listened on.
    """

    socket: socket.socket
    bind: Address
    everywhere: bool


def listen(address: Address) -> Listening:
    """Listens at the announced address alone: for 127.0.0.1, nobody outside this machine can connect.

    Where the host's name resolves to a loopback address on this machine and to another elsewhere, the other is not
    known here; then, and where the address belongs to something that forwards to this machine, all interfaces are
    listened on.

    Raises:
        PortTaken: Something else listens on that port.
        OSError: The name does not resolve.
    """
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    ips = list(dict.fromkeys(str(each[4][0]) for each in found))
    wanted = ips if address.is_loopback else [ip for ip in ips if not is_loopback(ip)]
    for ip in wanted:
        try:
            return Listening(_bound(ip, address), Address(ip, address.port), everywhere=False)
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
    for ip in EVERYWHERE:
        try:
            return Listening(_bound(ip, address), Address(ip, address.port), everywhere=True)
        except OSError as error:
            if ip == EVERYWHERE[-1] or error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
    raise AssertionError("the last of EVERYWHERE returns or raises")


def _bound(ip: str, address: Address) -> socket.socket:
    """A socket that listens exclusively.

    JAX's coordinator shares its port with whoever asks (SO_REUSEPORT), and two runs on one port abort each other. This
    socket does not share: where anything listens there already, it fails.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what an ended run left in TIME_WAIT is no user
        if ip == "::":
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
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

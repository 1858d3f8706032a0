"""Network addresses: "host:port", the interface that the coordinator listens on, and proxies."""

import errno
import ipaddress
import os
import re
import socket
import time
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from ...mesh.errors import TryAgain, UserError

MAX_PORT = 65535
ADDRESS = re.compile(r"(?:\[(?P<ip>[^\]\s]+)\]|(?P<name>[^\s:/,@\[\]]+)):(?P<port>[0-9]{1,5})")
LOCALHOST = "localhost"
HANDOVER_SECONDS = 20.0
PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
"""Variables that gRPC reads, the first that is set; it reads only lowercase names."""
DIRECT = ("no_grpc_proxy", "no_proxy")
"""Variables with hosts that gRPC reaches directly, the first that is set."""


class Address(NamedTuple):
    """The address of a process.

    Attributes:
        host: A name, or an IPv4 or IPv6 address without brackets.
        port: The port, 1 to 65535.
    """

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """True if the address is literally a loopback address."""
        return self.host == LOCALHOST or is_loopback(self.host)


class PortTaken(TryAgain):
    """Another program listens at the coordinator's address; the same command can work later."""


def parse_address(text: str, variable: str) -> Address:
    """Parses "host:port" or "[IPv6]:port".

    Args:
        text: The address.
        variable: The variable or argument that contains it, for the message.

    Raises:
        UserError: The host or the port is missing or invalid.
    """
    match = ADDRESS.fullmatch(text.strip())
    if match is None or not 1 <= int(match["port"]) <= MAX_PORT:
        raise UserError(
            f"{variable}={text[:200]!r} must be host:port with a port from 1 to {MAX_PORT}, such as host0:8476; an "
            "IPv6 address must be in brackets, such as [fd00::1]:8476."
        )
    return Address(match["ip"] or match["name"], int(match["port"]))


def is_loopback(ip: str) -> bool:
    """Returns True for a loopback IP address; False for a name."""
    with suppress(ValueError):
        return ipaddress.ip_address(ip.partition("%")[0]).is_loopback
    return False


def own_ip() -> str:
    """Returns the IP address of this host's own name, which Gloo listens on; "" if the name does not resolve."""
    with suppress(OSError):
        return str(socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)[0][4][0])
    return ""


class Listening(NamedTuple):
    """The listening socket of the rendezvous.

    Attributes:
        socket: The socket; close it before JAX starts.
        bind: The address of one interface, which JAX's coordinator binds to afterwards.
    """

    socket: socket.socket
    bind: Address


def listen(address: Address, others: Sequence[str] = ()) -> Listening:
    """Listens on the interface of the announced address.

    Many hosts resolve their own name to a loopback address (127.0.1.1 on Debian). If the processes are on several
    hosts, the interface of the route to another host is used instead. If the address belongs to a forwarder, the
    interface that faces it is used.

    Args:
        address: The announced address.
        others: The known other hosts of the run.

    Raises:
        PortTaken: Another program listens on that port.
        UserError: The address is not an address of this machine, and no route leads to it.
        OSError: The name does not resolve.
    """
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    ips = list(dict.fromkeys(str(each[4][0]) for each in found))
    own = ips if address.is_loopback else [ip for ip in ips if not is_loopback(ip)]
    facing = [] if own else [ip for ip in map(interface_facing, others) if ip and not is_loopback(ip)]
    for ip in own or facing or ips:
        try:
            return Listening(_bind(ip, address), Address(ip, address.port))
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
    for ip in filter(None, map(interface_facing, ips)):
        return Listening(_bind(ip, address), Address(ip, address.port))
    raise UserError(
        f"The coordinator's address {address} ({', '.join(ips)}) is not an address of {socket.gethostname()}, the host "
        "of process 0, and no route leads to it. Set SPMDKIT_JOB_ADDRESSES to an address of this host."
    )


def wait_until_listening(address: Address, seconds: float = HANDOVER_SECONDS) -> None:
    """Waits until JAX's coordinator listens; a client of JAX that connects earlier loses a second.

    Args:
        address: The coordinator's address.
        seconds: The timeout, after which JAX itself waits.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with suppress(OSError):
            socket.create_connection(address, timeout=1.0).close()
            return
        time.sleep(0.01)


def interface_facing(host: str) -> str:
    """Returns the IP address of the interface on the route to a host, or "".

    Sends nothing: connecting a datagram socket only looks up the route.
    """
    with suppress(OSError):
        for family, kind, protocol, _, target in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(target)
                return str(probe.getsockname()[0])
    return ""


def _bind(ip: str, address: Address) -> socket.socket:
    """Returns a socket that listens exclusively.

    JAX's coordinator shares its port (SO_REUSEPORT), and two runs on one port abort each other. This socket fails if
    anything else listens on the port.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # TIME_WAIT of an ended run does not count
        listener.bind((ip, address.port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortTaken(
                f"The port of the coordinator's address {address} is in use on {socket.gethostname()}: another program "
                "listens there, maybe another run. Wait until it ends, or choose another port for this run."
            ) from error
        if error.errno == errno.EACCES:
            raise UserError(
                f"The coordinator is not allowed to listen at {address}: {error.strerror}. Choose a port from 1024 up."
            ) from error
        raise
    return listener


def find_proxy(environ: Mapping[str, str], host: str) -> str:
    """Returns the variable that makes gRPC route traffic for a host through a proxy, or ""."""
    proxy = next((name for name in PROXIES if environ.get(name)), "")
    direct = next((environ[name] for name in DIRECT if environ.get(name)), "")
    suffixes = [each.strip() for each in direct.split(",")]  # gRPC compares suffixes; a star has no meaning
    return "" if any(each and host.endswith(each) for each in suffixes) else proxy


def bypass_proxy(host: str, environ: MutableMapping[str, str] = os.environ) -> None:
    """Exempts a host from the proxy, in this process and its children; gRPC would use the proxy and hang."""
    if find_proxy(environ, host):
        direct = next((name for name in DIRECT if environ.get(name)), "no_proxy")
        environ[direct] = ",".join(filter(None, (environ.get(direct, ""), host)))

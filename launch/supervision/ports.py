"""A port nobody has."""

import errno
import socket


def free_port() -> int:
    """Finds a port that nothing on this machine listens on, for one attempt of one run.

    JAX's coordinator binds with SO_REUSEPORT: two runs that share a port do not fail, they abort each other. So the
    port is proved free by binding it exclusively, on all interfaces, IPv4 and IPv6.

    Returns:
        The port, closed again; take a fresh one for every attempt.

    Raises:
        OSError: Twenty ports in a row were taken on one of the two.
    """
    for _ in range(20):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
            if _free_on_ipv6(port):
                return port
    raise OSError(errno.EADDRINUSE, "no port is free on both IPv4 and IPv6")


def _free_on_ipv6(port: int) -> bool:
    """Tells whether a port can be bound exclusively on IPv6; a machine without IPv6 has all of them free."""
    if not socket.has_ipv6:
        return True
    try:
        probe = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    except OSError:
        return True
    with probe:
        probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            probe.bind(("::", port))
        except OSError as error:
            return error.errno == errno.EADDRNOTAVAIL
    return True

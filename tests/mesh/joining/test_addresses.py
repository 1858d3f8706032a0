"""Addresses, and that the coordinator listens at the announced one alone."""

import socket

import pytest
from spmdkit.mesh.errors import UserError
from spmdkit.mesh.joining import addresses
from spmdkit.mesh.joining.addresses import Address, PortTaken, listen, parse_address


@pytest.mark.parametrize(
    ("text", "address", "loopback"),
    [
        ("host0:8476", Address("host0", 8476), False),
        (" 10.0.0.1:1 ", Address("10.0.0.1", 1), False),
        ("127.0.0.1:65535", Address("127.0.0.1", 65535), True),
        ("localhost:80", Address("localhost", 80), True),
        ("[::1]:80", Address("::1", 80), True),
        ("[fd00::1]:80", Address("fd00::1", 80), False),
    ],
)
def test_addresses(text, address, loopback):
    found = parse_address(text, "X")
    assert (found, found.is_loopback, str(found)) == (address, loopback, text.strip())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("host0", "the port is missing. Add one that is free on that host"),
        ("[fd00::1]", "the port is missing"),
        ("host0:", "'' is no port"),
        ("host0:http", "'http' is no port. Give a whole number from 1 to 65535"),
        ("host0:0", "'0' is no port"),
        ("host0:65536", "'65536' is no port"),
        (":80", "'' is no host"),
        ("http://host0:80", "an IPv6 address stands in brackets"),
        ("user@host0:80", "is no host"),
        ("fd00::1:80", r"stands in brackets: \[fd00::1\]:80"),
    ],
)
def test_no_addresses(text, says):
    with pytest.raises(UserError, match=f"VARIABLE='.*{says}"):
        parse_address(text, "VARIABLE")


def free() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_loopback_address_is_listened_on_alone():
    port = free()
    listening = listen(Address("127.0.0.1", port))
    with listening.socket:
        assert listening.socket.getsockname() == ("127.0.0.1", port)
        assert (listening.bind, listening.everywhere) == (Address("127.0.0.1", port), False)
        socket.create_connection(("127.0.0.1", port)).close()
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.2", port), timeout=1)


@pytest.mark.parametrize("share", [False, True], ids=["alone", "sharing its port, as JAX's does"])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_port_in_use(share, host):
    with socket.socket() as other:
        if share:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind((host, 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(PortTaken, match=f"address 127.0.0.1:{port} is in use on .*: another program listens"):
            listen(Address("127.0.0.1", port))


def test_a_port_that_was_just_used_is_free():
    listening = listen(Address("127.0.0.1", free()))
    with socket.create_connection(listening.socket.getsockname()) as client:
        peer, _ = listening.socket.accept()
        peer.close()  # the side that closes first keeps the connection in TIME_WAIT
        client.recv(1)
    listening.socket.close()
    listen(Address("127.0.0.1", listening.bind.port)).socket.close()


def test_an_unknown_host():
    with pytest.raises(socket.gaierror):
        listen(Address("no-such-host.invalid", 80))


@pytest.mark.parametrize("resolves_to", ["192.0.2.1", "127.0.1.1"], ids=["elsewhere", "to loopback, as on Debian"])
def test_an_address_that_is_not_this_hosts(resolves_to, monkeypatch):
    """A Service of Kubernetes forwards to the pod; Debian gives the host's own name a loopback address."""
    port = free()
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (resolves_to, port))]
    monkeypatch.setattr(addresses.socket, "getaddrinfo", lambda *arguments, **options: found)
    listening = listen(Address("host0", port))
    with listening.socket:
        assert listening.everywhere
        assert listening.bind.host in ("::", "0.0.0.0")


def test_own_ip():
    assert addresses.own_ip()

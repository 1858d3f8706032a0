"""Addresses, and that the coordinator listens at the announced one alone."""

import socket
import sys
from pathlib import Path

import pytest
from spmdkit.launch.startup import addresses
from spmdkit.launch.startup.addresses import Address, PortTaken, bypass_proxy, find_proxy, listen, parse_address
from spmdkit.mesh.errors import UserError


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
        ("host0", "the port is missing. Add a port that is free on that host"),
        ("[fd00::1]", "the port is missing"),
        ("host0:", "'' is not a valid port"),
        ("host0:http", "'http' is not a valid port. Use an integer from 1 to 65535"),
        ("host0:0", "'0' is not a valid port"),
        ("host0:65536", "'65536' is not a valid port"),
        (":80", "'' is not a valid host"),
        ("http://host0:80", "an IPv6 address must be in brackets"),
        ("user@host0:80", "is not a valid host"),
        ("fd00::1:80", r"must be in brackets: \[fd00::1\]:80"),
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
        assert (listening.bind, listening.announced) == (Address("127.0.0.1", port), True)
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


def resolve(monkeypatch, ip: str) -> None:
    """Makes the name host0 resolve to an address; the route to host1 and to networks goes through 127.0.0.3."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, 80))]
    monkeypatch.setattr(addresses.socket, "getaddrinfo", lambda *arguments, **options: found)
    routes = {"host0": "127.0.1.1", "host1": "127.0.0.3", "192.0.2.1": "127.0.0.3"}
    monkeypatch.setattr(addresses, "interface_facing", routes.__getitem__)


def listens_at(port: int) -> list[str]:
    """The IPv4 and IPv6 addresses that any process of this machine listens at on a port, as the kernel reports them."""
    found = []
    for path, family in (("/proc/net/tcp", socket.AF_INET), ("/proc/net/tcp6", socket.AF_INET6)):
        for line in Path(path).read_text().splitlines()[1:] if Path(path).exists() else []:
            _, local, _, state, *_ = line.split()
            ip, _, number = local.partition(":")
            if state == "0A" and int(number, 16) == port:
                words = [int(ip[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(ip), 8)]
                found.append(socket.inet_ntop(family, b"".join(words)))
    return found


@pytest.mark.parametrize(
    ("resolves_to", "others", "ip", "announced"),
    [
        ("127.0.1.1", (), "127.0.1.1", True),
        ("127.0.1.1", ("host0",), "127.0.1.1", True),
        ("192.0.2.1", (), "127.0.0.3", False),
    ],
    ids=["its own name is loopback, as on Debian", "so are all hosts", "something that forwards to it"],
)
def test_listens_on_one_interface(resolves_to, others, ip, announced, monkeypatch):
    resolve(monkeypatch, resolves_to)
    listening = listen(Address("host0", port := free()), others)
    with listening.socket:
        assert listens_at(port) == [ip]
        assert (listening.bind, listening.announced) == (Address(ip, port), announced)


def test_listens_where_other_hosts_can_reach_it(monkeypatch):
    """Its own name is loopback here, and an address of the network elsewhere: the route to another host tells which."""
    resolve(monkeypatch, "127.0.1.1")
    monkeypatch.setattr(addresses, "is_loopback", lambda ip: ip == "127.0.1.1")
    listening = listen(Address("host0", port := free()), ("host0", "host1"))
    with listening.socket:
        assert listens_at(port) == ["127.0.0.3"]
        assert not listening.announced


def test_an_address_without_a_route(monkeypatch):
    resolve(monkeypatch, "192.0.2.1")
    monkeypatch.setattr(addresses, "interface_facing", lambda host: "")
    with pytest.raises(UserError, match=r"address host0:80 \(192.0.2.1\) is not an address of .*no route leads to it"):
        listen(Address("host0", 80))


def test_the_interface_that_faces_a_host():
    assert addresses.interface_facing("127.0.0.1") == "127.0.0.1"
    assert addresses.interface_facing("no-such-host.invalid") == ""


def test_own_ip():
    assert addresses.own_ip()


PROXY = {"http_proxy": "http://proxy:3128"}


@pytest.mark.parametrize(
    ("environ", "variable"),
    [
        ({}, ""),
        (PROXY, "http_proxy"),
        ({**PROXY, "grpc_proxy": "http://other"}, "grpc_proxy"),
        ({**PROXY, "no_proxy": "localhost, host0"}, ""),
        ({**PROXY, "no_proxy": "*"}, "http_proxy"),  # gRPC knows no star
        ({**PROXY, "no_grpc_proxy": "other", "no_proxy": "host0"}, "http_proxy"),
        ({"HTTP_PROXY": "http://proxy"}, ""),  # nor capitals
    ],
)
def test_finds_the_proxy_that_grpc_uses(environ, variable):
    assert find_proxy(environ, "host0") == variable


@pytest.mark.parametrize("before", [{}, {"no_proxy": "localhost"}, {"no_grpc_proxy": "x", "no_proxy": "y"}])
def test_bypasses_the_proxy(before):
    environ = {**PROXY, **before}
    bypass_proxy("host0", environ)
    assert not find_proxy(environ, "host0")
    assert all(environ[name].startswith(value) for name, value in before.items())


def test_changes_nothing_without_a_proxy():
    environ = {"no_proxy": "x"}
    bypass_proxy("host0", environ)
    assert environ == {"no_proxy": "x"}

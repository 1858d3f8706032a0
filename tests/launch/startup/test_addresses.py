"""Addresses, and that the coordinator listens at the announced one alone."""

import errno
import socket
import sys
from pathlib import Path

import pytest
from spmdkit.launch.startup import addresses
from spmdkit.launch.startup.addresses import Address, PortTaken, bypass_proxy, find_proxy, listen, parse_address
from spmdkit.launch.supervision.workers import free_port
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
    "text",
    [
        "host0", "[fd00::1]", "host0:", "host0:http", "host0:0", "host0:65536", ":80", "http://host0:80", "fd00::1:80",
        "host 0:80",
    ],
)  # fmt: skip
def test_rejects_invalid_addresses(text):
    with pytest.raises(UserError, match=r"VARIABLE='.*' must be host:port with a port from 1 to 65535, .* in brackets"):
        parse_address(text, "VARIABLE")


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


def test_a_port_that_needs_permission(monkeypatch):
    class Unprivileged(socket.socket):
        def bind(self, address):
            raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(addresses.socket, "socket", Unprivileged)
    with pytest.raises(UserError, match=r"not allowed to listen at 127.0.0.1:80: Permission denied\. Choose a port"):
        listen(Address("127.0.0.1", 80))


def test_a_port_that_was_just_used_is_free():
    listening = listen(Address("127.0.0.1", free_port()))
    with socket.create_connection(listening.socket.getsockname()) as client:
        peer, _ = listening.socket.accept()
        peer.close()  # the side that closes first keeps the connection in TIME_WAIT
        client.recv(1)
    listening.socket.close()
    listen(Address("127.0.0.1", listening.bind.port)).socket.close()


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
    ("resolves_to", "others", "loopback", "ip"),
    [
        ("127.0.1.1", (), "127.", "127.0.1.1"),
        ("127.0.1.1", ("host0",), "127.", "127.0.1.1"),
        ("192.0.2.1", (), "127.", "127.0.0.3"),
        ("127.0.1.1", ("host0", "host1"), "127.0.1.1", "127.0.0.3"),
    ],
    ids=["loopback, as on Debian", "so are all hosts", "something that forwards to it", "another host routes to it"],
)
def test_listens_on_one_interface(resolves_to, others, loopback, ip, monkeypatch):
    resolve(monkeypatch, resolves_to)
    monkeypatch.setattr(addresses, "is_loopback", lambda ip: ip.startswith(loopback))
    listening = listen(Address("host0", port := free_port()), others)
    with listening.socket:
        assert listens_at(port) == [ip]
        assert listening.bind == Address(ip, port)


def test_an_address_without_a_route(monkeypatch):
    resolve(monkeypatch, "192.0.2.1")
    monkeypatch.setattr(addresses, "interface_facing", lambda host: "")
    with pytest.raises(UserError, match=r"address host0:80 \(192.0.2.1\) is not an address of .*no route leads to it"):
        listen(Address("host0", 80))


PROXY = {"http_proxy": "http://proxy:3128"}


@pytest.mark.parametrize(
    ("environ", "variable"),
    [
        ({}, ""),
        (PROXY, "http_proxy"),
        ({**PROXY, "grpc_proxy": "http://other"}, "grpc_proxy"),
        ({**PROXY, "no_proxy": "localhost, host0"}, ""),
        ({**PROXY, "no_proxy": "*"}, "http_proxy"),  # gRPC knows no star
        ({**PROXY, "no_proxy": "x,st0"}, ""),  # and compares suffixes
        ({**PROXY, "no_grpc_proxy": "other", "no_proxy": "host0"}, "http_proxy"),
        ({"HTTP_PROXY": "http://proxy"}, ""),  # nor capitals
    ],
)
def test_finds_the_proxy_that_grpc_uses(environ, variable):
    assert find_proxy(environ, "host0") == variable
    changed = dict(environ)
    bypass_proxy("host0", changed)
    assert not find_proxy(changed, "host0")
    assert (changed != environ) == bool(variable), "nothing changes without a proxy"

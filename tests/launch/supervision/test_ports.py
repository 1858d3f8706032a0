import socket

from spmdkit.launch.supervision.ports import free_port


def test_port_can_be_bound():
    with socket.socket() as server:
        server.bind(("", free_port()))


def test_ports_differ_while_taken():
    with socket.socket() as server:
        server.bind(("", free_port()))
        server.listen()
        assert free_port() != server.getsockname()[1]

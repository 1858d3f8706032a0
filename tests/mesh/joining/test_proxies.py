import pytest
from spmdkit.mesh.joining.proxies import proxy_in_the_way, reach_directly

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
def test_what_grpc_does(environ, variable):
    assert proxy_in_the_way(environ, "host0") == variable


@pytest.mark.parametrize("before", [{}, {"no_proxy": "localhost"}, {"no_grpc_proxy": "x", "no_proxy": "y"}])
def test_a_host_is_reached_directly(before):
    environ = {**PROXY, **before}
    reach_directly("host0", environ)
    assert not proxy_in_the_way(environ, "host0")
    assert all(environ[name].startswith(value) for name, value in before.items())


def test_without_a_proxy_nothing_changes():
    environ = {"no_proxy": "x"}
    reach_directly("host0", environ)
    assert environ == {"no_proxy": "x"}

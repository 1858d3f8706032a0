"""No proxy between the processes of a run: gRPC would send what they say to each other there, and wait for ever."""

import os
from collections.abc import Mapping, MutableMapping

PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
"""Read by gRPC, the first that is set; only in small letters."""
DIRECT = ("no_grpc_proxy", "no_proxy")
"""Hosts that are reached directly; the first of them that is set counts."""


def proxy_in_the_way(environ: Mapping[str, str], host: str) -> str:
    """The variable by which gRPC would send messages to a host through a proxy; "" where it would not.

    Args:
        environ: Of the process.
        host: Of the coordinator.
    """
    proxy = next((name for name in PROXIES if environ.get(name)), "")
    direct = next((environ[name] for name in DIRECT if environ.get(name)), "")
    return "" if any(_covers(each.strip(), host) for each in direct.split(",")) else proxy


def reach_directly(host: str, environ: MutableMapping[str, str] = os.environ) -> None:
    """Puts a host among those that this process, and what it starts, reach without a proxy."""
    if not proxy_in_the_way(environ, host):
        return
    direct = next((name for name in DIRECT if environ.get(name)), "no_proxy")
    environ[direct] = ",".join(filter(None, (environ.get(direct, ""), host)))


def _covers(entry: str, host: str) -> bool:
    """gRPC compares ends of names; a star means nothing to it."""
    return bool(entry) and host.endswith(entry)

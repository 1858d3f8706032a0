"""Who this process is among how many, and by which variables; the coordinator's address."""

import socket
from collections.abc import Mapping

from ...mesh.errors import UserError
from ...mesh.joining.addresses import Address, PortTaken, listen
from ...mesh.joining.detection import Job
from ...mesh.joining.proxies import proxy_in_the_way
from ...mesh.joining.sources import SOURCES
from .finding import Finding


def who(job: Job | None) -> list[Finding]:
    """The job, each part with the variable that says it.

    Args:
        job: The job; None = nothing says that there is one.
    """
    if job is None:
        return [Finding("job", "one process: no variable says that there are others")]
    said = job.said
    found = [
        Finding("job", f"process {job.process_id} of {job.num_processes}", variable=_both(said)),
        Finding("job", f"said by {job.source}"),
    ]
    if job.address is not None and job.is_shared:
        found.append(Finding("coordinator", str(job.address), variable=said.get("address", "")))
    if job.local_rank is not None and job.local_processes is not None:
        text = f"process {job.local_rank} of {job.local_processes} on its host"
        found.append(Finding("job", text, variable=said.get("local_rank", "")))
    if job.identity:
        found.append(Finding("job", f"identity: {job.identity}", variable=said.get("identity", "")))
    return found


def others(job: Job | None, environ: Mapping[str, str]) -> list[Finding]:
    """Sources that say something else and are not believed: those of a launcher around this one.

    Args:
        job: What is believed.
        environ: Of this process.
    """
    found = []
    for name, read in SOURCES.items():
        try:
            facts = read(environ)
        except UserError:
            continue
        if facts is None or job is None or not facts.is_whole or name == job.source:
            continue
        if (facts.process_id, facts.num_processes) != (job.process_id, job.num_processes):
            text = f"{name} says process {facts.process_id} of {facts.num_processes}: not believed, it comes later"
            found.append(Finding("job", text, "note"))
    return found


def coordinator(job: Job, environ: Mapping[str, str], several_hosts: bool) -> list[Finding]:
    """The coordinator's address: its name, its port, what stands between.

    Args:
        job: Of several processes.
        environ: Of this process.
        several_hosts: Whether they are on several hosts, as far as that is known.
    """
    assert job.address is not None
    found = []
    proxy = proxy_in_the_way(environ, job.address.host)
    if proxy:
        text = f"{proxy} would catch {job.address.host}; a run adds it to no_proxy by itself"
        found.append(Finding("proxy", text, "note", f"export no_proxy=$no_proxy,{job.address.host}", proxy))
    if job.address.is_loopback and several_hosts:
        fix = "give the address of process 0's host that the other hosts know it by (SPMDKIT_JOB_ADDRESSES)"
        return [*found, Finding("coordinator", f"{job.address} means another host on each host", "wrong", fix)]
    return [*found, port(job.address) if job.process_id == 0 else name(job.address)]


def name(address: Address) -> Finding:
    """Whether the coordinator's host is known here."""
    try:
        ips = {str(each[4][0]) for each in socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)}
    except OSError as error:
        text = f"{address.host} is unknown on {socket.gethostname()}: {error.strerror}"
        return Finding("coordinator", text, "wrong", "give a name that every host resolves, or an IP address")
    return Finding("coordinator", f"{address.host} is {', '.join(sorted(ips))}")


def port(address: Address) -> Finding:
    """Whether process 0 can listen at the coordinator's address."""
    try:
        listening = listen(address)
    except socket.gaierror:
        return name(address)
    except PortTaken:
        text = f"port {address.port} is in use on {socket.gethostname()}"
        return Finding("coordinator", text, "wrong", "wait for the end of what listens there, or choose another port")
    except (OSError, UserError) as error:
        return Finding("coordinator", f"cannot listen at {address}: {error}", "wrong", "choose another address")
    listening.socket.close()
    if not listening.announced:
        text = f"{address} is not an address of this host, {socket.gethostname()}: it would listen on {listening.bind}"
        fix = "run process 0 on that host, or give this host's own address"
        return Finding("coordinator", text, "note", fix)
    return Finding("coordinator", f"port {address.port} is free; listens on {listening.bind.host} alone")


def _both(said: Mapping[str, str]) -> str:
    return ", ".join(dict.fromkeys(said[fact] for fact in ("process_id", "num_processes") if fact in said))

"""Checks of the job: rank and coordinator, run.dir, and the comparison of all processes."""

import os
import secrets
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ...layouts.paths import some
from ...mesh.errors import UserError
from ...mesh.processes import differences, unequal
from ...runtime.machine_check import DirectoryUnavailable, check_directory
from ...runtime.process_check import wait_until_visible
from ..startup.addresses import find_proxy, own_ip
from ..startup.initialize import check_host_names
from ..startup.rendezvous import MAX_HOSTS, Rendezvous, join_rendezvous
from ..startup.variables import Job

GIB = 2**30
MIN_DISK_SPACE = GIB
VISIBLE_SECONDS = 5.0
"""The time for a new file to become visible: network file systems cache listings for some seconds."""


class Finding(NamedTuple):
    """The result of a check.

    Attributes:
        name: The subject.
        found: Its value.
        level: ok; note, which may be intended; wrong, which will not work.
        fix: The fix.
        variable: The environment variable that sets it.
    """

    name: str
    found: str
    level: Literal["ok", "note", "wrong"] = "ok"
    fix: str = ""
    variable: str = ""


def require(name: str, found: str, is_met: bool, fix: str) -> Finding:
    """Returns the finding of a requirement; it is wrong and has a fix only if it is not met."""
    return Finding(name, found) if is_met else Finding(name, found, "wrong", fix)


def describe_job(job: Job | None) -> list[Finding]:
    """Returns the parts of a job with the variables that set them.

    Args:
        job: The job; None = there is only this process.
    """
    if job is None:
        return [Finding("job", "one process: no variable sets a number of processes")]
    variables = job.variables
    both = [variables[fact] for fact in ("process_id", "num_processes") if fact in variables]
    found = [
        Finding("job", f"process {job.process_id} of {job.num_processes}", variable=", ".join(dict.fromkeys(both))),
        Finding("job", f"detected from {job.source}"),
    ]
    if job.address is not None and job.is_shared:
        found.append(Finding("coordinator", str(job.address), variable=variables.get("address", "")))
    if job.local_rank is not None and job.local_processes is not None:
        text = f"process {job.local_rank} of {job.local_processes} on its host"
        found.append(Finding("job", text, variable=variables.get("local_rank", "")))
    if job.identity:
        found.append(Finding("job", f"identity: {job.identity}", variable=variables.get("identity", "")))
    return found


def check_coordinator(job: Job, environ: Mapping[str, str], several_hosts: bool) -> list[Finding]:
    """Checks the coordinator's address, and if a proxy would be used for it; the rendezvous checks name and port.

    Args:
        job: The job, with several processes.
        environ: The environment of this process.
        several_hosts: If the processes are on several hosts, as far as that is known.
    """
    assert job.address is not None
    found = []
    if proxy := find_proxy(environ, job.address.host):
        text = f"{proxy} applies to {job.address.host}; a run adds it to no_proxy automatically"
        found.append(Finding("proxy", text, "note", f"export no_proxy=$no_proxy,{job.address.host}", proxy))
    if job.address.is_loopback and several_hosts:
        fix = "set the address of process 0's host that the other hosts can reach (SPMDKIT_JOB_ADDRESSES)"
        text = f"{job.address} refers to a different host on each host"
        found.append(Finding("coordinator", text, "wrong", fix))
    return found


def check_run_dir(run_dir: Path) -> Finding:
    """Checks that run.dir, which need not exist, can be written; leaves no files.

    Args:
        run_dir: The absolute path.
    """
    try:
        check_directory(run_dir)
    except (UserError, DirectoryUnavailable) as error:
        return Finding("run.dir", str(error), "wrong", "set run.dir to a writable directory, or repair the file system")
    free = shutil.disk_usage(existing_part(run_dir)).free
    text = f"{run_dir}: writable, {free / GIB:.1f} GiB free"
    return require("run.dir", text, free >= MIN_DISK_SPACE, "free some space, or set run.dir to another file system")


def existing_part(path: Path) -> Path:
    """Returns a directory, or its nearest existing parent."""
    return next((each for each in (path, *path.parents) if each.is_dir()), Path())


@contextmanager
def create_marker(run_dir: Path) -> Iterator[Path]:
    """Creates a temporary file, which other hosts should see.

    Args:
        run_dir: The directory of a run, relative or absolute. If it is missing, its nearest existing parent is used.

    Yields:
        The path of the file; relative if `run_dir` is.
    """
    path = existing_part(run_dir) / f".spmdkit-{secrets.token_hex(8)}"
    path.touch()
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def find_probes(run_dir: Path, names: Sequence[str], hosts: Sequence[str]) -> Finding:
    """Checks that this process sees the probes of all processes.

    Args:
        run_dir: The directory.
        names: The names of the probes by rank; "" if none was written.
        hosts: The hosts by rank.
    """
    existing = existing_part(run_dir)

    def find_missing() -> list[str]:
        here = set(os.listdir(existing))
        return sorted({host for name, host in zip(names, hosts, strict=True) if name and name not in here})

    wait_until_visible(lambda: not find_missing(), existing, VISIBLE_SECONDS)
    text = f"all {len(names)} processes see the same {existing}"
    if missing := find_missing():
        text = f"files written by {', '.join(missing)} to {existing} are not visible on {socket.gethostname()}"
    fix = "mount the same file system on all hosts, or set run.dir to one that they share"
    return require("shared", text, not missing, fix)


def compare(
    job: Job, own: Sequence[Finding], run_dir: Path, versions: Mapping[str, str], *, on_cpu: bool, seconds: float
) -> list[list[Finding]]:
    """Connects the doctors of all processes, and compares their findings.

    Args:
        job: The job, with several processes.
        own: The findings of this process.
        run_dir: The directory of the run, absolute.
        versions: The versions by package.
        on_cpu: If the run computes on the CPU.
        seconds: How long to wait for the others.

    Returns:
        The findings of each process by rank.

    Raises:
        ProcessesMissing: Some processes did not connect.
        PortTaken: The port of the coordinator is in use.
        UserError: The job is invalid.
    """
    meet = partial(join_rendezvous, job, seconds=seconds, run="spmdkit doctor", share=True)
    with ExitStack() as stack:
        probe = ""
        with suppress(OSError):  # `check_run_dir` reports it
            probe = stack.enter_context(create_marker(run_dir)).name
        meeting = meet(note={"own_ip": own_ip(), "probe": probe, "versions": dict(versions)})
        found = [
            *own,
            find_probes(run_dir, [str(note.get("probe", "")) for note in meeting.notes], meeting.hosts),
            describe_hosts(meeting),
            *([Finding("coordinator", f"listens on {meeting.bind} only")] if meeting.bind else []),
            *compare_versions(meeting.notes),
            *check_names(meeting, on_cpu),
        ]
        answers = meet(note={"findings": [list(finding) for finding in found]})
    return [[Finding(*map(str, each)) for each in note["findings"]] for note in answers.notes]  # pyright: ignore


def describe_hosts(meeting: Rendezvous) -> Finding:
    """Returns the number of processes on each host."""
    counts = {host: meeting.hosts.count(host) for host in dict.fromkeys(meeting.hosts)}
    text = some((f"{count} on {host}" for host, count in counts.items()), MAX_HOSTS)
    return Finding("processes", f"all {len(meeting.hosts)} have connected: {text}")


def compare_versions(notes: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Returns the packages with versions that differ between processes."""
    found = unequal([note.get("versions") or {} for note in notes], "none")
    fix = "install the same versions on all hosts"
    return [Finding("versions", differences(name, values), "wrong", fix) for name, values in found.items()]


def check_names(meeting: Rendezvous, on_cpu: bool) -> list[Finding]:
    """Returns host names that the other processes cannot reach."""
    try:
        check_host_names(meeting, on_cpu=on_cpu)
    except UserError as error:
        return [Finding("host name", str(error), "wrong")]
    return []

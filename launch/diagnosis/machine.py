"""The host: cores, memory, limits, its name, the locale."""

import locale
import os
import resource
import shutil
import socket
import sys
from pathlib import Path

from ...mesh.joining.accelerators import gpus_of_host
from ...mesh.joining.addresses import is_loopback, own_ip
from .finding import Finding

GIB = 2**30
LEAST_MEMORY = GIB
LEAST_FILES = 1024
LEAST_SHARED_MEMORY = GIB
GROUP = Path("/sys/fs/cgroup")


def machine(devices: int) -> list[Finding]:
    """Looks at the host.

    Args:
        devices: Simulated devices of all processes on it; 0 = the CPU only feeds accelerators.
    """
    return [
        cores(devices, _cores()),
        memory(_available()),
        *limits(resource.getrlimit(resource.RLIMIT_NOFILE)[0], resource.getrlimit(resource.RLIMIT_AS)[0]),
        *shared_memory(),
        host_name(socket.gethostname(), own_ip()),
        language(),
    ]


def cores(devices: int, count: float) -> Finding:
    """Cores against the devices that they simulate.

    Args:
        devices: Simulated on this host.
        count: Cores that this process may use.
    """
    said = f"{count:g} for this process"
    if devices > count:
        said += f", which share {devices} simulated devices: right, but not fast"
        return Finding("cores", said, "note", "see launch.cpus_per_process, or simulate fewer devices (run.simulate)")
    return Finding("cores", said)


def memory(available: int | None) -> Finding:
    """Memory that is free.

    Args:
        available: In bytes; None = not known.
    """
    if available is None:
        return Finding("memory", "not known on this system")
    said = f"{available / GIB:.0f} GiB free" if available > 9.5 * GIB else f"{available / GIB:.1f} GiB free"
    if available < LEAST_MEMORY:
        return Finding("memory", said, "wrong", "close other programs, or ask the scheduler for more")
    return Finding("memory", said)


def limits(files: int, addresses: int) -> list[Finding]:
    """The limits of this process.

    Args:
        files: Open files.
        addresses: Bytes of address space; -1 = no limit.
    """
    unlimited = resource.RLIM_INFINITY
    found = [Finding("open files", "no limit" if files == unlimited else f"at most {files}")]
    if files != unlimited and files < LEAST_FILES:
        found = [Finding("open files", f"at most {files}", "wrong", f"ulimit -n {LEAST_FILES * 4}")]
    if addresses not in (unlimited, -1):
        said = f"ulimit -v: {addresses / GIB:.0f} GiB of addresses"
        found.append(
            Finding("memory", said, "note", "ulimit -v unlimited: JAX reserves many more addresses than it uses")
        )
    return found


def shared_memory(folder: Path = Path("/dev/shm")) -> list[Finding]:
    """What GPUs of one host exchange data through; containers often have 64 MiB of it."""
    if not gpus_of_host() or not folder.is_dir():
        return []
    total = shutil.disk_usage(folder).total
    if total < LEAST_SHARED_MEMORY:
        said = f"{folder} holds {total / 2**20:.0f} MiB"
        return [Finding("shared memory", said, "wrong", "start the container with --shm-size=8g, or --ipc=host")]
    return []


def host_name(name: str, ip: str) -> Finding:
    """What the host's own name resolves to: collectives on the CPU listen there.

    Whether others have to reach it is known once the processes of a run have met.

    Args:
        name: Of the host.
        ip: What it resolves to; "" = nothing.
    """
    if not ip:
        fix = f"add a line with its address and '{name}' to /etc/hosts"
        return Finding("host name", f"{name} does not resolve", "wrong", fix)
    said = f"{name} is {ip}"
    if is_loopback(ip):
        return Finding("host name", f"{said}: enough for one host, not for several")
    return Finding("host name", said)


def language() -> Finding:
    """The locale, and the encoding of what is printed."""
    asked = next((os.environ[name] for name in ("LC_ALL", "LC_CTYPE", "LANG") if os.environ.get(name)), "none set")
    try:
        locale.setlocale(locale.LC_CTYPE, "")
    except locale.Error:
        fix = "set LC_ALL=C.UTF-8, or install that locale"
        return Finding("locale", f"{asked}, which this host does not have", "note", fix)
    encoding = (sys.stdout.encoding or "unknown").lower()
    if encoding.replace("-", "") != "utf8":
        return Finding("locale", f"{asked}; prints {encoding}", "note", "set LC_ALL=C.UTF-8")
    return Finding("locale", f"{asked}; prints {encoding}")


def _cores() -> float:
    """Cores that this process may use: by its affinity, and by the quota of its group."""
    count = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    quota, _, period = _text(GROUP / "cpu.max").partition(" ")
    if quota.isdecimal() and period.isdecimal() and int(period):
        count = min(count, int(quota) / int(period))
    return count


def _available() -> int | None:
    """Bytes of memory that are free, on the host and in the group of this process."""
    lines = _text(Path("/proc/meminfo")).splitlines()
    free = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
    most, used = _text(GROUP / "memory.max"), _text(GROUP / "memory.current")
    if most.isdecimal() and used.isdecimal():
        left = max(0, int(most) - int(used))
        free = left if free is None else min(free, left)
    return free


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""

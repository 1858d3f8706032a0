"""Checks of the host: versions, devices, GPUs, cores, memory, open files, shared memory, host name."""

import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path

from ...mesh.compat import known_faults
from ...mesh.devices import VISIBLE_GPUS, count_gpus
from ..startup.addresses import is_loopback, own_ip
from ..startup.detection import count_visible_gpus
from ..startup.variables import Job, without_job_variables
from .job_checks import GIB, Finding, require

MIN_MEMORY = GIB
MIN_FILES = 1024
MIN_SHARED_MEMORY = GIB
CGROUP = Path("/sys/fs/cgroup")
PACKAGES = ("spmdkit", "jax", "jaxlib", "numpy", "optax", "orbax-checkpoint", "grain")
PLUGINS = ("jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt", "jax-rocm7-plugin")
INSTALL = "pip install --upgrade 'spmdkit[cuda]'"
PROGRAM = (sys.executable, "-P", str(Path(__file__).with_name("device_program.py")))
"""The command that opens the devices and computes on them."""
REPLACE_DEVICE = "leave the device out (CUDA_VISIBLE_DEVICES, or another host), and have it tested or replaced"
OPEN_SECONDS = 120.0


def installed_versions() -> dict[str, str]:
    """Returns the versions of the installed packages that matter, by name."""
    found = {(each.name or "").lower().replace("_", "-"): each.version for each in distributions()}
    return {name: found[name] for name in (*PACKAGES, *PLUGINS) if name in found}


def check_versions(versions: Mapping[str, str]) -> list[Finding]:
    """Checks that jaxlib and the plugins have the version of jax.

    Args:
        versions: The versions by package.
    """
    text = ", ".join(f"{name} {version}" for name, version in versions.items())
    found = [Finding("versions", f"{text}, Python {platform.python_version()}")]
    jax = versions.get("jax", "")
    for name in ("jaxlib", *PLUGINS):
        if versions.get(name, jax) != jax:
            fix = f"pip install jaxlib=={jax}" if name == "jaxlib" else INSTALL
            found.append(Finding("versions", f"jax {jax} with {name} {versions[name]}", "wrong", fix))
    return found


def check_faults(platform: str, version: str) -> list[Finding]:
    """Returns the known faults of the installed jaxlib on a platform.

    Args:
        platform: The platform of the devices, such as "cpu".
        version: The version of jaxlib.
    """
    return [
        Finding("known faults", fault.describe(version), "note", fault.remedy)
        for fault in known_faults(platform, version)
    ]


def check_devices(
    environ: Mapping[str, str], simulated: int, job: Job | None, versions: Mapping[str, str]
) -> list[Finding]:
    """Opens JAX's devices as a run would, computes on them, and checks that it uses the GPUs of the host.

    Args:
        environ: The environment of this process.
        simulated: CPU devices that each process simulates; 0 = the real devices.
        job: The job, if this process is one of several.
        versions: The versions by package.
    """
    jaxlib = versions.get("jaxlib", "")
    if simulated:
        opened = Finding("devices", f"{simulated} simulated CPU devices in each process (run.simulate)")
        return [opened, *check_faults("cpu", jaxlib)]
    found = open_devices(environ, job.local_devices or () if job else ())
    platform = found[0].found.partition(":")[0]
    found += check_faults(platform, jaxlib)
    on_host = count_gpus()
    if on_host:
        found.append(check_gpus(environ, on_host, platform == "cpu", job, versions))
    return found


def open_devices(
    environ: Mapping[str, str],
    own: Sequence[int] = (),
    *,
    seconds: float = OPEN_SECONDS,
    program: Sequence[str] = PROGRAM,
) -> list[Finding]:
    """Opens JAX's devices and computes on them, in a child process with a time limit, because a backend can hang.

    Args:
        environ: The environment of this process.
        own: The positions of the devices that this process uses; empty = all.
        seconds: The time limit.
        program: The command; `own` is appended.
    """
    try:
        child = subprocess.run(
            [*program, *map(str, own)],
            env={**without_job_variables(environ), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        text = f"JAX did not open its devices and compute on them within {seconds:.0f} s"
        fix = "check if another process uses them (nvidia-smi), or try JAX_PLATFORMS=cpu"
        return [Finding("devices", text, "wrong", fix)]
    if child.returncode:
        message = " / ".join(child.stderr.strip().splitlines()[-3:])[-600:]
        how = f"exit code {child.returncode}" if child.returncode > 0 else f"killed by signal {-child.returncode}"
        text = f"JAX could not open its devices ({how}): {message}"
        return [Finding("devices", text, "wrong", "see JAX's message; check the driver")]
    result = json.loads(child.stdout.splitlines()[-1])
    opened = Finding("devices", f"{result['platform']}: {result['count']} x {result['kind']}")
    return [opened, *check_arithmetic(result["problems"], socket.gethostname())]


def check_arithmetic(problems: Mapping[str, Sequence[str]], host: str) -> list[Finding]:
    """Returns what the devices computed wrongly.

    Args:
        problems: The problems of each device, by its name.
        host: The name of this host, for messages.
    """
    wrong = [
        Finding("arithmetic", f"{device} of {host}: {problem}", "wrong", REPLACE_DEVICE)
        for device, found in problems.items()
        for problem in found
    ]
    return wrong or [Finding("arithmetic", f"known products and a known sum are right on {', '.join(problems)}")]


def check_gpus(
    environ: Mapping[str, str], on_host: int, on_cpu: bool, job: Job | None, versions: Mapping[str, str]
) -> Finding:
    """Checks for GPUs that are not used, or that are used by too many processes.

    Args:
        environ: The environment of this process.
        on_host: The number of GPUs that the driver lists, at least 1.
        on_cpu: If JAX computes on the CPU.
        job: The job, if this process is one of several.
        versions: The versions by package.
    """
    visible = count_visible_gpus(environ, on_host)
    processes = (job.local_processes if job else None) or 1
    text = f"{on_host} on this host, {visible} visible"
    if visible == 0:
        fix = f"unset {VISIBLE_GPUS}, or request GPUs from the scheduler (launch.gpus_per_process)"
        return Finding("GPUs", text, "wrong", fix)
    if on_cpu:
        has_plugin = any(name in versions for name in PLUGINS)
        asked = environ.get("JAX_PLATFORMS", "")
        fix = f"unset JAX_PLATFORMS={asked}" if asked else "check the driver" if has_plugin else INSTALL
        return Finding("GPUs", f"{text}, but JAX computes on the CPU", "wrong", fix)
    if visible > 1 and visible % processes:
        fix = (
            "start a number of processes on each host that divides its GPUs (launch.processes_per_node), or set "
            "SPMDKIT_LOCAL_DEVICES in each"
        )
        return Finding("GPUs", f"{text}, for {processes} processes", "wrong", fix)
    own = f"; for this process: {', '.join(map(str, job.local_devices))}" if job and job.local_devices else ""
    return Finding("GPUs", text + own)


def check_machine(devices: int) -> list[Finding]:
    """Checks cores, memory, open files, shared memory and the host name.

    Args:
        devices: The simulated devices of all processes on this host; 0 if the run uses accelerators.
    """
    return [
        check_cores(devices, _count_cores()),
        check_memory(_free_memory()),
        check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        *(check_shared_memory() if count_gpus() else []),
        check_host_name(socket.gethostname(), own_ip()),
    ]


def check_cores(devices: int, count: float) -> Finding:
    """Compares the cores that this process may use with the devices that are simulated on this host."""
    text = f"{count:g} for this process"
    if devices <= count:
        return Finding("cores", text)
    fix = "see launch.cpus_per_process, or simulate fewer devices (run.simulate)"
    return Finding("cores", f"{text}, shared by {devices} simulated devices: correct, but slow", "note", fix)


def check_memory(free: int | None) -> Finding:
    """Checks the free memory, in bytes; None = unknown."""
    text = "unknown on this system" if free is None else f"{free / GIB:.1f} GiB free"
    fix = "close other programs, or request more from the scheduler"
    return require("memory", text, free is None or free >= MIN_MEMORY, fix)


def check_open_files(limit: int) -> Finding:
    """Checks the maximum number of open files of this process."""
    is_unlimited = limit == resource.RLIM_INFINITY
    text = "no limit" if is_unlimited else f"at most {limit}"
    return require("open files", text, is_unlimited or limit >= MIN_FILES, f"ulimit -n {MIN_FILES * 4}")


def check_shared_memory(directory: Path = Path("/dev/shm")) -> list[Finding]:
    """Checks the shared memory through which GPUs of a host exchange data; containers often have only 64 MiB."""
    total = shutil.disk_usage(directory).total if directory.is_dir() else MIN_SHARED_MEMORY
    if total >= MIN_SHARED_MEMORY:
        return []
    text = f"{directory} has {total / 2**20:.0f} MiB"
    return [Finding("shared memory", text, "wrong", "start the container with --shm-size=8g, or --ipc=host")]


def check_host_name(name: str, ip: str) -> Finding:
    """Checks that the host can resolve its own name, because collectives on the CPU listen there.

    Args:
        name: The name of the host.
        ip: Its IP address; "" if it cannot be resolved.
    """
    reach = ": enough for one host, not for several" if is_loopback(ip) else ""
    text = f"{name} is {ip}{reach}" if ip else f"{name} cannot be resolved"
    return require("host name", text, bool(ip), f"add a line with its address and '{name}' to /etc/hosts")


def _count_cores() -> float:
    """Returns the cores that this process may use, by its affinity and the quota of its cgroup."""
    count = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    quota, _, period = _read(CGROUP / "cpu.max").partition(" ")
    return min(count, int(quota) / int(period)) if quota.isdecimal() else count


def _free_memory() -> int | None:
    """Returns the free memory in bytes, on the host and in the cgroup of this process."""
    lines = _read(Path("/proc/meminfo")).splitlines()
    free = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    limit, used = _read(CGROUP / "memory.max"), _read(CGROUP / "memory.current")
    if limit.isdecimal() and used.isdecimal():
        free.append(max(0, int(limit) - int(used)))
    return min(free, default=None)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""

"""Checks of the host: versions, devices, GPUs, cores, memory, limits, host name, locale, compilation."""

import json
import locale
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from ...configs.schema import RunConfig
from ...mesh.devices import VISIBLE_GPUS, count_gpus
from ...runtime.compilation import (
    CacheDirectory,
    XlaOptions,
    cache_directory,
    describe_cache,
    parse_options,
    runs_on_cpu,
)
from ..startup.addresses import is_loopback, own_ip
from ..startup.detection import Job, count_visible_gpus
from ..startup.variables import without_job_variables
from .job_checks import GIB, Finding

MIN_MEMORY = GIB
MIN_FILES = 1024
MIN_SHARED_MEMORY = GIB
CGROUP = Path("/sys/fs/cgroup")
PACKAGES = ("spmdkit", "jax", "jaxlib", "numpy", "optax", "orbax-checkpoint", "grain")
PLUGINS = ("jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt", "jax-rocm7-plugin")
INSTALL = "pip install --upgrade 'spmdkit[cuda]'"
PROGRAM = """
import json, jax
devices = jax.local_devices()
print("\\n" + json.dumps([devices[0].platform, devices[0].device_kind, len(devices)]))
"""
OPEN_SECONDS = 120.0


def installed_versions() -> dict[str, str]:
    """Returns the versions of the installed packages that matter, by name."""
    found = {(each.name or "").lower().replace("_", "-"): each.version for each in distributions()}
    return {name: found[name] for name in (*PACKAGES, *PLUGINS) if name in found}


def check_versions(versions: Mapping[str, str]) -> list[Finding]:
    """Checks that the versions of jax, jaxlib and the plugins match.

    Args:
        versions: The versions by package.
    """
    text = ", ".join(f"{name} {version}" for name, version in versions.items())
    found = [Finding("versions", f"{text}, Python {platform.python_version()}")]
    if missing := [name for name in ("jax", "jaxlib") if name not in versions]:
        return [*found, Finding("versions", f"{' and '.join(missing)} not installed", "wrong", "pip install spmdkit")]
    jax, jaxlib = versions["jax"], versions["jaxlib"]
    if jax != jaxlib:
        found.append(Finding("versions", f"jax {jax} with jaxlib {jaxlib}", "wrong", f"pip install jaxlib=={jax}"))
    plugins = {name: version for name, version in versions.items() if name in PLUGINS}
    if odd := [f"{name} {version}" for name, version in plugins.items() if version != jaxlib]:
        found.append(Finding("versions", f"jaxlib {jaxlib} with {', '.join(odd)}", "wrong", INSTALL))
    kinds = sorted({name.rpartition("-")[0] for name in plugins})
    if len(kinds) > 1:
        fix = f"pip uninstall {' '.join(name for name in plugins if name.startswith(kinds[0]))}"
        found.append(Finding("versions", f"plugins for {' and '.join(kinds)} are both installed", "wrong", fix))
    return found


def check_devices(
    environ: Mapping[str, str], simulated: int, job: Job | None, versions: Mapping[str, str]
) -> list[Finding]:
    """Opens JAX's devices as a run would, and checks that it uses the GPUs of the host.

    Args:
        environ: The environment of this process.
        simulated: CPU devices that each process simulates; 0 = the real devices.
        job: The job, if this process is one of several.
        versions: The versions by package.
    """
    if simulated:
        return [Finding("devices", f"{simulated} simulated CPU devices in each process (run.simulate)")]
    on_host = count_gpus()
    found = [open_devices(environ)]
    if on_host or environ.get(VISIBLE_GPUS) is not None:
        found += check_gpus(environ, on_host, found[0].found.startswith("cpu"), job, versions)
    return found


def open_devices(environ: Mapping[str, str], seconds: float = OPEN_SECONDS) -> Finding:
    """Opens JAX's devices in a child process with a time limit, because a backend can hang."""
    try:
        child = subprocess.run(
            [sys.executable, "-P", "-c", PROGRAM],
            env={**without_job_variables(environ), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        text = f"JAX did not open its devices within {seconds:.0f} s"
        fix = "check if another process uses them (nvidia-smi), or try JAX_PLATFORMS=cpu"
        return Finding("devices", text, "wrong", fix)
    answer = _parse_last_line(child.stdout)
    if child.returncode or answer is None:
        message = " / ".join(child.stderr.strip().splitlines()[-3:])[-600:]
        how = f"exit code {child.returncode}" if child.returncode >= 0 else f"killed by signal {-child.returncode}"
        text = f"JAX could not open its devices ({how}): {message}"
        return Finding("devices", text, "wrong", "see JAX's message; check the driver")
    kind, name, count = answer
    return Finding("devices", f"{kind}: {count} x {name}")


def check_gpus(
    environ: Mapping[str, str], on_host: int, on_cpu: bool, job: Job | None, versions: Mapping[str, str]
) -> list[Finding]:
    """Checks for GPUs that are not used, or that are used by too many processes.

    Args:
        environ: The environment of this process.
        on_host: The number of GPUs that the driver lists.
        on_cpu: If JAX computes on the CPU.
        job: The job, if this process is one of several.
        versions: The versions by package.
    """
    visible = count_visible_gpus(environ, on_host)
    if not on_host:
        text = f"{VISIBLE_GPUS}={environ.get(VISIBLE_GPUS)!r}, but no NVIDIA driver is loaded on this host"
        return [Finding("GPUs", text, "note", variable=VISIBLE_GPUS)]
    text = f"{on_host} on this host, {visible} visible"
    if visible == 0:
        fix = f"unset {VISIBLE_GPUS}, or request GPUs from the scheduler (launch.gpus_per_process)"
        return [Finding("GPUs", text, "wrong", fix)]
    if on_cpu:
        has_plugin = any(name in versions for name in PLUGINS)
        asked = environ.get("JAX_PLATFORMS", "")
        fix = f"unset JAX_PLATFORMS={asked}" if asked and has_plugin else "check the driver" if has_plugin else INSTALL
        return [Finding("GPUs", f"{text}, but JAX computes on the CPU", "wrong", fix)]
    processes = job.local_processes if job else None
    if processes and processes > visible and visible > 1:
        fix = f"start at most {visible} processes on each host (launch.processes_per_node)"
        return [Finding("GPUs", f"{text}, for {processes} processes", "wrong", fix)]
    if processes and visible > 1 and visible % processes:
        fix = "start a number of processes on each host that divides its GPUs, or set SPMDKIT_LOCAL_DEVICES in each"
        return [Finding("GPUs", f"{text}; {processes} processes do not divide them", "wrong", fix)]
    own = f"; for this process: {', '.join(map(str, job.local_devices))}" if job and job.local_devices else ""
    return [Finding("GPUs", text + own)]


def _parse_last_line(text: str) -> Any:
    lines = text.strip().splitlines()
    try:
        return json.loads(lines[-1]) if lines else None
    except ValueError:
        return None


def check_machine(devices: int) -> list[Finding]:
    """Checks cores, memory, limits, host name and locale.

    Args:
        devices: The simulated devices of all processes on this host; 0 if the run uses accelerators.
    """
    return [
        check_cores(devices, _count_cores()),
        check_memory(_free_memory()),
        *check_limits(resource.getrlimit(resource.RLIMIT_NOFILE)[0], resource.getrlimit(resource.RLIMIT_AS)[0]),
        *check_shared_memory(),
        check_host_name(socket.gethostname(), own_ip()),
        check_locale(),
    ]


def check_cores(devices: int, count: float) -> Finding:
    """Compares the cores that this process may use with the devices that are simulated on this host."""
    text = f"{count:g} for this process"
    if devices > count:
        fix = "see launch.cpus_per_process, or simulate fewer devices (run.simulate)"
        return Finding("cores", f"{text}, shared by {devices} simulated devices: correct, but slow", "note", fix)
    return Finding("cores", text)


def check_memory(free: int | None) -> Finding:
    """Checks the free memory, in bytes; None = unknown."""
    if free is None:
        return Finding("memory", "unknown on this system")
    text = f"{free / GIB:.0f} GiB free" if free > 9.5 * GIB else f"{free / GIB:.1f} GiB free"
    if free < MIN_MEMORY:
        return Finding("memory", text, "wrong", "close other programs, or request more from the scheduler")
    return Finding("memory", text)


def check_limits(files: int, addresses: int) -> list[Finding]:
    """Checks the limits of this process.

    Args:
        files: The maximum number of open files.
        addresses: The maximum address space in bytes; -1 = no limit.
    """
    unlimited = resource.RLIM_INFINITY
    found = [Finding("open files", "no limit" if files == unlimited else f"at most {files}")]
    if files != unlimited and files < MIN_FILES:
        found = [Finding("open files", f"at most {files}", "wrong", f"ulimit -n {MIN_FILES * 4}")]
    if addresses not in (unlimited, -1):
        text = f"ulimit -v: {addresses / GIB:.0f} GiB of addresses"
        fix = "ulimit -v unlimited: JAX reserves many more addresses than it uses"
        found.append(Finding("memory", text, "note", fix))
    return found


def check_shared_memory(directory: Path = Path("/dev/shm")) -> list[Finding]:
    """Checks the shared memory through which GPUs of a host exchange data; containers often have only 64 MiB."""
    if not count_gpus() or not directory.is_dir():
        return []
    total = shutil.disk_usage(directory).total
    if total < MIN_SHARED_MEMORY:
        text = f"{directory} has {total / 2**20:.0f} MiB"
        return [Finding("shared memory", text, "wrong", "start the container with --shm-size=8g, or --ipc=host")]
    return []


def check_host_name(name: str, ip: str) -> Finding:
    """Checks that the host can resolve its own name, because collectives on the CPU listen there.

    Args:
        name: The name of the host.
        ip: Its IP address; "" if it cannot be resolved.
    """
    if not ip:
        fix = f"add a line with its address and '{name}' to /etc/hosts"
        return Finding("host name", f"{name} cannot be resolved", "wrong", fix)
    text = f"{name} is {ip}"
    if is_loopback(ip):
        return Finding("host name", f"{text}: enough for one host, not for several")
    return Finding("host name", text)


def check_locale() -> Finding:
    """Checks the locale and the encoding of the output."""
    asked = next((os.environ[name] for name in ("LC_ALL", "LC_CTYPE", "LANG") if os.environ.get(name)), "none set")
    try:
        locale.setlocale(locale.LC_CTYPE, "")
    except locale.Error:
        fix = "set LC_ALL=C.UTF-8, or install that locale"
        return Finding("locale", f"{asked}, which is not installed on this host", "note", fix)
    encoding = (sys.stdout.encoding or "unknown").lower()
    if encoding.replace("-", "") != "utf8":
        return Finding("locale", f"{asked}; output in {encoding}", "note", "set LC_ALL=C.UTF-8")
    return Finding("locale", f"{asked}; output in {encoding}")


def _count_cores() -> float:
    """Returns the cores that this process may use, by its affinity and the quota of its cgroup."""
    count = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    quota, _, period = _read(CGROUP / "cpu.max").partition(" ")
    if quota.isdecimal() and period.isdecimal() and int(period):
        count = min(count, int(quota) / int(period))
    return count


def _free_memory() -> int | None:
    """Returns the free memory in bytes, on the host and in the cgroup of this process."""
    lines = _read(Path("/proc/meminfo")).splitlines()
    free = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
    limit, used = _read(CGROUP / "memory.max"), _read(CGROUP / "memory.current")
    if limit.isdecimal() and used.isdecimal():
        left = max(0, int(limit) - int(used))
        free = left if free is None else min(free, left)
    return free


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def check_compilation(run: RunConfig, simulated: int, environ: Mapping[str, str]) -> list[Finding]:
    """Returns how a run would compile here; opens no device.

    Args:
        run: The section `run` of the config.
        simulated: CPU devices that each process simulates; 0 = the real devices.
        environ: The environment of this process.
    """
    flags = environ.get("XLA_FLAGS", "").strip()
    kind = "cpu" if runs_on_cpu(simulated) else "cuda" if count_gpus() else "tpu"
    return [
        check_cache(cache_directory(run.cache, on_cpu=kind == "cpu")),
        *([Finding("XLA_FLAGS", flags, variable="XLA_FLAGS")] if flags else []),
        Finding("XLA options", f"{XlaOptions(parse_options(run.xla, kind))} (run.xla)"),
    ]


def check_cache(directory: CacheDirectory) -> Finding:
    """Checks that the directory of the compilation cache is writable."""
    above = directory.path
    while above and not os.path.exists(above):
        above = os.path.dirname(above)
    if directory.on_disk and not (os.path.isdir(above) and os.access(above, os.W_OK)):
        problem = f"{directory} is not writable: every start compiles again"
        return Finding("programs", problem, "note", "set run.cache to a writable directory")
    return Finding("programs", describe_cache(directory))

"""What JAX computes on here, seen by a child process with a time limit: a backend that hangs is told, not joined."""

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from ...mesh.joining.accelerators import VISIBLE, gpus_of_host, gpus_visible
from ...mesh.joining.detection import Job
from ...mesh.joining.sources import without_job
from .finding import Finding
from .software import INSTALL, PLUGINS

PROGRAM = """
import json, jax
devices = jax.local_devices()
print("\\n" + json.dumps([devices[0].platform, devices[0].device_kind, len(devices)]))
"""
SECONDS = 120.0
LAST_LINES = 3


def devices(environ: Mapping[str, str], simulated: int, job: Job | None, versions: Mapping[str, str]) -> list[Finding]:
    """Opens JAX's devices as a run would, and looks for GPUs that it does not see.

    Args:
        environ: Of this process.
        simulated: CPU devices that each process simulates; 0 = the machine's real devices are wanted.
        job: The run, where this process is one of several.
        versions: Of the packages that are installed.
    """
    if simulated:
        return [Finding("devices", f"{simulated} simulated CPU devices in each process (run.simulate)")]
    of_host = gpus_of_host()
    found = [_opened(environ)]
    if of_host or environ.get(VISIBLE) is not None:
        found += gpus(environ, of_host, found[0].found.startswith("cpu"), job, versions)
    return found


def _opened(environ: Mapping[str, str], seconds: float = SECONDS) -> Finding:
    """What a child process finds; it belongs to no job."""
    try:
        child = subprocess.run(
            [sys.executable, "-P", "-c", PROGRAM],
            env={**without_job(environ), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return Finding(
            "devices",
            f"JAX did not open its devices within {seconds:.0f} s",
            "wrong",
            "look whether another process holds them (nvidia-smi), or try JAX_PLATFORMS=cpu",
        )
    answer = _last_json(child.stdout)
    if child.returncode or answer is None:
        said = " / ".join(child.stderr.strip().splitlines()[-LAST_LINES:])[-600:]
        how = f"exit code {child.returncode}" if child.returncode >= 0 else f"killed by signal {-child.returncode}"
        return Finding(
            "devices", f"JAX could not open its devices ({how}): {said}", "wrong", "see what JAX says; check the driver"
        )
    platform, kind, count = answer
    return Finding("devices", f"{platform}: {count} x {kind}")


def gpus(
    environ: Mapping[str, str], of_host: int, on_cpu: bool, job: Job | None, versions: Mapping[str, str]
) -> list[Finding]:
    """GPUs that are there and not used, or used by more processes than there are.

    Args:
        environ: Of this process.
        of_host: GPUs that the driver of this host knows.
        on_cpu: Whether JAX computes on the CPU.
        job: The run, where this process is one of several.
        versions: Of the packages that are installed.
    """
    visible = gpus_visible(environ, of_host)
    if not of_host:
        said = f"{VISIBLE}={environ.get(VISIBLE)!r}, but no NVIDIA driver is loaded on this host"
        return [Finding("GPUs", said, "note", variable=VISIBLE)]
    said = f"{of_host} on this host, {visible} visible"
    if visible == 0:
        return [
            Finding("GPUs", said, "wrong", f"unset {VISIBLE}, or ask the scheduler for GPUs (launch.gpus_per_process)")
        ]
    if on_cpu:
        plugin = any(name in versions for name in PLUGINS)
        asked = environ.get("JAX_PLATFORMS", "")
        fix = f"unset JAX_PLATFORMS={asked}" if asked and plugin else INSTALL if not plugin else "check the driver"
        return [Finding("GPUs", f"{said}, but JAX computes on the CPU", "wrong", fix)]
    processes = job.local_processes if job else None
    if processes and processes > visible and visible > 1:
        fix = f"start at most {visible} processes on each host (launch.processes_per_node)"
        return [Finding("GPUs", f"{said}, for {processes} processes", "wrong", fix)]
    if processes and visible > 1 and visible % processes:
        fix = "start as many processes on each host as divide its GPUs, or set SPMDKIT_LOCAL_DEVICES in each"
        return [Finding("GPUs", f"{said}; they do not divide among {processes} processes", "wrong", fix)]
    own = f"; this process's: {', '.join(map(str, job.local_devices))}" if job and job.local_devices else ""
    return [Finding("GPUs", said + own)]


def _last_json(text: str) -> Any:
    """The last line of an output as JSON; None where it is none."""
    lines = text.strip().splitlines()
    try:
        return json.loads(lines[-1]) if lines else None
    except ValueError:
        return None

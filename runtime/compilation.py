"""Compilation of the step: XLA's options, JAX's persistent cache, and compilation.json.

    run.xla: default                 see `default_options`
             none                    no options
             [xla_gpu_x=true, ...]   these instead; xla_gpu_, xla_tpu_ and xla_cpu_ apply to that platform only

The options belong to the compiled step and are not put into XLA_FLAGS: XLA ends a process if XLA_FLAGS contain an
unknown name, but raises an error for an unknown option. Therefore each option is tried on a program of one addition,
and an unknown default option is left out. XLA_FLAGS of the user take precedence.

    run.cache: ""          JAX_COMPILATION_CACHE_DIR if it is set, otherwise spmdkit/programs in the user's caches
               none        no cache
               directory   this directory

JAX's key contains the program, its options, XLA's flags, the version of jaxlib and the devices. On a CPU it does not
contain the instruction set, so the name of the directory does.

On GPUs, the processes of a run autotune a program together: if one process reads a program that another one compiles,
the other one waits for its part of the tuning forever. Therefore all processes of a run read the same programs: process
0 lists its cache, each process reports which of these programs it does not see, and everything else is compiled by all.

Source: JAX's documentation, "Persistent compilation cache".
"""

import functools
import hashlib
import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax

from ..configs.schema import RunConfig
from ..mesh.compat import backend_started, coordination_client, is_intact_program, keep_programs
from ..mesh.devices import has_accelerators
from ..mesh.errors import UserError
from ..mesh.exit_codes import TRY_AGAIN
from ..mesh.files import atomic_write, write_text
from ..mesh.processes import broadcast_text, exchange, is_main_process, print_progress
from ..parallel import fsdp
from ..parallel.data import reduces_in_backward
from ..parallel.plan import ShardingPlan

DEFAULT, NONE, PLATFORMS = "default", "none", "jax_platforms"
DIRECTORY, MIN_SECONDS = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
MIN_COMPILE_SECONDS = 0.0
"""Stores every program; JAX's default is those over 1 second. Loading a small one takes less time than compiling it: a
second start of the preset mlp takes 3.5 s instead of 7.2 s (2 cores, 2026-11-23)."""
SUFFIX = "-cache"
"""The suffix of JAX's files."""
NOT_SHARED = "some processes of this run cannot read the programs that process 0 sees there"
NAME = "compilation.json"
HIT = "/jax/compilation_cache/cache_hits"
COMPILED = "/jax/core/compile/backend_compile_duration"
CUDA = ("gpu", "cuda")
"""The names of the platform of NVIDIA GPUs."""
ANALYTICAL_LATENCY = "xla_gpu_enable_analytical_sol_latency_estimator"
LATENCY_HIDING = "xla_gpu_enable_latency_hiding_scheduler"
DOUBLE_BUFFERING = "xla_gpu_enable_while_loop_double_buffering"
OVERLAP_LIMIT = "xla_gpu_experimental_parallel_collective_overlap_limit"
MEMORY_LIMIT = "xla_gpu_memory_limit_slop_factor"
UNKNOWN = re.compile(r"No such compile option: '([^']*)'")
BOOLEANS = {"true": True, "false": False}
PREFIXES = {"cuda": "xla_gpu_", "gpu": "xla_gpu_", "rocm": "xla_gpu_", "tpu": "xla_tpu_", "cpu": "xla_cpu_"}


class XlaOptions(NamedTuple):
    """XLA's options for a step.

    Attributes:
        used: Option -> value.
        left_out: Default option -> the reason why it is not used.
    """

    used: Mapping[str, Any] = {}
    left_out: Mapping[str, str] = {}

    def __str__(self) -> str:
        used = ", ".join(f"{name}={str(value).lower()}" for name, value in self.used.items()) or "no options of XLA"
        return used + "".join(f"; {name} left out: {why}" for name, why in self.left_out.items())


def default_options(plan: ShardingPlan) -> dict[str, Any]:
    """Returns the options that `run.xla: default` selects; empty except on NVIDIA GPUs.

    The times are those of Llama-3 8B on H100s, 8,192 positions x 2 rows per GPU, compiled and simulated
    (`planning/timeline.py`), not run, before the efficiency factors were calibrated:

        latency hiding      puts products between the start and the end of a collective. NVIDIA's images of JAX set it
        double buffering    two blocks in each turn of a loop, so that what it carries is not copied: fsdp 8 takes 1,776
                            instead of 1,785 ms, fsdp 128 1,779 instead of 1,807. It is slower if gradients are
                            summed over `data` in the loop (data 16 x fsdp 8 takes 1,901 instead of 1,815), and if
                            the loop is that of a pipeline, because it copies all buffers that a tick skips
        memory limit 1000   percent of the memory beside the state. Above its limit, by default 95 % and in total about
                            76 % of the card, XLA repeats operations and overlaps less. Its estimate counts what a
                            doubly buffered loop carries twice: remat `dots` on fsdp 8 needs 70 GB, estimated as 112,
                            and takes 1,535 instead of 1,834 ms. `train.remat` selects what is repeated
        overlap limit 2     two collectives at a time, if `fsdp` crosses hosts alone: fsdp 128 takes 1,767 instead of
                            1,779. Also if its gradients are exchanged between hosts (`fsdp.exchanges`): fsdp 16
                            x tensor 8, keep step, at 4,096 positions takes 181 instead of 185
        no analytical       if they are exchanged: XLA's estimates of collectives lack all-to-alls, which then overlap
        latency             with nothing. The same step takes 185 instead of 192

    Collectives are asynchronous in XLA by default. The thresholds for combining keep their defaults: `fsdp` gathers one
    block at a time already, and combining across blocks holds more of them at once. No option made CPUs faster.
    """
    if plan.platform not in CUDA:
        return {}
    options: dict[str, Any] = {LATENCY_HIDING: True, MEMORY_LIMIT: 1000}
    if not reduces_in_backward(plan) and not plan.pipeline:
        options[DOUBLE_BUFFERING] = True
    axes = list(plan.mesh.split_axes)
    exchanged = fsdp.AXIS in axes and fsdp.exchanges(plan.mesh, (fsdp.AXIS,), "bfloat16", "float32")
    if exchanged:
        options[ANALYTICAL_LATENCY] = False
    if exchanged or (axes == [fsdp.AXIS] and plan.mesh.axes_across_processes):
        options[OVERLAP_LIMIT] = 2
    return options


def xla_options(xla: str | Sequence[str], plan: ShardingPlan, *, flags: str | None = None) -> XlaOptions:
    """Returns XLA's options for a step.

    Args:
        xla: `run.xla`.
        plan: The layouts of the step. Options are tried if this process has devices of its platform.
        flags: XLA_FLAGS; those of this process by default.

    Raises:
        UserError: XLA does not know an option of the user, or its value.
    """
    flags = os.environ.get("XLA_FLAGS", "") if flags is None else flags
    given = default_options(plan) if xla == DEFAULT else parse_options(xla, plan.platform)
    named = {name: "XLA_FLAGS names it" for name in given if re.search(rf"--{name}\b", flags)}
    wanted = {name: value for name, value in given.items() if name not in named}
    problems: dict[str, str] = {}
    while wanted and _has_devices(plan.platform) and (problem := _find_problem(tuple(wanted.items()))):
        name, why = problem
        if xla != DEFAULT:
            raise UserError(f"run.xla: {why}")
        problems[name] = why
        del wanted[name]
    return XlaOptions(wanted, {**named, **problems})


def parse_options(xla: str | Sequence[str], platform: str) -> dict[str, Any]:
    """Returns the options that `run.xla` names for a platform, with typed values."""
    pairs = [each.removeprefix("--").partition("=") for each in ([] if xla == NONE else xla)]
    given = {name: _parse_value(value) if equals else True for name, equals, value in pairs}
    foreign = tuple({*PREFIXES.values()} - {PREFIXES.get(platform, "")})
    return {name: value for name, value in given.items() if not name.startswith(foreign)}


def _parse_value(text: str) -> Any:
    """Returns a boolean, a number or the text itself."""
    if text.lower() in BOOLEANS:
        return BOOLEANS[text.lower()]
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def _has_devices(platform: str) -> bool:
    """Returns True if this process has opened devices of a platform; opens none."""
    return backend_started() and jax.default_backend() in (CUDA if platform in CUDA else (platform,))


@functools.cache
def _find_problem(options: tuple[tuple[str, Any], ...]) -> tuple[str, str] | None:
    """Returns the name of the first option that XLA rejects, and its error."""
    try:
        jax.jit(lambda x: x + 1).lower(0.0).compile(compiler_options=dict(options))
    except jax.errors.JaxRuntimeError as error:
        if unknown := UNKNOWN.search(str(error)):
            name = unknown[1]
            return name, f"XLA of jaxlib {version('jaxlib')} does not know {name}; remove it, or find its new name"
        alone = (name for name, value in options if len(options) > 1 and _find_problem(((name, value),)))
        name = next(alone, next(iter(dict(options))))
        return name, f"{name}: {str(error).splitlines()[0]}"
    return None


class CacheDirectory(NamedTuple):
    """The directory of the compilation cache.

    Attributes:
        path: The directory or bucket; "" = no cache.
        origin: The setting that names it, or the reason why there is no cache.
    """

    path: str
    origin: str

    @property
    def on_disk(self) -> bool:
        """True for a directory of a file system, False for a bucket and for no cache."""
        return bool(self.path) and "://" not in self.path

    def __str__(self) -> str:
        return f"{self.path} ({self.origin})" if self.path else f"not kept ({self.origin})"


def cache_directory(cache: str, *, on_cpu: bool) -> CacheDirectory:
    """Returns the cache directory that `run.cache` selects.

    Args:
        cache: The value of the key.
        on_cpu: Whether the programs run on CPUs.
    """
    if cache == NONE:
        return CacheDirectory("", "run.cache: none")
    if not cache and (given := os.environ.get("JAX_COMPILATION_CACHE_DIR")):
        return CacheDirectory(given, "JAX_COMPILATION_CACHE_DIR")
    try:
        root = Path(cache).expanduser().absolute() if cache else users_caches() / "spmdkit" / "programs"
    except RuntimeError:
        return CacheDirectory("", "this user lacks a home directory; set run.cache")
    name = f"jax-{version('jax')}{f'-cpu-{processor_hash()}' if on_cpu else ''}"
    return CacheDirectory(str(root / name), "run.cache" if cache else "the user's caches")


def users_caches() -> Path:
    """Returns the user's cache directory by the XDG Base Directory Specification.

    Raises:
        RuntimeError: The home directory is unknown.
    """
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return given if given.is_absolute() else Path.home() / ".cache"


def processor_hash() -> str:
    """Returns eight digits that identify the instruction set: programs for another one may end in SIGILL."""
    features = platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        features += next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(features.encode()).hexdigest()[:8]


def runs_on_cpu(simulated: int) -> bool:
    """Returns True if this process computes on CPUs, as far as that is known before it opens devices."""
    platforms = str(getattr(jax.config, PLATFORMS) or "")
    return simulated > 0 or platforms.startswith("cpu") or not has_accelerators()


def open_cache(run: RunConfig, rendezvous: float) -> CacheDirectory:
    """Configures JAX's cache. Every process of a run calls this after the rendezvous.

    A directory that is not usable never ends a run: a warning is printed to stderr.

    Args:
        run: The section `run`.
        rendezvous: Seconds to wait for the other processes.

    Raises:
        ProcessesMissing: Some processes did not answer in time.
    """
    directory = cache_directory(run.cache, on_cpu=runs_on_cpu(run.simulate))
    problem = _make(Path(directory.path)) if directory.on_disk else ""
    keys: frozenset[str] | None = None
    if coordination_client() is not None and jax.process_count() > 1:
        problem, keys = _agree(directory, problem, rendezvous)
    if problem:
        warning = f"warning: compiled programs are not kept in {directory.path}: {problem}."
        print_progress(f"{warning} Set run.cache, or run.cache: none.")
        directory = CacheDirectory("", problem)
    if (
        directory.origin != "JAX_COMPILATION_CACHE_DIR"
        and "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ
    ):
        jax.config.update(MIN_SECONDS, MIN_COMPILE_SECONDS)
    before = getattr(jax.config, DIRECTORY)
    jax.config.update(DIRECTORY, directory.path or None)
    if directory.path != before or keys is not None:
        keep_programs(AgreedPrograms(Path(directory.path), keys) if keys is not None and directory.path else None)
    return directory


class ProgramLost(BaseException):
    """A program that the processes of this run agreed to read is missing or corrupt.

    Not an `Exception`: JAX turns those of its cache into warnings, and compiles.
    """

    exit_code = TRY_AGAIN


class AgreedPrograms:
    """The cache of one of several processes: reads the programs that all of them see, in JAX's own format.

    Args:
        directory: The cache directory.
        keys: The programs to read.
    """

    def __init__(self, directory: Path, keys: frozenset[str]) -> None:
        self._path, self._keys = directory, keys

    def get(self, key: str) -> bytes | None:
        """Returns a program; None if the processes did not agree on it.

        Raises:
            ProgramLost: The file is missing or corrupt.
        """
        if key not in self._keys:
            return None
        path = self._path / f"{key}{SUFFIX}"
        with suppress(OSError):
            value = path.read_bytes()
            if is_intact_program(value):
                return value
            path.unlink(missing_ok=True)
        raise ProgramLost(
            f"the compiled program {path} was there when this run started, and is missing or corrupt now. The other "
            "processes may have read it, and would not help to compile it. The same command compiles it. If this "
            "comes back, set run.cache to another directory, or to none."
        )

    def put(self, key: str, value: bytes) -> None:
        """Stores a program."""
        with atomic_write(self._path / f"{key}{SUFFIX}") as partial:
            partial.write_bytes(value)


def _make(directory: Path) -> str:
    """Creates the directory for this user only, because programs run unchecked; returns the problem, or ""."""
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.listdir(directory)
    except OSError as error:
        return error.strerror or type(error).__name__
    return ""


def _agree(directory: CacheDirectory, problem: str, seconds: float) -> tuple[str, frozenset[str] | None]:
    """Returns the problem of the processes together, or "", and the keys that all of them see; None for a bucket."""
    on_disk = directory.on_disk and not problem
    seen = set(_keys(Path(directory.path))) if on_disk else set()
    listed = set(json.loads(broadcast_text("cache", json.dumps(sorted(seen)), seconds=seconds)))
    mine = json.dumps([problem, on_disk or directory.path, sorted(listed - seen)])
    answers = [json.loads(each) for each in exchange("cache is seen", mine, seconds=seconds)]
    problems, kinds, missing = zip(*answers, strict=True)
    if any(problems) or len({*kinds}) > 1 or any(listed and len(each) == len(listed) for each in missing):
        return problem or NOT_SHARED, None
    return "", frozenset(listed.difference(*missing)) if on_disk else None


def _keys(directory: Path) -> list[str]:
    with suppress(OSError):
        return [name.removesuffix(SUFFIX) for name in os.listdir(directory) if name.endswith(SUFFIX)]
    return []


class Compilation:
    """Counts the programs that this process compiles from now on.

    Args:
        directory: The cache.
    """

    def __init__(self, directory: CacheDirectory) -> None:
        self.directory = directory
        self._before = dict(_count_programs())

    @property
    def found(self) -> dict[str, float]:
        """The number of programs so far, the number of those that were read from the cache, and the seconds of all."""
        now = _count_programs()
        return {name: round(now[name] - self._before[name], 3) for name in ("programs", "read", "seconds")}

    def line(self) -> str:
        """Returns the programs so far as a line of text."""
        found, directory = self.found, self.directory
        read = f", {found['read']} of them read from {directory.path}" if directory.path else f"; {directory}"
        return f"Compiled {found['programs']} programs in {found['seconds']:.1f} s{read}."

    def write(self, folder: Path, options: XlaOptions) -> None:
        """Writes compilation.json in process 0: versions, devices, flags, options and the programs of this start.

        Args:
            folder: The run directory.
            options: XLA's options for the step.
        """
        if not is_main_process():
            return
        device = jax.devices()[0]
        record = {
            "jax": version("jax"),
            "jaxlib": version("jaxlib"),
            "devices": f"{jax.device_count()} x {device.device_kind} ({device.platform})",
            "xla_flags": os.environ.get("XLA_FLAGS", "").strip(),
            "options": dict(options.used),
            "left_out": dict(options.left_out),
            "kept_in": str(self.directory),
            **self.found,
        }
        write_text(folder / NAME, json.dumps(record, indent=2) + "\n")


@functools.cache
def _count_programs() -> dict[str, float]:
    """Returns the programs since the first call; listeners for JAX's events update it."""
    counts = {"programs": 0, "read": 0, "seconds": 0.0}

    def count(event: str, **_: Any) -> None:
        counts["read"] += event == HIT

    def add(event: str, duration_secs: float, **_: Any) -> None:
        if event == COMPILED:
            counts["programs"] += 1
            counts["seconds"] += duration_secs

    jax.monitoring.register_event_listener(count)
    jax.monitoring.register_event_duration_secs_listener(add)
    return counts

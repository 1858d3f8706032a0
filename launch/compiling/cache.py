"""Where compiled programs are kept between runs, so that the second start compiles nothing.

    run.cache: ""       what JAX was told (JAX_COMPILATION_CACHE_DIR); otherwise spmdkit/programs in the user's caches
               none     nowhere
               folder   there

JAX keys a program by its text, its options, the flags of XLA, the version of jaxlib and the devices. On a CPU the key
leaves out what the processor can do, so the folder of its programs does not. On GPUs, XLA's own results of autotuning
lie beside the programs (JAX's default of jax_persistent_cache_enable_xla_caches).

Of several processes only the first writes, and all read what `sharing.py` has them agree on; where they do not see the
same folder none uses it.

Source: JAX's documentation, "Persistent compilation cache".
"""

import hashlib
import os
import platform
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import jax

from ...configs.schema import Config
from ...layouts.sizes import format_bytes
from ...mesh.compat import keep_programs
from ...mesh.joining.accelerators import has_accelerators
from .sharing import Shared, agree
from .store import ProgramStore

NONE = "none"
DIRECTORY, SHORTEST = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
PLATFORMS = "jax_platforms"
LEAST_SECONDS = 0.2
"""Programs that compile faster are not kept; JAX's default is a second."""

REPLACED: dict[str, str] = {}
"""What the user had told JAX, by the folder that a run of this process has told it since; "" = none."""


class Place(NamedTuple):
    """Where programs are kept.

    Attributes:
        folder: The folder; "" = nowhere.
        why: Who says so, or why nowhere.
        by_jax: Whether JAX looks after it, and nothing is to be done.
    """

    folder: str
    why: str
    by_jax: bool = False

    @property
    def on_disk(self) -> bool:
        """Whether it is a folder of a file system, and neither a bucket nor nowhere."""
        return bool(self.folder) and "://" not in self.folder

    def __str__(self) -> str:
        return f"{self.folder} ({self.why})" if self.folder else f"not kept ({self.why})"


def place_of(cache: str, *, on_cpu: bool) -> Place:
    """Where `run.cache` says that programs are kept.

    Args:
        cache: The key.
        on_cpu: Whether they run on CPUs.
    """
    if cache == NONE:
        return Place("", "run.cache: none")
    if not cache and (given := users_folder()):
        return Place(given, "jax_compilation_cache_dir", by_jax=True)
    try:
        root = Path(cache).expanduser().absolute() if cache else users_caches() / "spmdkit" / "programs"
    except RuntimeError:
        return Place("", "this user has no home folder; set run.cache")
    processor = f"-cpu-{processor_hash()}" if on_cpu else ""
    return Place(str(root / f"jax-{version('jax')}{processor}"), "run.cache" if cache else "the user's caches")


def users_folder() -> str:
    """The folder that the user told JAX, not one that an earlier run in this process did; "" = none."""
    told = str(getattr(jax.config, DIRECTORY) or "")
    return REPLACED.get(told, told)


def notes_folder(cache: str) -> Path | None:
    """Where it is noted which flags of XLA are known: beside the programs; None where they are not kept on a disk."""
    place = place_of(cache, on_cpu=False)
    if not place.on_disk:
        return None
    return Path(place.folder) if place.by_jax else Path(place.folder).parent


def users_caches() -> Path:
    """The folder of the user's caches, as the XDG Base Directory Specification has it.

    Raises:
        RuntimeError: Nothing says where the user's home is.
    """
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return given if given.is_absolute() else Path.home() / ".cache"


def processor_hash() -> str:
    """Eight digits that stand for what this processor can do: programs for another one may end in SIGILL."""
    said = platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        said += next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(said.encode()).hexdigest()[:8]


def on_cpu(simulated: int) -> bool:
    """Whether a process computes on CPUs, as far as can be told before it opens devices."""
    told = str(getattr(jax.config, PLATFORMS) or "")
    return simulated > 0 or told.startswith("cpu") or not has_accelerators()


def open_cache(config: Config, simulated: int, say: Callable[[str], None]) -> Place:
    """Lets JAX keep the programs of this process; every process of a run calls this once they have met.

    Args:
        config: The config.
        simulated: CPU devices that this process simulates; 0 = none.
        say: Gets what is wrong with the folder, in lines for people. Nothing wrong with it ends a run.

    Returns:
        Where they are kept.

    Raises:
        ProcessesMissing: Some processes did not answer within `timeouts.rendezvous`.
    """
    place = place_of(config.run.cache, on_cpu=on_cpu(simulated))
    problem = _problem_of_folder(Path(place.folder)) if place.on_disk else ""
    shared = _shared(place, problem, config.timeouts.rendezvous)
    if problem := problem or shared.problem:
        say(f"warning: compiled programs are not kept in {place.folder}: {problem}. Set run.cache, or run.cache: none.")
        place = Place("", problem)
    changed = _tell_jax(place.folder)
    if place.by_jax:
        if changed:
            keep_programs(None)  # JAX opens the user's folder again
        return place
    if place.folder and "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update(SHORTEST, LEAST_SECONDS)
    keep_programs(ProgramStore(Path(place.folder), say, shared=shared.keys) if place.folder else None)
    return place


def _tell_jax(folder: str) -> bool:
    """Has JAX keep programs there, and remembers what the user had told it; whether that is anything new to it."""
    users, before = users_folder(), str(getattr(jax.config, DIRECTORY) or "")
    if folder != users:
        REPLACED[folder] = users
    jax.config.update(DIRECTORY, folder or None)
    return folder != before


def describe(place: Place) -> str:
    """What is kept there, for people."""
    if not place.folder or place.by_jax:
        return str(place)
    count, size = ProgramStore(Path(place.folder), lambda line: None).size()
    return f"{place}, {count:,} programs, {format_bytes(size)}"


def _problem_of_folder(folder: Path) -> str:
    """Makes the folder, for this user alone, as programs are run as they are; why it cannot be used, or ""."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.listdir(folder)
    except OSError as error:
        return error.strerror or type(error).__name__
    return ""


def _shared(place: Place, problem: str, seconds: float) -> Shared:
    """What the processes of this run agree to read there.

    Args:
        place: Where this process would keep programs.
        problem: Why it cannot; "" = it can.
        seconds: How long to wait for the other processes.
    """
    if problem or not place.on_disk:
        return agree(problem or str(place), None, (), seconds)
    folder = Path(place.folder)
    return agree("jax" if place.by_jax else "ours", folder, ProgramStore(folder, lambda line: None).keys(), seconds)

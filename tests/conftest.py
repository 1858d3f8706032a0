"""Eight simulated CPU devices for every test, strict numerics, one compilation cache."""

import gc
import os
import signal
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
if version("jaxlib").startswith("0.10.") and "use_fusion_emitters" not in os.environ.get("XLA_FLAGS", ""):
    # 0.10 has an older code generator too, which compiles in half the time. The users' one compiles where
    # README is trained (docs/test_figures.py), outside the tests, and on every newer JAX.
    faster = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {faster}".strip()

from spmdkit.mesh.devices import simulate

NUM_DEVICES = 8
CACHE = Path(__file__).resolve().parent.parent / ".cache" / "jax"


def pytest_configure() -> None:
    """Configures JAX before any test touches a device."""
    import jax

    keep_to_one_core()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # begun in the background of a script: the runs would too
        signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.set_threshold(50_000, 20, 100)  # a full collection walks every trace that JAX keeps: a twentieth of all time
    simulate(NUM_DEVICES)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(CACHE)  # for runs within this process
    jax.config.update("jax_compilation_cache_dir", str(CACHE))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    jax.config.update("jax_disable_most_optimizations", True)  # programs here compile for longer than they run
    jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what `slow_except`, `slow_cases` and `long_cases` say, before any is left out for its marks."""
    for item in items:
        if (mark := item.get_closest_marker("slow_except")) and item.originalname not in mark.args:
            item.add_marker("slow")
        for kind in ("slow", "long"):
            cases = [case for mark in item.iter_markers(f"{kind}_cases") for case in mark.args]
            if cases and item.callspec.id in cases:
                item.add_marker(kind)


def keep_to_one_core() -> None:
    """Where there are as many workers as cores: threads of devices that wake each other on one core take less time."""
    worker, cores = os.environ.get("PYTEST_XDIST_WORKER"), os.cpu_count() or 1
    if worker and hasattr(os, "sched_setaffinity") and int(os.environ["PYTEST_XDIST_WORKER_COUNT"]) >= cores:
        allowed = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {allowed[int(worker.removeprefix("gw")) % len(allowed)]})


@pytest.fixture(autouse=True, scope="session")
def eight_devices() -> None:
    """Missing devices fail; they never skip."""
    import jax

    assert jax.device_count() == NUM_DEVICES, f"{jax.device_count()} devices instead of {NUM_DEVICES}"


@pytest.fixture(autouse=True)
def import_path(monkeypatch) -> None:
    """A run adds the directories of a user's code to the path; no later test imports from them."""
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture
def user_module(monkeypatch):
    """Puts objects into a module named `mine`."""
    module = ModuleType("mine")
    monkeypatch.setitem(sys.modules, "mine", module)
    return lambda **objects: vars(module).update(objects)


@pytest.fixture
def float64():
    """64-bit types for one test."""
    import jax

    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.fixture
def broadcasting():
    """Other libraries add a bias to rows without saying so."""
    import jax

    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="session")
def untrained(tmp_path_factory) -> Path:
    """The config of a classifier on data 2 x fsdp 4; run/ beside it, not to be changed, holds the steps 4 and 8."""
    from support.runs import leave_run, write_config

    path = write_config(tmp_path_factory.mktemp("untrained"))
    leave_run(path)
    return path


@pytest.fixture
def cli(capsys):
    """Runs a command, which has to end with this code; returns what it printed."""
    from spmdkit.launch.cli import main

    def run(code, *words):
        assert main([*map(str, words)]) == code, capsys.readouterr().err
        return capsys.readouterr()

    return run

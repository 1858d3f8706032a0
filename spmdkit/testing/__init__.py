"""Runs of a config in real processes, with faults injected on purpose: to see that a run survives them.

    from spmdkit.testing import Fault, cluster, same_run

    with cluster("tiny.yaml", processes=2, devices=2, faults=[Fault(kind="kill", rank=1, step=7)], restarts=2) as run:
        assert run.wait(120).code == 0
    assert same_run("runs/tiny", "runs/undisturbed") == []

faults                what a fault is: kind, rank, step, phase
cluster               starts the processes, hands them out, cleans up
compare               whether two runs are bit for bit the same
recovery              what became of each fault
damage disk           checkpoints cut or flipped; a small disk that is full or read-only
soak plans            `python -m spmdkit.testing.soak`: random faults until the run ends by itself
worker                `python -m spmdkit.testing.worker train|launch ...`: the command line, with faults
injector moments actions journal   how the worker injects them

The package itself has no hook for any of this: the worker replaces the functions that a phase begins with, in its own
process, and then calls the command line. Where nothing of spmdkit.testing is started, nothing of it runs.
"""

# The packages lie beside the folder above (see pyproject.toml), where pyright does not look for them.
# pyright: reportMissingImports=false

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cluster import Cluster as Cluster
    from .cluster import Ended as Ended
    from .cluster import cluster as cluster
    from .compare import arrays_of as arrays_of
    from .compare import losses_of as losses_of
    from .compare import same_run as same_run
    from .damage import damage as damage
    from .disk import SmallDisk as SmallDisk
    from .disk import small_disk as small_disk
    from .faults import Fault as Fault

_HOMES = {
    "cluster": ("Cluster", "Ended", "cluster"),
    "compare": ("arrays_of", "losses_of", "same_run"),
    "damage": ("damage",),
    "disk": ("SmallDisk", "small_disk"),
    "faults": ("Fault",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Imports a public name from its home on first use."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'spmdkit.testing' has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME_OF[name]}", __name__), name)
    globals()[name] = value
    return value

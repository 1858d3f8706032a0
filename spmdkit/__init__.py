"""spmdkit: a distributed SPMD training runtime for JAX.

The names are imported when they are first used, so that `spmdkit --help` does not wait for JAX.
"""

# The packages lie beside this folder (see pyproject.toml), where pyright does not look for them.
# pyright: reportMissingImports=false

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .layouts import DataParallel as DataParallel
    from .layouts import Distribution as Distribution
    from .layouts import LayoutMap as LayoutMap
    from .layouts import ModelParallel as ModelParallel
    from .layouts import TensorLayout as TensorLayout
    from .layouts import distribute_tensor as distribute_tensor
    from .layouts import distribution as distribution
    from .layouts import set_distribution as set_distribution
    from .mesh import DeviceMesh as DeviceMesh
    from .mesh import get_device_count as get_device_count
    from .mesh import initialize as initialize
    from .mesh import list_devices as list_devices

__all__ = [
    "DataParallel",
    "DeviceMesh",
    "Distribution",
    "LayoutMap",
    "ModelParallel",
    "TensorLayout",
    "distribute_tensor",
    "distribution",
    "get_device_count",
    "initialize",
    "list_devices",
    "set_distribution",
]

_HOMES = ("mesh", "layouts")


def __getattr__(name: str) -> Any:
    """Imports a public name, or a package, where it is first used."""
    if name in _HOMES:
        return import_module(f".{name}", __name__)
    for home in _HOMES if name in __all__ else ():
        module = import_module(f".{home}", __name__)
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

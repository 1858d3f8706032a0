"""spmdkit: a distributed SPMD training runtime for JAX."""

# The folders beside this one are mapped under it at installation, which pyright cannot see in a checkout.
# pyright: reportMissingImports=false

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

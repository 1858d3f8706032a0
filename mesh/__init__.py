"""Devices in a named grid: the mesh, its axis names, simulated devices, processes.

`axes` shares the tests of `device_mesh`; `compat` shares the tests of `simulate`; `errors` shares the tests of
`user_errors`.
"""

from .axes import AXES as AXES
from .device_mesh import DeviceMesh as DeviceMesh
from .devices import get_device_count as get_device_count
from .devices import list_devices as list_devices
from .errors import UserError as UserError
from .processes import initialize as initialize
from .processes import is_main_process as is_main_process
from .simulate import backend_started as backend_started
from .simulate import simulate as simulate

__all__ = [
    "AXES",
    "DeviceMesh",
    "UserError",
    "backend_started",
    "get_device_count",
    "initialize",
    "is_main_process",
    "list_devices",
    "simulate",
]

"""Device meshes and their axes, simulated devices, processes, errors with exit codes, versions of JAX, and files."""

from .axes import AXES as AXES
from .compat import backend_started as backend_started
from .device_mesh import DeviceMesh as DeviceMesh
from .devices import get_device_count as get_device_count
from .devices import list_devices as list_devices
from .devices import simulate as simulate
from .errors import UserError as UserError
from .processes import is_main_process as is_main_process

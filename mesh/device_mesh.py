"""DeviceMesh: devices in a grid with named axes."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import compress
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from .axes import AXES, axes_across, check_shape, physical_order, resolve_shape, sizes_text
from .compat import Device, backend_started
from .devices import device_name, find_devices, list_devices, simulate
from .errors import UserError, counted, unknown_name
from .targets import MARK, Target, parse_target

MAX_COLUMNS = 8
MAX_ROWS = 16
GAP = "..."


def draw(devices: np.ndarray, axis_names: Sequence[str], across: Sequence[str] = ()) -> str:
    """Draws a mesh as a table of at most 8 columns and 16 rows: the last axis across, the others down.

    Args:
        devices: Names of devices, shaped like the mesh.
        axis_names: One name per axis.
        across: The axes that cross processes, if known.
    """
    kinds = sorted({_kind(name) for name in devices.flat})
    heading = f"{sizes_text(devices.shape, axis_names)}: {counted(devices.size, 'device')}, {', '.join(kinds)}"
    split = [axis for axis, size in enumerate(devices.shape) if size > 1]
    *outer, last = split or [devices.ndim - 1]
    grid: Any = devices.reshape([devices.shape[axis] for axis in (*outer, last)])
    columns = shorten(range(grid.shape[-1]), MAX_COLUMNS)
    headings = [GAP if column is None else f"{axis_names[last]} {column}" for column in columns]
    table = [["", *headings]]
    for row in shorten(list(np.ndindex(grid.shape[:-1])), MAX_ROWS):
        if row is None:
            table.append([GAP] * (1 + len(columns)))
            continue
        numbers = [f"{axis_names[axis]} {number}" for axis, number in zip(outer, row, strict=True)]
        cells = [GAP if column is None else grid[(*row, column)].partition(MARK)[0] for column in columns]
        table.append([" ".join(numbers), *cells])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    indent = "  " if outer else ""
    lines = [heading]
    for cells in table:
        lines.append(indent + "  ".join(map(str.ljust, cells, widths)).rstrip())
    if across:
        lines.append(f"  crosses processes: {', '.join(across)}")
    return "\n".join(lines)


def _kind(name: str) -> str:
    """Returns the target of a device, or its platform: "h100:1x8" for "gpu:3@h100:1x8", "cpu" for "cpu:3"."""
    device, _, target = name.partition(MARK)
    return target or device.partition(":")[0]


def shorten(places: Sequence, limit: int) -> list:
    """Keeps the first entries and the last one if there are more than `limit`, with None for the omitted ones."""
    if len(places) <= limit:
        return list(places)
    return [*places[: limit - 2], None, places[-1]]


class DeviceMesh:
    """A grid of devices with one name per axis; immutable, comparable and hashable.

    The devices need not exist: everything except `backend_mesh` works for a mesh of other machines.

    Example:
        mesh = DeviceMesh((2, 4), ("data", "model"))            # all devices, row by row
        mesh = DeviceMesh.of(data=2, fsdp=-1)                   # the six canonical axes, physical order
        mesh = DeviceMesh.simulated(8, data=2, fsdp=4)          # CPU devices, for a test or a laptop
    """

    def __init__(
        self,
        shape: Sequence[int],
        axis_names: Sequence[str],
        devices: Sequence[str | Device] | np.ndarray | None = None,
    ) -> None:
        """Creates a mesh, row by row.

        Args:
            shape: One size per axis, each at least 1; one can be -1, the remaining devices.
            axis_names: One distinct name per axis.
            devices: Names such as "cpu:0" (or JAX devices); None for all devices of all processes in JAX's order.

        Raises:
            UserError: Sizes, names or devices are invalid, or the product of the sizes is not the number of devices.
        """
        if isinstance(shape, np.ndarray):
            shape = shape.tolist()
        check_shape(shape, axis_names)
        if devices is None:
            names = list_devices()
        else:
            names = [_name(device) for device in np.asarray(devices).flat]
        if len(set(names)) < len(names):
            repeated = sorted({name for name in names if names.count(name) > 1})
            raise UserError(f"devices contains {repeated} more than once; each device must be in one place.")
        self._axis_names = axis_names
        self._devices = np.array(names).reshape(resolve_shape(shape, axis_names, len(names)))
        self._devices.flags.writeable = False

    @classmethod
    def of(
        cls, devices: Iterable[str | Device] | None = None, *, axes: Sequence[str] = AXES, **axis_sizes: int
    ) -> "DeviceMesh":
        """Creates a mesh with all six canonical axes; the default size is 1.

        Args:
            devices: Names or JAX devices, in this order (they need not exist); None for all devices of all
                processes in physical order: the last axes inside a host, the first ones across hosts.
            axes: Other axes than the canonical ones, slowest network first.
            **axis_sizes: Sizes of these axes, each at least 1; one can be -1, the remaining devices.

        Raises:
            UserError: A name is not in `axes`, or the product of the sizes is not the number of devices.
        """
        problems = [unknown_name("mesh axis", name, axes) for name in axis_sizes if name not in axes]
        if problems:
            raise UserError("; ".join(problems))
        if devices is None:
            devices = physical_order(jax.devices())
        shape = [axis_sizes.get(name, 1) for name in axes]
        return cls(shape, tuple(axes), list(devices))

    @classmethod
    def simulated(cls, num_devices: int, **axis_sizes: int) -> "DeviceMesh":
        """Creates a mesh of simulated CPU devices, and configures them if JAX has not opened its devices.

        For one process; if several share a mesh, each calls `simulate` for its own devices, and then `of`.

        Args:
            num_devices: The number of CPU devices, at least 1.
            **axis_sizes: As in `of`; by default `data=num_devices`.

        Returns:
            The mesh over cpu:0 .. cpu:num_devices-1, with the six canonical axes. Opens no device.

        Raises:
            UserError: The product of the sizes is not `num_devices`.
            RuntimeError: JAX has already opened fewer CPU devices.
        """
        simulate(num_devices)
        names = [f"cpu:{number}" for number in range(num_devices)]
        if not axis_sizes:
            axis_sizes = {"data": num_devices}
        return cls.of(names, axes=AXES, **axis_sizes)

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of each axis."""
        return self._devices.shape

    @property
    def axis_names(self) -> Sequence[str]:
        """The name of each axis, in the type of the argument."""
        return self._axis_names

    @property
    def split_axes(self) -> dict[str, int]:
        """Axis -> size, of the axes with a size over 1."""
        return {name: size for name, size in zip(self._axis_names, self.shape, strict=True) if size > 1}

    @property
    def devices(self) -> np.ndarray:
        """Device names, shaped like the mesh; read-only."""
        return self._devices

    @property
    def size(self) -> int:
        """The number of devices."""
        return self._devices.size

    @cached_property
    def backend_mesh(self) -> Mesh:
        """The JAX mesh over the real devices, all axes Auto; UserError if a device is not on this machine."""
        devices = np.array(find_devices(self._devices.flat), dtype=object).reshape(self.shape)
        return Mesh(devices, tuple(self._axis_names), axis_types=(AxisType.Auto,) * len(self._axis_names))

    @property
    def target(self) -> Target | None:
        """The target of the devices, if they are not on this machine, see `list_devices(target=...)`."""
        _, mark, text = str(self._devices.flat[0]).partition(MARK)
        return parse_target(text) if mark else None

    @cached_property
    def abstract_mesh(self) -> AbstractMesh:
        """The JAX mesh without devices, all axes Auto: what a program is lowered for."""
        return AbstractMesh(self.shape, tuple(self._axis_names), axis_types=(AxisType.Auto,) * len(self._axis_names))

    @cached_property
    def axes_across_processes(self) -> tuple[str, ...]:
        """The axes with collectives across processes, or hosts of a target; UserError if a device is unknown here."""
        return axes_across(self._processes, self._axis_names)

    @cached_property
    def _processes(self) -> np.ndarray:
        if self.target is None:
            processes = [device.process_index for device in self.backend_mesh.devices.flat]
        else:
            processes = [self.target.host_of(str(name)) for name in self._devices.flat]
        return np.array(processes).reshape(self.shape)

    def has_one_per_host(self, axes: Sequence[str]) -> bool:
        """Returns whether devices along some axes are all in different hosts.

        Processes stand for hosts. If each process has one device, the hosts are unknown, and the result is False.

        Args:
            axes: Axes of this mesh.
        """
        num_hosts = np.unique(self._processes).size
        if num_hosts == self.size:
            return False
        is_kept = [name not in axes for name in self._axis_names]
        places = set()
        for index, host in np.ndenumerate(self._processes):
            places.add((host, *compress(index, is_kept)))
        return len(places) == self.size  # no host has two devices that differ only along these axes

    @property
    def summary(self) -> str:
        """The axes with more than one device, for people: "mesh data 2 x fsdp 4"."""
        sizes = [f"{name} {size}" for name, size in self.split_axes.items()]
        return f"mesh {' x '.join(sizes) or '1 device'}"

    def axis_size(self, name: str) -> int:
        """Gives the size of an axis.

        Args:
            name: An axis of this mesh, or any of `AXES`.

        Returns:
            The size; 1 for an axis of `AXES` that this mesh does not have.

        Raises:
            UserError: If the name is neither.
        """
        if name in self._axis_names:
            return self.shape[list(self._axis_names).index(name)]
        if name in AXES:
            return 1
        raise UserError(unknown_name("mesh axis", name, dict.fromkeys((*self._axis_names, *AXES))))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DeviceMesh):
            return NotImplemented
        return self is other or self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @cached_property
    def _key(self) -> tuple[tuple[int, ...], tuple[str, ...], tuple[str, ...]]:
        return self.shape, tuple(self._axis_names), tuple(self._devices.flat)

    def __repr__(self) -> str:
        return f"DeviceMesh({sizes_text(self.shape, self._axis_names)}; {counted(self.size, 'device')})"

    def __str__(self) -> str:
        across: tuple[str, ...] = ()
        if backend_started():
            with suppress(UserError):  # its devices may be on other machines
                across = self.axes_across_processes
        return draw(self._devices, self._axis_names, across)


def _name(device: str | Device) -> str:
    if isinstance(device, str):
        return str(device)
    return device_name(device)

"""DeviceMesh: devices in a grid whose axes have names."""

from collections.abc import Iterable, Sequence
from functools import cached_property

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from .axes import AXES
from .compat import Device, backend_started, make_abstract_mesh
from .devices import device_name, find_devices, list_devices
from .drawing import draw
from .errors import UserError
from .near_miss import unknown_name
from .ordering import axes_across, physical_order
from .shapes import check_shape, resolve_shape, sizes_text
from .simulate import simulate
from .text import counted


class DeviceMesh:
    """A grid of devices with one name per axis; immutable, comparable and hashable.

    The devices need not exist: everything but `backend_mesh` works for a mesh of machines that are elsewhere.

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
        """Lays devices out row by row.

        Args:
            shape: One size per axis, each at least 1; a single -1 stands for what the devices leave.
            axis_names: One distinct name per axis.
            devices: Names such as "cpu:0" (or JAX devices); None for all devices of all processes in JAX's order.

        Raises:
            UserError: If shape or names are empty, differ in length or repeat, a name or a size is invalid, a device
                is named twice, or the product of the sizes is not the number of devices.
        """
        if isinstance(shape, int) or isinstance(axis_names, str):
            raise UserError(
                f"DeviceMesh(shape={shape!r}, axis_names={axis_names!r}): both have one entry for each axis. Write "
                f"DeviceMesh({(shape,) if isinstance(shape, int) else shape}, "
                f"{[axis_names or 'data'] if isinstance(axis_names, str) else axis_names})."
            )
        shape = shape.tolist() if isinstance(shape, np.ndarray) else shape
        check_shape(shape, axis_names)
        names = list_devices() if devices is None else [_name(device) for device in np.asarray(devices).flat]
        repeated = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
        if repeated:
            raise UserError(f"devices names {repeated} more than once; a mesh holds each device in one place.")
        self._axis_names = axis_names
        self._devices = np.array(names).reshape(resolve_shape(shape, axis_names, len(names)))
        self._devices.flags.writeable = False

    @classmethod
    def of(
        cls, devices: Iterable[str | Device] | None = None, *, axes: Sequence[str] = AXES, **axis_sizes: int
    ) -> "DeviceMesh":
        """Builds a mesh with all six canonical axes, those not named having size 1.

        Args:
            devices: Names or JAX devices, kept in the order given (they need not exist); None for all devices of all
                processes in physical order: the last axes inside a host, the first ones across hosts.
            axes: Other axes than the canonical ones, slowest network first.
            **axis_sizes: Sizes of these axes, each at least 1; a single -1 stands for the rest.

        Returns:
            The mesh, its axes in the order of `axes`.

        Raises:
            UserError: If a name is not in `axes`, or the sizes do not multiply to the number of devices.
        """
        unknown = [name for name in axis_sizes if name not in axes]
        if unknown:
            raise UserError("; ".join(unknown_name("mesh axis", name, axes) for name in unknown))
        if devices is None:
            devices = physical_order(jax.devices())
        return cls(tuple(axis_sizes.get(name, 1) for name in axes), tuple(axes), list(devices))

    @classmethod
    def simulated(cls, num_devices: int, **axis_sizes: int) -> "DeviceMesh":
        """Builds a mesh of simulated CPU devices, configuring them if JAX has not opened its devices yet.

        For one process; where several share a mesh, each calls `simulate` for its own devices, and then `of`.

        Args:
            num_devices: CPU devices of the mesh, at least 1.
            **axis_sizes: As in `of`; none for `data=num_devices`.

        Returns:
            The mesh over cpu:0 .. cpu:num_devices-1, with the six canonical axes. Opens no device.

        Raises:
            UserError: If the sizes do not multiply to `num_devices`.
            RuntimeError: If JAX has opened fewer CPU devices already.
        """
        simulate(num_devices)
        names = [f"cpu:{number}" for number in range(num_devices)]
        return cls.of(names, axes=AXES, **(axis_sizes or {"data": num_devices}))

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of each axis."""
        return self._devices.shape

    @property
    def axis_names(self) -> Sequence[str]:
        """The name of each axis, in the type it was given."""
        return self._axis_names

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

    @cached_property
    def abstract_mesh(self) -> AbstractMesh:
        """The JAX mesh without devices, all axes Auto: what a program is lowered for."""
        return make_abstract_mesh(self.shape, tuple(self._axis_names))

    @cached_property
    def axes_across_processes(self) -> tuple[str, ...]:
        """The axes whose collectives cross processes, so hosts; UserError if a device is not on this machine."""
        processes = [device.process_index for device in self.backend_mesh.devices.flat]
        return axes_across(np.array(processes).reshape(self.shape), self._axis_names)

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
        return self._hash

    @cached_property
    def _key(self) -> tuple[tuple[int, ...], tuple[str, ...], tuple[str, ...]]:
        return self.shape, tuple(self._axis_names), tuple(self._devices.flat)

    @cached_property
    def _hash(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"DeviceMesh({sizes_text(self.shape, self._axis_names)}; {counted(self.size, 'device')})"

    def __str__(self) -> str:
        return draw(self._devices, self._axis_names, self._known_crossing())

    def _known_crossing(self) -> tuple[str, ...]:
        """The axes that cross processes; none before JAX's devices are open, or where devices are elsewhere."""
        try:
            return self.axes_across_processes if backend_started() else ()
        except UserError:
            return ()


def _name(device: str | Device) -> str:
    return str(device) if isinstance(device, str) else device_name(device)

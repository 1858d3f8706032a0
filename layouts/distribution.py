"""The two distributions: DataParallel replicates every variable, ModelParallel splits them by a LayoutMap."""

import warnings
from collections.abc import Sequence
from typing import Any

from ..mesh.compat import Device
from ..mesh.device_mesh import DeviceMesh
from ..mesh.devices import list_devices
from ..mesh.errors import UserError
from .distribution_base import Distribution as Distribution
from .distribution_base import distribution as distribution
from .distribution_base import first_axis, own_layout
from .distribution_base import set_distribution as set_distribution
from .layout_map import LayoutMap
from .resolve import resolve
from .table import LayoutTable
from .tensor_layout import TensorLayout


class DataParallel(Distribution):
    """Every device holds all variables; the rows of a batch are split over the devices.

    Example:
        distribution = DataParallel(devices=["cpu:0", "cpu:1"])
        distribution = DataParallel(DeviceMesh((8,), ("data",)))
    """

    def __init__(
        self,
        device_mesh: DeviceMesh | None = None,
        devices: Sequence[str | Device] | None = None,
        auto_shard_dataset: bool = True,
    ) -> None:
        """Puts data parallelism on a mesh, or on a new mesh of one axis "batch".

        Args:
            device_mesh: The mesh; `devices` is not looked at then. Rows are split over its first axis (over "data" if
                it has the canonical axes).
            devices: Devices of a new mesh; None for all of them.
            auto_shard_dataset: As in Keras; it is kept, and read by nothing here.

        Raises:
            UserError: If `device_mesh` is no DeviceMesh.

        Warns:
            UserWarning: If other axes have sizes over 1, as devices along those do the same work.
        """
        if device_mesh is None:
            names = list_devices() if devices is None else list(devices)
            device_mesh = DeviceMesh((len(names),), ["batch"], names)
        elif not isinstance(device_mesh, DeviceMesh):
            raise UserError(
                f"Expect `mesh` to be an instance of `DeviceMesh`. Received: mesh={device_mesh!r} (of type "
                f"{type(device_mesh).__name__}). Devices go into devices=[...]."
            )
        super().__init__(device_mesh, first_axis(device_mesh), auto_shard_dataset)
        if device_mesh.axis_size(str(self.batch_dim_name)) != device_mesh.size:
            warnings.warn(
                f"Expect the input mesh to be 1D, but received {device_mesh!r}. Only mesh axis {self.batch_dim_name!r} "
                "splits the batch; devices along the others do the same work.",
                stacklevel=2,
            )

    @property
    def num_model_replicas(self) -> int:
        """Copies of the model on the mesh: one per device."""
        return self._device_mesh.size

    def get_variable_layout(self, variable: Any, path: str | None = None) -> TensorLayout:
        """Gives the layout of a variable.

        Args:
            variable: Anything with a `shape`.
            path: Not needed here.

        Returns:
            All dims whole, unless the variable has its own layout.
        """
        return own_layout(variable) or self.whole_layout(variable)

    def get_tensor_layout(self, path: str) -> TensorLayout | None:
        """Gives the layout of an intermediate value.

        Args:
            path: Its name.

        Returns:
            None: it follows from the batch.
        """
        return None

    def layout_table(self, params: Any, **policies: Any) -> LayoutTable:
        """Gives the layouts of a pytree of parameters.

        Args:
            params: Arrays or ShapeDtypeStructs.
            **policies: As for `resolve`.

        Returns:
            The table: every parameter whole on every device.
        """
        return resolve(
            params, self._device_mesh, default=lambda _, leaf: (self.whole_layout(leaf), "data parallel"), **policies
        )


class ModelParallel(Distribution):
    """Variables are split by the rules of a LayoutMap; the rows of a batch over one axis of its mesh.

    Example:
        mesh = DeviceMesh((2, 4), ("batch", "model"))
        rules = LayoutMap(mesh)
        rules[".*kernel"] = (None, "model")
        distribution = ModelParallel(layout_map=rules, batch_dim_name="batch")
    """

    def __init__(
        self,
        *,
        layout_map: LayoutMap | None = None,
        batch_dim_name: str | None = None,
        auto_shard_dataset: bool = True,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        """Puts model parallelism on the mesh of a LayoutMap.

        Args:
            layout_map: The rules.
            batch_dim_name: The mesh axis that splits the rows of a batch; None for the first (for "data" on a mesh with
                the canonical axes).
            auto_shard_dataset: As in Keras; it is kept, and read by nothing here.
            device_mesh: Not needed; the mesh of `layout_map` if given.

        Raises:
            UserError: If `layout_map` is missing or no LayoutMap, `device_mesh` is another mesh than its own, the mesh
                has no axis `batch_dim_name`, or processes and model replicas do not divide.
        """
        if layout_map is None:
            raise UserError("You must specify a layout_map argument.")
        if not isinstance(layout_map, LayoutMap):
            raise UserError(
                f"Argument `layout_map` must be a `LayoutMap` instance. Received: layout_map={layout_map!r}. Make one "
                "with LayoutMap(device_mesh) and add the rules to it."
            )
        if device_mesh is not None and device_mesh != layout_map.device_mesh:
            raise UserError(
                f"device_mesh={device_mesh!r} is not the mesh of layout_map, {layout_map.device_mesh!r}. Leave it out."
            )
        super().__init__(
            layout_map.device_mesh, batch_dim_name or first_axis(layout_map.device_mesh), auto_shard_dataset
        )
        self._layout_map = layout_map
        if self.num_processes > self.num_model_replicas and self.num_processes % self.num_model_replicas:
            raise UserError(
                "If there are more processes than model replicas, `num_processes` must be divisible by "
                f"`num_model_replicas`: {self.num_processes} % {self.num_model_replicas} = "
                f"{self.num_processes % self.num_model_replicas}. The replicas are the size of mesh axis "
                f"{self.batch_dim_name!r}; change it, or the number of processes."
            )

    @property
    def layout_map(self) -> LayoutMap:
        """The rules."""
        return self._layout_map

    @property
    def num_model_replicas(self) -> int:
        """Copies of the model on the mesh: the size of the batch axis."""
        return self._device_mesh.axis_size(str(self._batch_dim_name))

    def get_variable_layout(self, variable: Any, path: str | None = None) -> TensorLayout:
        """Gives the layout of a variable.

        Args:
            variable: Anything with a `shape`, and a `path` unless given here.
            path: Names joined by "/".

        Returns:
            Its own layout, else that of the rule for its path, else all dims whole.

        Raises:
            UserError: If it has no path, or several rules match it.
        """
        own = own_layout(variable)
        if own is not None:
            return own
        path = getattr(variable, "path", None) if path is None else path
        if path is None:
            raise UserError("The variable has no path, by which its rule is found. Give get_variable_layout(x, path).")
        return self._layout_map[path] or self.whole_layout(variable)

    def get_tensor_layout(self, path: str) -> TensorLayout | None:
        """Gives the layout of an intermediate value.

        Args:
            path: Its name, for example "block/dense/output".

        Returns:
            The layout of the rule for that name, or None.
        """
        return self._layout_map[path]

    def layout_table(self, params: Any, **policies: Any) -> LayoutTable:
        """Gives the layouts of a pytree of parameters.

        Args:
            params: Arrays or ShapeDtypeStructs; a leaf's path is its keys joined by "/".
            **policies: As for `resolve`.

        Returns:
            The table.

        Raises:
            LayoutError: Listing everything that is wrong.
        """
        return resolve(params, self._device_mesh, rules=self._layout_map, **policies)

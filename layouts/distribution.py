"""The distributions of Keras, and `distribute_tensor`, which puts one array into a layout.

DataParallel replicates every variable, ModelParallel splits them by a LayoutMap.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.experimental.layout import Format
from jax.sharding import Sharding

from ..mesh.axes import AXES
from ..mesh.compat import Device, backend_started
from ..mesh.device_mesh import DeviceMesh
from ..mesh.devices import list_devices
from ..mesh.errors import UserError, unknown_name
from .layout_map import LayoutMap
from .tensor_layout import TensorLayout

_current: "Distribution | None" = None


def distribution() -> "Distribution | None":
    """Returns the distribution of the process, from `set_distribution` or an open `scope`, if any."""
    return _current


def set_distribution(value: "Distribution | None") -> None:
    """Sets the distribution of the process; None clears it."""
    global _current
    if value is not None and not isinstance(value, Distribution):
        raise UserError(
            f"set_distribution takes a DataParallel, a ModelParallel or None, got {value!r} ({type(value).__name__})."
        )
    _current = value


class Distribution:
    """The base class of `DataParallel` and `ModelParallel`.

    A variable is anything with a `shape`: an array, a ShapeDtypeStruct, or an object of your own. Its path is its own
    `path` or an argument. A TensorLayout in its `_layout` takes precedence over all rules.

    Attributes:
        device_mesh: The mesh.
        batch_dim_name: The mesh axis that splits the rows of a batch.
        auto_shard_dataset: Accepted for compatibility with Keras; unused.
        layout_map: The rules; None if all variables are whole.
    """

    layout_map: LayoutMap | None = None

    def __init__(
        self, device_mesh: DeviceMesh, batch_dim_name: str | None = None, auto_shard_dataset: bool = True
    ) -> None:
        """Creates a distribution.

        Args:
            device_mesh: The mesh.
            batch_dim_name: The mesh axis that splits the rows of a batch.
            auto_shard_dataset: Accepted for compatibility with Keras; unused.

        Raises:
            UserError: `device_mesh` is not a DeviceMesh, or does not have the axis `batch_dim_name`.
        """
        if not isinstance(device_mesh, DeviceMesh):
            raise UserError(
                f"Expect `device_mesh` to be an instance of DeviceMesh, got {type(device_mesh).__name__}. A list of "
                "devices is devices=[...] of DataParallel."
            )
        if batch_dim_name is not None and batch_dim_name not in device_mesh.axis_names:
            raise UserError("batch_dim_name: " + unknown_name("mesh axis", batch_dim_name, device_mesh.axis_names))
        self.device_mesh = device_mesh
        self.batch_dim_name = batch_dim_name
        self.auto_shard_dataset = auto_shard_dataset

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Makes this the distribution of the process in a `with` block."""
        former = distribution()
        set_distribution(self)
        try:
            yield
        finally:
            set_distribution(former)

    @property
    def num_processes(self) -> int:
        """The number of processes; 1 if JAX's devices are not open and processes are not connected."""
        if backend_started() or jax.distributed.is_initialized():
            return jax.process_count()
        return 1

    @property
    def num_model_replicas(self) -> int:
        """Copies of the model on the mesh."""
        raise NotImplementedError(f"{type(self).__name__} must define num_model_replicas.")

    @property
    def num_data_shards(self) -> int:
        """Parts of a dataset that processes read: one per process, at most one per model replica."""
        return min(self.num_model_replicas, self.num_processes)

    @property
    def data_shard_id(self) -> int:
        """The part this process reads, from 0; processes that share a replica read the same part."""
        if self.num_processes == 1:
            return 0
        if self.num_model_replicas >= self.num_processes:
            return jax.process_index()
        return jax.process_index() // (self.num_processes // self.num_model_replicas)

    def get_data_layout(self, data_shape: Sequence[int | None]) -> TensorLayout:
        """Returns the layout of a batch: rows (dim 0) split over the batch axis, all other dims whole.

        Raises:
            UserError: The shape is (): a scalar without rows.
        """
        if not data_shape:
            raise UserError(
                f"Data of shape () has no dim 0 to split over mesh axis {self.batch_dim_name!r}. Give it a dim of "
                "rows, or leave it out of the batch."
            )
        whole_dims = (None,) * (len(data_shape) - 1)
        return TensorLayout((self.batch_dim_name, *whole_dims), self.device_mesh)

    def get_variable_layout(self, variable: Any, path: str | None = None) -> TensorLayout:
        """Returns the variable's own layout, else that of the rule for its path, else all dims whole.

        Args:
            variable: An object with a `shape`, and a `path` unless it is an argument.
            path: Names joined by "/"; not needed without rules.

        Raises:
            UserError: There are rules and the path is missing, or several rules match it.
        """
        layout = getattr(variable, "_layout", None)
        if isinstance(layout, TensorLayout):
            return layout
        replicated = TensorLayout((None,) * len(variable.shape), self.device_mesh)
        if self.layout_map is None:
            return replicated
        if path is None:
            path = getattr(variable, "path", None)
        if path is None:
            raise UserError("The variable must have a path to find its rule. Pass one: get_variable_layout(x, path).")
        return self.layout_map[path] or replicated

    def get_tensor_layout(self, path: str) -> TensorLayout | None:
        """Returns the layout of the rule for an intermediate value such as "block/dense/output"; None leaves it to the
        compiler."""
        if self.layout_map is None:
            return None
        return self.layout_map[path]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.device_mesh!r}, batch_dim_name={self.batch_dim_name!r})"


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
        """Creates data parallelism on a mesh, or on a new mesh with the axis "batch".

        Args:
            device_mesh: The mesh; `devices` is ignored then. Rows are split over its first axis ("data" if it has the
                canonical axes).
            devices: Devices of a new mesh; None for all of them.
            auto_shard_dataset: Accepted for compatibility with Keras; unused.

        Raises:
            UserError: `device_mesh` is not a DeviceMesh.

        Warns:
            UserWarning: Other axes have sizes over 1; devices along them do the same work.
        """
        if device_mesh is None:
            names: list[Any] = list_devices() if devices is None else list(devices)
            device_mesh = DeviceMesh((len(names),), ["batch"], names)
        super().__init__(device_mesh, None, auto_shard_dataset)
        self.batch_dim_name = first_axis(device_mesh)
        if device_mesh.axis_size(self.batch_dim_name) != device_mesh.size:
            warnings.warn(
                f"Expect the input mesh to be 1D, but received {device_mesh!r}. Only mesh axis {self.batch_dim_name!r} "
                "splits the batch; devices along the others do the same work.",
                stacklevel=2,
            )

    @property
    def num_model_replicas(self) -> int:
        """Copies of the model on the mesh: one per device."""
        return self.device_mesh.size


class ModelParallel(Distribution):
    """Variables are split by the rules of a LayoutMap, `layout_map`; the rows of a batch over one axis of its mesh.

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
        """Creates model parallelism on the mesh of a LayoutMap.

        Args:
            layout_map: The rules.
            batch_dim_name: The mesh axis that splits the rows of a batch; None for the first (for "data" on a mesh with
                the canonical axes).
            auto_shard_dataset: Accepted for compatibility with Keras; unused.
            device_mesh: Optional; must be the mesh of `layout_map`.

        Raises:
            UserError: `layout_map` is missing or not a LayoutMap, `device_mesh` is another mesh, the mesh does not have
                the axis `batch_dim_name`, or processes and model replicas do not divide.
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
        mesh = layout_map.device_mesh
        super().__init__(mesh, batch_dim_name or first_axis(mesh), auto_shard_dataset)
        self.layout_map = layout_map
        processes = self.num_processes
        replicas = self.num_model_replicas
        if processes > replicas and processes % replicas:
            raise UserError(
                "If there are more processes than model replicas, `num_processes` must be divisible by "
                f"`num_model_replicas`: {processes} % {replicas} = {processes % replicas}. The replicas are the size "
                f"of mesh axis {self.batch_dim_name!r}; change it, or the number of processes."
            )

    @property
    def num_model_replicas(self) -> int:
        """Copies of the model on the mesh: the size of the batch axis."""
        return self.device_mesh.axis_size(str(self.batch_dim_name))


def first_axis(mesh: DeviceMesh) -> str:
    """Returns the default batch axis: "data" on a mesh with the canonical axes, else the first axis."""
    return "data" if set(AXES) <= set(mesh.axis_names) else mesh.axis_names[0]


def distribute_tensor(tensor: Any, layout: TensorLayout | Sharding | Format) -> Any:
    """Puts an array into a layout.

    Args:
        tensor: A JAX or NumPy array (global), a number or a nested list of numbers, or an array being traced inside
            `jit`, whose sizes may be symbolic. A ShapeDtypeStruct holds no data and is returned unchanged.
        layout: A TensorLayout with a mesh, a JAX sharding, or a JAX Format (sharding and order in memory).

    Returns:
        The same values in that layout: under `jit` a constraint, outside a copy, or `tensor` itself if it already has
        that layout.

    Raises:
        UserError: A TensorLayout is without a mesh, has too many entries, or does not divide the array; `layout` or
            `tensor` has another type; or the call is inside a step, which is a `shard_map`.
    """
    if isinstance(tensor, jax.ShapeDtypeStruct):
        return tensor
    if not isinstance(layout, TensorLayout | Sharding | Format):
        raise UserError(
            f"distribute_tensor takes a TensorLayout with a mesh, a JAX Sharding or a Format, got {layout!r} "
            f"({type(layout).__name__}). Write TensorLayout(axes, device_mesh)."
        )
    if not hasattr(tensor, "dtype"):
        try:
            tensor = jnp.asarray(tensor)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"distribute_tensor takes one array, got a {type(tensor).__name__}: {str(error).splitlines()[0]}. For "
                "a tree, use jax.tree.map(distribute_tensor, tree, layouts)."
            ) from error
    if isinstance(layout, TensorLayout):
        layout.shard_shape(tensor.shape)
        layout = layout.backend_layout
    if isinstance(tensor, Tracer):
        _check_place()
        return jax.lax.with_sharding_constraint(tensor, layout)
    if isinstance(tensor, jax.Array) and _has_layout(tensor, layout):
        return tensor
    return jax.device_put(tensor, layout)


def _check_place() -> None:
    """Raises UserError inside a `shard_map`, where a device only has its own shard of an array."""
    context = jax.sharding.get_abstract_mesh()
    manual = [str(axis) for axis in context.manual_axes if context.shape[axis] > 1]
    if manual:
        raise UserError(
            f"distribute_tensor inside a shard_map over {', '.join(manual)}: there a device only has its own "
            "rows, without a layout on the whole mesh. In a model that a step trains, name the activation, "
            'y = spmdkit.name_output(y, "layer/output"), and lay it out by a rule of that name.'
        )


def _has_layout(tensor: Any, layout: Sharding | Format) -> bool:
    if isinstance(layout, Sharding):
        return tensor.sharding.is_equivalent_to(layout, tensor.ndim)
    return tensor.format == layout

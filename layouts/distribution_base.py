"""What all distributions share, and the one that is set for the process."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from ..mesh.axes import AXES
from ..mesh.compat import backend_started
from ..mesh.device_mesh import DeviceMesh
from ..mesh.errors import UserError
from ..mesh.near_miss import unknown_name
from .table import LayoutTable
from .tensor_layout import TensorLayout

_current: "Distribution | None" = None


def distribution() -> "Distribution | None":
    """Gives the distribution set for the whole process.

    Returns:
        The one last set by `set_distribution` or an open `scope`; None if there is none.
    """
    return _current


def set_distribution(value: "Distribution | None") -> None:
    """Sets the distribution for the whole process.

    Args:
        value: The distribution; None to clear it.

    Raises:
        UserError: If it is neither.
    """
    global _current
    if value is not None and not isinstance(value, Distribution):
        raise UserError(
            f"set_distribution takes a DataParallel, a ModelParallel or None, not {value!r} ({type(value).__name__})."
        )
    _current = value


class Distribution:
    """What all distributions share; make a `DataParallel` or a `ModelParallel`.

    A variable is anything with a `shape`: an array, a ShapeDtypeStruct, or an object of your own. Its path is its own
    `path`, or is given next to it. A TensorLayout in its `_layout` wins over every rule.
    """

    def __init__(
        self, device_mesh: DeviceMesh, batch_dim_name: str | None = None, auto_shard_dataset: bool = True
    ) -> None:
        """Puts a distribution on a mesh.

        Args:
            device_mesh: The mesh.
            batch_dim_name: The mesh axis that splits the rows of a batch.
            auto_shard_dataset: As in Keras; it is kept, and read by nothing here.

        Raises:
            UserError: If `device_mesh` is no DeviceMesh, or has no axis `batch_dim_name`.
        """
        if not isinstance(device_mesh, DeviceMesh):
            raise UserError(f"Expect `device_mesh` to be an instance of DeviceMesh, got {type(device_mesh).__name__}.")
        if batch_dim_name is not None and batch_dim_name not in device_mesh.axis_names:
            raise UserError("batch_dim_name: " + unknown_name("mesh axis", batch_dim_name, device_mesh.axis_names))
        self._device_mesh = device_mesh
        self._batch_dim_name = batch_dim_name
        self.auto_shard_dataset = auto_shard_dataset

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Makes this the distribution of the process inside a `with` block, and restores the former one after it.

        Yields:
            Nothing.
        """
        former = distribution()
        set_distribution(self)
        try:
            yield
        finally:
            set_distribution(former)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh."""
        return self._device_mesh

    @property
    def batch_dim_name(self) -> str | None:
        """The mesh axis that splits the rows of a batch."""
        return self._batch_dim_name

    @property
    def num_processes(self) -> int:
        """Processes of the run; 1 while JAX's devices are not open and processes are not connected."""
        return jax.process_count() if backend_started() or jax.distributed.is_initialized() else 1

    @property
    def num_model_replicas(self) -> int:
        """Copies of the model on the mesh."""
        raise NotImplementedError(f"{type(self).__name__} must define num_model_replicas.")

    @property
    def num_data_shards(self) -> int:
        """Parts the processes read a data set in: one per process, but no more than there are model replicas."""
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
        """Gives the layout of a batch.

        Args:
            data_shape: Its global shape, rows on dim 0; sizes may be None.

        Returns:
            Rows split over the batch axis, all other dims whole.

        Raises:
            UserError: If the shape is (): a scalar has no rows.
        """
        if not data_shape:
            raise UserError(
                f"Data of shape () has no dim 0 to split over mesh axis {self._batch_dim_name!r}. Give it a dim of "
                "rows, or leave it out of the batch."
            )
        return TensorLayout((self._batch_dim_name, *(None for _ in data_shape[1:])), self._device_mesh)

    def get_variable_layout(self, variable: Any, path: str | None = None) -> TensorLayout:
        """Gives the layout of a variable.

        Args:
            variable: Anything with a `shape`, and a `path` unless given here.
            path: Names joined by "/".

        Returns:
            The layout, on the mesh.
        """
        raise NotImplementedError(f"{type(self).__name__} must define get_variable_layout.")

    def get_tensor_layout(self, path: str) -> TensorLayout | None:
        """Gives the layout of an intermediate value.

        Args:
            path: Its name, for example "block/dense/output".

        Returns:
            The layout, or None to leave it to the compiler.
        """
        raise NotImplementedError(f"{type(self).__name__} must define get_tensor_layout.")

    def layout_table(self, params: Any, **policies: Any) -> LayoutTable:
        """Gives the layouts of a pytree of parameters.

        Args:
            params: Arrays or ShapeDtypeStructs; a leaf's path is its keys joined by "/".
            **policies: As for `resolve`: unmatched, unmatched_floor_bytes, indivisible, required_axes.

        Returns:
            The table.

        Raises:
            LayoutError: Listing everything that is wrong.
        """
        raise NotImplementedError(f"{type(self).__name__} must define layout_table.")

    def whole_layout(self, variable: Any) -> TensorLayout:
        """Gives the layout of a variable that every device holds whole.

        Args:
            variable: Anything with a `shape`.

        Returns:
            One None per dim.
        """
        return TensorLayout((None,) * len(variable.shape), self._device_mesh)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._device_mesh!r}, batch_dim_name={self._batch_dim_name!r})"


def first_axis(mesh: DeviceMesh) -> str:
    """Gives the axis of the batch where none is named.

    Args:
        mesh: Any mesh.

    Returns:
        "data" on a mesh with the canonical axes, else the first axis.
    """
    return "data" if set(AXES) <= set(mesh.axis_names) else mesh.axis_names[0]


def own_layout(variable: Any) -> TensorLayout | None:
    """Gives the layout a variable carries in `_layout`.

    Args:
        variable: Anything.

    Returns:
        The layout; None if there is none.
    """
    layout = getattr(variable, "_layout", None)
    return layout if isinstance(layout, TensorLayout) else None

"""TensorLayout: the mesh axes that split each dim of an array."""

from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from math import prod
from numbers import Integral

from jax.sharding import NamedSharding, PartitionSpec

from ..mesh.axes import divisors
from ..mesh.device_mesh import DeviceMesh
from ..mesh.errors import UserError, counted, unknown_name

AxisEntry = str | tuple[str, ...] | None


class TensorLayout:
    """The layout of one array on a mesh.

    `TensorLayout((None, "fsdp"))` keeps dim 0 whole and splits dim 1 over the axis fsdp;
    `TensorLayout((("data", "fsdp"), None))` splits dim 0 over both, the slower axis first.
    Dims beyond the last entry are whole, so `TensorLayout(())` replicates an array of any rank.
    """

    def __init__(self, axes: Sequence[str | Sequence[str] | None], device_mesh: DeviceMesh | None = None) -> None:
        """Creates a layout.

        Args:
            axes: One entry per dim: None, an axis name, or a tuple of axis names.
            device_mesh: The mesh; it can be set once later.

        Raises:
            UserError: An entry is invalid, or the mesh does not have an axis.
        """
        if isinstance(axes, str):
            raise UserError(
                f"TensorLayout({axes!r}): axes must have one entry for each dim. Write TensorLayout(({axes!r},))."
            )
        if not isinstance(axes, Iterable):
            raise UserError(f"TensorLayout({axes!r}): axes must have one entry for each dim. Write TensorLayout(()).")
        self._axes = tuple(_entry(entry, axes) for entry in axes)
        self._device_mesh = None
        if device_mesh is not None:
            self.device_mesh = device_mesh

    @property
    def axes(self) -> tuple[AxisEntry, ...]:
        """One entry per dim: None, an axis name, or a tuple of at least two axis names."""
        return self._axes

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """The mesh; can be set once."""
        return self._device_mesh

    @device_mesh.setter
    def device_mesh(self, device_mesh: DeviceMesh) -> None:
        if self._device_mesh is not None:
            raise UserError(
                f"Cannot override device mesh value. Existing value is {self._device_mesh!r}, new value is "
                f"{device_mesh!r}. Make another TensorLayout({self._axes}) for the other mesh."
            )
        valid = tuple(device_mesh.axis_names)
        unknown = [name for name in self._names if name not in valid]
        if unknown:
            raise UserError(
                f"Invalid axis names for Layout. Valid axis names: {valid}, Got {self._axes}. "
                + " ".join(unknown_name("mesh axis", name, valid) for name in unknown)
            )
        self._device_mesh = device_mesh

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh; UserError if it is not set."""
        if self._device_mesh is None:
            raise UserError(
                "Cannot create sharding when device mesh is not set for TensorLayout. "
                f"Pass it: TensorLayout({self._axes}, device_mesh)."
            )
        return self._device_mesh

    @cached_property
    def spec(self) -> PartitionSpec:
        """The PartitionSpec, without axes of size 1 and trailing None.

        Raises:
            UserError: An axis is used twice, or the mesh is not set.
        """
        repeated = self.repeated_axes
        if repeated:
            raise UserError(
                f"Layout {self} uses mesh axis {repeated[0]!r} more than once; an axis can split one dim only. "
                "Keep it in one place."
            )
        self.mesh  # noqa: B018  # raises if it is not set
        entries = [make_entry(self.axes_of_dim(dim)) for dim in range(len(self._axes))]
        while entries and entries[-1] is None:
            entries.pop()
        return PartitionSpec(*entries)

    @cached_property
    def backend_layout(self) -> NamedSharding:
        """The sharding on the mesh's real devices; UserError without a mesh."""
        return NamedSharding(self.mesh.backend_mesh, self.spec)

    @property
    def used_axes(self) -> tuple[str, ...]:
        """The axes of size over 1 that split some dim, in the order of the dims."""
        names: list[str] = []
        for dim in range(len(self._axes)):
            names.extend(self.axes_of_dim(dim))
        return tuple(names)

    @property
    def repeated_axes(self) -> tuple[str, ...]:
        """The axes named more than once; () in a valid layout."""
        names = self._names
        return tuple(name for name in dict.fromkeys(names) if names.count(name) > 1)

    @property
    def _names(self) -> list[str]:
        """The axes of all entries, in order, whatever their sizes."""
        names: list[str] = []
        for entry in self._axes:
            names.extend(names_of(entry))
        return names

    def axes_of_dim(self, dim: int) -> tuple[str, ...]:
        """Returns the axes of size over 1 that split a dim, slowest first; without a mesh, all axes."""
        if dim >= len(self._axes):
            return ()
        names = names_of(self._axes[dim])
        mesh = self._device_mesh
        if mesh is None:
            return names
        return tuple(name for name in names if mesh.axis_size(name) > 1)

    def parts_of_dim(self, dim: int) -> int:
        """Returns the number of parts that a dim is split into."""
        return prod(self.mesh.axis_size(name) for name in self.axes_of_dim(dim))

    def shard_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the per-device shape of an array of this global shape.

        Raises:
            UserError: The layout has too many entries, or a dim cannot be split evenly.
        """
        if len(self._axes) > len(shape):
            raise UserError(
                f"Layout {self} has {counted(len(self._axes), 'entry', 'entries')}, but the array of shape "
                f"{tuple(shape)} has {counted(len(shape), 'dim')}. Give one entry per dim."
            )
        reasons = [self.indivisible(dim, size) for dim, size in enumerate(shape)]
        problems = [reason for reason in reasons if reason is not None]
        if problems:
            raise UserError(f"Layout {self} cannot split shape {tuple(shape)}: {'; '.join(problems)}.")
        return tuple(size // self.parts_of_dim(dim) for dim, size in enumerate(shape))

    def indivisible(self, dim: int, size: int) -> str | None:
        """Returns why a dim of this global size cannot be split evenly, with the nearest valid sizes, or None."""
        parts = self.parts_of_dim(dim)
        if not isinstance(size, Integral) or size % parts == 0:  # symbolic sizes are checked later
            return None
        names = self.axes_of_dim(dim)
        sizes = " x ".join(str(self.mesh.axis_size(name)) for name in names)
        product = f"{sizes} = {parts}" if len(names) > 1 else sizes
        below = size // parts * parts
        above = below + parts
        nearest = f"{below} or {above}" if below else above
        fits = [number for number in divisors(self.mesh.size) if size % number == 0]  # only these are possible
        fewer = [number for number in fits if number < parts]
        more = [number for number in fits if number > parts]
        possible = [*fewer[-1:], *more[:1]]
        return (
            f"dim {dim} of size {size} does not divide over {_text(names)} (size {product}): "
            f"{size} % {parts} = {size % parts}; nearest dim sizes that work: {nearest}; "
            f"numbers of parts that work: {' or '.join(map(str, possible))}"
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorLayout):
            return NotImplemented
        return self._axes == other._axes and self._device_mesh == other._device_mesh

    def __hash__(self) -> int:
        return hash(self._axes)  # not the mesh, which can be set later

    def __repr__(self) -> str:
        return f"TensorLayout({self})"

    def __str__(self) -> str:
        entries = [_text(names_of(entry)) for entry in self._axes]
        if len(entries) == 1:
            return f"({entries[0]},)"
        return f"({', '.join(entries)})"


def split_further(
    layout: TensorLayout, shape: tuple[int, ...], mesh: DeviceMesh, axis: str, *, first: int
) -> tuple[TensorLayout, int] | None:
    """Adds an axis to a layout: on the first whole dim that it divides, else on a split dim.

    The first dim, not the largest: shards of a leading dim are contiguous in memory, so gathering needs no transpose.

    Args:
        layout: The layout.
        shape: The global shape of the array.
        mesh: The mesh.
        axis: The axis to add.
        first: The first dim that may be split.

    Returns:
        The new layout and the dim, or None if the axis divides no dim.
    """
    size = mesh.axis_size(axis)
    dims = range(first, len(shape))
    whole_dims = [dim for dim in dims if layout.parts_of_dim(dim) == 1]
    split_dims = [dim for dim in dims if layout.parts_of_dim(dim) > 1]
    for dim in whole_dims + split_dims:
        if shape[dim] % (layout.parts_of_dim(dim) * size) == 0:
            return add_axis(layout, dim, axis, mesh), dim
    return None


def add_axis(layout: TensorLayout, dim: int, axis: str, mesh: DeviceMesh) -> TensorLayout:
    """Splits one dim by one more axis, inside its existing shards."""
    entries = list(layout.axes)
    entries[dim] = make_entry((*layout.axes_of_dim(dim), axis))
    return TensorLayout(entries, mesh)


def without_axes(layout: TensorLayout, axes: Collection[str]) -> TensorLayout:
    """Returns the layout without some axes: what they split is whole."""
    entries: list[AxisEntry] = []
    for dim in range(len(layout.axes)):
        kept = [axis for axis in layout.axes_of_dim(dim) if axis not in axes]
        entries.append(make_entry(kept))
    return TensorLayout(entries, layout.device_mesh)


def _entry(entry: str | Sequence[str] | None, axes: Sequence) -> AxisEntry:
    if entry is None or isinstance(entry, str):
        return entry
    if isinstance(entry, (tuple, list)) and all(isinstance(name, str) for name in entry):
        return make_entry(entry)
    raise UserError(
        f"Invalid entry {entry!r} in layout {axes!r}. Each entry is None (the dim is whole), the name of a mesh axis, "
        "or a tuple of names."
    )


def make_entry(names: Sequence[str]) -> AxisEntry:
    """Returns the entry of a dim that these axes split."""
    if not names:
        return None
    if len(names) == 1:
        return names[0]
    return tuple(names)


def names_of(entry: str | Sequence[str] | None) -> tuple[str, ...]:
    """Returns the axes of an entry."""
    if entry is None:
        return ()
    if isinstance(entry, str):
        return (entry,)
    return tuple(entry)


def _text(names: tuple[str, ...]) -> str:
    if not names:
        return "None"
    if len(names) == 1:
        return names[0]
    return f"({', '.join(names)})"

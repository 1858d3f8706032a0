"""Compares the copies of one array that several devices hold: a flipped bit in one of them is found and named.

A parameter that is not split over a mesh axis is held once by every device along it, and XLA takes for granted that
these copies are equal: whatever reads such an array reads one of them. So each device hashes what lies in its own
memory, and only the hashes travel:

    per device     sums[arrays] = checksum of this device's own part of each array      no communication
    then           all-gather of the sums over the whole mesh: 4 bytes an array and device
    on each host   devices that hold the same part of an array have the same sum, or a copy has changed

Arrays that every device holds a part of its own of (parameters under `fsdp` alone) have no copy to compare with.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

from ...layouts.paths import leaves_with_paths
from ...mesh.compat import Device
from ...mesh.devices import device_name
from ..checkpointing.checksums import checksums
from ..ending.exits import TRY_AGAIN

MOST_TOLD = 4
MOST_NAMED = 6


class ReplicasDiffer(RuntimeError):
    """Devices that should hold copies of the same thing do not; the same command goes on from before."""

    exit_code = TRY_AGAIN


class Difference(NamedTuple):
    """Copies of one part of an array that are not equal.

    Attributes:
        path: Of the array in the state, such as "params/blocks/query".
        odd: The devices whose copy is not that of most, by their number in the mesh; where there is no majority, all
            that hold the part.
        agreeing: The devices whose copies are those of most; none where there is no majority.
    """

    path: str
    odd: tuple[int, ...]
    agreeing: tuple[int, ...]


class ReplicaCheck:
    """Compares the copies in a state of one run."""

    def __init__(self, abstract_state: Any) -> None:
        """Finds what has copies, and compiles nothing yet.

        Args:
            abstract_state: A pytree of arrays or ShapeDtypeStructs with a NamedSharding over one mesh of real devices;
                what is on a single device has no copies.
        """
        leaves = {path: leaf for path, leaf in leaves_with_paths(abstract_state) if _is_on_mesh(leaf)}
        self._mesh: Any = next((leaf.sharding.mesh for leaf in leaves.values()), None)
        self.devices: tuple[Device, ...] = tuple(self._mesh.devices.flat) if self._mesh is not None else ()
        groups = {path: _groups(leaf, self.devices) for path, leaf in leaves.items()}
        self._groups = {path: found for path, found in sorted(groups.items()) if found}
        self._abstract = {path: leaves[path] for path in self._groups}
        self._compiled: jax.stages.Compiled | None = None
        self.bytes_of_state = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves.values())
        self.bytes_compared = sum(leaf.size * leaf.dtype.itemsize for leaf in self._abstract.values())

    @property
    def paths(self) -> tuple[str, ...]:
        """The arrays that have copies, sorted; none where every device holds a part of its own of each."""
        return tuple(self._groups)

    def compile(self) -> jax.stages.Compiled:
        """Compiles the program of `begin`, once; its text shows what crosses devices."""
        if self._compiled is None:
            specs = {path: leaf.sharding.spec for path, leaf in self._abstract.items()}
            axes = tuple(self._mesh.axis_names)

            def own(parts: dict[str, Array]) -> Array:
                return lax.all_gather(checksums(parts), axes)

            program = jax.shard_map(own, mesh=self._mesh, in_specs=(specs,), out_specs=PartitionSpec(), check_vma=False)
            shaped = {
                path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
                for path, leaf in self._abstract.items()
            }
            self._compiled = jax.jit(program).lower(shaped).compile()
        return self._compiled

    def begin(self, state: Any) -> Array:
        """Starts to hash every device's own copies; waits for nothing, so the state may be consumed afterwards.

        Args:
            state: Structured and laid out like `abstract_state`.

        Returns:
            (devices, arrays) uint32, whole on every device.
        """
        leaves = dict(leaves_with_paths(state))
        return self.compile()({path: leaves[path] for path in self._groups})

    def differences(self, sums: Array) -> list[Difference]:
        """Compares what `begin` gave; waits until it is there. Every process finds the same.

        Args:
            sums: (devices, arrays) uint32.
        """
        table = np.asarray(sums.addressable_data(0))
        assert table.shape == (len(self.devices), len(self._groups)), table.shape
        found = []
        for column, (path, groups) in zip(table.T, self._groups.items(), strict=True):
            for members in groups:
                difference = _compare(path, members, column[members])
                found += [difference] if difference else []
        return found

    def check(self, number: int, state: Any) -> None:
        """Compares the copies in a state that is about to be saved; waits for the devices.

        Args:
            number: Steps done.
            state: As for `begin`.

        Raises:
            ReplicasDiffer: Some differ; they are named.
        """
        found = self.differences(self.begin(state)) if self.paths else []
        if found:
            raise ReplicasDiffer(f"{self.describe(number, found)}\nThe state was not saved; earlier checkpoints stay.")

    def describe(self, number: int, found: Sequence[Difference]) -> str:
        """The lines of an error: each array with the devices that differ.

        Args:
            number: Steps done.
            found: What `differences` gave.
        """
        lines = [self._line(each) for each in found[:MOST_TOLD]]
        more = [f"... and {len(found) - MOST_TOLD} more"] if len(found) > MOST_TOLD else []
        begin = f"Step {number}: devices that hold copies of the same array hold other bits:"
        return "\n  ".join([begin, *lines, *more])

    def _line(self, difference: Difference) -> str:
        odd, agreeing = ([self._named(each) for each in numbers] for numbers in (difference.odd, difference.agreeing))
        if not agreeing:
            return f"{difference.path}: {few(odd)} differ from each other; with no majority, any may be at fault"
        return f"{difference.path}: {few(odd)} {'has' if len(odd) == 1 else 'have'} other bits than {few(agreeing)}"

    def _named(self, number: int) -> str:
        device = self.devices[number]
        return f"{device_name(device)} (rank {device.process_index})"


def few(names: Sequence[str]) -> str:
    """The first of some names, and the number of the others."""
    return ", ".join(names[:MOST_NAMED]) + (f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else "")


def _is_on_mesh(leaf: Any) -> bool:
    """Returns whether an array has elements, and a layout on a mesh."""
    return bool(leaf.size) and isinstance(getattr(leaf, "sharding", None), NamedSharding)


def _groups(leaf: Any, devices: Sequence[Device]) -> list[np.ndarray]:
    """The devices that hold the same part of an array, by number in the mesh, for every part that has copies."""
    indices = leaf.sharding.devices_indices_map(tuple(leaf.shape))
    holders: dict[Any, list[int]] = {}
    for number, device in enumerate(devices):
        part = tuple(each.indices(size)[:2] for each, size in zip(indices[device], leaf.shape, strict=True))
        holders.setdefault(part, []).append(number)
    return [np.array(held) for held in holders.values() if len(held) > 1]


def _compare(path: str, members: np.ndarray, sums: np.ndarray) -> Difference | None:
    counted = Counter(sums.tolist()).most_common()
    if len(counted) == 1:
        return None
    (common, most), (_, next_most) = counted[:2]
    agreeing = tuple(members[sums == common].tolist()) if most > next_most else ()
    return Difference(path, tuple(int(each) for each in members if each not in agreeing), agreeing)

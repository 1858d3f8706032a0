"""Compares the replicas of an array that several devices hold: finds a flipped bit, and names the device.

If no mesh axis shards a parameter, every device along that axis holds a replica, and XLA assumes that the replicas are
equal: a reader of such an array reads one of them. So each device hashes its own memory, and only the hashes travel:

    per device     sums[arrays] = checksum of this device's own part of each array      no communication
    then           all-gather of the sums over the whole mesh: 4 bytes an array and device
    on each host   devices that hold the same part of an array have the same sum, or a replica has changed

Arrays without replicas (parameters under `fsdp` alone) cannot be compared.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

from ..layouts.paths import leaves_with_paths, some
from ..layouts.sizes import array_bytes
from ..mesh.compat import Device
from ..mesh.devices import device_name
from ..mesh.errors import TryAgain, UserError, first_lines
from .checksums import checksums

MAX_ARRAYS = 4
MAX_DEVICES = 6
"""Arrays and devices listed in one message."""


class ReplicasDiffer(TryAgain):
    """The replicas of an array differ; the same command continues from the last checkpoint."""


class StartDiffers(UserError):
    """Before the first step, devices hold different values of one array: they would train different models."""


class Difference(NamedTuple):
    """Replicas of one part of an array that are not equal.

    Attributes:
        path: The path of the array in the state, such as "params/blocks/query".
        odd: The devices that differ from the majority, by their number in the mesh; without a majority, all that hold
            the part.
        agreeing: The devices of the majority; () if there is none.
    """

    path: str
    odd: tuple[int, ...]
    agreeing: tuple[int, ...]


class ReplicaCheck:
    """Compares the replicas in the state of one run."""

    def __init__(self, abstract_state: Any) -> None:
        """Finds the arrays with replicas, and compiles nothing yet.

        Args:
            abstract_state: A pytree of arrays or ShapeDtypeStructs with a NamedSharding over one mesh of real devices;
                arrays on a single device have no replicas.
        """
        leaves = {
            path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
            for path, leaf in leaves_with_paths(abstract_state)
            if leaf.size and isinstance(getattr(leaf, "sharding", None), NamedSharding)
        }
        self._mesh: Any = next((leaf.sharding.mesh for leaf in leaves.values()), None)
        self.devices: tuple[Device, ...] = tuple(self._mesh.devices.flat) if self._mesh is not None else ()
        groups = {path: _groups(leaf, self.devices) for path, leaf in leaves.items()}
        self._groups = {path: found for path, found in sorted(groups.items()) if found}
        self._abstract = {path: leaves[path] for path in self._groups}
        self._compiled: jax.stages.Compiled | None = None
        self.bytes_of_state, self.bytes_compared = (
            sum(array_bytes(leaf.shape, leaf.dtype) for leaf in each.values()) for each in (leaves, self._abstract)
        )

    @property
    def paths(self) -> tuple[str, ...]:
        """The arrays that have replicas, sorted."""
        return tuple(self._groups)

    def compile(self) -> jax.stages.Compiled:
        """Compiles the program of `begin`, once; its text shows what crosses devices."""
        if self._compiled is None:
            specs = {path: leaf.sharding.spec for path, leaf in self._abstract.items()}
            axes = tuple(self._mesh.axis_names)

            def own(parts: dict[str, Array]) -> Array:
                return lax.all_gather(checksums(parts), axes)

            program = jax.shard_map(own, mesh=self._mesh, in_specs=(specs,), out_specs=PartitionSpec(), check_vma=False)
            self._compiled = jax.jit(program).lower(self._abstract).compile()
        return self._compiled

    def begin(self, state: Any) -> Array:
        """Starts to hash every device's own replicas without waiting, so the state may be donated afterwards.

        Args:
            state: Arrays structured and laid out like `abstract_state`.

        Returns:
            (devices, arrays) uint32, replicated.
        """
        return self.compile()({path: leaf for path, leaf in leaves_with_paths(state) if path in self._groups})

    def differences(self, sums: Array) -> list[Difference]:
        """Compares the result of `begin`, after waiting for it. Every process finds the same.

        Args:
            sums: (devices, arrays) uint32.
        """
        table = np.asarray(sums.addressable_data(0))
        assert table.shape == (len(self.devices), len(self._groups)), table.shape
        found = []
        for column, (path, groups) in zip(table.T, self._groups.items(), strict=True):
            for members in groups:
                found += _compare(path, members, column[members])
        return found

    def check(self, number: int, state: Any) -> None:
        """Compares the replicas in a state that is about to be saved; waits for the devices.

        Args:
            number: Steps done.
            state: Arrays structured and laid out like `abstract_state`.

        Raises:
            ReplicasDiffer: Some differ; they are named.
        """
        if self.paths and (found := self.differences(self.begin(state))):
            raise ReplicasDiffer(f"{self.describe(number, found)}\nThe state was not saved; earlier checkpoints stay.")

    def check_start(self, state: Any, advice: str) -> None:
        """Compares the replicas of a state before its first step; waits for the devices.

        Args:
            state: Arrays structured and laid out like `abstract_state`.
            advice: The likely cause and its fix, one or more sentences.

        Raises:
            StartDiffers: Some differ; they are named. Every process finds the same.
        """
        found = self.differences(self.begin(state)) if self.paths else []
        if found:
            begin = "Before the first step, devices that hold copies of the same array hold other values:"
            lines = first_lines([self._line(each) for each in found], MAX_ARRAYS)
            raise StartDiffers("\n  ".join([begin, *lines]) + f"\n{advice} Nothing was trained.")

    def describe(self, number: int, found: Sequence[Difference]) -> str:
        """Returns the lines of an error: each array with the devices that differ.

        Args:
            number: Steps done.
            found: The result of `differences`.
        """
        begin = f"Step {number}: devices that hold copies of the same array hold other bits:"
        return "\n  ".join([begin, *first_lines([self._line(each) for each in found], MAX_ARRAYS)])

    def _line(self, difference: Difference) -> str:
        names = [f"{device_name(device)} (rank {device.process_index})" for device in self.devices]
        odd, agreeing = (
            some((names[each] for each in numbers), MAX_DEVICES) for numbers in (difference.odd, difference.agreeing)
        )
        if not agreeing:
            return f"{difference.path}: {odd} differ from each other; with no majority, any may be at fault"
        return f"{difference.path}: {odd} {'has' if len(difference.odd) == 1 else 'have'} other bits than {agreeing}"


def _groups(leaf: Any, devices: Sequence[Device]) -> list[np.ndarray]:
    """Returns the devices that hold the same part of an array, by number in the mesh, for every part with replicas."""
    indices = leaf.sharding.devices_indices_map(tuple(leaf.shape))
    holders: dict[Any, list[int]] = {}
    for number, device in enumerate(devices):
        part = tuple(each.indices(size)[:2] for each, size in zip(indices[device], leaf.shape, strict=True))
        holders.setdefault(part, []).append(number)
    return [np.array(held) for held in holders.values() if len(held) > 1]


def _compare(path: str, members: np.ndarray, sums: np.ndarray) -> list[Difference]:
    counted = Counter(sums.tolist()).most_common()
    if len(counted) == 1:
        return []
    (common, most), (_, next_most) = counted[:2]
    agreeing = tuple(members[sums == common].tolist()) if most > next_most else ()
    return [Difference(path, tuple(int(each) for each in members if each not in agreeing), agreeing)]

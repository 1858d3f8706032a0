"""A checkpoint with low-rank adapters, read as if its model had none: each adapted matrix is W + scale * A B.

    params/blocks/lora/attention/query/a, .../b    beside    params/blocks/attention/query
    params/lora/first/kernel/a, .../b              beside    params/first/kernel

A and B are small and read whole; of W, each part gets the rows of A and the columns of B that it needs. Where the
parameters of a group are no dict, they stand under `base`, which is taken off again (see models/layers/low_rank.py).
"""

from collections.abc import Iterator, Mapping
from functools import cached_property

import numpy as np

from ...models.layers.low_rank import BASE, NAME
from .stored import StoredArray, StoredCheckpoint

PARAMETERS = "params/"
BESIDE = f"/{NAME}/"


class MergedCheckpoint(StoredCheckpoint):
    """The parameters of a checkpoint, its adapters merged into what they adapt as it is read."""

    def __init__(self, stored: StoredCheckpoint, scale: float) -> None:
        """Reads nothing yet.

        Args:
            stored: The checkpoint.
            scale: What the product of A and B is multiplied by: alpha / rank.
        """
        super().__init__(stored.folder)
        self._stored, self._scale = stored, scale
        self._adapters: dict[str, str] = {}  # the path of what is adapted -> that of the folder of its A and B
        self._wrapped: set[str] = set()
        for path in stored.names:
            if path.startswith(PARAMETERS) and path.endswith("/a") and BESIDE in path:
                self._add(path.removesuffix("/a"))

    @cached_property
    def arrays(self) -> Mapping[str, StoredArray]:
        """The parameters of the model without adapters, by its own paths; and its state."""
        return {own: self._stored.arrays[held]._replace(path=own) for own, held in self._held.items()}

    def parts(self, path: str) -> Iterator[tuple[tuple[slice, ...], np.ndarray]]:
        """As of any checkpoint, with the product of the adapters added to what they adapt."""
        held = self._held[path]
        if held not in self._adapters:
            yield from self._stored.parts(held)
            return
        a, b = (self._stored.read(f"{self._adapters[held]}/{name}") for name in ("a", "b"))
        for region, part in self._stored.parts(held):
            *front, rows, columns = region
            product = self._wide(a[(*front, rows)]) @ self._wide(b[(*front, slice(None), columns)])
            yield region, (self._wide(part) + self._scale * product).astype(part.dtype)

    def _add(self, folder: str) -> None:
        group, _, adapted = folder.partition(BESIDE)
        own = f"{group}/{adapted}"
        if own not in self._stored.names:
            own = f"{group}/{BASE}/{adapted}"
            self._wrapped.add(f"{group}/{BASE}/")
        self._adapters[own] = folder

    @cached_property
    def _held(self) -> dict[str, str]:
        """The path in the model without adapters -> that in the checkpoint."""
        return {self._own(path): path for path in self._stored.names if BESIDE not in path}

    def _own(self, path: str) -> str:
        """The path in the model without adapters of what a checkpoint holds under this one."""
        front = next((each for each in self._wrapped if path.startswith(each)), "")
        return f"{front.removesuffix(f'{BASE}/')}{path.removeprefix(front)}" if front else path

    @staticmethod
    def _wide(array: np.ndarray) -> np.ndarray:
        return array if array.dtype == np.float64 else array.astype(np.float32)

"""The blocks of a model as one array, while each block's own array stays where it is."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...mesh.errors import UserError


class Stacked:
    """Arrays of one shape and dtype as if they were stacked along a new dim 0; memory holds what is asked for alone.

    Indexing reads: with a slice, a whole number or an array of whole numbers for dim 0, and NumPy's own indices for the
    others. `np.asarray` reads everything.

    Attributes:
        shape: (number of arrays, *shape of each).
        dtype: That of each.
    """

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        """Takes the arrays, at least one.

        Args:
            arrays: Usually memory maps, or views of them.

        Raises:
            UserError: They differ in shape or dtype; with the first that does.
        """
        self._arrays = list(arrays)
        first = self._arrays[0]
        self.shape = (len(self._arrays), *first.shape)
        self.dtype = first.dtype
        for number, array in enumerate(self._arrays):
            if (array.shape, array.dtype) != (first.shape, first.dtype):
                raise UserError(
                    f"Block {number} is {array.dtype}{list(array.shape)} and block 0 {first.dtype}{list(first.shape)}; "
                    "all blocks are alike."
                )

    @property
    def ndim(self) -> int:
        """Number of dims, the first included."""
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> np.ndarray:
        rows, *rest = index if isinstance(index, tuple) else (index,)
        chosen = np.arange(len(self._arrays))[rows]
        if np.ndim(chosen) == 0:
            return np.asarray(self._arrays[int(chosen)][tuple(rest)])
        parts = [self._arrays[number][tuple(rest)] for number in chosen]
        return np.stack(parts) if parts else np.empty((0, *self._arrays[0][tuple(rest)].shape), self.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("The blocks lie in arrays of their own: they cannot be one array without a copy.")
        return np.asarray(self[:], dtype)

    def __repr__(self) -> str:
        return f"Stacked({self.dtype}{list(self.shape)})"

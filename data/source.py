"""What the rest of the runtime needs to know about data: random access to examples of one shape, in two splits."""

import hashlib
from collections.abc import Iterable
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from ..mesh.errors import UserError

WHOLE_BYTES = 1 << 24


class BadDataError(UserError):
    """The data itself is wrong, found while reading it: trying again cannot help."""

    exit_code = 3


class Source(Protocol):
    """Random access to examples, as `grain.MapDataset.source` takes it."""

    def __len__(self) -> int:
        """Number of examples."""
        ...

    def __getitem__(self, index: int, /) -> dict[str, np.ndarray]:
        """One example: arrays whose shapes and dtypes do not depend on the index, "weights" among them."""
        ...


@runtime_checkable
class BatchedSource(Source, Protocol):
    """A source that reads many examples faster together than one by one."""

    def take(self, indices: np.ndarray, /) -> dict[str, np.ndarray]:
        """The examples at `indices` (int64, (N,)) stacked on a new dim 0."""
        ...


class Splits(NamedTuple):
    """Training and evaluation examples of one source.

    Attributes:
        train: Training examples.
        evaluation: Held-out examples, or None without an evaluation split.
        vocabulary: Number of token ids, or None where examples are not tokens.
        description: One line for people.
        fingerprint: Changes when the data or the way it is cut changes; "" where unknown.
    """

    train: Source
    evaluation: Source | None
    vocabulary: int | None
    description: str
    fingerprint: str = ""


def take(source: Source, indices: np.ndarray) -> dict[str, np.ndarray]:
    """The examples of `source` at `indices`, stacked on dim 0.

    Args:
        source: Any source; one with a `take` of its own is asked once, others example by example.
        indices: int64, (N,), each in [0, len(source)); N >= 1.

    Returns:
        Name -> array of N rows, freshly allocated.
    """
    if isinstance(source, BatchedSource):
        return source.take(indices)
    examples = [source[int(index)] for index in indices]
    return {name: np.stack([example[name] for example in examples]) for name in examples[0]}


def fingerprint(arrays: Iterable[np.ndarray], *facts: object) -> str:
    """A short hash of `facts` and of the arrays: whole where they are small, sampled where they are large.

    Args:
        arrays: Any arrays. Of those over 16 MiB, which may be memory maps on slow storage, just 17 rows are read.
        *facts: Values with a stable `repr`, such as the length of an example.

    Returns:
        16 hexadecimal digits.
    """
    digest = hashlib.blake2b(repr(facts).encode(), digest_size=8)
    for array in arrays:
        digest.update(f"{array.dtype}{array.shape}".encode())
        sampled = [array] if array.nbytes <= WHOLE_BYTES else [array[:: len(array) // 16], array[-1:]]
        for part in sampled:
            digest.update(np.ascontiguousarray(part).data)
    return digest.hexdigest()

"""Where a checkpoint holds the averages of its parameters (`optimizer.ema`), and that checkpoint read as if they were
the parameters."""

from collections.abc import Iterator, Mapping
from functools import cached_property

import numpy as np

from ...training.checkpointing.errors import CheckpointError
from .finding import shown
from .stored import StoredArray, StoredCheckpoint

AVERAGES = "opt_state/average/"
"""What comes before the path of a parameter; see training/optimizing/averaging.py."""


def averages_in(stored: StoredCheckpoint) -> dict[str, str]:
    """Path of a parameter -> path of its average; what was frozen has none.

    Args:
        stored: The checkpoint.

    Raises:
        CheckpointError: It holds no averages.
    """
    found = {path.removeprefix(AVERAGES): path for path in stored.names if path.startswith(AVERAGES)}
    if not found:
        raise CheckpointError(
            f"The checkpoint {shown(stored.folder)} holds no averages of its parameters: its run was trained without "
            "optimizer.ema.decay. Leave --ema (in Python ema=True) out, or train with optimizer.ema={decay: 0.999}."
        )
    return found


class AveragedCheckpoint(StoredCheckpoint):
    """The averages of a checkpoint under the names of its parameters; what was frozen has none, and stays as it is."""

    def __init__(self, stored: StoredCheckpoint) -> None:
        """Reads nothing yet.

        Raises:
            CheckpointError: It holds no averages.
        """
        super().__init__(stored.folder)
        self._held = {f"params/{path}": average for path, average in averages_in(stored).items()}

    @cached_property
    def arrays(self) -> Mapping[str, StoredArray]:
        """As of any checkpoint, each parameter with the dtype of its average."""
        held = super().arrays
        return {path: held[self._held.get(path, path)]._replace(path=path) for path in held}

    def parts(self, path: str) -> Iterator[tuple[tuple[slice, ...], np.ndarray]]:
        """As of any checkpoint, those of the average where there is one."""
        yield from super().parts(self._held.get(path, path))

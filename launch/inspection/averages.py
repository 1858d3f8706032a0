"""Where a checkpoint holds the averages of its parameters (`optimizer.ema`)."""

from ...training.checkpointing.errors import CheckpointError
from .finding import shown
from .stored import StoredCheckpoint

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

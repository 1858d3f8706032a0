"""Which checkpoint the processes of a command load: the one that process 0 takes for the newest.

A run that goes on saves a newer one meanwhile, and a file system of several hosts shows it to each at another time.
What processes load together is one checkpoint all the same.
"""

import time
from itertools import count
from pathlib import Path

import jax

from ...mesh.coordination import told_by_first
from ...training.checkpointing.errors import CheckpointError
from .place import Place

AGREEMENTS = count(1)
"""Numbers what processes agree on: all of them load as often, in the same order."""
SEE_SECONDS = 60.0
"""For a checkpoint to be seen on another host: file systems of networks remember for so long that there was none."""
POLL_SECONDS = 0.2


def agreed_checkpoint(place: Place, seconds: float) -> Path:
    """Gives the folder of the checkpoint to load; every process of the command calls this.

    Args:
        place: Of the run, as this process sees it.
        seconds: How long to wait for process 0.

    Returns:
        The one that was named, or the newest that process 0 sees.

    Raises:
        CheckpointError: There is none, or this process does not see that of process 0.
        ProcessesMissing: Process 0 did not say which.
    """
    if place.found.chosen is not None or jax.process_count() == 1:
        return place.found.one
    steps = place.found.contents.steps
    newest = str(steps[-1]) if steps else ""
    name = told_by_first(f"the checkpoint to load/{next(AGREEMENTS)}", newest, seconds=seconds)
    if not name:
        raise CheckpointError(f"There is no complete checkpoint in {place.found.checkpoints}, as rank 0 sees it.")
    folder = place.found.checkpoints / name
    _wait_to_see(folder)
    return folder


def _wait_to_see(folder: Path) -> None:
    deadline = time.monotonic() + SEE_SECONDS
    while not folder.is_dir():
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"Rank 0 loads the checkpoint {folder}, and rank {jax.process_index()} sees none there. Give a path on "
                "a file system that all hosts mount, under the same name."
            )
        time.sleep(POLL_SECONDS)

"""The newest checkpoint that all processes of a run can read, which they find together."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from ...mesh.coordination import exchange
from .errors import CheckpointError, DamagedCheckpoint
from .reading import Reader


class Restored(NamedTuple):
    """What `restore_newest` found.

    Attributes:
        step: of the checkpoint.
        state: structured like `abstract_state`.
        damaged: newer steps that could not be used, each with the reason.
    """

    step: int
    state: Any
    damaged: dict[int, str]


def restore_newest(
    reader: Reader, directory: Path, steps: Iterable[int], name: str, seconds: float, say: Callable[[str], None]
) -> Restored:
    """Restores the first of some checkpoints that all processes can read; what is damaged is passed over.

    Args:
        reader: Reads one.
        directory: The folder of checkpoints.
        steps: Of the checkpoints, the newest first; at least one.
        name: Of this restore: the same in every process, another for every restore.
        seconds: How long processes wait for each other.
        say: Gets a line for every checkpoint that is passed over.

    Raises:
        CheckpointError: All are damaged, or the arrays of one are not those of this run.
        CheckpointUnavailable: The machine or the file system does not let one be read.
        ProcessesMissing: A process did not come to say what it found.
    """
    damaged: dict[int, str] = {}
    for step in steps:
        folder, arrays, states = directory / str(step), {}, []

        def read(folder: Path = folder, arrays: dict[str, Any] = arrays) -> None:
            arrays.update(reader.arrays(folder))

        def compare(folder: Path = folder, arrays: dict[str, Any] = arrays, states: list[Any] = states) -> None:
            states.append(reader.checked_state(folder, arrays))

        # Checksums are computed by all processes together: only where each of them has read its part.
        of = f"{step} of {name}"
        damage = _damage(read, f"read {of}", seconds, say) or _damage(compare, f"compare {of}", seconds, say)
        if not damage:
            return Restored(step, states[0], damaged)
        damaged[step] = damage
        say(f"{damage} Going back to the checkpoint before it.")
    raise CheckpointError(
        f"No checkpoint in {directory} can be used:\n  "
        + "\n  ".join(damaged.values())
        + "\nPut one of them back from a copy, or start anew with --fresh, which moves this run aside."
    )


def _damage(action: Callable[[], None], name: str, seconds: float, say: Callable[[str], None]) -> str:
    """Does something that may find a checkpoint damaged, as all processes do; gives what the first finds, or ""."""
    found = ""
    try:
        action()
    except DamagedCheckpoint as error:
        found = str(error)
    return next((each for each in exchange(name, found, seconds=seconds, say=say) if each), "")

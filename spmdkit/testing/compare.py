"""Whether two runs are the same: every loss, and every bit of every array of their newest checkpoint.

Arrays are read from the files, onto no device, whatever mesh wrote them.
"""

# pyright: reportMissingImports=false

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from .damage import newest

TIMED = ("seconds", "tokens_per_second", "rows_per_second", "flops_per_second")
"""What the clock says."""
MOST_TOLD = 5


def losses_of(folder: Path | str) -> dict[int, dict[str, Any]]:
    """The metrics of a run by step, without what the clock says.

    Args:
        folder: `run.dir`.
    """
    lines = (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return {
        record["step"]: {key: value for key, value in record.items() if key not in TIMED and _is_plain(value)}
        for record in records
    }


def arrays_of(folder: Path | str, step: int | None = None) -> dict[str, np.ndarray]:
    """The arrays of a checkpoint by path, each whole, without the checksums.

    Args:
        folder: `run.dir`.
        step: Which; None for the newest.
    """
    import jax
    import orbax.checkpoint as ocp

    checkpoints = Path(folder).absolute() / "checkpoints"
    found = newest(checkpoints) if step is None else checkpoints / str(step)
    assert found is not None, f"{checkpoints} holds no complete checkpoint"
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler(state=ocp.PyTreeCheckpointHandler())) as reader:
        tree = reader.metadata(found).item_metadata["state"].tree
        as_numpy = jax.tree.map(lambda leaf: ocp.RestoreArgs(restore_type=np.ndarray), dict(tree))
        wanted = ocp.args.PyTreeRestore(restore_args=as_numpy)
        arrays = reader.restore(found, args=ocp.args.Composite(state=wanted))["state"]
    return {path: np.asarray(array) for path, array in arrays.items() if path != "checksums"}


def same_run(folder: Path | str, expected: Path | str) -> list[str]:
    """Compares what two runs have left.

    Args:
        folder: `run.dir` of one.
        expected: `run.dir` of the other.

    Returns:
        What differs, in lines for people; empty where they are the same, bit for bit.
    """
    found, wanted = losses_of(folder), losses_of(expected)
    problems = [f"steps logged: {_span(found)} and {_span(wanted)}"] if found.keys() != wanted.keys() else []
    other = [step for step in sorted(found.keys() & wanted.keys()) if not _same(found[step], wanted[step])]
    if other:
        first = other[0]
        problems.append(f"metrics of {len(other)} steps, first {first}: {found[first]} and {wanted[first]}")
    return problems + _array_problems(arrays_of(folder), arrays_of(expected))


def _array_problems(arrays: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> list[str]:
    problems = [f"{path}: in one of them only" for path in sorted(arrays.keys() ^ expected.keys())]
    for path in sorted(arrays.keys() & expected.keys()):
        one, other = arrays[path], expected[path]
        if one.dtype != other.dtype or one.shape != other.shape or one.tobytes() != other.tobytes():
            problems.append(f"{path}: other bits")
    more = len(problems) - MOST_TOLD
    return problems if more <= 0 else [*problems[:MOST_TOLD], f"and {more} more arrays"]


def _is_plain(value: Any) -> bool:
    return isinstance(value, int | float) or value is None


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        value == other[key] or (_is_nan(value) and _is_nan(other[key])) for key, value in one.items()
    )


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _span(records: dict[int, Any]) -> str:
    return f"{len(records)} from {min(records)} to {max(records)}" if records else "none"

"""The largest value of every whole number in a config: arithmetic below it holds, and no sane run needs more."""

from math import inf
from typing import NamedTuple


class AtLeast(NamedTuple):
    """The smallest value a number may have, written as `Annotated[int, AtLeast(1)]`."""

    minimum: float


INDEX = 2**31 - 1
"""Devices count steps, rows and indices in 32 bits."""
BYTES = 2**63 - 1
"""Bytes are counted in 64 bits."""
DEVICES = 2**20
"""Devices along one axis."""

LARGEST = {
    "run.seed": inf,  # its own check says why it is less
    "run.simulate": 4096,
    "data.prefetch": 1024,
    "data.threads": 1024,
    "layouts.unmatched_floor": BYTES,
    "strategy.data.floor_bytes": BYTES,
    "strategy.fsdp.floor_bytes": BYTES,
    "strategy.pipe.size": 4096,
    "strategy.pipe.microbatches": 4096,
    "strategy.pipe.virtual": 1024,
    "strategy.pipe.layers": 2**16,
    "model.layers": 2**16,
    "model.width": 2**24,
    "model.heads": 2**16,
    "model.kv_heads": 2**16,
    "model.head_width": 2**16,
    "model.mlp_width": 2**24,
    "model.experts": 2**16,
    "model.top_k": 2**16,
    "model.widths": 2**24,
    "model.features": 2**24,
    "model.scan_unroll": 2**16,
    "sample.length": 10**6,
    "launch.nodes": 2**16,
    "launch.processes_per_node": 256,
    "launch.gpus_per_process": 64,
    "launch.cpus_per_process": 4096,
    "launch.slurm.warn_seconds": 65535,
    "launch.slurm.restarts": 10**6,
    "timeouts.rendezvous": 7 * 86400,
    "timeouts.heartbeat": 7 * 86400,
    "timeouts.shutdown": 7 * 86400,
}
"""Dotted key -> largest value, where that is not `INDEX`."""
LARGEST_NUMBER = 3.4e38
"""The largest number of float32, in which parameters and rates are computed."""
SMALLEST_NUMBER = 1.18e-38
"""The smallest number over 0 of float32 that devices do not round to 0."""


def largest(path: str) -> float:
    """Returns the largest whole number that a key may have.

    Args:
        path: Dotted key.
    """
    if path.startswith("strategy.") and path.endswith(".size"):
        return LARGEST.get(path, DEVICES)
    return LARGEST.get(path, INDEX)

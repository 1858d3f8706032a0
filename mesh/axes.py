"""The six mesh axes of a mesh made by hand, slowest network first; an axis of size 1 costs nothing.

A run's own mesh has the axes of `parallel.STRATEGIES`, which is these and those of any strategy that was added.
"""

AXES: tuple[str, ...] = ("pipe", "data", "fsdp", "expert", "context", "tensor")
"""Canonical axis names. Neighbours along the last ones sit on the fastest links."""

SYNONYMS: dict[str, str] = {
    **dict.fromkeys(("dp", "ddp", "data_parallel", "replicate", "replica"), "data"),
    **dict.fromkeys(("zero3", "zero_3", "zero-3", "sharded", "shard", "fully_sharded", "fsdp2", "hsdp"), "fsdp"),
    **dict.fromkeys(("tp", "mp", "model", "model_parallel", "tensor_parallel"), "tensor"),
    **dict.fromkeys(("pp", "pipeline", "stage", "stages", "pipeline_parallel"), "pipe"),
    **dict.fromkeys(
        ("cp", "sp", "seq", "sequence", "ring", "ulysses", "context_parallel", "sequence_parallel"), "context"
    ),
    **dict.fromkeys(("ep", "moe", "experts", "expert_parallel"), "expert"),
}
"""What other libraries call the axes, in small letters -> the axis; for errors about an unknown one."""

"""The six mesh axes every run has, slowest network first; an axis of size 1 costs nothing."""

AXES: tuple[str, ...] = ("pipe", "data", "fsdp", "expert", "context", "tensor")
"""Canonical axis names. Neighbours along the last ones sit on the fastest links."""

BATCH_AXES: tuple[str, ...] = ("data", "fsdp")
"""The axes over which the rows of a batch are split."""

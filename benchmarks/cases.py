"""What is compared: for each case the model, our strategies, and the hand-written steps of the same mesh.

All contestants of a case agree in model, optimizer and loop over blocks; what backward computes again differs in
pipelines alone, where time is traded for memory.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import handwritten
import handwritten_pipeline
import handwritten_tensor
from spmdkit.models.transformer import TransformerConfig
from spmdkit.parallel import FSDPConfig
from spmdkit.parallel.pipeline import PipelineConfig

QUICKSTART = TransformerConfig(vocabulary=256, length=256, layers=5, kv_heads=2, tied=True)
DIVISIBLE = replace(QUICKSTART, layers=4, kv_heads=0)
"""Its layers are dealt out to 4 stages, its heads to 4 devices."""
ROWS = 32
SMALL = {"length": 32}
SMALL_ROWS = 16
MICROBATCHES = 8


class Setting(NamedTuple):
    """One way to train with the runtime: the strategy, and what blocks keep for backward."""

    strategy: dict[str, Any]
    remat: str = "none"


class Case(NamedTuple):
    """One comparison.

    Attributes:
        config: The transformer.
        ours: Settings by name.
        theirs: Hand-written steps by name: `make(config, optimizer, **sizes)`.
        sizes: The mesh of the hand-written steps.
    """

    config: TransformerConfig
    ours: dict[str, Setting]
    theirs: dict[str, Callable[..., handwritten.HandWritten]]
    sizes: dict[str, int]


def _sharded(data: int, fsdp: int) -> Case:
    theirs = {"jit": handwritten.by_jit, "shard_map": handwritten.by_shard_map}
    sizes = {"data": data, "fsdp": fsdp}
    return Case(QUICKSTART, {"ours": Setting({"data": data, "fsdp": FSDPConfig(size=fsdp)})}, theirs, sizes)


def _tensor(**sizes: int) -> Case:
    theirs = {"jit": handwritten_tensor.by_jit, "shard_map": handwritten_tensor.by_shard_map}
    return Case(DIVISIBLE, {"ours": Setting(dict(sizes))}, theirs, sizes)


def _pipeline(**sizes: int) -> Case:
    """What we keep for backward and what we recompute, against GPipe in its three forms."""
    options = {"size": sizes["pipe"], "microbatches": MICROBATCHES}

    def ours(remat: str = "none", **more: Any) -> Setting:
        return Setting({**sizes, "pipe": PipelineConfig(**options, **more)}, remat)

    settings = {
        "1f1b": ours(schedule="1f1b"),
        "zb_h1": ours(schedule="zb_h1"),
        "1f1b_recompute": ours(schedule="1f1b", recompute=True),
        "1f1b_remat_full": ours("full", schedule="1f1b"),
    }
    theirs = {name: getattr(handwritten_pipeline, name) for name in ("gpipe", "gpipe_skip", "gpipe_checkpoint")}
    return Case(DIVISIBLE, settings, theirs, sizes)


CASES = {
    "data 8": _sharded(8, 1),
    "fsdp 8": _sharded(1, 8),
    "data 2 x fsdp 4": _sharded(2, 4),
    "tensor 4 x data 2": _tensor(data=2, tensor=4),
    "fsdp 2 x tensor 4": _tensor(fsdp=2, tensor=4),
    "pipe 4 x data 2": _pipeline(pipe=4, data=2),
}

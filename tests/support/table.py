"""The rows of the equivalence table: every strategy at every size, and every product of two and of three axes."""

import itertools
from typing import NamedTuple

from spmdkit.parallel import FSDPConfig
from spmdkit.parallel.context import ContextConfig
from spmdkit.parallel.data import DataParallelConfig
from spmdkit.parallel.pipeline import PipelineConfig
from spmdkit.parallel.tensor import TensorConfig

AXES = ("pipe", "data", "fsdp", "expert", "context", "tensor")
FLOOR = 256
MICROBATCHES = 8


class Training(NamedTuple):
    """What rows have in common that are compared with one training on one device."""

    kind: str
    layers: int
    dropout: float
    seed: int
    train: str


class Row(NamedTuple):
    """One row: the strategy, and with which model and options it trains.

    Attributes:
        train: "all" parameters, "part" of those of blocks, or "lora": adapters of all matrices of blocks.
        branches: The "own" ones of simulated devices, those of "gpus", or those of "hosts" with a GPU each.
    """

    name: str
    kind: str
    strategy: dict
    accumulate: int = 1
    remat: str = "none"
    dropout: float = 0.0
    seed: int = 0
    train: str = "all"
    branches: str = "own"

    @property
    def layers(self):
        """Blocks of the model: 4, or 5 that fill no stages evenly, or 8, which fill 8 stages or twice 4."""
        if self.kind in ("uneven", "moe"):
            return {"uneven": 5, "moe": 4}[self.kind]
        stages = getattr(self.strategy.get("pipe"), "size", 1)
        return 8 if stages > 2 else 4

    @property
    def training(self):
        """What trains, on any mesh."""
        return Training(self.kind, self.layers, self.dropout, self.seed, self.train)


def options(axis, size):
    """An axis as the table runs it; the floor is low enough for tiny parameters to be split."""
    given = {
        "pipe": PipelineConfig(size=size, microbatches=min(2 * size, MICROBATCHES)),
        "data": DataParallelConfig(size=size),
        "fsdp": FSDPConfig(size=size, floor_bytes=FLOOR),
    }
    return given.get(axis, size)


def product(kind, **sizes):
    """A row for a product of axes."""
    name = "-".join(f"{axis}{size}" for axis, size in sizes.items())
    return Row(f"{kind}-{name}", kind, {axis: options(axis, size) for axis, size in sizes.items()})


def products():
    """Every strategy at 2, 4 and 8; every product of two axes and of three that fits in 8 devices."""
    for count, sizes in ((1, (2, 4, 8)), (2, (2, 4)), (3, (2,))):
        for axes in itertools.combinations(AXES, count):
            for each in itertools.product(sizes, repeat=count):
                if count == 1 or each in ((2, 2), (2, 4), (4, 2), (2, 2, 2)):
                    yield product("moe" if "expert" in axes else "transformer", **dict(zip(axes, each, strict=True)))


def special():
    """What an option changes about a strategy."""
    zero = {stage: DataParallelConfig(size=4, zero=stage, floor_bytes=FLOOR) for stage in (1, 2)}
    beside = {stage: DataParallelConfig(size=2, zero=stage, floor_bytes=FLOOR) for stage in (1, 2)}
    fsdp = {"fsdp": FSDPConfig(size=2, floor_bytes=FLOOR)}
    for stage in (1, 2):
        yield Row(f"zero{stage}-size2", "transformer", {"data": beside[stage]})
        yield Row(f"zero{stage}-size4-accumulate", "transformer", {"data": zero[stage]}, accumulate=2)
        yield Row(
            f"zero{stage}-size8", "transformer", {"data": DataParallelConfig(size=8, zero=stage, floor_bytes=FLOOR)}
        )
        yield Row(f"zero{stage}-fsdp-tensor", "transformer", {"data": beside[stage], **fsdp, "tensor": 2})
        yield Row(f"zero{stage}-mlp", "mlp", {"data": zero[stage]})
    overlapped = {size: DataParallelConfig(size=size, reduce="overlapped") for size in (2, 4)}
    shards = {"fsdp": FSDPConfig(size=4, floor_bytes=FLOOR)}
    yield Row("overlapped", "transformer", {"data": overlapped[4]}, dropout=0.1)
    yield Row("overlapped-fsdp-full", "transformer", {"data": overlapped[2], **shards}, remat="full", dropout=0.1)
    yield Row("overlapped-fsdp-tensor-dots", "transformer", {"data": overlapped[2], **fsdp, "tensor": 2}, remat="dots")
    yield Row("overlapped-ring", "transformer", {"data": overlapped[2], "context": 4})
    yield Row("overlapped-accumulate", "transformer", {"data": overlapped[2], **fsdp}, accumulate=2)
    keep, ahead = (FSDPConfig(size=4, floor_bytes=FLOOR, **each) for each in ({"keep": "step"}, {"prefetch": 1}))
    yield Row("fsdp-keep-step", "transformer", {"fsdp": keep}, accumulate=2)
    yield Row("fsdp-prefetch", "transformer", {"fsdp": ahead, "tensor": 2}, accumulate=2)
    yield Row("fsdp-prefetch-full", "transformer", {"fsdp": ahead}, remat="full", dropout=0.1)
    ahead = FSDPConfig(size=2, floor_bytes=FLOOR, prefetch=1)
    yield Row("fsdp-prefetch-ring", "transformer", {"fsdp": ahead, "context": 4})
    yield Row("fsdp-prefetch-ring-full", "transformer", {"fsdp": ahead, "context": 4}, remat="full", dropout=0.1)
    yield Row("fsdp-ring-full", "transformer", {**fsdp, "context": 4}, remat="full")
    yield Row("ring-full", "transformer", {"context": 4}, remat="full")
    yield Row("tensor-ring", "transformer", {"tensor": TensorConfig(size=4, collective_matmul=True)})
    yield Row("tensor-tied-full", "tied", {"tensor": 2, **fsdp}, remat="full")
    for kind in ("qwen", "gpt"):
        yield product(kind, tensor=2, context=2)
        yield product(kind, pipe=2, fsdp=2, tensor=2)
    yield product("qwen", tensor=4)  # a key-value head serves two devices
    yield Row("gpt-context-all-to-all-fsdp", "gpt", {"context": ContextConfig(size=2, attention="all_to_all"), **fsdp})
    all_to_all = ContextConfig(size=2, attention="all_to_all")
    yield Row("context-all-to-all", "transformer", {"context": all_to_all, "tensor": 2}, dropout=0.1)
    yield Row("fsdp-tensor-selective", "transformer", {**fsdp, "tensor": 2}, remat="selective", dropout=0.1)
    yield Row("fsdp-tensor-local", "transformer", {**fsdp, "tensor": 2}, remat="local", dropout=0.1)
    yield Row("context-dots-dropout", "transformer", {"context": 2, **fsdp}, remat="dots", dropout=0.1)
    for kind in ("mlp",):
        for data, size in ((1, 2), (2, 1), (2, 4), (4, 2), (1, 8), (8, 1)):
            yield product(kind, **{axis: n for axis, n in (("data", data), ("fsdp", size)) if n > 1})
    for axis in ("data", "fsdp", "context", "tensor", "pipe"):
        yield product("moe", **{axis: 2})


def pipelines():
    """Every schedule, even and uneven, with and without recomputation, and beside other strategies."""
    for schedule in ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zbv"):
        for size in (2, 4):
            pipe = PipelineConfig(size=size, schedule=schedule, microbatches=MICROBATCHES)
            yield Row(f"{schedule}-{size}", "transformer", {"pipe": pipe})
        pipe = PipelineConfig(size=2, schedule=schedule, microbatches=MICROBATCHES, recompute=True)
        yield Row(f"{schedule}-recompute", "tied", {"pipe": pipe}, dropout=0.1)
        pipe = PipelineConfig(size=2, schedule=schedule, microbatches=4)
        yield Row(f"{schedule}-fsdp-tensor", "transformer", {"pipe": pipe, **{"fsdp": options("fsdp", 2), "tensor": 2}})
    single = PipelineConfig(size=4, schedule="interleaved_1f1b", microbatches=MICROBATCHES, recompute=True)
    # Of the masks of seed 0, one gradient is so near zero that one device in float32 is 3e-5 off.
    yield Row("recompute-single-tensor", "transformer", {"pipe": single, "tensor": 2}, dropout=0.1, seed=2)
    yield Row("recompute-single-full", "transformer", {"pipe": single, "tensor": 2}, remat="full")
    yield Row("recompute-single-dots", "transformer", {"pipe": single, "context": 2}, remat="dots")
    single = PipelineConfig(size=4, schedule="1f1b", microbatches=4, recompute=True)
    yield Row("recompute-single-moe-dots", "moe", {"pipe": single, "expert": 2}, remat="dots")
    yield Row("recompute-single-moe", "moe", {"pipe": single, "expert": 2})
    yield Row("recompute-single-fsdp", "moe", {"pipe": single, "fsdp": options("fsdp", 2)})
    yield Row("recompute-single-local", "transformer", {"pipe": single, "tensor": 2}, remat="local")
    yield Row(
        "pipe-full", "transformer", {"pipe": options("pipe", 2), "tensor": 2, "fsdp": options("fsdp", 2)}, remat="full"
    )
    yield Row("pipe-dots", "transformer", {"pipe": options("pipe", 2), "context": 2}, remat="dots", dropout=0.1)
    kept = FSDPConfig(size=2, floor_bytes=FLOOR, keep="step")
    yield Row("pipe-keep-step", "transformer", {"pipe": options("pipe", 4), "fsdp": kept})
    each = PipelineConfig(size=2, microbatches=4, scatter="microbatch")
    yield Row("pipe-scatter-microbatch", "transformer", {"pipe": each, "fsdp": options("fsdp", 2), "tensor": 2})
    ring = TensorConfig(size=2, collective_matmul=True)
    yield Row(
        "pipe-tensor-ring", "transformer", {"pipe": options("pipe", 2), "tensor": ring, "fsdp": options("fsdp", 2)}
    )
    yield Row("pipe-uneven", "uneven", {"pipe": options("pipe", 2), "fsdp": options("fsdp", 2)}, dropout=0.1)
    yield Row(
        "pipe-accumulate", "transformer", {"pipe": PipelineConfig(size=2, microbatches=4), "data": 2}, accumulate=2
    )


REMATS = ("none", "dots", "selective", "local", "full")
TRAIN = ("all", "part", "lora")
RING = TensorConfig(size=2, collective_matmul=True)
PRODUCTS_OF_GPUS = {
    "data-tensor": ("transformer", {"data": 2, "tensor": RING}),
    "expert-tensor": ("moe", {"expert": 2, "tensor": RING}),
    "data-context": ("gpt", {"data": 2, "context": 2}),
}


def of_gpus():
    """The branches of GPUs: each product with each remat policy, each `keep`, and what trains in turn."""
    turns = itertools.cycle(TRAIN)
    for name, (kind, strategy) in PRODUCTS_OF_GPUS.items():
        for remat, keep in itertools.product(REMATS, ("block", "step")):
            # Only with these two, the first and the last block run outside the loop.
            separates_ends = remat == "full" and keep == "block"
            fsdp = FSDPConfig(size=2, floor_bytes=FLOOR, keep=keep)
            for train in TRAIN if separates_ends else (next(turns),):
                yield Row(
                    f"gpus-{name}-{remat}-{keep}-{train}",
                    kind,
                    {**strategy, "fsdp": fsdp},
                    remat=remat,
                    train=train,
                    branches="gpus",
                )
        next(turns)
    fsdp = {"fsdp": options("fsdp", 2)}
    more = {"remat": "full", "branches": "gpus"}
    yield Row("gpus-accumulate", "transformer", {**fsdp, "tensor": 2}, accumulate=2, dropout=0.1, **more)
    yield Row("gpus-accumulate-lora", "moe", {**fsdp, "expert": 2}, accumulate=2, train="lora", **more)
    all_to_all = ContextConfig(size=2, attention="all_to_all")
    yield Row("gpus-all-to-all", "transformer", {**fsdp, "context": all_to_all}, train="part", **more)
    zero = DataParallelConfig(size=2, zero=1, floor_bytes=FLOOR)
    yield Row("gpus-zero", "transformer", {"data": zero, **fsdp}, train="part", **more)
    ahead = {"fsdp": FSDPConfig(size=2, floor_bytes=FLOOR, prefetch=1), "tensor": RING}
    yield Row("gpus-prefetch", "transformer", ahead, train="part", **more)
    whole = {"data": DataParallelConfig(size=2, zero=2, floor_bytes=FLOOR), "expert": 2}
    yield Row("gpus-zero2-local", "moe", whole, remat="local", train="part", branches="gpus")


def pipelines_of_gpus():
    """The conditionals and the messages of GPUs: every schedule, and what trains in turn."""
    turns = itertools.cycle(TRAIN)
    for schedule in ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zbv"):
        pipe = PipelineConfig(size=2, schedule=schedule, microbatches=4)
        strategy = {"pipe": pipe, "fsdp": options("fsdp", 2), "tensor": 2}
        train = next(turns)
        yield Row(f"gpus-{schedule}-{train}", "transformer", strategy, train=train, branches="gpus")
    ring = {"pipe": options("pipe", 2), "context": 2}
    yield Row("gpus-pipe-ring-local", "transformer", ring, remat="local", train="part", branches="gpus")
    again = PipelineConfig(size=2, microbatches=4, recompute=True)
    yield Row("gpus-pipe-recompute", "moe", {"pipe": again, "expert": 2}, train="lora", branches="gpus")
    yield Row("gpus-pipe-uneven", "uneven", {"pipe": options("pipe", 2)}, dropout=0.1, branches="gpus")


def between_hosts():
    """Gradients that are exchanged in float32 and summed in float64, where each device is in another host."""
    turns = itertools.cycle(TRAIN)
    for remat, keep in itertools.product(("none", "local", "full"), ("block", "step")):
        fsdp = FSDPConfig(size=4, floor_bytes=FLOOR, keep=keep)
        train = next(turns)
        strategy = {"fsdp": fsdp, "tensor": 2}
        yield Row(f"hosts-{remat}-{keep}-{train}", "transformer", strategy, remat=remat, train=train, branches="hosts")


ROWS_OF_GPUS = sorted([*of_gpus(), *pipelines_of_gpus(), *between_hosts()], key=lambda row: row.training)
"""Rows that take the branches that simulated devices take only in tests; see `platform.branches_of_gpus`."""
ROWS = sorted([*products(), *special(), *pipelines()], key=lambda row: row.training)
"""Those that are compared with one training on one device follow one another, so that one worker of pytest makes it."""

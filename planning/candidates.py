"""Candidates of a search: every mesh, schedule, number of microbatches and rematerialization that a model allows."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd, prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..configs.schema import Config
from ..data.splits import open_splits
from ..layouts.paths import in_blocks
from ..mesh.axes import divisors
from ..mesh.devices import list_devices
from ..mesh.targets import Target
from ..models.catalog import MODELS, transformer_of
from ..models.moe import MoEConfig
from ..models.transformer_config import TransformerConfig
from ..parallel.model import BlockModel
from ..parallel.sharding.strategies import read_strategy
from ..runtime.build_run import configured_model, data_facts, plan_step
from .own_model import AXES, OwnModel

SCHEDULES = (("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 4), ("zb_h1", 1), ("zbv", 2))
"""Names and chunks per stage. GPipe takes as long as 1F1B and holds more, so it is left out."""
POLICIES = ("none", "dots", "selective", "local", "full")
MAX_MICROBATCHES = 256
ONE_DEVICE = "h100:1x1"
"""A device to lay the model out on, for the state without a mesh; which one does not matter."""


class ModelSizes(NamedTuple):
    """Facts about a model that the estimate of a step needs.

    Attributes:
        sizes: The options of the transformer; None for another model, whose work only rows can split.
        length: Positions of a row; 1 for a model without rows of tokens.
        layers: Blocks; 1 for a model without blocks.
        block_parameters: Parameters of one block outside its experts.
        expert_parameters: Parameters of all experts of one block.
        outer_parameters: Parameters outside the blocks.
        bytes_per_parameter: Bytes of one stored parameter.
        optimizer_ratio: Bytes of the optimizer's state per byte of the parameters.
        own: The work and the memory of a model that is not a transformer; None for a transformer.
    """

    sizes: TransformerConfig | None
    length: int
    layers: int
    block_parameters: float
    expert_parameters: float
    outer_parameters: float
    bytes_per_parameter: int
    optimizer_ratio: float
    own: OwnModel | None


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to run a config.

    Attributes:
        mesh: Axis of `AXES` -> size, for sizes above 1.
        accumulate: `train.accumulate`.
        remat: `train.remat`.
        keep: `strategy.fsdp.keep`.
        zero: `strategy.data.zero`.
        schedule: The schedule of the pipeline; "" without one.
        virtual: Chunks of each stage.
        microbatches: Microbatches of the pipeline.
        recompute: `strategy.pipe.recompute`.
    """

    mesh: tuple[tuple[str, int], ...]
    accumulate: int = 1
    remat: str = "none"
    keep: str = "block"
    zero: int = 0
    schedule: str = ""
    virtual: int = 1
    microbatches: int = 1
    recompute: bool = False

    def size(self, axis: str) -> int:
        """Returns the size of an axis of the mesh."""
        return dict(self.mesh).get(axis, 1)

    @property
    def strategy(self) -> dict[str, dict[str, Any]]:
        """The section `strategy`, with the options that differ from their defaults."""
        options: dict[str, dict[str, Any]] = {axis: {"size": size} for axis, size in self.mesh}
        if self.schedule:
            options["pipe"] |= {"schedule": self.schedule, "microbatches": self.microbatches}
            options["pipe"] |= {"virtual": self.virtual} if self.virtual > 1 else {}
            options["pipe"] |= {"recompute": True} if self.recompute else {}
        if self.keep != "block":
            options["fsdp"]["keep"] = self.keep
        if self.zero:
            options["data"]["zero"] = self.zero
        return options

    def configure(self, config: Config) -> Config:
        """Returns a config with this strategy, accumulation and rematerialization."""
        strategy = self.strategy or {"data": {"size": 1}}
        train = replace(config.train, accumulate=self.accumulate, remat=self.remat)
        return replace(config, strategy=read_strategy(strategy), train=train)

    def __str__(self) -> str:
        parts = [" x ".join(f"{axis} {size}" for axis, size in self.mesh) or "one device"]
        if self.schedule:
            chunks = f" x {self.virtual}" if self.virtual > 1 else ""
            parts.append(f"{self.schedule}{chunks} of {self.microbatches}")
        parts += [f"accumulate {self.accumulate}"] if self.accumulate > 1 else []
        parts += [f"remat {self.remat}"] if self.remat != "none" else []
        parts += ["recompute"] if self.recompute else []
        parts += ["keep step"] if self.keep != "block" else []
        parts += [f"zero {self.zero}"] if self.zero else []
        return ", ".join(parts)


def model_sizes(config: Config, devices: int = 1) -> ModelSizes:
    """Returns the facts about the model of a config.

    Args:
        config: The run's configuration; its strategy does not matter.
        devices: The devices of the target.

    Raises:
        UserError: The model or its data is invalid.
    """
    folders = config.run.search_path
    splits = open_splits(config.data, folders)
    model = configured_model(config, splits)
    alone = replace(config, strategy=read_strategy({"data": 1}), train=replace(config.train, accumulate=1))
    layouts, step = plan_step(alone, model, list_devices(target=ONE_DEVICE))
    sizes = _transformer_sizes(config.model, data_facts(splits, config.data.length), folders)
    layers = model.num_blocks if isinstance(model, BlockModel) else 1
    counts = {row.path: prod(row.shape) for row in layouts.table.rows}
    blocks = sum(count for path, count in counts.items() if in_blocks(path) and isinstance(model, BlockModel))
    experts = 3 * sizes.experts * sizes.width * sizes.mlp_size if isinstance(sizes, MoEConfig) else 0
    return ModelSizes(
        sizes=sizes,
        length=sizes.length if sizes else 1,
        layers=layers,
        block_parameters=blocks / layers - experts,
        expert_parameters=experts,
        outer_parameters=sum(counts.values()) - blocks,
        bytes_per_parameter=np.dtype(config.precision.params).itemsize,
        optimizer_ratio=step.optimizer_table.bytes_per_device / layouts.table.bytes_per_device,
        own=None if sizes else OwnModel(config, model, splits, devices),
    )


def _transformer_sizes(
    model: Mapping[str, Any], facts: dict[str, int], folders: Sequence[Path]
) -> TransformerConfig | None:
    """Returns the options of a transformer, with the sizes of the data; None for another model."""
    name = model["name"]
    if "lora" in model or name not in ("transformer", "moe", "hugging_face"):
        return None
    if name != "moe":
        return transformer_of(model, facts, folders)[0]
    options = {key: value for key, value in model.items() if key not in ("name", "check")}
    sizes = {fact: options.get(fact) or facts.get(fact, 0) for fact in ("vocabulary", "length")}
    return MODELS[name][0](**{**options, **sizes})


def enumerate_candidates(model: ModelSizes, target: Target, global_batch: int) -> Iterator[Candidate]:
    """Yields every candidate that the sizes of the model, the batch and the target allow.

    Args:
        model: Facts about the model.
        target: The accelerators.
        global_batch: Rows of a step.
    """
    axes = AXES if model.sizes else ("data", "fsdp")
    for sizes in _factorizations(target.size, len(axes)):
        mesh = {axis: size for axis, size in zip(axes, sizes, strict=True) if size > 1}
        parts = prod(mesh.get(axis, 1) for axis in ("data", "fsdp", "expert"))
        if global_batch % parts == 0 and _model_allows(model, target, mesh):
            yield from _variants(mesh, model, global_batch // parts)


def _factorizations(number: int, count: int) -> Iterator[tuple[int, ...]]:
    if count == 1:
        yield (number,)
        return
    for first in divisors(number):
        for rest in _factorizations(number // first, count - 1):
            yield (first, *rest)


def _model_allows(model: ModelSizes, target: Target, mesh: dict[str, int]) -> bool:
    """Returns True if the axes divide the sizes of the model; `tensor` stays inside a host."""
    sizes = model.sizes
    if sizes is None:
        return True
    pipe, context, tensor, expert = (mesh.get(axis, 1) for axis in ("pipe", "context", "tensor", "expert"))
    chunks = 2 * context if context > 1 else 1
    return (
        pipe <= model.layers
        and tensor <= target.gpus
        and gcd(tensor, sizes.heads, sizes.mlp_size, sizes.vocabulary) == tensor
        and sizes.length % (chunks * tensor) == 0
        and (expert == 1 or getattr(sizes, "experts", 0) % expert == 0 < getattr(sizes, "experts", 0))
    )


def _variants(mesh: dict[str, int], model: ModelSizes, rows: int) -> Iterator[Candidate]:
    """Yields the schedules, microbatches and policies of a mesh with so many rows for each device."""
    stages, named = mesh.get("pipe", 1), tuple(mesh.items())
    for zero in (0, 1) if mesh.get("data", 1) > 1 else (0,):
        for keep in ("block", "step") if mesh.get("fsdp", 1) > 1 and model.layers > 1 else ("block",):
            for microbatches in divisors(rows):
                if stages == 1:
                    for remat in POLICIES if model.layers > 1 else ("none",):
                        if remat != "local" or "tensor" in mesh:  # otherwise the same as `full`
                            yield Candidate(mesh=named, accumulate=microbatches, remat=remat, keep=keep, zero=zero)
                elif 1 < stages <= microbatches <= MAX_MICROBATCHES:
                    common = {"mesh": named, "microbatches": microbatches, "keep": keep, "zero": zero}
                    yield from _pipelines(common, stages, model.layers)


def _pipelines(common: dict[str, Any], stages: int, layers: int) -> Iterator[Candidate]:
    for schedule, virtual in SCHEDULES:
        if stages * virtual <= layers:
            for remat, recompute in (("none", False), ("none", True), ("full", False)):
                yield Candidate(**common, schedule=schedule, virtual=virtual, remat=remat, recompute=recompute)


def group_of(candidate: Candidate, axes: Sequence[str], target: Target) -> tuple[int, ...]:
    """Returns the devices that communicate over some axes of a mesh: a group over the most hosts."""
    shape = [candidate.size(axis) for axis in AXES]
    last = [AXES.index(axis) for axis in axes]
    groups = np.moveaxis(np.arange(prod(shape)).reshape(shape), last, range(-len(last), 0))
    rows = groups.reshape(-1, prod(shape[place] for place in last))
    return tuple(max(rows.tolist(), key=lambda devices: len({device // target.gpus for device in devices})))

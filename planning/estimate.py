"""Estimates the time and the memory of a candidate in closed form, in microseconds instead of a compilation.

The terms of the time: products, attention and other kernels (forward, backward, and what backward computes again), the
collectives of each axis with the part that products do not hide, idle stages, and the update. The terms of the memory:
the state, its gradients, the activations that backward reads, the gathered parameters and one block's working set.
The search uses it to decide what is worth compiling, so it errs on the side of too little memory.
"""

from functools import cache, lru_cache
from math import ceil
from typing import NamedTuple

import jax.numpy as jnp

from ..mesh.targets import Target
from ..models.layers import MAX_LOGITS_BYTES
from ..models.moe import MoEConfig
from ..models.transformer_config import TransformerConfig
from ..parallel.expert import Buffer, ExpertConfig, buffer_of
from ..parallel.options import Precision
from ..parallel.schedule.builders import make_schedule
from ..parallel.schedule.schedule_table import Schedule
from ..parallel.schedule.timing import measure
from ..parallel.xla.platform import overhead_of
from .candidates import Candidate, ModelSizes, group_of
from .kernel_time import EFFICIENCY, WIDE_HEAD
from .link_time import collective_seconds

OVERLAPPED = {"one microbatch": 0.95, "several": 0.1}
"""The share of FSDP's traffic that products can hide. In a loop over microbatches, XLA hides little of it: compiled
steps of Llama-3 70B on 64 H100s expose 3 % of all traffic without accumulation, and 88 % with 8 microbatches."""
RECOMPUTED = {"none": 0.0, "dots": 0.2, "selective": 0.6, "local": 1.0, "full": 1.0}
"""`train.remat` -> the share of a block's forward that backward repeats. Compiled steps of Llama-3 8B on 8 H100s repeat
0, 0, 0.61, 1 and 1 of its products (docs/gpu.md); `dots` also repeats what is not a product."""
MAX_ROUNDS = 4
"""Microbatches for each stage up to which a schedule is made and timed."""


class Pass(NamedTuple):
    """Seconds of one block for one microbatch on one device, without communication."""

    forward: float
    backward_input: float
    backward_weight: float


class Estimate(NamedTuple):
    """The estimated step of a candidate.

    Attributes:
        step_seconds: The time of a step.
        peak_bytes: The most memory that a device needs.
        terms: Name -> seconds of the step, which add up to `step_seconds`.
        communication: Seconds in collectives, hidden or not.
        bubble: The share of a pipeline's time in which stages are idle.
    """

    step_seconds: float
    peak_bytes: float
    terms: dict[str, float]
    communication: float
    bubble: float

    @property
    def exposed_share(self) -> float:
        """The share of the communication that nothing hides."""
        exposed = sum(seconds for name, seconds in self.terms.items() if name.startswith("traffic of"))
        return min(exposed / self.communication, 1.0) if self.communication else 0.0


class Estimator:
    """Estimates candidates of one config for one target."""

    def __init__(self, model: ModelSizes, target: Target, global_batch: int, precision: Precision) -> None:
        """Reads what all candidates share.

        Args:
            model: Facts about the model.
            target: The accelerators.
            global_batch: Rows of a step.
            precision: The section `precision`.
        """
        self.model, self.target, self.batch = model, target, global_batch
        self.width = jnp.dtype(precision.compute).itemsize
        self.reduced = jnp.dtype(precision.reduce).itemsize
        self.peak = target.card.flops.get(precision.compute) or max(target.card.flops.values())
        self.collective = lru_cache(1 << 16)(self._collective)
        self.group = lru_cache(1 << 14)(self._group)

    def kernel_seconds(self, candidate: Candidate) -> float:
        """Returns the time of a device's kernels in one step, whichever schedule a pipeline has."""
        rows = self._rows(candidate)
        return sum(self._kernels(candidate, self._block(candidate, rows), rows).values())

    def estimate(self, candidate: Candidate) -> Estimate:
        """Returns the time and memory of a step."""
        rows_at_once, passes = self._rows(candidate), candidate.accumulate * candidate.microbatches
        block = self._block(candidate, rows_at_once)
        traffic = self._traffic(candidate, rows_at_once)
        terms, bubble = self._times(candidate, block, traffic, rows_at_once)
        communication = passes * self._layers(candidate) * sum(map(sum, traffic.values())) + self._once(candidate)[0]
        gather, scatter = self._outer_traffic(candidate)
        communication += gather + candidate.accumulate * scatter
        return Estimate(sum(terms.values()), self.peak_bytes(candidate), terms, communication, bubble)

    def _rows(self, candidate: Candidate) -> float:
        """Returns the rows of a device in one microbatch."""
        parts = candidate.accumulate * candidate.microbatches
        return self.batch / (parts * candidate.size("data") * candidate.size("fsdp") * candidate.size("expert"))

    def _collective(self, kind: str, size: float, devices: tuple[int, ...]) -> float:
        return collective_seconds(kind, int(size), [list(devices)], self.target, EFFICIENCY)

    def _group(self, mesh: tuple[tuple[str, int], ...], axes: tuple[str, ...]) -> tuple[int, ...]:
        return group_of(Candidate(mesh=mesh), axes, self.target)

    def _seconds(self, candidate: Candidate, kind: str, size: float, *axes: str) -> float:
        if not size or all(candidate.size(axis) == 1 for axis in axes):
            return 0.0
        return self.collective(kind, size, self.group(candidate.mesh, axes))

    def _block(self, candidate: Candidate, rows: float) -> Pass:
        """Returns the kernels of one block for one microbatch."""
        sizes, length = self.model.sizes, self.model.length
        if sizes is None:
            return self._own_block(candidate, rows)
        tensor, context = candidate.size("tensor"), candidate.size("context")
        tokens = rows * length / context
        matrices = (sizes.matmul_parameters - sizes.width * sizes.vocabulary) / sizes.layers
        product = 2 * tokens * matrices / tensor / (EFFICIENCY.matmul * self.peak)
        scores = rows * sizes.heads / tensor * length / context * length / 2  # half of them are masked
        attention = 4 * scores * sizes.head_size / (min(1.0, sizes.head_size / WIDE_HEAD) * self.peak)
        forward, backward = attention / EFFICIENCY.attention, 2.5 * attention / EFFICIENCY.attention_backward
        hidden = getattr(sizes, "top_k", 1) * sizes.mlp_size
        touched = 12 * sizes.width / tensor + 4 * sizes.heads * sizes.head_size / tensor + 6 * hidden / tensor
        other = tokens * touched * self.width / (EFFICIENCY.memory * self.target.card.memory_bandwidth)
        experts = self._experts(candidate, sizes, rows) if isinstance(sizes, MoEConfig) else Pass(0.0, 0.0, 0.0)
        return Pass(
            product + forward + other + experts.forward,
            product + backward + 2 * other + experts.backward_input,
            product + experts.backward_weight,
        )

    def _own_block(self, candidate: Candidate, rows: float) -> Pass:
        """Returns the kernels of a block of a model that is not a transformer: an equal share of all.

        Beside each product, one kernel works on single elements; together, they read and write what the products touch.
        """
        own = self.model.own
        assert own is not None
        work = own.work(max(round(rows), 1))
        split = self.model.layers * candidate.size("tensor") * candidate.size("context")
        speed = split * EFFICIENCY.matmul * self.peak
        bandwidth = split * EFFICIENCY.memory * self.target.card.memory_bandwidth
        start = (EFFICIENCY.product_seconds + EFFICIENCY.kernel_seconds) / self.model.layers
        gradients = work.backward / work.forward if work.forward else 2.0
        forward = work.forward / speed + 2 * work.touched / bandwidth + work.products * start
        backward = work.backward / speed + 4 * work.touched / bandwidth + gradients * work.products * start
        return Pass(forward, backward / 2, backward / 2)

    def _experts(self, candidate: Candidate, sizes: MoEConfig, rows: float) -> Pass:
        """Returns what `grouped_experts.py` adds to the products of the rows: padding, copies, gate and up again."""
        buffer, own = self._buffer(candidate, sizes, rows), sizes.experts / candidate.size("expert")
        weights = 3 * sizes.width * sizes.mlp_size / candidate.size("tensor")
        product = 2 * weights / (EFFICIENCY.matmul * self.peak)
        touch = weights / (EFFICIENCY.memory * self.target.card.memory_bandwidth)
        computed = buffer.expected * buffer.block
        padding = (computed - rows * self.model.length / candidate.size("context") * sizes.top_k) * product
        copies = 2 * own * self.width * touch
        added = (buffer.expected * (8 + self.width) + own * (4 + self.width)) * touch
        return Pass(padding + copies, padding + copies + 2 / 3 * computed * product, padding + added)

    def _buffer(self, candidate: Candidate, sizes: MoEConfig, rows: float) -> Buffer:
        held = self.model.length // candidate.size("context")
        return buffer_of(
            ExpertConfig(size=candidate.size("expert")),
            overhead_of("tpu" if self.target.shape else "gpu", sizes.width * sizes.mlp_size / candidate.size("tensor")),
            experts=sizes.experts,
            top_k=sizes.top_k,
            positions=ceil(rows * held),
            limit=ceil(rows * min(held, sizes.capacity(self.model.length))),
        )

    def _traffic(self, candidate: Candidate, rows: float) -> dict[str, tuple[float, float, float]]:
        """Returns axis -> seconds of one block's collectives in forward, backward, and recomputation."""
        sizes, size = self.model.sizes, candidate.size
        block = self._block_bytes(candidate, self.width)
        gather = self._seconds(candidate, "all-gather", block, "fsdp") if candidate.keep == "block" else 0.0
        scatter = self._seconds(candidate, "reduce-scatter", block * self.reduced / self.width, "fsdp")
        found = {"fsdp": (gather, gather + scatter, 0.0)}
        if sizes is None:
            return found
        positions = rows * self.model.length / size("context")
        residual = positions * sizes.width * self.width
        whole = self._seconds(candidate, "all-gather", residual, "tensor")
        parts = self._seconds(candidate, "reduce-scatter", residual, "tensor")
        repeats = candidate.remat not in ("none", "local") or candidate.recompute
        found["tensor"] = (2 * (whole + parts), 2 * (whole + parts), repeats * (2 * whole + parts))
        heads = max(sizes.num_kv_heads // size("tensor"), 1)
        keys = 2 * positions * heads * sizes.head_size
        hops = size("context") - 1
        hop = self._seconds(candidate, "collective-permute", keys * self.width, "context")
        back = self._seconds(candidate, "collective-permute", keys * 4, "context")
        found["context"] = (hops * hop, hops * (hop + back), repeats * hops * hop)
        if isinstance(sizes, MoEConfig):
            moved = (buffer := self._buffer(candidate, sizes, rows)).devices * buffer.rows * sizes.width * self.width
            exchange = self._seconds(candidate, "all-to-all", moved, "expert")
            found["expert"] = (2 * exchange, 2 * exchange, repeats * 2 * exchange)
        return found

    def _outer_traffic(self, candidate: Candidate) -> tuple[float, float]:
        """Returns the time to gather the parameters outside the blocks, once a step, and to reduce their gradients."""
        gradients = self.model.outer_parameters / candidate.size("tensor") * self.reduced
        gather = self._seconds(candidate, "all-gather", gradients, "fsdp") / 2
        return gather, self._seconds(candidate, "reduce-scatter", gradients, "fsdp")

    def _block_bytes(self, candidate: Candidate, itemsize: float) -> float:
        """Returns the bytes of one block that a device computes with."""
        tensor = candidate.size("tensor")
        experts = self.model.expert_parameters / (tensor * candidate.size("expert"))
        return (self.model.block_parameters / tensor + experts) * itemsize

    def _times(
        self, candidate: Candidate, block: Pass, traffic: dict[str, tuple[float, float, float]], rows: float
    ) -> tuple[dict[str, float], float]:
        """Returns the terms of the step time, and the bubble."""
        stages, passes = candidate.size("pipe"), candidate.accumulate * candidate.microbatches
        terms, blocks = self._kernels(candidate, block, rows), passes * self._layers(candidate)
        update = terms.pop("update")
        for axis, seconds in traffic.items():
            terms[f"traffic of {axis}"] = blocks * self._exposed(candidate, axis, seconds, block)
        gather, scatter = self._outer_traffic(candidate)
        if self.model.own and not self.model.own.is_stacked:
            # the layers of a model without blocks hide the traffic of each other, half of it if compiled for 8 H100s
            terms["traffic of fsdp"] += (gather + scatter) / 2
        else:
            terms["traffic of fsdp"] += gather + candidate.accumulate * scatter
        bubble = 0.0
        if stages > 1:
            again = RECOMPUTED[candidate.remat] * block.forward
            costs = (block.forward, block.backward_input + again, block.backward_weight)
            shares = tuple(max(round(4 * cost / block.forward), 1) / 4 for cost in costs)
            time, ticks = pipeline_time(
                candidate.schedule, stages, candidate.microbatches, candidate.virtual, candidate.recompute, shares
            )
            busy = candidate.microbatches * (sum(shares) + candidate.recompute * shares[0])
            bubble = 1 - busy / time
            terms["idle stages"] = (time / busy - 1) * sum(terms.values())
            assert self.model.sizes is not None
            residual = rows * self.model.length / candidate.size("context") * self.model.sizes.width * self.width
            sent = self._seconds(candidate, "collective-permute", residual / candidate.size("tensor"), "pipe")
            terms["traffic of pipe"] = 2 * ticks * sent
        once, hidden = self._once(candidate)
        terms["traffic of data"] = max(once - hidden * terms["products and kernels"], 0.0)
        return terms | {"update": update}, bubble

    def _kernels(self, candidate: Candidate, block: Pass, rows: float) -> dict[str, float]:
        """Returns the terms of a device's kernels."""
        passes, again = candidate.accumulate * candidate.microbatches, RECOMPUTED[candidate.remat] + candidate.recompute
        blocks = passes * self._layers(candidate)
        moved = self._stored(candidate, self.model.bytes_per_parameter)[0] * (3 + 2 * self.model.optimizer_ratio)
        return {
            "products and kernels": blocks * sum(block),
            "recomputation": blocks * again * block.forward,
            "head and embedding": passes * self._head(candidate, rows),
            "update": moved / (EFFICIENCY.memory * self.target.card.memory_bandwidth),
        }

    def _layers(self, candidate: Candidate) -> int:
        """Returns the blocks of a device, with the empty places of its chunks."""
        return ceil(self.model.layers / (candidate.size("pipe") * candidate.virtual)) * candidate.virtual

    def _exposed(self, candidate: Candidate, axis: str, seconds: tuple[float, float, float], block: Pass) -> float:
        """Returns the time of a block's collectives over an axis that its kernels do not hide."""
        forward, total = seconds[0], sum(seconds)
        if axis == "fsdp" and candidate.size("pipe") == 1:
            share = OVERLAPPED["one microbatch" if candidate.accumulate == 1 else "several"]
            return (1 - share) * total + max(share * total - sum(block), 0.0)
        if axis == "context":
            return max(forward - block.forward, 0.0) + max(total - forward - block.backward_input, 0.0)
        return total

    def _head(self, candidate: Candidate, rows: float) -> float:
        """Returns the kernels outside the blocks for one microbatch; in a pipeline, all stages wait for them."""
        sizes = self.model.sizes
        if sizes is None:
            return 0.0
        tokens = rows * self.model.length / candidate.size("context")
        products = 6 * tokens * sizes.width * sizes.vocabulary / candidate.size("tensor")
        return products / (EFFICIENCY.matmul * self.peak)

    def _once(self, candidate: Candidate) -> tuple[float, float]:
        """Returns the time of the sums of gradients once a step, and the share of the kernels that can hide them."""
        local, outer = self._stored(candidate, self.reduced)
        pipe = candidate.size("pipe") > 1
        kind = "all-reduce"
        total = self._seconds(candidate, kind, local - (outer if pipe else 0.0), "data", "context")
        if pipe:
            total += self._seconds(candidate, kind, outer, "pipe", "data", "context")
        if candidate.keep == "step":
            whole = self._block_bytes(candidate, self.width) * self.model.layers / candidate.size("pipe")
            total += self._seconds(candidate, "all-gather", whole, "fsdp")
        at_once = candidate.accumulate == 1 and not pipe and not candidate.zero and candidate.size("fsdp") == 1
        return total, 0.5 if at_once else 0.0

    def _stored(self, candidate: Candidate, itemsize: float) -> tuple[float, float]:
        """Returns the stored parameters of a device and those of them outside the blocks, times a number of bytes."""
        outer = self.model.outer_parameters / (candidate.size("fsdp") * candidate.size("tensor")) * itemsize
        blocks = self._layers(candidate) * self._block_bytes(candidate, itemsize) / candidate.size("fsdp")
        return blocks + outer, outer

    def peak_bytes(self, candidate: Candidate) -> float:
        """Returns the most bytes that a device needs."""
        size, model = candidate.size, self.model
        sizes = model.sizes
        if sizes is None:
            return self._own_peak_bytes(candidate)
        stored, _ = self._stored(candidate, model.bytes_per_parameter)
        optimizer = stored * model.optimizer_ratio / (size("data") if candidate.zero else 1)
        outer = model.outer_parameters / size("tensor")
        gathered = 2 * self._block_bytes(candidate, self.width) if size("fsdp") > 1 else 0.0
        if candidate.keep == "step" or size("fsdp") == 1:
            gathered = self._block_bytes(candidate, self.width) * ceil(model.layers / size("pipe"))
        held = stored + optimizer + stored + gathered + outer * (self.width + 4)
        tokens = self._rows(candidate) * model.length / size("context")
        kept, everything = (tokens * each for each in self._bytes_per_token(sizes, candidate))
        layers = ceil(model.layers / (size("pipe") * candidate.virtual))
        slots = _slots(candidate)
        if candidate.recompute:
            activations = slots * tokens * sizes.width * self.width / size("tensor") + layers * kept
        else:
            activations = slots * layers * kept
        logits = min(MAX_LOGITS_BYTES, tokens * sizes.vocabulary / size("tensor") * 4)
        return held + activations + max(1.5 * everything, 1.5 * logits)

    def _own_peak_bytes(self, candidate: Candidate) -> float:
        """Returns the most bytes that a device needs for a model that is not a transformer.

        A device that holds all parameters needs the same besides its state, but for three things: blocks reduce their
        gradients one after the other; several microbatches add their gradients up; and FSDP gathers parameters. A model
        without blocks gathers all, in place of the copies in the compute dtype if there is no loop over microbatches.
        """
        own = self.model.own
        assert own is not None
        shards = candidate.size("fsdp")
        stored, _ = self._stored(candidate, self.model.bytes_per_parameter)
        optimizer = stored * self.model.optimizer_ratio / (candidate.size("data") if candidate.zero else 1)
        memory = own.memory(max(round(self._rows(candidate)), 1), candidate.remat)
        blocks = self._block_bytes(candidate, self.width) * self.model.layers
        gathered = 0.0
        if shards > 1 and own.is_stacked:
            gathered = blocks if candidate.keep == "step" else 2 * blocks / self.model.layers
        copies = self.width != self.model.bytes_per_parameter
        if shards > 1 and not own.is_stacked and (candidate.accumulate > 1 or not copies):
            gathered = self.model.outer_parameters * self.width
        sums = stored if candidate.accumulate > 1 else 0.0
        return stored + optimizer + memory.gradients / shards + memory.others + gathered + sums

    def _bytes_per_token(self, sizes: TransformerConfig, candidate: Candidate) -> tuple[float, float]:
        """Returns what backward reads of a block under the candidate's policy, and all that a block makes."""
        tensor = candidate.size("tensor")
        residual = sizes.width / tensor
        heads = (sizes.heads + 2 * sizes.num_kv_heads) * sizes.head_size / tensor
        out = sizes.heads * sizes.head_size / tensor
        hidden = getattr(sizes, "top_k", 1) * sizes.mlp_size / tensor
        whole = 2 * sizes.width if tensor > 1 else 0
        everything = 4 * residual + whole + 2 * heads + out + 4 * hidden
        narrow = 2 * residual + heads + out
        kept = {"none": everything, "dots": narrow + 2 * hidden, "selective": narrow, "local": 2 * residual + whole}
        return kept.get(candidate.remat, residual) * self.width, everything * self.width


def _slots(candidate: Candidate) -> float:
    """Returns the microbatches of one chunk that a stage holds at once, as `schedule/builders.py` documents."""
    stages, virtual = candidate.size("pipe"), candidate.virtual
    if stages == 1:
        return 1
    if candidate.schedule == "interleaved_1f1b":
        groups = candidate.microbatches // stages
        return (virtual - 1) * ceil(candidate.microbatches / groups) + stages
    return stages * virtual


@cache
def pipeline_time(
    name: str, stages: int, microbatches: int, virtual: int, recompute: bool, costs: tuple[float, ...]
) -> tuple[float, float]:
    """Returns the time of a schedule in units of `costs`, see `measure`, and its ticks.

    Both grow linearly with the microbatches once the pipeline is full, so long schedules are not made.
    """
    full = MAX_ROUNDS * stages
    if microbatches > full:
        half, whole = (pipeline_time(name, stages, number, virtual, recompute, costs) for number in (full // 2, full))
        rounds = (microbatches - full) / (full - full // 2)
        return whole[0] + rounds * (whole[0] - half[0]), whole[1] + rounds * (whole[1] - half[1])
    timing = measure(_schedule(name, stages, microbatches, virtual, recompute), costs)
    return timing.time, timing.ticks


@lru_cache(64)
def _schedule(name: str, stages: int, microbatches: int, virtual: int, recompute: bool) -> Schedule:
    return make_schedule(name, stages, microbatches, virtual=virtual, recompute=recompute)

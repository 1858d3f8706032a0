"""The computation of one pipeline stage: the parts of a tick, and the buffers between them."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..blocks.forward import part_of
from ..blocks.model_parts import ModelParts
from ..blocks.split_backward import Held, SplitBlock, split_block
from ..collectives import vary
from ..model import Activations, Batch, Params, fold_block, join_differentiable, split_differentiable
from ..model.loss_sums import LossSums
from ..options import scaled
from ..pipeline import AXIS
from ..schedule.schedule_table import Kind
from ..schedule.timetable import Entry, Timetable
from .tick import Message, Tick, add, put, take, zeros_like_message


class State(NamedTuple):
    """The state that a stage carries from tick to tick; dim 0 of a buffer counts its slots."""

    inbox: Message
    residuals: Held
    deferred: Held
    gradients: Params
    sums: LossSums


@dataclass
class Stage:
    """The parts of a tick on one device.

    Attributes:
        parts: The model.
        axes: The manual axes; parameters vary over all of them.
        timetable: The timetable of the schedule.
        params: The trained parameters, varying over all manual axes, with None in place of the frozen ones; "blocks"
            contains the rows of this stage, see `schedule/stages.py`.
        whole: The parameters gathered for the entire step. If it has "blocks", they have the same rows: whole ones or,
            if blocks are gathered one by one, the shards of the frozen ones.
        batch: The rows of this device, the same on all stages.
        key: The random key of this step, or None.
        scale: The factor of the loss before it is differentiated; None for no factor.
    """

    parts: ModelParts
    axes: tuple[str, ...]
    timetable: Timetable
    params: Params
    whole: Params
    batch: Batch
    key: Array | None
    scale: Array | None = None

    def entries(self) -> Entry:
        """Returns this stage's column of the timetable, to scan over."""
        stage = lax.axis_index(AXIS)
        columns = (lax.dynamic_index_in_dim(jnp.asarray(field), stage, 1, False) for field in self.timetable.entries)
        return Entry(*columns)

    # Initial values.

    @cached_property
    def like(self) -> Activations:
        """Example activations of one microbatch; only their types matter."""
        batch, groups = self.microbatch(0), part_of(self.parts.embed_reads, self.params)
        shapes = jax.eval_shape(lambda: self.parts.embed(groups, self.whole, batch, self.key))
        return jax.tree.map(lambda leaf: self.vary(jnp.zeros(leaf.shape, leaf.dtype)), shapes)

    @cached_property
    def block(self) -> SplitBlock:
        """The block, split into forward, backward to the input and backward to the weights."""
        params, extra = self.layer(jnp.zeros((), jnp.int32) + lax.axis_index(AXIS), lax.axis_index(AXIS))
        return split_block(
            lambda params, x, extra: self.parts.block(params, extra[0], x, extra[1]), params, self.like, extra
        )

    def start(self) -> State:
        """Returns the state before the first tick."""
        blocks = self.timetable.blocks_per_slot
        residuals = self.buffers(self.timetable.residuals * blocks, self.block.residuals)
        deferred = self.buffers(self.timetable.deferred * blocks, self.block.deferred)
        return State(self.new_inbox(), residuals, deferred, jax.tree.map(jnp.zeros_like, self.params), self.no_sums())

    def new_inbox(self) -> Message:
        """Returns the inbox before the first tick."""
        differentiable, others = split_differentiable(self.like)
        return Message(*(list(self.buffers(self.timetable.inbox, leaves)) for leaves in (differentiable, others)))

    def buffers(self, slots: int, shapes: Any) -> Held:
        """Returns a buffer of zeros for each shape."""
        return tuple(self.vary(jnp.zeros((slots, *leaf.shape), leaf.dtype)) for leaf in shapes)

    def no_sums(self) -> LossSums:
        """Returns sums of zero rows."""
        groups, batch = part_of(self.parts.head_reads, self.params), self.microbatch(0)
        shapes = jax.eval_shape(lambda: self.parts.head(groups, self.whole, self.like, batch, self.key))
        return jax.tree.map(lambda leaf: self.vary(jnp.zeros(leaf.shape, leaf.dtype)), shapes)

    def vary(self, value: Array) -> Array:
        """Types a value as varying over the manual axes."""
        return vary(value, self.axes)

    # Values that a tick reads.

    def microbatch(self, index: Array | int) -> Batch:
        """Returns the rows of one microbatch."""
        size = next(iter(self.batch.values())).shape[0] // self.timetable.microbatches
        start = index * size
        return {name: lax.dynamic_slice_in_dim(rows, start, size) for name, rows in self.batch.items()}

    def layer(self, row: Array, block: Array, tick: Tick | None = None) -> tuple[Params, tuple[Params, Array | None]]:
        """Returns the trained parameters of one block, and its other inputs: its kept parameters and its key."""
        read = tick.take if tick and self.parts.gathers else take  # so that gathers stay in the loop
        params, kept = read((self.params["blocks"], self.whole.get("blocks")), row)
        return params, (kept, fold_block(self.key, block))

    # The parts of a tick.

    def embed(self, tick: Tick, message: Message) -> Message:
        """Returns the input of forward: the received activations or, on the first virtual stage, the embedding."""
        groups = part_of(self.parts.embed_reads, self.params)

        def run(_: Message) -> Message:
            batch = self.microbatch(tick.wait(tick.entry.microbatch))
            return self.message(self.parts.embed(groups, self.whole, batch, self.key))

        return tick.once("embed", tick.entry.embeds * tick.does(Kind.FORWARD, Kind.RECOMPUTE), run, message)

    def forward(self, tick: Tick, kind: Kind, message: Message, residuals: Held) -> tuple[Message, Held]:
        """Runs the blocks of the chunk; stores the residuals for backward, unless the buffer is empty."""
        entry, slot = tick.entry, tick.entry.residuals * self.timetable.blocks_per_slot

        def run(index: Array, carry: tuple[Message, Held]) -> tuple[Message, Held]:
            x, residuals = carry
            params, extra = self.layer(entry.stored_block + index, entry.block + index, tick)
            y, new = self.block.forward(params, self.activations(x), extra)
            return self.message(y), put(residuals, slot + index, new) if residuals else residuals

        return tick.each_block(kind.name.lower(), tick.does(kind), run, (message, residuals))

    def recompute(self, tick: Tick, message: Message, residuals: Held) -> tuple[Message, Held]:
        """Recomputes the residuals of the chunk's blocks; for a single block, without what only its output needs."""
        if self.timetable.blocks_per_slot > 1 or self.parts.recomputes_output:
            return self.forward(tick, Kind.RECOMPUTE, message, residuals)
        entry = tick.entry

        def run(residuals: Held) -> Held:
            row, x = tick.wait((entry.stored_block, message))
            params, extra = self.layer(row, entry.block, tick)
            return put(residuals, entry.residuals, self.block.recompute(params, self.activations(x), extra))

        return message, tick.once("recompute", tick.does(Kind.RECOMPUTE) * entry.num_blocks, run, residuals)

    def head(self, tick: Tick, groups: Params, y: Message) -> LossSums:
        """Returns this device's share of the sums of one microbatch."""
        batch = self.microbatch(tick.entry.microbatch)
        return self.parts.head(groups, self.whole, self.activations(y), batch, self.key)

    def head_forward(self, tick: Tick, message: Message, sums: LossSums) -> tuple[Message, LossSums]:
        """Adds this microbatch's share to the sums, on the last virtual stage, which sends nothing on."""

        def run(carry: tuple[Message, LossSums]) -> tuple[Message, LossSums]:
            y, sums = carry
            shares = self.head(tick, part_of(self.parts.head_reads, self.params), y)
            return zeros_like_message(y), add(sums, jax.tree.map(self.vary, shares))

        return tick.once("head_forward", tick.entry.heads * tick.does(Kind.FORWARD), run, (message, sums))

    def head_backward(
        self, tick: Tick, message: Message, gradients: Params, sums: LossSums
    ) -> tuple[Message, Params, LossSums]:
        """Returns the input of backward: the received gradient or, on the last virtual stage, that of the head."""
        names = self.parts.head_reads

        def run(carry: tuple[list[Array], Params, LossSums]) -> tuple[list[Array], Params, LossSums]:
            y, gradients, sums = carry

            def share(groups: Params, differentiable: list[Array]) -> tuple[Array, LossSums]:
                shares = self.head(tick, groups, message._replace(differentiable=differentiable))
                return scaled(shares.total, self.scale), shares

            differentiate = jax.value_and_grad(share, argnums=(0, 1), has_aux=True)
            (_, shares), (new_gradients, dy) = differentiate(part_of(names, self.params), y)
            return dy, add(gradients, new_gradients), add(sums, jax.tree.map(self.vary, shares))

        carry = (message.differentiable, part_of(names, gradients), sums)
        dy, own, sums = tick.once("head_backward", tick.entry.heads * tick.does(Kind.BACKWARD_INPUT), run, carry)
        return message._replace(differentiable=dy), {**gradients, **own}, sums

    def backward_input(self, tick: Tick, message: Message, residuals: Held, deferred: Held) -> tuple[Message, Held]:
        """Propagates the gradient through the blocks of the chunk, last to first."""
        entry, blocks = tick.entry, self.timetable.blocks_per_slot

        def run(turn: Array, carry: tuple[list[Array], Held]) -> tuple[list[Array], Held]:
            dy, deferred = carry
            index = entry.num_blocks - 1 - turn
            params, extra = self.layer(entry.stored_block + index, entry.block + index, tick)
            dx, new = self.block.backward_input(
                params, extra, tick.take(residuals, entry.residuals * blocks + index), dy
            )
            return list(map(self.vary, dx)), put(deferred, entry.deferred * blocks + index, new)

        carry = (message.differentiable, deferred)
        dx, deferred = tick.each_block("backward_input", tick.does(Kind.BACKWARD_INPUT), run, carry)
        return message._replace(differentiable=dx), deferred

    def backward_weight(self, tick: Tick, residuals: Held, deferred: Held, gradients: Params) -> Params:
        """Adds the gradients of the parameters of the chunk's blocks."""
        entry, blocks = tick.entry, self.timetable.blocks_per_slot

        def run(index: Array, sums: Params) -> Params:
            row = entry.stored_block + index
            params, extra = self.layer(row, entry.block + index, tick)
            own = (
                tick.take(residuals, entry.residuals * blocks + index),
                tick.take(deferred, entry.deferred * blocks + index),
            )
            return put(sums, row, add(take(sums, row), self.block.backward_weight(params, extra, *own)))

        does = tick.does(Kind.BACKWARD_WEIGHT)
        return {**gradients, "blocks": tick.each_block("backward_weight", does, run, gradients["blocks"])}

    def embed_backward(self, tick: Tick, message: Message, gradients: Params) -> tuple[Message, Params]:
        """Adds the gradient of the embedding, on the first virtual stage, which sends nothing on."""
        names = self.parts.embed_reads

        def embed(groups: Params) -> list[Array]:
            batch = self.microbatch(tick.wait(tick.entry.microbatch))
            return split_differentiable(self.parts.embed(groups, self.whole, batch, self.key))[0]

        def run(carry: tuple[Message, Params]) -> tuple[Message, Params]:
            dx, gradients = carry
            (new,) = jax.vjp(embed, part_of(names, self.params))[1](dx.differentiable)
            return zeros_like_message(dx), add(gradients, new)

        carry = (message, part_of(names, gradients))
        turns = tick.entry.embeds * tick.does(Kind.BACKWARD_INPUT)
        message, own = tick.once("embed_backward", turns, run, carry)
        return message, {**gradients, **own}

    def message(self, x: Activations) -> Message:
        """Converts activations to a message."""
        differentiable, others = split_differentiable(x)
        return Message(list(map(self.vary, differentiable)), list(map(self.vary, others)))

    def activations(self, message: Message) -> Activations:
        """Converts a message to activations."""
        return join_differentiable(self.like, message.differentiable, message.others)

"""What one stage of a pipeline computes: the parts of a tick, and the buffers between them."""

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..mesh.compat import varying_axes
from .cut import Cut, Held, cut, join_floats, split_floats
from .model import Activations, Batch, Params, fold_block
from .timetable import Entry, Timetable

AXIS = "pipe"
_Carry = TypeVar("_Carry")


class Pieces(NamedTuple):
    """A model in pieces, with all that happens to parameters before their use (casts, gathers) inside them.

    Attributes:
        embed: `embed(groups, whole, batch, key) -> x`; `groups` are the groups of parameters in `embed_reads`, to be
            differentiated, `whole` what was gathered for the whole step.
        block: `block(params, whole, x, key) -> x` for one block.
        head: `head(groups, whole, x, batch, key) -> (sum, weight)`, this device's share; `groups` as in `head_reads`.
        embed_reads: groups that `embed` reads.
        head_reads: groups that `head` reads.
    """

    embed: Callable[[Params, Params, Batch, Array | None], Activations]
    block: Callable[[Params, Params, Activations, Array | None], Activations]
    head: Callable[[Params, Params, Activations, Batch, Array | None], tuple[Array, Array]]
    embed_reads: tuple[str, ...]
    head_reads: tuple[str, ...]


class Inputs(NamedTuple):
    """What one device works on.

    Attributes:
        params: Parameters, varying over all manual axes; "blocks" hold this stage's rows, see `stages.py`.
        whole: What was gathered of them for the whole step; "blocks", if there, with as many rows.
        batch: Its rows, the same on all stages.
        key: Randomness of this step, or None.
    """

    params: Params
    whole: Params
    batch: Batch
    key: Array | None


class Message(NamedTuple):
    """Activations, or (in `floats` alone) their gradient."""

    floats: list[Array]
    others: list[Array]


class State(NamedTuple):
    """What a stage carries from tick to tick; buffers have their slots on dim 0."""

    inbox: Message
    kept: Held
    crossing: Held
    gradients: Params
    sums: tuple[Array, Array]


class Stage:
    """The parts of a tick on one device."""

    def __init__(self, pieces: Pieces, timetable: Timetable, inputs: Inputs, fill: float) -> None:
        self.pieces, self.timetable, self.fill = pieces, timetable, fill
        self.params, self.whole, self.batch, self.key = inputs
        self.axes = frozenset().union(*map(varying_axes, jax.tree.leaves(inputs.params)))
        rows = next(iter(inputs.batch.values())).shape[0]
        if rows % timetable.microbatches:
            raise ValueError(
                f"{rows} rows on a device cannot be cut into strategy.pipe.microbatches={timetable.microbatches}: "
                f"{rows} % {timetable.microbatches} = {rows % timetable.microbatches}."
            )
        self.rows = rows // timetable.microbatches

    def entries(self) -> Entry:
        """This stage's column of the timetable, for a scan over its ticks."""
        stage = lax.axis_index(AXIS)
        columns = (lax.dynamic_index_in_dim(jnp.asarray(field), stage, 1, False) for field in self.timetable.entries)
        return Entry(*columns)

    def outer(self, names: tuple[str, ...] | None = None) -> Params:
        """Groups of parameters outside the blocks."""
        return {name: self.params[name] for name in names or self.pieces.head_reads}

    # What a stage starts with.

    @cached_property
    def like(self) -> Activations:
        """Activations of one microbatch: their types, and of no meaning."""
        batch, outer = self.microbatch(0), self.outer(self.pieces.embed_reads)
        shapes = jax.eval_shape(lambda: self.pieces.embed(outer, self.whole, batch, self.key))
        return jax.tree.map(lambda leaf: self.vary(jnp.zeros(leaf.shape, leaf.dtype)), shapes)

    @cached_property
    def cut(self) -> Cut:
        """The block in three parts."""
        params, extra = self.layer(jnp.zeros((), jnp.int32) + lax.axis_index(AXIS), lax.axis_index(AXIS))
        return cut(lambda params, x, extra: self.pieces.block(params, extra[0], x, extra[1]), params, self.like, extra)

    @cached_property
    def nothing(self) -> Message:
        """What is sent where there is nothing to send."""
        floats, others = split_floats(self.like)
        return Message([jnp.full_like(leaf, self.fill) for leaf in floats], others)

    def start(self) -> State:
        """The state before the first tick."""
        blocks = self.timetable.blocks_per_slot
        kept = self.buffers(self.timetable.kept * blocks, self.cut.kept)
        crossing = self.buffers(self.timetable.crossing * blocks, self.cut.crossing)
        return State(self.new_inbox(), kept, crossing, jax.tree.map(jnp.zeros_like, self.params), self.no_sums())

    def new_inbox(self) -> Message:
        """The inbox before the first tick."""
        floats, others = split_floats(self.like)
        return Message(*(list(self.buffers(self.timetable.inbox, leaves)) for leaves in (floats, others)))

    def buffers(self, slots: int, shapes: Any) -> Held:
        """A buffer for each shape, filled with `fill`."""

        def make(leaf: Any) -> Array:
            value = self.fill if jnp.issubdtype(leaf.dtype, jnp.floating) else 0
            return self.vary(jnp.full((slots, *leaf.shape), value, leaf.dtype))

        return tuple(map(make, shapes))

    def no_sums(self) -> tuple[Array, Array]:
        """Loss and weight of no rows."""
        outer, batch = self.outer(), self.microbatch(0)
        shapes = jax.eval_shape(lambda: self.pieces.head(outer, self.whole, self.like, batch, self.key))
        total, weight = (self.vary(jnp.zeros(shape.shape, shape.dtype)) for shape in shapes)
        return total, weight

    def vary(self, value: Array) -> Array:
        """A value typed as different on each device."""
        missing = tuple(sorted(self.axes - varying_axes(value)))
        return lax.pcast(value, missing, to="varying") if missing else value

    # What a tick reads.

    def microbatch(self, index: Array | int) -> Batch:
        """The rows of one microbatch."""
        start = index * self.rows
        return {name: lax.dynamic_slice_in_dim(rows, start, self.rows) for name, rows in self.batch.items()}

    def layer(self, row: Array, block: Array) -> tuple[Params, tuple[Params, Array | None]]:
        """Parameters of one block, and what else it is run with: gathered copies and its key."""
        params, whole = _take((self.params["blocks"], self.whole.get("blocks")), row)
        return params, (whole, fold_block(self.key, block))

    def read(self, inbox: Message, entry: Entry) -> Message:
        """What the action starts from."""
        return _take(inbox, entry.reads)

    # The parts of a tick. Each takes how many turns it is this stage's turn: 0 or 1.

    def embed(self, arrived: Message, entry: Entry, turns: Array) -> Message:
        """What forward starts from: what arrived or, at the model's first position, the embedding."""
        batch, outer = self.microbatch(entry.microbatch), self.outer(self.pieces.embed_reads)

        def run(_: Message) -> Message:
            return self.message(self.pieces.embed(outer, self.whole, batch, self.key))

        return repeat(entry.embeds * turns, run, arrived)

    def forward(self, x: Message, kept: Held, entry: Entry, turns: Array) -> tuple[Message, Held]:
        """Runs the chunk's blocks; puts what backward needs into `kept`, or drops it where that is ()."""
        slot = entry.kept * self.timetable.blocks_per_slot

        def run(index: Array, carry: tuple[Message, Held]) -> tuple[Message, Held]:
            x, kept = carry
            params, extra = self.layer(entry.row + index, entry.block + index)
            y, new = self.cut.forward(params, self.activations(x), extra)
            return self.message(y), _put(kept, slot + index, new) if kept else kept

        return lax.fori_loop(0, turns * entry.num_blocks, run, (x, kept))

    def head(self, groups: Params, y: Message, entry: Entry) -> tuple[Array, Array]:
        """The share of (loss, weight) of one microbatch."""
        batch = self.microbatch(entry.microbatch)
        return self.pieces.head(groups, self.whole, self.activations(y), batch, self.key)

    def head_backward(
        self, arrived: Message, gradients: Params, sums: tuple[Array, Array], entry: Entry, turns: Array
    ) -> tuple[list[Array], Params, tuple[Array, Array]]:
        """What backward starts from: what arrived or, at the last position, the gradient of the head."""
        names = self.pieces.head_reads

        def share(groups: Params, floats: list[Array]) -> tuple[Array, Array]:
            return self.head(groups, arrived._replace(floats=floats), entry)

        def run(carry: Any) -> Any:
            y, gradients, sums = carry
            differentiate = jax.value_and_grad(share, argnums=(0, 1), has_aux=True)
            new_sums, (new_gradients, dy) = differentiate(self.outer(names), y)
            return dy, add(gradients, new_gradients), add(sums, tuple(map(self.vary, new_sums)))

        carry = (arrived.floats, {name: gradients[name] for name in names}, sums)
        dy, own, sums = repeat(entry.heads * turns, run, carry)
        return dy, {**gradients, **own}, sums

    def backward_input(
        self, dy: list[Array], kept: Held, crossing: Held, entry: Entry, turns: Array
    ) -> tuple[list[Array], Held]:
        """Takes the gradient through the chunk's blocks, last to first."""
        blocks = self.timetable.blocks_per_slot

        def run(turn: Array, carry: tuple[list[Array], Held]) -> tuple[list[Array], Held]:
            dy, crossing = carry
            index = entry.num_blocks - 1 - turn
            params, extra = self.layer(entry.row + index, entry.block + index)
            own = _take(kept, entry.kept * blocks + index)
            dx, new = self.cut.backward_input(params, extra, own, dy)
            return list(map(self.vary, dx)), _put(crossing, entry.crossing * blocks + index, new)

        return lax.fori_loop(0, turns * entry.num_blocks, run, (dy, crossing))

    def embed_backward(self, dx: list[Array], gradients: Params, entry: Entry, turns: Array) -> Params:
        """Adds the gradient of the embedding, at the model's first position."""
        names, batch = self.pieces.embed_reads, self.microbatch(entry.microbatch)

        def embed(groups: Params) -> list[Array]:
            return split_floats(self.pieces.embed(groups, self.whole, batch, self.key))[0]

        def run(gradients: Params) -> Params:
            (new,) = jax.vjp(embed, self.outer(names))[1](dx)
            return add(gradients, new)

        own = repeat(entry.embeds * turns, run, {name: gradients[name] for name in names})
        return {**gradients, **own}

    def backward_weight(self, kept: Held, crossing: Held, gradients: Params, entry: Entry, turns: Array) -> Params:
        """Adds the gradients of the parameters of the chunk's blocks."""
        blocks = self.timetable.blocks_per_slot

        def run(index: Array, sums: Params) -> Params:
            row = entry.row + index
            params, extra = self.layer(row, entry.block + index)
            own = _take(kept, entry.kept * blocks + index), _take(crossing, entry.crossing * blocks + index)
            new = self.cut.backward_weight(params, extra, *own)
            return _put(sums, row, add(_take(sums, row), new))

        summed = lax.fori_loop(0, turns * entry.num_blocks, run, gradients["blocks"])
        return {**gradients, "blocks": summed}

    def exchange(self, inbox: Message, made: Message, entry: Entry) -> Message:
        """Sends what was made to both neighbours, and puts what arrives where the timetable says."""
        table = self.timetable
        from_below = lax.ppermute(made, AXIS, table.up)
        going_down = made if table.both_ways else made._replace(others=[])
        from_above = lax.ppermute(going_down, AXIS, table.down)
        inbox = _put(inbox, entry.from_below, from_below)
        others = inbox.others if table.both_ways else []
        down = _put(inbox._replace(others=others), entry.from_above, from_above)
        inbox = down if table.both_ways else inbox._replace(floats=down.floats)
        return _put(inbox, entry.from_self, made)

    def message(self, x: Activations) -> Message:
        """Activations as they travel."""
        floats, others = split_floats(x)
        return Message(list(map(self.vary, floats)), list(map(self.vary, others)))

    def activations(self, message: Message) -> Activations:
        """Activations as the model has them."""
        return join_floats(self.like, message.floats, message.others)


def repeat(turns: Array, run: Callable[[_Carry], _Carry], carry: _Carry) -> _Carry:
    """Runs a function `turns` times, 0 or 1; see the top of `pipeline_run.py` for why this is no conditional."""
    return lax.fori_loop(0, turns, lambda _, carry: run(carry), carry)


def choose(flag: Array, yes: Any, no: Any) -> Any:
    """The first of two trees where the flag is 1."""
    return jax.tree.map(lambda a, b: jnp.where(flag == 1, a, b), yes, no)


def add(sums: Any, new: Any) -> Any:
    """The sum of two trees."""
    return jax.tree.map(jnp.add, sums, new)


def _take(buffers: Any, slot: Array) -> Any:
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, slot, 0, keepdims=False), buffers)


def _put(buffers: Any, slot: Array, values: Any) -> Any:
    return jax.tree.map(lambda leaf, value: lax.dynamic_update_index_in_dim(leaf, value, slot, 0), buffers, values)

"""Batches on the mesh: Grain reads the rows of each step, a background thread places them on the devices.

    train:  step s holds samples [s * B, (s + 1) * B) of the order; starting at step s is a seek, not a replay. Where
            batches are left out, later ones move up.
    eval:   step s holds examples [s * B, (s + 1) * B); the last batch is filled up with rows of weight zero.

Each process makes the batches it is asked for, always the same number on every process: no iterator ends on one
process before it ends on another.
"""

from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import closing
from functools import partial

import jax
import numpy as np
from jax.sharding import NamedSharding

from ..mesh.errors import UserError
from ..mesh.processes import is_main_process, tell
from .ordering.buckets import BucketedSource
from .ordering.order import batch_number, source_order
from .placement import check_divisible, place_rows, rows_of_devices
from .prefetch import run_ahead
from .ranges import NO_LIMITS, Limits, checked
from .source import Source, is_stream
from .storage import Rules, Storage
from .windows import WindowSource

Batch = dict[str, jax.Array]
LocalBatch = dict[str, np.ndarray]
EXAMPLE_MODULUS = 2**31


def train_batches(
    source: Source,
    sharding: NamedSharding,
    *,
    global_batch: int,
    seed: int,
    start_step: int,
    num_steps: int,
    shuffle: bool = True,
    prefetch: int = 2,
    threads: int = 0,
    limits: Limits = NO_LIMITS,
    layout: Rules | None = None,
    left_out: Collection[int] = (),
    took: Callable[[float], None] | None = None,
) -> Generator[Batch, None, None]:
    """The batches of training steps start_step, start_step + 1, ..., start_step + num_steps - 1.

    Args:
        source: Training examples.
        sharding: How rows are split over the mesh, such as P(("data", "fsdp")); further dims are not split.
        global_batch: Rows of a batch, over all processes.
        seed: Chooses the order, >= 0.
        start_step: First step; the batches are those a run from step 0 has from there on.
        num_steps: Number of batches.
        shuffle: False for the source's own order in every epoch.
        prefetch: Batches kept ready on the devices ahead of the step, by a background thread; 0 reads on demand.
        threads: Further threads that read examples, for slow storage; none where the source is a stream.
        limits: What the model takes; every batch is checked against it.
        layout: Where arrays are put before they are laid out by `sharding`, see `storage`; None: at once so.
        left_out: Numbers of the batches of the order that no step gets; see `order.batch_number`.
        took: Gets the seconds that each batch took to read and place, in the background thread; not with prefetch=0.

    Returns:
        A generator of name -> global array (global_batch, ...), plus "example": int32 (global_batch,), the global
        sample index (mod 2**31). Closing it stops its threads; an error while reading is raised at the step it hits.

    Raises:
        UserError: the batch does not divide over the mesh or is larger than the split, or a number is negative.
        BadDataError: while reading, for a value that is not allowed (see `ranges`).
    """
    check_enough(source, global_batch)
    in_batches = getattr(source, "in_batches", None)  # of a source whose order depends on which rows share a batch
    source = source if in_batches is None else in_batches(global_batch)
    streamed = is_stream(source)
    if min(seed, start_step, num_steps) < 0:
        raise UserError(f"seed={seed}, start_step={start_step} and num_steps={num_steps} must be 0 or more.")
    placed = _Placed(source, sharding, global_batch, layout)
    rows = placed.rows
    take = checked(source, limits, "training")

    def read(step: int) -> LocalBatch:
        samples = batch_number(step, left_out) * global_batch + rows
        local = take(source_order(samples, source=source, seed=seed, shuffle=shuffle))
        return {**local, "example": (samples % EXAMPLE_MODULUS).astype(np.int32)}

    if streamed and start_step and num_steps and is_main_process():
        again = round(batch_number(start_step, left_out) * global_batch * getattr(source, "streamed_share", 1.0))
        tell(
            f"data: a stream cannot be sought: the {again:,} rows before step {start_step + 1} are read again and "
            "dropped, by every process."
        )
    steps = range(start_step, start_step + num_steps)
    return placed.batches(read, steps, prefetch=prefetch, threads=0 if streamed else threads, took=took)


def eval_batches(
    source: Source,
    sharding: NamedSharding,
    *,
    global_batch: int,
    max_batches: int | None = None,
    prefetch: int = 2,
    threads: int = 0,
    limits: Limits = NO_LIMITS,
    layout: Rules | None = None,
) -> Generator[Batch, None, None]:
    """All examples of a source in order, each once.

    Args:
        source: Evaluation examples.
        sharding: How rows are split over the mesh; further dims are not split.
        global_batch: Rows of a batch, over all processes.
        max_batches: Stop after so many batches; None for the whole split.
        prefetch: Batches kept ready on the devices ahead, by a background thread; 0 reads on demand.
        threads: Further threads that read examples, for slow storage.
        limits: What the model takes; every batch is checked against it.
        layout: As for `train_batches`.

    Returns:
        A generator like that of `train_batches`, where "example" is the index into the source. Rows past its end
        repeat the last example with weights of zero.

    Raises:
        UserError: the batch does not divide over the mesh.
        BadDataError: while reading, for a value that is not allowed (see `ranges`).
    """
    take = checked(source, limits, "evaluation")
    placed = _Placed(source, sharding, global_batch, layout)
    rows = placed.rows
    num_batches = -(-len(source) // global_batch)
    if max_batches is not None:
        num_batches = min(num_batches, max_batches)

    def read(step: int) -> LocalBatch:
        indices = step * global_batch + rows
        local = take(np.minimum(indices, len(source) - 1))
        weights = local["weights"].copy()
        weights[indices >= len(source)] = 0
        return {**local, "weights": weights, "example": (indices % EXAMPLE_MODULUS).astype(np.int32)}

    return placed.batches(read, range(num_batches), prefetch=prefetch, threads=threads)


def check_enough(source: Source, global_batch: int) -> None:
    """Raises a UserError where a training split has fewer examples than one batch has rows."""
    if global_batch > len(source):
        shorter = ", lower data.length" if isinstance(source, WindowSource) else ""
        raise UserError(
            f"train.global_batch={global_batch} rows, but the training split holds {len(source)} examples. "
            f"Set train.global_batch to at most {len(source)}{shorter}, or give more data."
        )


def abstract_batch(source: Source, global_batch: int, sharding: NamedSharding) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes, dtypes and shardings of the batches that `train_batches` and `eval_batches` make.

    Args:
        source: Any split of the data; its first example is read.
        global_batch: Rows of a batch, over all processes.
        sharding: How rows are split over the mesh; its devices need not exist.

    Raises:
        UserError: the batch does not divide over the mesh.
    """
    check_divisible(sharding, global_batch)
    example = {**source[0], "example": np.int32(0)}
    return {
        name: jax.ShapeDtypeStruct(
            (global_batch, *np.shape(value)), jax.dtypes.canonicalize_dtype(value.dtype), sharding=sharding
        )
        for name, value in example.items()
    }


def check_layout(source: Source, global_batch: int, sharding: NamedSharding, layout: Rules) -> None:
    """Raises a UserError where batches of a source, of any of its lengths, cannot be stored in a layout.

    Args:
        source: Any split of the data.
        global_batch: Rows of a batch, over all processes.
        sharding: How rows are split over the mesh; its devices need not exist.
        layout: As of `train_batches`.
    """
    storage = Storage(layout, sharding)
    for batch in (abstract_batch(source, global_batch, sharding), *further_batches(source, global_batch, sharding)):
        storage.check({name: array.shape for name, array in batch.items()})


def batch_shapes(source: Source, global_batch: int) -> dict[str, tuple[int, ...]]:
    """The global shape of each array of the batches that `train_batches` and `eval_batches` make."""
    return {"example": (global_batch,), **{name: (global_batch, *np.shape(row)) for name, row in source[0].items()}}


def further_batches(
    source: Source, global_batch: int, sharding: NamedSharding
) -> Iterator[dict[str, jax.ShapeDtypeStruct]]:
    """What batches of the other lengths are, of a source that has several; `abstract_batch` is of the longest.

    Args:
        source: Any split of the data.
        global_batch: Rows of a batch, over all processes.
        sharding: How rows are split over the mesh.
    """
    if not isinstance(source, BucketedSource):
        return
    for number, length in enumerate(source.lengths[:-1]):
        example = source.padded_to(int(length), int(np.flatnonzero(source.bucket_of == number)[0]))
        yield abstract_batch(_Single(example), global_batch, sharding)


class _Single:
    """A source of one example."""

    def __init__(self, example: dict[str, np.ndarray]) -> None:
        self._example = example

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return self._example


class _Placed:
    """Which rows this process reads, and how they become batches in the layout of the step."""

    def __init__(self, source: Source, sharding: NamedSharding, global_batch: int, layout: Rules | None) -> None:
        check_divisible(sharding, global_batch)
        devices = [*sharding.addressable_devices]
        self._storage = Storage(layout, sharding) if layout else None
        if self._storage is None:
            self.rows = rows_of_devices(sharding, global_batch, devices)
            self._place = partial(place_rows, rows=self.rows, sharding=sharding, global_batch=global_batch)
            return
        shapes = batch_shapes(source, global_batch)
        self._storage.check(shapes)
        self.rows = self._storage.rows_of_devices(shapes, devices)
        self._place = partial(self._storage.place, rows=self.rows, global_batch=global_batch)

    def batches(
        self,
        read: Callable[[int], LocalBatch],
        steps: range,
        *,
        prefetch: int,
        threads: int,
        took: Callable[[float], None] | None = None,
    ) -> Generator[Batch, None, None]:
        """The batches of some steps, read and placed ahead; they come into the step's layout as they are taken."""
        made = _batches(read, self._place, steps, prefetch=prefetch, threads=threads, took=took)
        return made if self._storage is None else _each(self._storage.to_step, made)


def _each(function: Callable[[Batch], Batch], batches: Generator[Batch, None, None]) -> Generator[Batch, None, None]:
    """A function of every batch; closing the result closes the batches."""
    with closing(batches):
        yield from map(function, batches)


def _batches(
    read: Callable[[int], LocalBatch],
    place: Callable[[LocalBatch], Batch],
    steps: range,
    *,
    prefetch: int,
    threads: int,
    took: Callable[[float], None] | None,
) -> Generator[Batch, None, None]:
    """`place(read(step))` for each step: Grain reads in its threads, another places, `prefetch` batches ahead."""

    def placed() -> Generator[Batch, None, None]:
        if not steps:
            return
        import grain  # here, as importing it takes a second

        options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=threads)
        with closing(iter(grain.MapDataset.range(steps.start, steps.stop).map(read).to_iter_dataset(options))) as local:
            yield from map(place, local)

    return run_ahead(placed(), prefetch, took)

"""Batches on the mesh: Grain reads the rows of each step, and a background thread places them on the devices.

    train:  step s gets samples [s * B, (s + 1) * B) of the order; starting at step s is a seek, not a replay. Later
            batches move up if batches are left out.
    eval:   step s gets examples [s * B, (s + 1) * B); the last batch is padded with rows of weight zero.

Every process makes the same number of batches, so no iterator ends on one process before it ends on another.
"""

import atexit
import threading
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from queue import SimpleQueue
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from ..mesh.errors import UserError, counted
from ..mesh.processes import is_main_process, print_progress
from .ordering.buckets import BucketedSource
from .ordering.order import batch_number, source_order
from .placement import Rules, Storage, check_divisible
from .source import Source, is_stream, reading
from .value_ranges import NO_LIMITS, Limits, checked
from .windows import WindowSource

Batch = dict[str, jax.Array]
LocalBatch = dict[str, np.ndarray]
EXAMPLE_MODULUS = 2**31
JOIN_SECONDS = 10.0


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
) -> Generator[Batch, None, None]:
    """Yields the batches of training steps start_step, start_step + 1, ..., start_step + num_steps - 1.

    Args:
        source: Training examples.
        sharding: The split of rows over the mesh, such as P(("data", "fsdp")); further dims are not split.
        global_batch: Rows of a batch, over all processes.
        seed: Selects the order, >= 0.
        start_step: The first step; its batches are those that a run from step 0 gets from there on.
        num_steps: Number of batches.
        shuffle: If false, every epoch has the source's own order.
        prefetch: Batches that a background thread keeps ready on the devices; 0 reads on demand.
        threads: Further threads that read examples, for slow storage; not used if the source is a stream.
        limits: The values that the model accepts; every batch is checked.
        layout: The layout of arrays before the step takes them, see `placement`; None: `sharding`.
        left_out: Numbers of the batches of the order that no step gets; see `order.batch_number`.

    Returns:
        A generator of name -> global array (global_batch, ...), plus "example": int32 (global_batch,), the global
        sample index (mod 2**31). Closing it stops its threads. An error while reading is raised at its step.

    Raises:
        UserError: The batch does not divide over the mesh or is larger than the split, or a number is negative.
        BadDataError: While reading, if a value is invalid (see `value_ranges`).
    """
    check_enough(source, global_batch)
    in_batches = getattr(source, "in_batches", None)  # a source whose order depends on which rows share a batch
    source = source if in_batches is None else in_batches(global_batch)
    streamed = is_stream(source)
    if min(seed, start_step, num_steps) < 0:
        raise UserError(f"seed={seed}, start_step={start_step} and num_steps={num_steps} must be 0 or more.")
    storage, rows = _storage(source, sharding, global_batch, layout)
    take = checked(source, limits, "training", varies=in_batches is not None)

    def read(step: int) -> LocalBatch:
        samples = batch_number(step, left_out) * global_batch + rows
        with reading(source):
            local = take(source_order(samples, source=source, seed=seed, shuffle=shuffle))
        return {**local, "example": (samples % EXAMPLE_MODULUS).astype(np.int32)}

    if streamed and start_step and num_steps and is_main_process():
        print_progress(
            "data: a stream does not support seeking: every process reads its rows before step "
            f"{start_step + 1:,} again and drops them."
        )
    steps = range(start_step, start_step + num_steps)
    threads = 0 if streamed else threads
    return _batches(read, storage, rows, global_batch, steps, prefetch=prefetch, threads=threads)


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
    """Yields all examples of a source in order, each once.

    Args:
        source: Evaluation examples.
        sharding: The split of rows over the mesh; further dims are not split.
        global_batch: Rows of a batch, over all processes.
        max_batches: The maximum number of batches; None for the whole split.
        prefetch: Batches that a background thread keeps ready on the devices; 0 reads on demand.
        threads: Further threads that read examples, for slow storage.
        limits: The values that the model accepts; every batch is checked.
        layout: See `train_batches`.

    Returns:
        A generator like that of `train_batches`; "example" is the index into the source. Rows past its end repeat the
        last example with weights of zero.

    Raises:
        UserError: The batch does not divide over the mesh.
        BadDataError: While reading, if a value is invalid (see `value_ranges`).
    """
    take = checked(source, limits, "evaluation")
    storage, rows = _storage(source, sharding, global_batch, layout)
    number = len(source)
    num_batches = min(-(-number // global_batch), number if max_batches is None else max_batches)

    def read(step: int) -> LocalBatch:
        indices = step * global_batch + rows
        local = take(np.minimum(indices, number - 1))
        weights = local["weights"].copy()
        weights[indices >= number] = 0
        return {**local, "weights": weights, "example": (indices % EXAMPLE_MODULUS).astype(np.int32)}

    return _batches(read, storage, rows, global_batch, range(num_batches), prefetch=prefetch, threads=threads)


def check_enough(source: Source, global_batch: int) -> None:
    """Raises a UserError if a training split has fewer examples than a batch has rows."""
    if global_batch > len(source):
        shorter = ", lower data.length" if isinstance(source, WindowSource) else ""
        raise UserError(
            f"train.global_batch={global_batch} rows, but the training split has only {len(source)} examples. "
            f"Set train.global_batch to at most {len(source)}{shorter}, or give more data."
        )


def abstract_batch(source: Source, global_batch: int, sharding: NamedSharding) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shapes, dtypes and shardings of the batches that `train_batches` and `eval_batches` make.

    Args:
        source: A split of the data; its first example is read.
        global_batch: Rows of a batch, over all processes.
        sharding: The split of rows over the mesh; its devices need not exist.

    Raises:
        UserError: The batch does not divide over the mesh.
    """
    check_divisible(sharding, global_batch)
    return {
        name: jax.ShapeDtypeStruct(
            (global_batch, *np.shape(value)), jax.dtypes.canonicalize_dtype(value.dtype), sharding=sharding
        )
        for name, value in {**source[0], "example": np.int32(0)}.items()
    }


def further_batches(
    source: Source, global_batch: int, sharding: NamedSharding
) -> Iterator[dict[str, jax.ShapeDtypeStruct]]:
    """Yields the abstract batches of the other lengths of a bucketed source; `abstract_batch` has the longest.

    Args:
        source: A split of the data.
        global_batch: Rows of a batch, over all processes.
        sharding: The split of rows over the mesh.
    """
    if not isinstance(source, BucketedSource):
        return
    for number, length in enumerate(source.lengths[:-1]):
        example = source.padded_to(int(length), int(np.flatnonzero(source.bucket_of == number)[0]))
        yield abstract_batch([example], global_batch, sharding)


def check_form(batch: Mapping[str, Any], expected: Iterable[Mapping[str, Any]]) -> None:
    """Checks that a batch has the form of a program that is compiled for its source.

    Args:
        batch: Global arrays.
        expected: The abstract batches of the source, see `abstract_batch` and `further_batches`.

    Raises:
        UserError: The reader gives rows of another form than its first example.
    """
    forms = [{name: (str(array.dtype), array.shape[1:]) for name, array in sorted(each.items())} for each in expected]
    found = {name: (str(array.dtype), array.shape[1:]) for name, array in sorted(batch.items())}
    if found not in forms:
        raise UserError(
            f"The first example of the training split is {forms[0]}, but the rows of the first batch are {found}; all "
            "must have the same names, dtypes and shapes. Correct the reader (data.source)."
        )


def check_layout(source: Source, global_batch: int, sharding: NamedSharding, layout: Rules) -> None:
    """Raises a UserError if batches of a source, of any of its lengths, cannot be stored in a layout.

    Args:
        source: A split of the data.
        global_batch: Rows of a batch, over all processes.
        sharding: The split of rows over the mesh; its devices need not exist.
        layout: See `train_batches`.
    """
    storage = Storage(layout, sharding)
    for batch in (abstract_batch(source, global_batch, sharding), *further_batches(source, global_batch, sharding)):
        storage.check({name: array.shape for name, array in batch.items()})


def _storage(
    source: Source, sharding: NamedSharding, global_batch: int, layout: Rules | None
) -> tuple[Storage, np.ndarray]:
    """Returns the layout of batches, and the rows of the global batch that this process reads."""
    check_divisible(sharding, global_batch)
    storage = Storage(layout or {}, sharding)
    shapes: dict[str, tuple[int, ...]] = {"example": (global_batch,)}
    if layout:
        shapes |= {name: (global_batch, *np.shape(row)) for name, row in source[0].items()}
        storage.check(shapes)
    return storage, storage.rows_of_devices(shapes, [*sharding.addressable_devices])


def _batches(
    read: Callable[[int], LocalBatch],
    storage: Storage,
    rows: np.ndarray,
    global_batch: int,
    steps: range,
    *,
    prefetch: int,
    threads: int,
) -> Generator[Batch, None, None]:
    """Reads and places the batch of each step ahead; the caller's thread moves it to the layout of the step."""

    def placed() -> Generator[Batch, None, None]:
        import grain  # takes a second

        options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=threads)
        with closing(iter(grain.MapDataset.source(steps).map(read).to_iter_dataset(options))) as local:
            yield from (storage.place(batch, rows, global_batch) for batch in local)

    with closing(prefetch_items(placed(), prefetch)) as batches:
        yield from map(storage.to_step, exactly(batches, len(steps)))


def exactly(batches: Iterator[Batch], number: int) -> Iterator[Batch]:
    """Yields batches, and raises a UserError if they end before there were `number`."""
    count = 0
    for batch in batches:
        count += 1
        yield batch
    if count < number:
        raise UserError(
            f"The data ended after {count:,} of {counted(number, 'batch', 'batches')} without an error. A reader "
            "must give an example for every index, or raise an error."
        )


def prefetch_items(items: Generator[Batch, None, None], depth: int) -> Generator[Batch, None, None]:
    """Yields the items of a generator, made ahead of time by a background thread.

    Grain's own prefetch thread ends silently at a SystemExit, so that the caller waits forever, and closing it waits
    for a reader that hangs.

    Args:
        items: The generator; the thread that runs it closes it.
        depth: Items kept ready besides the one in use; 0 makes each on demand, without a thread.

    Returns:
        A generator. An error in `items` is raised in place of its item. Closing the generator stops the thread after
        its current item, and waits at most JOIN_SECONDS for it.
    """
    if depth == 0:
        with closing(items):
            yield from items
        return
    ready: SimpleQueue[tuple[Batch | None, BaseException | None]] = SimpleQueue()  # C code: 3 us a step
    slots: SimpleQueue[bool] = SimpleQueue()  # True: make one more item; False: stop
    for _ in range(depth):
        slots.put(True)
    stopped = threading.Event()

    def make() -> None:
        try:
            with closing(items):
                while slots.get() and not stopped.is_set():
                    ready.put((next(items), None))
        except BaseException as error:  # StopIteration at the end
            ready.put((None, error))

    thread = threading.Thread(target=make, name="spmdkit-prefetch", daemon=True)

    def stop() -> None:
        stopped.set()
        slots.put(False)
        thread.join(JOIN_SECONDS)

    atexit.register(stop)  # a thread that runs while Python exits aborts the process
    thread.start()
    try:
        while not isinstance((made := ready.get())[1], StopIteration):
            if made[1] is not None:
                raise made[1]
            slots.put(True)
            yield made[0]  # pyright: ignore[reportReturnType]
    finally:
        atexit.unregister(stop)
        stop()

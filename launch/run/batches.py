"""The batches of a run from any of its steps on, and the position in the data that a checkpoint notes."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from ...configs.not_finite import policy_of
from ...data.batches import EXAMPLE_MODULUS, train_batches
from ...data.ordering.order import batch_number
from ...mesh.errors import UserError
from .build import Built
from .guarding.limits import data_limits


def batches_after(
    start: int, built: Built, left_out: Collection[int] = (), took: Callable[[float], None] | None = None
) -> Any:
    """The batches of the steps that are left after so many, read by threads of their own; to be closed.

    Where the run does not stop for what is not finite, values that are not reach the step, where every process sees
    them.

    Args:
        start: Steps done.
        built: The run.
        left_out: Numbers of batches that no step gets.
        took: Gets the seconds that each batch took in the background, as of `train_batches`.
    """
    config = built.config
    limits = data_limits(config, built.splits)._replace(finite=policy_of(config).policy == "stop")
    return train_batches(
        built.splits.train,
        built.layouts.batch_sharding(),
        global_batch=config.train.global_batch,
        seed=config.run.seed,
        start_step=start,
        num_steps=config.train.steps - start,
        shuffle=config.data.shuffle,
        prefetch=config.data.prefetch,
        threads=config.data.threads,
        limits=limits,
        layout=config.data.layout,
        left_out=left_out,
        took=took,
    )


def data_position(step: int, left_out: Collection[int]) -> dict[str, Any]:
    """Describes how far a run has read its data, for the notes of a checkpoint.

    Args:
        step: Steps done.
        left_out: Numbers of batches that no step gets.

    Returns:
        `batches`: the batches of the order that were read or left out; `left_out`: the numbers of the latter.
    """
    read = batch_number(step - 1, left_out) + 1 if step else 0
    return {"batches": read, "left_out": [number for number in sorted(left_out) if number < read]}


def check_position(notes: Mapping[str, Any], step: int, left_out: Collection[int]) -> None:
    """Checks that a run goes on in its data where its checkpoint was saved.

    Args:
        notes: The notes of the checkpoint.
        step: Its step.
        left_out: Numbers of batches that no step gets, as rollbacks.json lists them.

    Raises:
        UserError: Batches would be read twice, or never.
    """
    noted, now = notes.get("data"), data_position(step, left_out)
    if noted is not None and noted != now:
        raise UserError(
            f"The checkpoint of step {step} was saved after {noted['batches']} batches of the data, of which "
            f"{noted['left_out'] or 'none'} were left out; rollbacks.json now gives {now['batches']} and "
            f"{now['left_out'] or 'none'}. Batches would be read twice or never. Put rollbacks.json back, or start "
            "anew with --fresh, which moves this run aside."
        )


def check_first_batch(batch: Mapping[str, Any], step: int, left_out: Collection[int]) -> None:
    """Checks that the first batch of a start contains the samples that follow those of the steps before.

    Args:
        batch: The first batch, of which this process looks at the rows of one device.
        step: Steps done.
        left_out: Numbers of batches that no step gets.

    Raises:
        RuntimeError: It contains other samples.
    """
    examples = batch["example"]
    shard = examples.addressable_shards[0]
    first = batch_number(step, left_out) * examples.shape[0]
    expected = ((first + np.arange(examples.shape[0])) % EXAMPLE_MODULUS)[shard.index[0]]
    found = np.asarray(shard.data)
    if not np.array_equal(found, expected):
        raise RuntimeError(
            f"The first batch after step {step} begins with sample {found[0]} instead of {expected[0]}: samples would "
            "be read twice or never. Nothing was trained. This is an error in the data source or in spmdkit."
        )

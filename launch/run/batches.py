"""The batches of a run, from any of its steps on."""

from collections.abc import Callable, Collection
from typing import Any

from ...configs.not_finite import policy_of
from ...data.batches import train_batches
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

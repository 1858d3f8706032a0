"""`spmdkit verify`: compares a config's training with one device, on simulated CPU devices, at a small size."""

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from ..checkpoints.manager import Checkpoints
from ..configs.checks import REST, axis_sizes
from ..configs.schema import Config
from ..data.ordering.order import source_order
from ..data.source import Source, take
from ..data.splits import open_splits
from ..mesh.devices import simulate
from ..mesh.errors import UserError
from ..parallel.model import Params
from ..parallel.step.state import TrainState
from ..parallel.verification.after_training import Averages
from ..parallel.verification.compare import verify_step, x64
from ..parallel.verification.contract.probe import quick_compilation
from ..parallel.verification.reference import HostBatch
from ..parallel.verification.result import Verification
from ..training.optimizing.averaging import Averaged, average_reader
from .build_run import Built, build
from .reduce import Reduced, reduce_config

DEFAULT_DEVICES = 8
DEFAULT_STEPS = 3


def verify_config(
    config: Config, *, full: bool = False, float32: bool = False, steps: int = DEFAULT_STEPS
) -> Verification:
    """Compares the strategy of a config with one device, on as many simulated CPU devices as it needs.

    Args:
        config: The run's configuration.
        full: Verify the sizes of the config itself, not smaller ones.
        float32: Compute in float32 instead of float64.
        steps: Optimizer steps before the parameters are compared.

    Raises:
        UserError: The config is invalid, see `build`, or `steps` is less than 1.
    """
    if steps < 1:
        raise UserError(f"--steps {steps}: parameters are compared after at least 1 step.")
    devices = simulate_devices(axis_sizes(config.strategy), config.run.simulate or DEFAULT_DEVICES)
    check = str(config.model.get("check", "error"))
    config = replace(config, model={**config.model, "check": "off"})  # verification checks the contract itself
    dtype = "float32" if float32 else "float64"
    dtypes = {"params": dtype, "compute": dtype, "reduce": dtype}
    precision = replace(config.precision, **dtypes, loss_scale=config.precision.scaling)
    with x64(precision), quick_compilation():
        if full:
            splits = open_splits(config.data, config.run.search_path, config.train.global_batch)
            reduced = Reduced(replace(config, precision=precision), splits, {})
        else:
            reduced = reduce_config(config, precision, devices)
        small = reduced.config
        built = build(small, splits=reduced.splits, devices=devices)
        rows = {"rows": small.train.global_batch, "seed": small.run.seed, "shuffle": small.data.shuffle}
        return verify_step(
            built.step,
            [ragged_batch(reduced.splits.train, number, **rows) for number in range(steps)],
            clip_norm=small.train.clip_norm,
            seed=small.run.seed,
            reduced=reduced.changes,
            save_and_restore=through_files,
            averages=averages_of(built) if small.optimizer.ema.decay else None,
            check=check,
        )


def averages_of(built: Built) -> Averages:
    """Returns readers for the averages of the parameters: as evaluations read them, and from the optimizer's state."""

    def of_optimizer(params: Params, opt_state: Averaged) -> Params:
        def select(mean: Any, leaf: Any) -> Any:
            return leaf if isinstance(mean, optax.MaskedNode) else mean

        return jax.tree.map(select, opt_state.average, params, is_leaf=lambda node: isinstance(node, optax.MaskedNode))

    return Averages(average_reader(built.layouts), of_optimizer)


def through_files(state: TrainState, like: TrainState) -> TrainState:
    """Saves a state as the checkpoint of a run, and restores it as a run with other layouts does.

    Args:
        state: The state as its step stores it.
        like: Abstract values of the state of the other run's step.

    Returns:
        The arrays, with the layouts of `like`.
    """
    number = int(state.step)
    with tempfile.TemporaryDirectory(prefix="spmdkit-verify-") as folder:
        with Checkpoints(Path(folder), keep=1, abstract_state=state) as checkpoints:
            checkpoints.save(number, state)
        with Checkpoints(Path(folder), keep=1, abstract_state=like) as checkpoints:
            return checkpoints.restore(checkpoints.latest())


def simulate_devices(sizes: Mapping[str, int], default: int) -> list[str]:
    """Simulates as many CPU devices as the strategy needs, and returns their names.

    Args:
        sizes: Mesh axis -> size; -1 for one = the rest of the devices.
        default: The number of devices if an axis is the rest.
    """
    product = int(np.prod([size for size in sizes.values() if size != REST], dtype=np.int64))
    if REST in sizes.values() and default % product == 0:
        product = default
    simulate(product)
    return [f"cpu:{number}" for number in range(product)]


def ragged_batch(source: Source, step: int, *, rows: int, seed: int, shuffle: bool) -> HostBatch:
    """Returns the batch of one step with different weights for each row, and with some tokens masked.

    Equal weights hide errors: then the mean of the devices' means is the mean.

    Args:
        source: The training examples.
        step: The step.
        rows: Rows of a batch.
        seed: The seed of the order.
        shuffle: Whether the data is shuffled.
    """
    samples = step * rows + np.arange(rows)
    batch = take(source, source_order(samples, source=source, seed=seed, shuffle=shuffle))
    random = np.random.default_rng(step)
    weights = batch["weights"] * random.choice([0.25, 0.5, 1.0], (rows, *[1] * (batch["weights"].ndim - 1)))
    if weights.ndim > 1:
        kept = random.random(weights.shape) < random.uniform(0.3, 1.0, (rows, *[1] * (weights.ndim - 1)))
        kept[:, 0] = True
        weights = weights * kept
    return {**batch, "weights": weights.astype(batch["weights"].dtype), "example": samples.astype(np.int32)}

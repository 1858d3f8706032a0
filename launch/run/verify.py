"""`spmdkit verify`: does a config train as one device does? Compared on simulated CPU devices, at a small size."""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from ...configs.checks import REST, axis_sizes
from ...configs.schema import Config
from ...data.ordering.order import source_order
from ...data.source import Source, take
from ...data.splits import open_splits
from ...mesh.errors import UserError
from ...mesh.simulate import simulate
from ...parallel.model import Params
from ...parallel.precision import Precision
from ...parallel.step.state import TrainState
from ...parallel.verification.beyond_steps import Averages
from ...parallel.verification.compare import verify_step, x64
from ...parallel.verification.contract.probe import quick_compilation
from ...parallel.verification.prepared import prepared
from ...parallel.verification.reference import HostBatch
from ...parallel.verification.result import Verification
from ...training.checkpointing.checkpoints import Checkpoints
from ...training.optimizing.averaging import Averaged, average_reader
from .build import Built, build, configured_model, search_path
from .reduce import Reduced, reduce_config

DEFAULT_DEVICES = 8
DEFAULT_STEPS = 3


def verify_config(
    config: Config, *, full: bool = False, float32: bool = False, steps: int = DEFAULT_STEPS
) -> Verification:
    """Compares the strategy of a config with one device, on as many simulated CPU devices as it needs.

    Args:
        config: The config.
        full: Verify the sizes of the config itself, not smaller ones.
        float32: Compute in float32 instead of float64.
        steps: Optimizer steps after which parameters are compared.

    Raises:
        UserError: The config does not work out, as `build` says, or `steps` is less than 1.
    """
    if steps < 1:
        raise UserError(f"--steps {steps}: parameters are compared after at least 1 step.")
    devices = simulated_devices(config)
    config = replace(config, model={**config.model, "check": "off"})  # what it breaks shows in the comparison
    dtype = "float32" if float32 else "float64"
    dtypes = {"params": dtype, "compute": dtype, "reduce": dtype}
    precision = replace(config.precision, **dtypes, loss_scale=config.precision.scaling)
    with x64(precision), quick_compilation():
        reduced = _unreduced(config, precision) if full else reduce_config(config, precision, devices)
        small = reduced.config
        model = prepared(configured_model(small, reduced.splits), precision.reduce)
        built = build(small, splits=reduced.splits, model=model, devices=devices)
        batches = [ragged_batch(reduced.splits.train, small, number) for number in range(steps)]
        return verify_step(
            built.step,
            batches,
            clip_norm=small.train.clip_norm,
            seed=small.run.seed,
            reduced=reduced.changes,
            save_and_restore=through_files,
            averages=averages_of(built) if small.optimizer.ema.decay else None,
        )


def averages_of(built: Built) -> Averages:
    """The averages of the parameters as evaluations of a run read them, and as the optimizer's state holds them."""

    def of_optimizer(params: Params, opt_state: Averaged) -> Params:
        def chosen(mean: Any, leaf: Any) -> Any:
            return leaf if isinstance(mean, optax.MaskedNode) else mean

        return jax.tree.map(chosen, opt_state.average, params, is_leaf=lambda node: isinstance(node, optax.MaskedNode))

    return Averages(average_reader(built.layouts), of_optimizer)


def through_files(state: TrainState, like: TrainState) -> TrainState:
    """Writes a state as the checkpoint of a run, and restores it as one that goes on elsewhere.

    Args:
        state: Arrays in the model's order.
        like: Abstract values of the state of the run that goes on.

    Returns:
        The arrays, laid out as `like`.
    """
    number = int(state.step)
    with tempfile.TemporaryDirectory(prefix="spmdkit-verify-") as folder:
        with Checkpoints(Path(folder), keep=1, abstract_state=state) as checkpoints:
            checkpoints.save(number, state)
        with Checkpoints(Path(folder), keep=1, abstract_state=like) as checkpoints:
            return checkpoints.restore(checkpoints.latest())


def simulated_devices(config: Config) -> list[str]:
    """Simulates as many CPU devices as the strategy's sizes need, and names them."""
    sizes = list(axis_sizes(config).values())
    product = int(np.prod([size for size in sizes if size != REST], dtype=np.int64))
    if REST in sizes:
        rest = config.run.simulate or DEFAULT_DEVICES
        product = rest if rest % product == 0 else product
    simulate(product)
    return [f"cpu:{number}" for number in range(product)]


def _unreduced(config: Config, precision: Precision) -> Reduced:
    return Reduced(replace(config, precision=precision), open_splits(config.data, search_path(config)), {})


def ragged_batch(source: Source, config: Config, step: int) -> HostBatch:
    """The batch of one step of a run, its weights made to differ: from row to row, and with some tokens left out.

    Equal weights hide mistakes: the mean of the devices' means is then the mean.

    Args:
        source: Training examples.
        config: For the batch's size and the order of the data.
        step: Which step.
    """
    rows = config.train.global_batch
    samples = step * rows + np.arange(rows)
    seed, shuffle = config.run.seed, config.data.shuffle
    batch = take(source, source_order(samples, source=source, seed=seed, shuffle=shuffle))
    random = np.random.default_rng(step)
    weights = batch["weights"] * random.choice([0.25, 0.5, 1.0], (rows, *[1] * (batch["weights"].ndim - 1)))
    if weights.ndim > 1:
        kept = random.random(weights.shape) < random.uniform(0.3, 1.0, (rows, *[1] * (weights.ndim - 1)))
        kept[:, 0] = True
        weights = weights * kept
    return {**batch, "weights": weights.astype(batch["weights"].dtype), "example": samples.astype(np.int32)}

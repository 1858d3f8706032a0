"""The model of a run is checked before anything is compiled for its mesh: its functions, then its contract."""

import warnings
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from ....configs.schema import Config
from ....data.ordering.order import source_order
from ....data.source import Source, take
from ....layouts.sizes import format_bytes
from ....mesh.compat import Device
from ....mesh.keys import make_key
from ....mesh.processes import is_main_process
from ....mesh.user_errors import text_of, told_as_users
from ....parallel.model import BlockModel, Model
from ....parallel.precision import FLOAT32
from ....parallel.sharding.lay_out import abstract_parameters
from ....parallel.sharding.model_errors import ModelError, check_loss
from ....parallel.step.train_step import Step
from ....parallel.verification.contract.breaches import NotChecked, breaches
from ....parallel.verification.contract.check import initial_params, report

MOST_BYTES = 256 << 20
"""The largest parameters, in float32, that are made whole on one device to check a model."""
LOOKED_AT = 64
"""Rows of the data among which those with weight are looked for."""
OF_A_MESH = ("axis name", "mesh")
"""What JAX's errors say of a collective that is traced outside its mesh."""


def check_functions(
    model: Model | BlockModel, step: Step, batch: Mapping[str, jax.ShapeDtypeStruct], *, evaluates: bool
) -> bool:
    """Traces the model's functions on the rows of one device.

    Args:
        model: The model, not split.
        step: Its step: a model with collectives of its own is traced in it, on the mesh.
        batch: Global shapes and dtypes of a batch.
        evaluates: Whether the loss will be called without a key too.

    Returns:
        Whether it runs on one device alone; else on the mesh alone.

    Raises:
        ModelError: It does neither.
    """
    pieces = step.plan.rows(step.accumulate).total
    local = {
        name: jax.ShapeDtypeStruct((leaf.shape[0] // pieces, *leaf.shape[1:]), leaf.dtype)
        for name, leaf in batch.items()
    }
    try:
        check_loss(model, local, compute=step.precision.compute, evaluates=evaluates)
    except ModelError as error:
        cause = error.__cause__
        if cause is None:
            raise
        try:
            with told_as_users(f"model {model.name!r}: on the mesh, loss", model.loss, ModelError):
                jax.eval_shape(step.gradients, step.abstract_state(), dict(batch))
                if evaluates:
                    jax.eval_shape(step.evaluate, step.abstract_state().params, dict(batch))
        except ModelError as on_the_mesh:
            raise (on_the_mesh if any(word in text_of(cause) for word in OF_A_MESH) else error) from cause
        return False
    return True


def check_contract(config: Config, model: Model | BlockModel, source: Source, device: Device) -> None:
    """Measures the user's own model on the first rows of its data, as `model.check` says.

    Models of the catalogue are not measured: their tests hold them to the contract, and a run need not wait for it.

    Args:
        config: The run's config.
        model: The model, not split.
        source: Training examples.
        device: A device of this process; nothing moves between processes.

    Raises:
        ContractError: The model breaks the contract, under `model.check: error`.
    """
    check, name = config.model.get("check", "error"), str(config.model["name"])
    if check == "off" or ":" not in name:
        return
    size = sum(leaf.size * 4 for leaf in jax.tree.leaves(abstract_parameters(model, FLOAT32)))
    if size > MOST_BYTES:
        _skipped(f"its parameters are {format_bytes(size)}, and at most {format_bytes(MOST_BYTES)} are made whole")
        return
    rows = _first_rows(source, config)
    try:
        with jax.default_device(device):
            key = make_key(config.run.seed)
            broken = breaches(model, initial_params(model, key), rows, jax.random.fold_in(key, 0))
    except NotChecked as error:
        _skipped(str(error))
    except Exception as error:  # it has traced on the rows of a device: it may need as many, or the machine is at fault
        _skipped(f"on 4 rows, and on 2, of one device it raises {text_of(error)}")
    else:
        report(f"model.name={name!r}", broken, check)


def _first_rows(source: Source, config: Config) -> dict[str, Any]:
    """The rows that training begins with."""
    samples = np.arange(min(LOOKED_AT, len(source)))
    order = source_order(samples, source=source, seed=config.run.seed, shuffle=config.data.shuffle)
    return {**take(source, order), "example": samples.astype(np.int32)}


def _skipped(reason: str) -> None:
    if is_main_process():
        warnings.warn(
            f"The model's contract is not checked: {reason}. `spmdkit verify` compares a smaller run with one device; "
            "model.check: off leaves this line out.",
            stacklevel=2,
        )

"""`spmdkit.check_model`: checks if the runtime can train a model, by tracing it and by measuring a few rows."""

import warnings
from collections.abc import Sequence

import jax
import numpy as np
from jax import Array

from ....mesh.errors import UserError
from ....mesh.keys import make_key
from ...model import BlockModel, Model, Params
from ...options import cast_floats
from ...sharding.model_errors import check_loss
from ..reference import HostBatch
from .breaches import Breach, ContractError, NotChecked, breaches
from .probe import compile_quickly, count
from .random_key import check_key

CHECKS = ("error", "warn", "off")
"""The reaction to a breach: an error, a warning, or no check."""


def check_model(
    model: Model | BlockModel,
    batch: HostBatch,
    *,
    params: Params | None = None,
    seed: int = 0,
    check: str = "error",
) -> tuple[Breach, ...]:
    """Checks a model and its contract with the runtime on one device, as `spmdkit train` does.

    Args:
        model: The model; its parameters are created whole, so pass a small model of the same structure.
        batch: Host arrays with rows on dim 0, four or more; "example", the index of each row, is added if absent.
        params: The parameters; by default, those of `model.init`.
        seed: The seed of the parameters and of the training key.
        check: "error" raises for a breach, "warn" warns, "off" only traces the model's functions.

    Returns:
        The breaches of the contract.

    Raises:
        ModelError: One of the model's functions cannot be called as the runtime calls it.
        ContractError: The model breaks the contract, with "error"; lists every breach.
        UserError: The batch has arrays of unequal length, or needs too much memory on one device.
    """
    if check not in CHECKS:
        raise UserError(f"check={check!r} is not one of {', '.join(CHECKS)}.")
    arrays = {name: np.asarray(array) for name, array in batch.items()}
    rows = {name: array.shape[0] if array.ndim else "no dim" for name, array in arrays.items()}
    if len(set(rows.values())) != 1 or "no dim" in rows.values():
        raise UserError(f"The arrays of a batch have one row for each example on dim 0; these have {rows}.")
    arrays = {"example": np.arange(count(arrays), dtype=np.int32), **arrays}
    dtypes = {name: jax.dtypes.canonicalize_dtype(array.dtype) for name, array in arrays.items()}  # int64 as int32
    check_loss(model, {name: jax.ShapeDtypeStruct(array.shape, dtypes[name]) for name, array in arrays.items()})
    if check == "off":
        return ()
    key = make_key(seed)
    params = initial_params(model, key) if params is None else params
    try:
        broken = breaches(model, params, arrays, jax.random.fold_in(key, 0))
    except NotChecked as error:
        raise UserError(f"model {model.name!r}: {error}. Give a smaller model or shorter rows.") from error
    report(f"model {model.name!r}", broken, check)
    return broken


def initial_params(model: Model | BlockModel, key: Array) -> Params:
    """Returns float32 initial parameters, whole on the default device, from the generator of `random_key`."""
    key = check_key(key)
    return compile_quickly(lambda key: cast_floats(model.init(key), "float32"), key)(key)


def report(name: str, broken: Sequence[Breach], check: str) -> None:
    """Raises an error, warns, or does nothing, depending on `check`.

    Args:
        name: Names the model: "model.name='mine:make'".
        broken: The breaches.
        check: One of `CHECKS`.

    Raises:
        ContractError: There are breaches, and `check` is "error".
    """
    if not broken or check == "off":
        return
    message = "\n".join(f"{name} breaks the contract ({breach.kind}): {breach.message}" for breach in broken)
    if check == "warn":
        warnings.warn(message, stacklevel=3)
        return
    raise ContractError(f"{message} To train it as it is, set model.check: warn, or off.")

"""`spmdkit.check_model`: is this a model that the runtime can train? Traced, then measured on a few rows."""

import warnings
from collections.abc import Sequence

import jax
import numpy as np
from jax import Array

from ....mesh.errors import UserError
from ....mesh.keys import make_key
from ...model import BlockModel, Model, Params
from ...precision import cast_floats
from ...sharding.model_errors import check_loss
from .breaches import Breach, ContractError, NotChecked, breaches
from .draws import with_host_draws
from .probe import HostBatch, count
from .random_key import check_key

CHECKS = ("error", "warn", "off")
"""What happens to a breach of the contract: the run is refused, warned of, or the contract is not looked at."""


def check_model(
    model: Model | BlockModel,
    batch: HostBatch,
    *,
    params: Params | None = None,
    seed: int = 0,
    check: str = "error",
) -> tuple[Breach, ...]:
    """Checks a model and its contract with the runtime on one device, as a run of a config does when it is built.

    Args:
        model: The model; parameters are made whole, so give a small one of the same structure.
        batch: Host arrays with rows on dim 0, four or more; "example", the index of each row, is added if absent.
        params: Parameters to check at; those of `model.init` by default.
        seed: Of the parameters and of the key of training.
        check: "error" raises for a breach, "warn" warns, "off" only traces the model's functions.

    Returns:
        The breaches of the contract.

    Raises:
        ModelError: One of the model's functions cannot be called as the runtime calls it.
        ContractError: The model breaks the contract, under "error"; every breach is told.
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
    """Initial parameters, whole on the default device, in float32; of the model's distribution, but drawn otherwise."""
    return with_host_draws(lambda key: cast_floats(model.init(key), "float32"), check_key(key))


def report(name: str, broken: Sequence[Breach], check: str) -> None:
    """Raises, warns or does nothing, as `check` says.

    Args:
        name: Names the model: "model.name='mine:make'".
        broken: What was found.
        check: One of `CHECKS`.

    Raises:
        ContractError: Something was found, and `check` is "error".
    """
    if not broken or check == "off":
        return
    message = "\n".join(f"{name} breaks the contract ({breach.kind}): {breach.message}" for breach in broken)
    if check == "warn":
        warnings.warn(message, stacklevel=3)
        return
    raise ContractError(f"{message} To train it as it is, set model.check: warn, or off.")

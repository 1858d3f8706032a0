"""Checks the contract of the model of a run before anything is compiled for its mesh."""

import warnings
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from ..data.ordering.order import source_order
from ..data.source import Source, take
from ..layouts.sizes import format_bytes
from ..mesh.keys import make_key
from ..mesh.processes import is_main_process
from ..parallel.model import BlockModel, Model
from ..parallel.model.user_errors import describe_error
from ..parallel.options import FLOAT32
from ..parallel.sharding.lay_out import abstract_parameters
from ..parallel.verification.contract.breaches import NotChecked, breaches, initial_params, report

MAX_BYTES = 256 << 20
"""The largest parameters, in float32, that are created on one device to check a model."""
MAX_ROWS = 64
"""Rows of the data that are searched for rows with weight."""


def check_contract(
    options: Mapping[str, Any], model: Model | BlockModel, source: Source, *, seed: int, shuffle: bool
) -> None:
    """Checks the contract of the user's own model on the first rows of its data, as `model.check` selects.

    The check runs on JAX's default device; nothing moves between processes. Models of the catalog are not checked:
    their tests do that.

    Args:
        options: The section `model`.
        model: The model, not split.
        source: The training examples.
        seed: `run.seed`.
        shuffle: `data.shuffle`.

    Raises:
        ContractError: The model violates the contract, and `model.check` is `error`.
    """
    check, name = options.get("check", "error"), str(options["name"])
    if check == "off" or ":" not in name:
        return
    size = sum(leaf.size * 4 for leaf in jax.tree.leaves(abstract_parameters(model, FLOAT32)))
    if size > MAX_BYTES:
        _warn_skipped(f"its parameters are {format_bytes(size)}, more than {format_bytes(MAX_BYTES)}")
        return
    samples = np.arange(min(MAX_ROWS, len(source)))
    order = source_order(samples, source=source, seed=seed, shuffle=shuffle)
    rows = {**take(source, order), "example": samples.astype(np.int32)}
    try:
        key = make_key(seed)
        broken = breaches(model, initial_params(model, key), rows, jax.random.fold_in(key, 0))
    except NotChecked as error:
        _warn_skipped(str(error))
    except Exception as error:  # the model was traced on a device's rows: it may need as many, or the machine failed
        _warn_skipped(f"on 4 rows, and on 2, of one device it raises {describe_error(error)}")
    else:
        report(f"model.name={name!r}", broken, check)


def _warn_skipped(reason: str) -> None:
    if is_main_process():
        warnings.warn(
            f"The model's contract is not checked: {reason}. `spmdkit verify` compares a smaller run with one device; "
            "model.check: off disables this warning.",
            stacklevel=2,
        )

"""A learning rate that falls where the loss no longer does: decided within the step, so all devices decide alike.

    mean    = mean of the loss over the last `window_steps` steps
    better  = mean < (1 - tolerance) * best
    scale   = scale * factor after `patience` windows in a row that are not better, at least final_ratio
    update  = scale * update

The loss is the one that the step has anyway, of the batch before its update. An evaluation is not looked at: it happens
between steps, on the host.

Source: optax.contrib.reduce_on_plateau, which this is.
"""

from collections.abc import Mapping
from typing import Any

import jax
import optax
import optax.contrib
from jax import Array

from .groups import REST

NAME = "plateau"
DEFAULTS: dict[str, Any] = {
    "factor": 0.5,
    "patience": 10,
    "window_steps": 10,
    "cooldown": 0,
    "tolerance": 1e-4,
    "final_ratio": 0.0,
}
"""Option -> its default."""


INT32 = 2**31 - 1
"""The largest count of the optimizer's state; a larger option means the same, as no run has as many steps."""


def is_plateau(schedule: Mapping[str, Any]) -> bool:
    """Whether a schedule follows the loss."""
    return schedule.get("name") == NAME


def scale_on_plateau(schedule: Mapping[str, Any]) -> optax.GradientTransformationExtraArgs:
    """Scales updates down where the loss has stopped to fall.

    Args:
        schedule: `optimizer.schedule` with the name plateau.

    Returns:
        A transformation whose update needs `value`, the loss, as a scalar.
    """
    options = {**DEFAULTS, **schedule}
    for name in ("patience", "cooldown", "window_steps"):
        options[name] = min(options[name], INT32)
    return optax.contrib.reduce_on_plateau(
        factor=options["factor"],
        patience=options["patience"],
        rtol=options["tolerance"],
        cooldown=options["cooldown"],
        accumulation_size=options["window_steps"],
        min_scale=options["final_ratio"],
    )


def plateau_scales(opt_state: Any) -> list[Array]:
    """What the learning rates are multiplied with by now: a scalar for each group that follows the loss.

    Args:
        opt_state: The optimizer's state, `TrainState.opt_state`.
    """
    nodes = jax.tree.leaves(opt_state, is_leaf=_is_plateau_state)
    return [node.scale for node in nodes if _is_plateau_state(node)]


def main_plateau_scale(opt_state: Any) -> Array | None:
    """What the learning rate of `optimizer.schedule` itself is multiplied by, in the step that this is the state after.

    Args:
        opt_state: The optimizer's state, `TrainState.opt_state`.

    Returns:
        A scalar (with local steps one for each group of devices): that of the parameters in no group of
        `optimizer.groups`, or, where all are in one, of the first; None where nothing follows the loss.
    """
    nodes, _ = jax.tree_util.tree_flatten_with_path(opt_state, is_leaf=_is_plateau_state)
    found = [(path, node.scale) for path, node in nodes if _is_plateau_state(node)]
    rest = [scale for path, scale in found if jax.tree_util.DictKey(REST) in path]
    return next(iter(rest or [scale for _, scale in found]), None)


def _is_plateau_state(node: Any) -> bool:
    return isinstance(node, optax.contrib.ReduceLROnPlateauState)

"""Optimizers by name: each is a direction, then decoupled weight decay, then the learning rate.

    update = -rate(step) * (direction(gradient) + weight_decay * parameter)

The direction is what the optimizer is known for; see `directions`. The step clips gradients before any of this. Parts
of the parameters may have options of their own, or not train at all, and an update may be left out: see `optimizing/`.
"""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import optax

from ...layouts.paths import leaves_with_paths
from ...mesh.errors import UserError
from ...mesh.user_code import import_function
from ...mesh.user_options import call_with_options
from ...models.frozen import frozen_paths
from .averaging import averaged
from .directions import DIRECTIONS
from .groups import KEY, assign, by_group, labels, only
from .learning_rates import make_learning_rate
from .optimizer_config import OptimizerConfig as OptimizerConfig
from .optimizer_config import of_group, told_of
from .parameter_kinds import check_met, is_stacked, select
from .plateau import is_plateau, scale_on_plateau
from .skipping import skip_not_finite


def make_optimizer(
    config: OptimizerConfig,
    num_steps: int,
    abstract_params: Any,
    *,
    stacked: bool | None = None,
    search_path: Sequence[str | Path] = (),
    frozen: Collection[str] = (),
    around: Callable[[optax.GradientTransformation], optax.GradientTransformation] = lambda optimizer: optimizer,
) -> optax.GradientTransformation:
    """Builds the optimizer, without clipping.

    Args:
        config: The `optimizer:` section.
        num_steps: Optimizer steps in the whole run.
        abstract_params: Shapes of the parameters, as global arrays: paths and ranks decide what is decayed.
        stacked: Whether `abstract_params["blocks"]` holds blocks stacked on dim 0; None: exactly where the parameters
            are a dict of "embed", "blocks" and "head", as a `BlockModel`'s.
        search_path: Folders where the user's own optimizer is looked for first.
        frozen: Paths of parameters that do not train, besides those of `optimizer.freeze`.
        around: What else changes its updates, such as `callbacks.rate_factor.adjustable`: an average of the parameters
            is one of those that they make.

    Returns:
        A transformation of global arrays. Those of sgd, adam, adamw and lion treat every element alone; adafactor and
        muon look across a matrix, never across blocks. Without `freeze`, groups, skipping and an average, its state has
        the form that it had before there were any.

    Raises:
        UserError: The schedule does not fit the run, a pattern meets no parameter, all parameters are frozen, two
            groups meet one parameter, this optax has no muon, or the user's function is missing, takes other options or
            returns something else.
    """
    stacked = is_stacked(abstract_params) if stacked is None else stacked
    check_met(abstract_params, config.decay_skip, "optimizer.decay_skip")
    frozen = frozen_paths(config.freeze, abstract_params) | frozenset(frozen)
    if frozen and frozen.issuperset(path for path, _ in leaves_with_paths(abstract_params)):
        raise UserError("optimizer.freeze and model.lora freeze all parameters: nothing is left to train. Free some.")

    def one(config: OptimizerConfig, params: Any) -> optax.GradientTransformation:
        return _one_optimizer(config, num_steps, params, stacked, search_path)

    if not (frozen or config.groups):
        optimizer = one(config, abstract_params)
    else:
        groups = assign(tuple(config.groups), abstract_params, frozen)
        label_of = labels(groups)
        transformations = {}
        for pattern in dict.fromkeys(groups.values()):
            own = config if pattern is None else of_group(config, config.groups[pattern])
            paths = [path for path, group in groups.items() if group == pattern]
            try:
                transformations[label_of[pattern]] = one(own, only(abstract_params, paths))
            except UserError as error:
                raise (UserError(told_of(f"{KEY}.{pattern}", error)) if pattern else error) from error
        by_path = {path: label_of[pattern] for path, pattern in groups.items()}
        optimizer = by_group(transformations, by_path, abstract_params)
    optimizer = around(skip_not_finite(optimizer, config.skip_not_finite) if config.skip_not_finite else optimizer)
    return averaged(optimizer, config.ema.decay, frozen) if config.ema.decay else optimizer


def _one_optimizer(
    config: OptimizerConfig, num_steps: int, params: Any, stacked: bool, search_path: Sequence[str | Path]
) -> optax.GradientTransformation:
    """The optimizer of one group, or of all parameters; `params` are the shapes of its own."""
    learning_rate = make_learning_rate(config.learning_rate, config.schedule, num_steps)
    follows = [scale_on_plateau(config.schedule)] if is_plateau(config.schedule) else []
    if ":" in config.name:
        offered = {"learning_rate": learning_rate, "num_steps": num_steps, "abstract_params": params}
        own = _user_optimizer(config, offered, search_path)
        return optax.chain(own, *follows) if follows else own
    decayed = select(params, stacked, skip=config.decay_skip)
    return optax.chain(
        DIRECTIONS[config.name](config, params, stacked),
        optax.add_decayed_weights(config.weight_decay, mask=decayed),
        optax.scale_by_learning_rate(learning_rate),
        *follows,
    )


def _user_optimizer(
    config: OptimizerConfig, offered: dict[str, Any], search_path: Sequence[str | Path]
) -> optax.GradientTransformation:
    function = import_function(config.name, "optimizer.name", search_path)
    given = f"optimizer.name={config.name!r}"
    result = call_with_options(function, config.options, offered, "optimizer.options", given)
    if not isinstance(result, optax.GradientTransformation):
        raise UserError(
            f"optimizer.name={config.name!r} returned a {type(result).__name__}. "
            "It has to return an optax.GradientTransformation."
        )
    return result

"""Optimizers by name: each is a direction, then decoupled weight decay, then the learning rate.

    update = -rate(step) * (direction(gradient) + weight_decay * parameter)

The direction defines the optimizer. The step clips gradients before any of this. Groups of parameters may have their
own options or not train at all (`groups`), and an update may be skipped (`step/skipping.py`) or averaged
(`averaging`).

Sources: Kingma & Ba 2015 (adam); Loshchilov & Hutter 2019 (adamw, decoupled decay); Chen et al. 2023 (lion); Shazeer &
Stern 2018 (adafactor); Jordan et al. 2024, Liu et al. 2025 (muon).
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import optax
import optax.contrib

from ...layouts.paths import in_blocks, leaves_with_paths, map_with_path, match_paths
from ...mesh.errors import UserError
from ...models.frozen import frozen_paths
from ...parallel.model.arguments import check_is_optimizer
from ...parallel.model.user_code import import_function
from ...parallel.model.user_options import with_options
from ...parallel.step.skipping import skip_not_finite
from .averaging import averaged
from .groups import KEY, assign, by_group, labels, only
from .learning_rates import is_plateau, make_learning_rate, scale_on_plateau
from .optimizer_config import OptimizerConfig as OptimizerConfig
from .optimizer_config import group_config, rename_keys

MUON_RMS = 0.2
"""Root mean square of muon's updates: about that of adam, so that one learning rate works for both (Liu et al.
2025)."""


def make_optimizer(
    config: OptimizerConfig,
    num_steps: int,
    abstract_params: Any,
    *,
    stacked: bool | None = None,
    search_path: Sequence[str | Path] = (),
    frozen: Collection[str] = (),
    max_skips: int = 0,
    around: Callable[[optax.GradientTransformation], optax.GradientTransformation] = lambda optimizer: optimizer,
) -> optax.GradientTransformation:
    """Builds the optimizer, without clipping.

    Args:
        config: The section `optimizer`.
        num_steps: Optimizer steps of the whole run.
        abstract_params: Shapes of the parameters as global arrays: paths and ranks determine weight decay.
        stacked: Whether `abstract_params["blocks"]` has blocks stacked on dim 0; None: if the parameters are a dict of
            "embed", "blocks" and "head", as those of a `BlockModel`.
        search_path: Directories that are searched first for the user's own optimizer.
        frozen: Paths of parameters that do not train, in addition to `optimizer.freeze`.
        max_skips: Consecutive updates with non-finite gradients that are skipped; 0 = none.
        around: Wraps the optimizer before the average, such as `callbacks.rate_factor.adjustable`.

    Returns:
        A transformation of global arrays. sgd, adam, adamw and lion treat every element alone; adafactor and muon look
        across a matrix, but never across blocks.

    Raises:
        UserError: The schedule does not fit the run, a pattern matches no parameter, all parameters are frozen, two
            groups match one parameter, or the user's function is missing, takes other options
            or returns something else.
    """
    stacked = is_stacked(abstract_params) if stacked is None else stacked
    paths = [path for path, _ in leaves_with_paths(abstract_params)]
    match_paths(config.decay_skip, paths, "optimizer.decay_skip")
    frozen = frozen_paths(config.freeze, abstract_params) | frozenset(frozen)
    if frozen and frozen.issuperset(paths):
        raise UserError("optimizer.freeze and model.lora freeze all parameters: nothing is left to train. Free some.")
    if not (frozen or config.groups):
        optimizer = _one_optimizer(config, num_steps, abstract_params, stacked, search_path)
    else:
        groups = assign(tuple(config.groups), abstract_params, frozen)
        label_of = labels(groups)
        transformations = {}
        for pattern in dict.fromkeys(groups.values()):
            own = config if pattern is None else group_config(config, config.groups[pattern])
            params = only(abstract_params, [path for path, group in groups.items() if group == pattern])
            try:
                transformations[label_of[pattern]] = _one_optimizer(own, num_steps, params, stacked, search_path)
            except UserError as error:
                raise (UserError(rename_keys(f"{KEY}.{pattern}", error)) if pattern else error) from error
        by_path = {path: label_of[pattern] for path, pattern in groups.items()}
        optimizer = by_group(transformations, by_path, abstract_params)
    optimizer = around(skip_not_finite(optimizer, max_skips) if max_skips else optimizer)
    return averaged(optimizer, config.ema.decay, frozen) if config.ema.decay else optimizer


def _one_optimizer(
    config: OptimizerConfig, num_steps: int, params: Any, stacked: bool, search_path: Sequence[str | Path]
) -> optax.GradientTransformation:
    """Returns the optimizer of one group, or of all parameters; `params` are the shapes of its own parameters."""
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
    result = with_options(function, config.options, offered, "optimizer.options", given)()
    check_is_optimizer(result, f"{given}: the result")
    return result


def is_stacked(abstract_params: Any) -> bool:
    """Returns whether the parameters look like those of a `BlockModel`: the groups "embed", "blocks" and "head"."""
    return isinstance(abstract_params, Mapping) and set(abstract_params) == {"embed", "blocks", "head"}


def select(
    abstract_params: Any, stacked: bool, *, skip: Sequence[str] = (), layer_rank: Sequence[int] = range(2, 100)
) -> Any:
    """Selects parameters by their rank in one layer: a stack of norms (N, D) has rank 1, like vectors.

    Args:
        abstract_params: Shapes of the parameters.
        stacked: Whether "blocks" has blocks stacked on dim 0.
        skip: Regular expressions of whole paths to leave out.
        layer_rank: Ranks to select, without the layer dim.

    Returns:
        A tree of booleans, structured like the parameters.
    """

    def is_selected(path: str, leaf: Any) -> bool:
        rank = len(leaf.shape) - (stacked and in_blocks(path))
        return rank in layer_rank and not any(re.fullmatch(pattern, path) for pattern in skip)

    return map_with_path(is_selected, abstract_params)


def by_layer(transformation: optax.GradientTransformation, abstract_params: Any) -> optax.GradientTransformation:
    """Applies a transformation of whole arrays to each block of a stack separately.

    Args:
        transformation: A transformation with a state and updates that depend on the whole array.
        abstract_params: The parameters of a `BlockModel`: everything under "blocks" is stacked on dim 0.

    Returns:
        A transformation of the same parameters.
    """

    def init(params: Any) -> Any:
        return jax.vmap(transformation.init)(params)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return jax.vmap(transformation.update)(updates, state, params)

    labels = map_with_path(lambda path, _: "blocks" if in_blocks(path) else "rest", abstract_params)
    if "blocks" not in jax.tree.leaves(labels):  # a group of parameters outside the blocks
        return transformation
    return optax.partition({"blocks": optax.GradientTransformation(init, update), "rest": transformation}, labels)


def _sgd(config: OptimizerConfig, abstract_params: Any, stacked: bool) -> optax.GradientTransformation:
    """The gradient, or its running sum."""
    return optax.trace(config.momentum) if config.momentum else optax.identity()


def _adam(config: OptimizerConfig, abstract_params: Any, stacked: bool) -> optax.GradientTransformation:
    """The average gradient over the root of the average square."""
    first, second = config.betas or (0.9, 0.999)
    return optax.scale_by_adam(first, second, 1e-8 if config.epsilon is None else config.epsilon)


def _lion(config: OptimizerConfig, abstract_params: Any, stacked: bool) -> optax.GradientTransformation:
    """The sign of the average gradient."""
    first, second = config.betas or (0.9, 0.99)
    return optax.scale_by_lion(first, second)


def _adafactor(config: OptimizerConfig, abstract_params: Any, stacked: bool) -> optax.GradientTransformation:
    """The gradient over the root of a rank-one estimate of the average square, limited and scaled per parameter."""
    factored = optax.chain(
        optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0), optax.scale_by_param_block_rms()
    )
    return by_layer(factored, abstract_params) if stacked else factored


def _muon(config: OptimizerConfig, abstract_params: Any, stacked: bool) -> optax.GradientTransformation:
    """The average gradient of each matrix with its singular values brought near 1; adam for all other parameters."""
    matrices = select(abstract_params, stacked, skip=config.muon_skip, layer_rank=(2,))
    kinds = jax.tree.map(lambda is_matrix: "muon" if is_matrix else "adam", matrices)
    per_matrix = optax.contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
    orthogonal = optax.contrib.scale_by_muon(
        beta=0.95 if config.momentum is None else config.momentum,
        weight_dimension_numbers=lambda updates: jax.tree.map(lambda _: per_matrix, updates),
    )
    return optax.partition(
        {"muon": optax.chain(orthogonal, optax.stateless(_consistent_rms)), "adam": _adam(config, (), stacked)}, kinds
    )


def _consistent_rms(updates: Any, params: Any) -> Any:
    """Scales orthogonal matrices (..., rows, columns), with root mean square max(rows, columns) ** -0.5, to 0.2."""
    return jax.tree.map(lambda update: update * (MUON_RMS * max(update.shape[-2:]) ** 0.5), updates)


DIRECTIONS: dict[str, Callable[[OptimizerConfig, Any, bool], optax.GradientTransformation]] = {
    "sgd": _sgd,
    "adam": _adam,
    "adamw": _adam,
    "lion": _lion,
    "adafactor": _adafactor,
    "muon": _muon,
}
"""Name -> the direction of the update."""

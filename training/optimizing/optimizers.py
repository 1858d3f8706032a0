"""Optimizers by name: each is a direction, then decoupled weight decay, then the learning rate.

    update = -rate(step) * (direction(gradient) + weight_decay * parameter)

The direction is what the optimizer is known for; see `DIRECTIONS`. The step clips gradients before any of this. Parts
of the parameters may have options of their own, or not train at all, and an update may be left out: see `optimizing/`.

Sources: Kingma & Ba 2015 (adam); Loshchilov & Hutter 2019 (adamw, decoupled decay); Chen et al. 2023 (lion); Shazeer &
Stern 2018 (adafactor); Jordan et al. 2024, Liu et al. 2025 (muon).
"""

import inspect
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import jax
import optax
import optax.contrib

from ...layouts.path_patterns import pattern_problem
from ...layouts.paths import leaves_with_paths
from ...mesh.errors import UserError
from ...mesh.near_miss import did_you_mean
from ...mesh.user_code import import_function
from ...mesh.user_options import call_with_options
from ...models.frozen import frozen_paths
from .averaging import EMAConfig, averaged
from .groups import KEY, GroupConfig, assign, by_group, labels, only
from .learning_rates import learning_rate_problems, make_learning_rate
from .parameter_kinds import by_layer, check_met, is_stacked, select
from .plateau import is_plateau, scale_on_plateau
from .skipping import skip_not_finite

DECAY = ("weight_decay", "decay_skip")
READS: dict[str, tuple[str, ...]] = {
    "sgd": (*DECAY, "momentum"),
    "adam": ("betas", "epsilon"),
    "adamw": (*DECAY, "betas", "epsilon"),
    "lion": (*DECAY, "betas"),
    "adafactor": DECAY,
    "muon": (*DECAY, "momentum", "betas", "epsilon", "muon_skip"),
}
"""What each optimizer reads besides the learning rate and its schedule."""
OF_ALL = ("learning_rate", "schedule", "freeze", "groups", "skip_not_finite", "ema")
"""What every optimizer reads, the user's own too."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How gradients become updates."""

    name: str = "adamw"
    """sgd, adam, adamw, lion, adafactor, muon, or your own `module:function` that returns an
    optax.GradientTransformation; "optax:adabelief" is one too, with `run.allow: [optax]`."""
    learning_rate: float = 1e-3
    """The highest learning rate of the schedule. adafactor multiplies it by the root mean square of each parameter."""
    schedule: Mapping[str, Any] = field(default_factory=lambda: {"name": "constant"})
    """`name`, one of constant, cosine, warmup_cosine, linear, wsd, plateau, and options of that schedule: warmup_steps,
    decay_steps (wsd), final_ratio (the last learning rate as a part of the highest). plateau multiplies the rate by
    `factor` after `patience` means of the loss, over `window_steps` steps each, that are not lower than the lowest by a
    part of `tolerance`, and then looks away for `cooldown` of them."""
    weight_decay: float = 0.0
    """Part of each decayed parameter that is taken off in a step, before multiplying by the learning rate. Matrices are
    decayed, embeddings among them; vectors (norms, biases) never are. adam has none: that is adamw."""
    decay_skip: tuple[str, ...] = ()
    """Regular expressions of the paths of matrices that are not decayed either, such as embed/.*"""
    betas: tuple[float, float] | None = None
    """Decay rates of the two averages of adam, adamw, lion, and of what muon leaves to adam; null = 0.9 and 0.999 (0.99
    for lion)."""
    momentum: float | None = None
    """Decay rate of the average of gradients of sgd and muon; null = 0 for sgd (none), 0.95 for muon."""
    epsilon: float | None = None
    """Added to the denominator in adam, adamw and muon; null = 1e-8."""
    muon_skip: tuple[str, ...] = ("embed/.*", "head/.*")
    """Regular expressions of the paths of matrices that muon leaves to adam, as it does vectors."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments for your own optimizer. It is also given `learning_rate` (the schedule), `num_steps` and
    `abstract_params` where it has parameters of these names. The optimizer's update gets `value` (the loss) and `grad`
    if it asks for them."""
    freeze: tuple[str, ...] = ()
    """Regular expressions of the paths of parameters that do not train, such as embed/.*: no gradient, no part in its
    norm, no update, no decay, no state."""
    groups: Mapping[str, GroupConfig] = field(default_factory=dict)
    """Regular expression of parameter paths -> what differs for these. A parameter is in one group at most."""
    skip_not_finite: int = 0
    """Updates in a row that are left out where a gradient is not finite; 0 = none is. The next one is made. The older
    name of `train.not_finite: skip`."""
    ema: EMAConfig = field(default_factory=EMAConfig)
    """An exponential moving average of the parameters, kept beside them."""

    def __post_init__(self) -> None:
        problems = [*_name_problems(self), *_range_problems(self), *learning_rate_problems(self.schedule)]
        problems = problems or _group_problems(self)
        if problems:
            raise UserError("\n".join(problems))

    @property
    def names(self) -> tuple[str, ...]:
        """The optimizers of all groups, each once; its own first."""
        return tuple(dict.fromkeys((self.name, *(each.name for each in self.groups.values() if each.name))))


def _name_problems(config: OptimizerConfig) -> list[str]:
    """An unknown name, or settings that the optimizer of this name would not read."""
    own = ":" in config.name
    if not own and config.name not in READS:
        hint = did_you_mean(config.name, [*READS, "your own as module:function"], otherwise="Choose from")
        return [f"optimizer.name={config.name!r} is not an optimizer.{hint}"]
    reads = {"name", *OF_ALL, *(("options",) if own else READS[config.name])}
    given = [each.name for each in fields(config) if getattr(config, each.name) != _default(each)]
    remedy = " Give it under optimizer.options." if own else ""
    if config.name == "adam" and config.weight_decay:
        remedy = " Use optimizer.name=adamw, which is adam with decoupled weight decay."
    return [f"optimizer.{name}: {config.name} does not read it.{remedy}" for name in given if name not in reads]


def _default(each: Field[Any]) -> Any:
    return each.default if each.default_factory is MISSING else each.default_factory()


def _range_problems(config: OptimizerConfig) -> list[str]:
    problems = []
    if not 0 < config.learning_rate < math.inf:
        problems.append(f"optimizer.learning_rate={config.learning_rate} has to be over 0, and finite.")
    if not 0 <= config.weight_decay < math.inf:
        problems.append(f"optimizer.weight_decay={config.weight_decay} has to be at least 0, and finite.")
    if config.epsilon is not None and not 0 < config.epsilon < math.inf:
        problems.append(f"optimizer.epsilon={config.epsilon} has to be over 0, and finite.")
    rates = {"betas": config.betas or (), "momentum": () if config.momentum is None else (config.momentum,)}
    for name, values in rates.items():
        if not all(0 <= value < 1 for value in values):
            problems.append(f"optimizer.{name}={getattr(config, name)}: a decay rate has to be at least 0 and below 1.")
    if config.skip_not_finite < 0:
        problems.append(f"optimizer.skip_not_finite={config.skip_not_finite} has to be a number of updates, or 0.")
    for name in ("decay_skip", "muon_skip", "freeze", "groups"):
        problems += [f"optimizer.{name}: {error}" for error in map(pattern_problem, getattr(config, name)) if error]
    return problems


def _group_problems(config: OptimizerConfig) -> list[str]:
    """What is wrong with the options of groups; each says its own key."""
    problems = []
    for pattern, group in config.groups.items():
        key, given = f"{KEY}.{pattern}", group.given()
        if not given:
            problems.append(f"{key} gives no option: it changes nothing. Give one, or take it out.")
        if group.learning_rate is not None and group.learning_rate_factor is not None:
            problems.append(f"{key}: learning_rate and learning_rate_factor are two ways to say one thing. Give one.")
        elif group.learning_rate_factor is not None and not 0 < group.learning_rate_factor < math.inf:
            problems.append(
                f"{key}.learning_rate_factor={group.learning_rate_factor} has to be over 0, and finite. To stop "
                "training these parameters, name them in optimizer.freeze."
            )
        else:
            try:
                _of_group(config, group)
            except UserError as error:
                problems += _told_of(key, error).splitlines()
    return problems


def _told_of(key: str, error: UserError) -> str:
    """What is said of a section like a group's own, with the keys of the group."""
    return re.sub(r"optimizer\.(?=\w)", lambda _: f"{key}.", str(error))


def _of_group(config: OptimizerConfig, group: GroupConfig) -> OptimizerConfig:
    """The section as if all parameters were of one group."""
    given = group.given()
    factor = given.pop("learning_rate_factor", 1.0)
    inherited = {"learning_rate": config.learning_rate * factor, "schedule": config.schedule}
    if group.name is None:
        return replace(config, **{**inherited, **given}, freeze=(), groups={}, skip_not_finite=0)
    skip = {"muon_skip": ()} if group.name == "muon" else {}
    return OptimizerConfig(**{**inherited, **skip, **given})


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
            own = config if pattern is None else _of_group(config, config.groups[pattern])
            paths = [path for path, group in groups.items() if group == pattern]
            try:
                transformations[label_of[pattern]] = one(own, only(abstract_params, paths))
            except UserError as error:
                raise (UserError(_told_of(f"{KEY}.{pattern}", error)) if pattern else error) from error
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


MUON_RMS = 0.2
"""Root mean square of muon's updates: about adam's, so that one learning rate serves both (Liu et al. 2025)."""


def _muon(config: OptimizerConfig, abstract_params: Any, stacked: bool) -> optax.GradientTransformation:
    """The average gradient of each matrix with its singular values brought near 1; adam for everything else."""
    if "consistent_rms" not in inspect.signature(getattr(optax.contrib, "muon", lambda: None)).parameters:
        raise UserError(f"optimizer.name=muon needs optax 0.2.7; this is optax {optax.__version__}.")
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
    """Orthogonal matrices (..., rows, columns) have a root mean square of max(rows, columns) ** -0.5; makes it 0.2."""
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

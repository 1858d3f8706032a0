"""Optimizers by name: each is a direction, then decoupled weight decay, then the learning rate.

    update = -rate(step) * (direction(gradient) + weight_decay * parameter)

The direction is what the optimizer is known for; see `DIRECTIONS`. The step clips gradients before any of this.

Sources: Kingma & Ba 2015 (adam); Loshchilov & Hutter 2019 (adamw, decoupled decay); Chen et al. 2023 (lion); Shazeer &
Stern 2018 (adafactor); Jordan et al. 2024, Liu et al. 2025 (muon).
"""

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any

import jax
import optax
import optax.contrib

from ..mesh.errors import UserError
from ..mesh.near_miss import did_you_mean
from ..mesh.user_code import call_with_options, import_function
from .learning_rates import learning_rate_problems, make_learning_rate
from .parameter_kinds import by_layer, is_stacked, select

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


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How gradients become updates."""

    name: str = "adamw"
    """sgd, adam, adamw, lion, adafactor, muon, or your own `module:function` that returns an
    optax.GradientTransformation; "optax:adabelief" is one too, with `run.allow: [optax]`."""
    learning_rate: float = 1e-3
    """The highest learning rate of the schedule. adafactor multiplies it by the root mean square of each parameter."""
    schedule: Mapping[str, Any] = field(default_factory=lambda: {"name": "constant"})
    """`name`, one of constant, cosine, warmup_cosine, linear, wsd, and options of that schedule: warmup_steps,
    decay_steps (wsd), final_ratio (the last learning rate as a part of the highest)."""
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

    def __post_init__(self) -> None:
        problems = [*_name_problems(self), *_range_problems(self), *learning_rate_problems(self.schedule)]
        if problems:
            raise UserError("\n".join(problems))


def _name_problems(config: OptimizerConfig) -> list[str]:
    """An unknown name, or settings that the optimizer of this name would not read."""
    own = ":" in config.name
    if not own and config.name not in READS:
        hint = did_you_mean(config.name, [*READS, "your own as module:function"], otherwise="Choose from")
        return [f"optimizer.name={config.name!r} is not an optimizer.{hint}"]
    reads = {"name", "learning_rate", "schedule", *(("options",) if own else READS[config.name])}
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
    for name in ("decay_skip", "muon_skip"):
        problems += [f"optimizer.{name}: {error}" for error in map(_pattern_error, getattr(config, name)) if error]
    return problems


def _pattern_error(pattern: str) -> str | None:
    try:
        re.compile(pattern)
    except re.error as error:
        return f"{pattern!r} is not a regular expression: {error}."
    return None


def make_optimizer(
    config: OptimizerConfig,
    num_steps: int,
    abstract_params: Any,
    *,
    stacked: bool | None = None,
    search_path: Sequence[str | Path] = (),
) -> optax.GradientTransformation:
    """Builds the optimizer, without clipping.

    Args:
        config: The `optimizer:` section.
        num_steps: Optimizer steps in the whole run.
        abstract_params: Shapes of the parameters, as global arrays: paths and ranks decide what is decayed.
        stacked: Whether `abstract_params["blocks"]` holds blocks stacked on dim 0; None: exactly where the parameters
            are a dict of "embed", "blocks" and "head", as a `BlockModel`'s.
        search_path: Folders where the user's own optimizer is looked for first.

    Returns:
        A transformation of global arrays. Those of sgd, adam, adamw and lion treat every element alone; adafactor and
        muon look across a matrix, never across blocks.

    Raises:
        UserError: The schedule does not fit the run, a pattern meets no parameter, this optax has no muon, or the
            user's function is missing, takes other options or returns something else.
    """
    learning_rate = make_learning_rate(config.learning_rate, config.schedule, num_steps)
    if ":" in config.name:
        offered = {"learning_rate": learning_rate, "num_steps": num_steps, "abstract_params": abstract_params}
        return _user_optimizer(config, offered, search_path)
    stacked = is_stacked(abstract_params) if stacked is None else stacked
    decayed = select(abstract_params, stacked, skip=config.decay_skip, key="optimizer.decay_skip")
    return optax.chain(
        DIRECTIONS[config.name](config, abstract_params, stacked),
        optax.add_decayed_weights(config.weight_decay, mask=decayed),
        optax.scale_by_learning_rate(learning_rate),
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
    matrices = select(abstract_params, stacked, skip=config.muon_skip, key=None, layer_rank=(2,))
    labels = jax.tree.map(lambda is_matrix: "muon" if is_matrix else "adam", matrices)
    per_matrix = optax.contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
    orthogonal = optax.contrib.scale_by_muon(
        beta=0.95 if config.momentum is None else config.momentum,
        weight_dimension_numbers=lambda updates: jax.tree.map(lambda _: per_matrix, updates),
    )
    return optax.partition(
        {"muon": optax.chain(orthogonal, optax.stateless(_consistent_rms)), "adam": _adam(config, (), stacked)}, labels
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

"""The section `optimizer:`: its options, which of them each optimizer reads, and what they are for a group."""

import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from typing import Any

from ...layouts.path_patterns import pattern_problem
from ...mesh.errors import UserError
from ...mesh.near_miss import did_you_mean
from .averaging import EMAConfig
from .groups import KEY, GroupConfig
from .learning_rates import TINY, learning_rate_problems

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
    if not TINY <= config.learning_rate < math.inf:
        problems.append(f"optimizer.learning_rate={config.learning_rate} has to be over 0, and finite, in float32.")
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
                of_group(config, group)
            except UserError as error:
                problems += told_of(key, error).splitlines()
    return problems


def told_of(key: str, error: UserError) -> str:
    """What is said of a section like a group's own, with the keys of the group."""
    return re.sub(r"optimizer\.(?=\w)", lambda _: f"{key}.", str(error))


def of_group(config: OptimizerConfig, group: GroupConfig) -> OptimizerConfig:
    """The section as if all parameters were of one group."""
    given = group.given()
    factor = given.pop("learning_rate_factor", 1.0)
    inherited = {"learning_rate": config.learning_rate * factor, "schedule": config.schedule}
    if group.name is None:
        return replace(config, **{**inherited, **given}, freeze=(), groups={}, skip_not_finite=0)
    skip = {"muon_skip": ()} if group.name == "muon" else {}
    return OptimizerConfig(**{**inherited, **skip, **given})

"""The section `optimizer`: its options, the options that each optimizer uses, and those of a group."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from typing import Annotated, Any

from annotated_types import Ge, Lt

from ...layouts.paths import pattern_problem
from ...mesh.errors import UserError, did_you_mean, raise_problems
from ...parallel.options import PositiveFloat32, type_problems
from .averaging import EMAConfig
from .groups import KEY, GroupConfig
from .learning_rates import learning_rate_problems

DECAY = ("weight_decay", "decay_skip")
READS: dict[str, tuple[str, ...]] = {
    "sgd": (*DECAY, "momentum"),
    "adam": ("betas", "epsilon"),
    "adamw": (*DECAY, "betas", "epsilon"),
    "lion": (*DECAY, "betas"),
    "adafactor": DECAY,
    "muon": (*DECAY, "momentum", "betas", "epsilon", "muon_skip"),
}
"""Optimizer -> its options, in addition to those of all."""
COMMON = ("learning_rate", "schedule", "freeze", "groups", "ema")
"""Options of every optimizer, including the user's own."""
Decay = Annotated[float, Ge(0), Lt(1)]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer, its learning rate, and the parameters that it trains."""

    name: str = "adamw"
    """sgd, adam, adamw, lion, adafactor, muon, or your own `module:function` that returns an
    optax.GradientTransformation, such as "optax:adabelief" with `run.allow: [optax]`."""
    learning_rate: PositiveFloat32 = 1e-3
    """Maximum learning rate of the schedule. adafactor multiplies it by the root mean square of each parameter."""
    schedule: Mapping[str, Any] = field(default_factory=lambda: {"name": "constant"})
    """`name`, one of constant, cosine, warmup_cosine, linear, wsd, plateau, and options of that schedule: warmup_steps,
    decay_steps (wsd), final_ratio (the last learning rate as a fraction of the maximum). plateau multiplies the rate by
    `factor` after `patience` consecutive means of the loss, over `window_steps` steps each, that are not lower than the
    lowest by a fraction of `tolerance`, and then ignores `cooldown` of them."""
    weight_decay: Annotated[float, Ge(0)] = 0.0
    """Fraction of each decayed parameter that a step subtracts, before multiplying by the learning rate. Matrices are
    decayed, including embeddings; vectors (norms, biases) are not. For adam, use adamw."""
    decay_skip: tuple[str, ...] = ()
    """Regular expressions of the paths of matrices without decay, such as embed/.*"""
    betas: tuple[Decay, Decay] | None = None
    """Decay rates of the two averages of adam, adamw, lion, and of adam within muon; null = 0.9 and 0.999 (0.99 for
    lion)."""
    momentum: Decay | None = None
    """Decay rate of the average of gradients of sgd and muon; null = 0 for sgd (none), 0.95 for muon."""
    epsilon: PositiveFloat32 | None = None
    """Added to the denominator in adam, adamw and muon; null = 1e-8."""
    muon_skip: tuple[str, ...] = ("embed/.*", "head/.*")
    """Regular expressions of the paths of matrices that adam updates instead of muon, as it does vectors."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments for your own optimizer. It also receives `learning_rate` (the schedule), `num_steps` and
    `abstract_params` if it has parameters with these names. Its update receives `value` (the loss) and `grad` if it has
    these parameters."""
    freeze: tuple[str, ...] = ()
    """Regular expressions of the paths of parameters that do not train, such as embed/.*: they have no gradient,
    update, decay or state, and do not count in the norm of the gradient."""
    groups: Mapping[str, GroupConfig] = field(default_factory=dict)
    """Regular expression of parameter paths -> options for these parameters. A parameter is in at most one group."""
    ema: EMAConfig = field(default_factory=EMAConfig)
    """An exponential moving average of the parameters."""

    def __post_init__(self) -> None:
        problems = [*_name_problems(self), *type_problems("optimizer", self), *learning_rate_problems(self.schedule)]
        for name in ("decay_skip", "muon_skip", "freeze", "groups"):
            problems += [f"optimizer.{name}: {error}" for error in map(pattern_problem, getattr(self, name)) if error]
        raise_problems(problems or _group_problems(self))

    @property
    def names(self) -> tuple[str, ...]:
        """The optimizers of all groups, each once; its own first."""
        return tuple(dict.fromkeys((self.name, *(each.name for each in self.groups.values() if each.name))))


def _name_problems(config: OptimizerConfig) -> list[str]:
    """Returns the problem of an unknown name, or of options that the optimizer does not use."""
    own = ":" in config.name
    if not own and config.name not in READS:
        hint = did_you_mean(config.name, [*READS, "your own as module:function"], otherwise="Choose from")
        return [f"optimizer.name={config.name!r} is not an optimizer.{hint}"]
    reads = {"name", *COMMON, *(("options",) if own else READS[config.name])}
    given = [each.name for each in fields(config) if getattr(config, each.name) != _default(each)]
    fix = " Set it in optimizer.options." if own else ""
    if config.name == "adam" and config.weight_decay:
        fix = " Use optimizer.name=adamw, which is adam with decoupled weight decay."
    return [f"optimizer.{name}: {config.name} does not use it.{fix}" for name in given if name not in reads]


def _default(each: Field[Any]) -> Any:
    return each.default if each.default_factory is MISSING else each.default_factory()


def _group_problems(config: OptimizerConfig) -> Iterator[str]:
    """Yields the problems of the options of groups, with their own keys."""
    for pattern, group in config.groups.items():
        key = f"{KEY}.{pattern}"
        if not group.given():
            yield f"{key} is empty, so it changes nothing. Add an option, or remove the group."
        if group.learning_rate is not None and group.learning_rate_factor is not None:
            yield f"{key}: learning_rate and learning_rate_factor exclude each other. Keep one of them."
            continue
        invalid = type_problems(key, group)
        try:
            if not invalid:
                group_config(config, group)
        except UserError as error:
            invalid = rename_keys(key, error).splitlines()
        yield from invalid


def rename_keys(key: str, error: UserError) -> str:
    """Returns an error about the section `optimizer` with the keys of a group."""
    return re.sub(r"optimizer\.(?=\w)(?!groups\.)", lambda _: f"{key}.", str(error))


def group_config(config: OptimizerConfig, group: GroupConfig) -> OptimizerConfig:
    """Returns the section as if all parameters were in one group."""
    given = group.given()
    factor = given.pop("learning_rate_factor", 1.0)
    inherited = {"learning_rate": config.learning_rate * factor, "schedule": config.schedule}
    if group.name is None:
        return replace(config, **{**inherited, **given}, freeze=(), groups={})
    skip = {"muon_skip": ()} if group.name == "muon" else {}
    return OptimizerConfig(**{**inherited, **skip, **given})

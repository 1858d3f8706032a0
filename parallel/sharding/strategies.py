"""The strategies there are, what each of them has, and reading `strategy: {fsdp: 4, data: 2}`.

A new strategy is a file and a line in `STRATEGIES`: the mesh axes, the layouts, the checks, the step and its cost go
through this dict, in its order.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, Literal, Protocol, TypeAlias

from ...layouts.tensor_layout import TensorLayout
from ...mesh.axes import SYNONYMS
from ...mesh.errors import UserError
from ...mesh.near_miss import nearest
from .. import compression, context, data, diloco, expert, fsdp, pipeline, tensor, zero
from ..collectives import Collective, StepCounts
from ..model import Params
from ..plan import MeshPlan, Parameter, Reduced, ShardingPlan


class Strategy(Protocol):
    """What every strategy has: a module with these names. Those with nothing to do take theirs from `plan.py`."""

    @property
    def AXIS(self) -> str:
        """The mesh axis that it acts over."""
        ...

    @property
    def OPTIONS(self) -> type | None:
        """Its options, a dataclass with a `size`; None where they are options of the strategy named like the axis."""
        ...

    @property
    def SPLITS(self) -> tuple[Literal["rows", "parameters", "work"], ...]:
        """What is split over the axis: rows of a batch, parameters as they are stored, work that the model splits."""
        ...

    def layout(self, parameter: Parameter, placed: TensorLayout, plan: MeshPlan) -> tuple[TensorLayout, str]:
        """Adds the axis to where a parameter is stored, and says why ("" for nothing)."""
        ...

    def update_layout(self, parameter: Parameter, placed: TensorLayout, plan: MeshPlan) -> tuple[TensorLayout, str]:
        """Adds the axis to where its gradient and the optimizer's state are, and says why."""
        ...

    def used_layout(self, path: str, layout: TensorLayout) -> TensorLayout:
        """Drops the axis where `begin` makes a parameter whole along it for the step."""
        ...

    def check(self, plan: ShardingPlan) -> list[str]:
        """What of a plan cannot be, one message each."""
        ...

    def cost(self, plan: ShardingPlan, counts: StepCounts, platform: str) -> list[Collective]:
        """Its collectives in one step, unmerged, as they travel on a platform."""
        ...

    def begin(self, params: Params, plan: ShardingPlan, /) -> Params:
        """Per device, once at the start of a step: makes parameters whole along the axis."""
        ...

    def finish(self, gradients: Params, plan: ShardingPlan, /) -> Params:
        """Per device, once after backward: leaves each device its part of the summed gradients."""
        ...

    def reduce(self, found: Reduced, plan: ShardingPlan) -> Reduced:
        """Per device, after all have finished: sums over every axis that still lacks it."""
        ...


STRATEGIES: dict[str, Strategy] = {
    "pipe": pipeline,
    "data": data,
    "zero": zero,
    "diloco": diloco,
    "compression": compression,
    "fsdp": fsdp,
    "expert": expert,
    "context": context,
    "tensor": tensor,
}
"""Every strategy by its name, in the order of the mesh axes: the slowest network first.

`begin`, `finish` and `reduce` go through it in this order, layouts the other way round."""


def axis_names() -> tuple[str, ...]:
    """The mesh axes of the strategies, slowest network first."""
    return tuple(dict.fromkeys(strategy.AXIS for strategy in STRATEGIES.values()))


def option_types() -> dict[str, type]:
    """The options of each strategy that `strategy:` of a config names, which is the name of its mesh axis too."""
    return {name: strategy.OPTIONS for name, strategy in STRATEGIES.items() if strategy.OPTIONS is not None}


def axes_that_split(what: Literal["rows", "parameters", "work"]) -> tuple[str, ...]:
    """The mesh axes over which rows, parameters or the model's work are split."""
    return tuple(dict.fromkeys(strategy.AXIS for strategy in STRATEGIES.values() if what in strategy.SPLITS))


StrategyConfigs: TypeAlias = dict[str, Any]
"""Options dataclasses by the name of the strategy."""


def read_strategy(strategy: Mapping[str, Any]) -> StrategyConfigs:
    """Turns sizes and mappings of options into options dataclasses.

    Args:
        strategy: Name of a strategy -> its size (devices along its mesh axis; -1 = the rest), a mapping of options, or
            its options dataclass.

    Returns:
        Name -> options dataclass, in the order given.

    Raises:
        UserError: All unknown strategies and options, with the nearest that exist.
    """
    problems: list[str] = []
    configs: StrategyConfigs = {}
    types = option_types()
    for name, given in strategy.items():
        kind = types.get(name)
        if kind is None:
            problems.append(f"strategy.{name}: there is no such strategy{_nearest(name, types)}.")
        elif isinstance(given, kind):
            configs[name] = given
        elif isinstance(given, int) and not isinstance(given, bool):
            configs[name] = replace(kind(), size=given)
        elif isinstance(given, Mapping):
            known = {field.name for field in fields(kind)}
            unknown = [key for key in given if key not in known]
            problems += [f"strategy.{name}.{key}: there is no such option{_nearest(key, known)}." for key in unknown]
            configs[name] = kind(**{key: value for key, value in given.items() if key in known})
        else:
            problems.append(f"strategy.{name}={given!r}: give a size (an int) or a mapping of options.")
    if problems:
        raise UserError("\n".join(problems))
    return configs


def _nearest(name: Any, known: Any) -> str:
    meant = SYNONYMS.get(str(name).lower())
    close = [meant] if meant in known else nearest(name, known)
    return f" (did you mean {close[0]}?)" if close else f"; choose from {', '.join(sorted(known))}"

"""The strategies, their common interface, and the parser of `strategy: {fsdp: 4, data: 2}`.

A new strategy is a file and a line in `STRATEGIES`: the mesh axes, the layouts, the checks, the step and its cost use
this dict, in its order.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, Literal, Protocol, TypeAlias

from ...layouts.tensor_layout import TensorLayout
from ...mesh.axes import SYNONYMS
from ...mesh.errors import nearest, raise_problems
from .. import compression, context, data, diloco, expert, fsdp, pipeline, tensor, zero
from ..collectives import Collective, StepCounts
from ..model import Params
from ..plan import MeshPlan, Parameter, Reduced, ShardingPlan


class Strategy(Protocol):
    """The interface of a strategy, which is a module with these names. `plan.py` has implementations without effect."""

    @property
    def AXIS(self) -> str:
        """The mesh axis of the strategy."""
        ...

    @property
    def OPTIONS(self) -> type | None:
        """The options, a dataclass with a `size`; None if the strategy named after the axis has them."""
        ...

    @property
    def SPLITS(self) -> tuple[Literal["rows", "parameters", "work"], ...]:
        """The things split over the axis: rows of a batch, stored parameters, work of the model."""
        ...

    def layout(self, parameter: Parameter, placed: TensorLayout, plan: MeshPlan, /) -> tuple[TensorLayout, str]:
        """Adds the axis to the stored layout of a parameter, and returns the reason ("" for no change)."""
        ...

    def update_layout(self, parameter: Parameter, placed: TensorLayout, plan: MeshPlan) -> tuple[TensorLayout, str]:
        """Adds the axis to the layout of its gradient and optimizer state, and returns the reason."""
        ...

    def used_layout(self, path: str, layout: TensorLayout) -> TensorLayout:
        """Drops the axis if `begin` gathers the parameter along it for the step."""
        ...

    def check(self, plan: ShardingPlan) -> list[str]:
        """Returns the problems with a plan, one message each."""
        ...

    def cost(self, plan: ShardingPlan, counts: StepCounts, platform: str) -> list[Collective]:
        """Returns the strategy's collectives in one step on a platform, unmerged."""
        ...

    def begin(self, params: Params, plan: ShardingPlan, /) -> Params:
        """Gathers parameters along the axis; per device, once at the start of a step."""
        ...

    def finish(self, gradients: Params, plan: ShardingPlan, /) -> Params:
        """Reduces gradients to this device's part; per device, once after backward."""
        ...

    def reduce(self, found: Reduced, plan: ShardingPlan) -> Reduced:
        """Sums over the remaining axes; per device, after every `finish`."""
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

`begin`, `finish` and `reduce` run in this order; layouts are determined in reverse order."""


def axis_names() -> tuple[str, ...]:
    """Returns the mesh axes of the strategies, slowest network first."""
    return tuple(dict.fromkeys(strategy.AXIS for strategy in STRATEGIES.values()))


def option_types() -> dict[str, type]:
    """Returns the options class of each key of `strategy:` in a config; the keys are names of mesh axes."""
    return {name: strategy.OPTIONS for name, strategy in STRATEGIES.items() if strategy.OPTIONS is not None}


def axes_that_split(what: Literal["rows", "parameters", "work"]) -> tuple[str, ...]:
    """Returns the mesh axes over which rows, parameters or the model's work are split."""
    return tuple(dict.fromkeys(strategy.AXIS for strategy in STRATEGIES.values() if what in strategy.SPLITS))


StrategyConfigs: TypeAlias = dict[str, Any]
"""Options dataclasses by the name of the strategy."""


def read_strategy(strategy: Mapping[str, Any]) -> StrategyConfigs:
    """Converts sizes and mappings of options to options dataclasses.

    Args:
        strategy: Name of a strategy -> its size (devices along its mesh axis; -1 = the rest), a mapping of options, or
            its options dataclass.

    Returns:
        Name -> options dataclass, in the order given.

    Raises:
        UserError: All unknown strategies and options, with the most similar valid ones.
    """
    problems: list[str] = []
    configs: StrategyConfigs = {}
    types = option_types()
    for name, given in strategy.items():
        kind = types.get(name)
        if kind is None:
            problems.append(f"strategy.{name}: unknown strategy{_nearest(name, types)}.")
        elif isinstance(given, kind):
            configs[name] = given
        elif isinstance(given, int) and not isinstance(given, bool):
            configs[name] = replace(kind(), size=given)
        elif isinstance(given, Mapping):
            known = {field.name for field in fields(kind)}
            unknown = [key for key in given if key not in known]
            problems += [f"strategy.{name}.{key}: unknown option{_nearest(key, known)}." for key in unknown]
            configs[name] = kind(**{key: value for key, value in given.items() if key in known})
        else:
            problems.append(f"strategy.{name}={given!r}: give a size (an integer) or a mapping of options.")
    raise_problems(problems)
    return configs


def _nearest(name: Any, known: Any) -> str:
    synonym = SYNONYMS.get(str(name).lower())
    close = [synonym] if synonym in known else nearest(name, known)
    return f" (did you mean {close[0]}?)" if close else f"; choose from {', '.join(sorted(known))}"

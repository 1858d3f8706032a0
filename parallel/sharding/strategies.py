"""The strategies there are, and reading `strategy: {fsdp: 4, data: 2}`: a new one is a file and a line here."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, TypeAlias

from ...mesh.axes import SYNONYMS
from ...mesh.errors import UserError
from ...mesh.near_miss import nearest
from ..context import ContextConfig
from ..data import DataParallelConfig
from ..expert import ExpertConfig
from ..fsdp import FSDPConfig
from ..pipeline import PipelineConfig
from ..tensor import TensorConfig

STRATEGIES: dict[str, type] = {
    "pipe": PipelineConfig,
    "data": DataParallelConfig,
    "fsdp": FSDPConfig,
    "expert": ExpertConfig,
    "context": ContextConfig,
    "tensor": TensorConfig,
}
"""Each strategy's options by its name, which is also the name of its mesh axis."""

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
    for name, given in strategy.items():
        kind = STRATEGIES.get(name)
        if kind is None:
            problems.append(f"strategy.{name}: there is no such strategy{_nearest(name, STRATEGIES)}.")
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

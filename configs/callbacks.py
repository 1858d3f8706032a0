"""The section `callbacks` of a config: a list, in the order in which they are called.

    callbacks:
      - csv
      - {name: early_stopping, patience: 3}
      - {name: "my_module:make", more: options}

Of those in training/callbacks/catalog.py every option is known and checked; the user's own check theirs when they are
made. Paths of keys count from 0: `callbacks.1.patience`.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ..mesh.near_miss import did_you_mean
from ..training.callbacks.catalog import CALLBACKS
from .errors import Problem
from .reading.convert import to_dataclass
from .reading.words import shown

KEY = "callbacks"
EXAMPLE = "[csv, {name: early_stopping, patience: 3}]"


def to_callbacks(value: Any, problems: list[Problem]) -> tuple[dict[str, Any], ...]:
    """Returns the section with all options of the callbacks of the catalogue, and the user's own as given.

    Args:
        value: What YAML gave for it; None is an empty list.
        problems: What is wrong with it is added here.
    """
    if not isinstance(value, list | tuple | None):
        problems.append(Problem(KEY, f"{KEY} must be a list such as {EXAMPLE}, not {shown(value)}."))
        return ()
    found = [_to_callback(each, f"{KEY}.{place}", problems) for place, each in enumerate(value or ())]
    return tuple(each for each in found if each is not None)


def _to_callback(value: Any, key: str, problems: list[Problem]) -> dict[str, Any] | None:
    value = {"name": value} if isinstance(value, str) else value
    if not isinstance(value, Mapping) or "name" not in value:
        problems.append(Problem(key, f"{key} must be a name or a mapping with a name, as in {EXAMPLE}."))
        return None
    options = dict(value)
    name = options.pop("name")
    if isinstance(name, str) and ":" in name:
        return {"name": name, **options}
    if not isinstance(name, str) or name not in CALLBACKS:
        near = did_you_mean(name, CALLBACKS) if isinstance(name, str) else ""
        known = ", ".join(CALLBACKS)
        message = f"{key}.name must be {known}, or your own as module:function, not {shown(name)}.{near}"
        problems.append(Problem(f"{key}.name", message))
        return None
    wrong: list[Problem] = []
    built = to_dataclass(CALLBACKS[name], options, key, wrong)
    problems += [_named(problem, key) for problem in wrong]
    if built is None:
        return None
    return {"name": name, **{field.name: getattr(built, field.name) for field in fields(built) if field.init}}


def _named(problem: Problem, key: str) -> Problem:
    """A problem that begins with its key; a callback itself knows its options alone."""
    return problem if problem.message.startswith(key) else Problem(problem.path, f"{key}.{problem.message}")

"""The form of report.json: damage is found where the file is read, not where a page is half drawn."""

from collections.abc import Mapping
from typing import Any

KINDS = {
    **dict.fromkeys(("model", "data", "sample"), str),
    **dict.fromkeys(("parameters", "finished"), int),
    **dict.fromkeys(("mesh", "costs", "figures", "measured", "schedule"), Mapping),
    "layouts": list,
}
"""Field of `Facts` -> what it is."""


def check_form(facts: Mapping[str, Any]) -> None:
    """Raises a TypeError or KeyError where the fields of a `Facts`, by name, are not what it and `StepCosts` say."""
    for name, kind in KINDS.items():
        _check(name, facts[name], kind)
    _check_values("figures", facts["figures"], (int, float))
    _check_values("measured", facts["measured"], int)
    _check_values("schedule", facts["schedule"], str)
    for row in facts["layouts"]:
        _check_values("layouts", {name: row[name] for name in ("path", "rule", "dtype")}, str)
    _check_costs(facts["costs"])


def _check_costs(costs: Mapping[str, Any]) -> None:
    for name in ("held", "compiled"):
        _check_values(name, costs[name], int)
    for name in ("notes", "unexpected"):
        _check_values(name, dict(enumerate(costs.get(name) or ())), str)
    _check("schedule_text", costs["schedule_text"], str)
    for line in (*costs["predicted"], *costs["found"]):
        _check("kind", line["kind"], str)
        _check_values("axes", dict(enumerate(line["axes"])), str)
        _check_values("collective", {name: line[name] for name in ("count", "bytes")}, int)


def _check_values(name: str, values: Any, kind: type | tuple[type, ...]) -> None:
    _check(name, values, Mapping)
    for key, value in values.items():
        _check(f"{name}.{key}", value, kind)


def _check(name: str, value: Any, kind: type | tuple[type, ...]) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{name} is {value!r}")

"""XLA's text of a compiled program, taken apart: computations, their instructions, and what these run how often.

XLA writes the trip counts of loops that it knows. The parts of a pipeline have theirs in their names, see `skip.py`.
"""

import re
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

_KINDS = "all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all|ragged-all-to-all|collective-broadcast"
_COLLECTIVE = re.compile(rf"= (.*?) ({_KINDS})(-start)?\(")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_ROLES = ("body", "to_apply", "calls", "branch_computations", "true_computation", "false_computation")
_CALLED = re.compile(rf"({'|'.join(_ROLES)})=(\{{[^}}]*\}}|%?[\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_TURNS = re.compile(r"\bturns_(\d+)_of_(\d+)\b")
_BRANCHES = ("branch_computations", "true_computation", "false_computation")
_BRANCH_TURNS = re.compile(r"\bturns_(\d+)_of_(\d+)/(?:cond|branch\w*)\"")


class Call(NamedTuple):
    """A computation that an instruction runs, and how often; less than once where only some turns of a loop do."""

    name: str
    times: Fraction


def computations_of(text: str) -> tuple[dict[str, list[str]], str]:
    """The instructions of each computation of `compiled.as_text()`, in order, and the name of the entry."""
    computations: dict[str, list[str]] = {}
    entry = name = ""
    for line in text.splitlines():
        header = _COMPUTATION.match(line)
        if header:
            name = header.group(2)
            computations[name] = []
            entry = name if header.group(1) else entry
        elif name:
            computations[name].append(line)
    return computations, entry


def collective_of(instruction: str) -> re.Match[str] | None:
    """Of an instruction that is a collective: the type of its result, its kind, and "-start" if it only starts one."""
    if any(kind in instruction for kind in _KINDS.split("|")):  # most are none: a plain search passes over them
        return _COLLECTIVE.search(instruction)
    return None


def calls_of(instruction: str) -> Iterator[Call]:
    """The computations that an instruction runs."""
    if not any(role in instruction for role in _ROLES):
        return
    trips, turns, branch = (each.search(instruction) for each in (_TRIPS, _TURNS, _BRANCH_TURNS))
    for role, names in _CALLED.findall(instruction):
        times = Fraction(1)
        if role == "body" and trips:
            times = Fraction(int(trips.group(1)))
        elif role == "body" and turns:
            times = Fraction(int(turns.group(1)), int(turns.group(2)))
        elif role in _BRANCHES and branch:
            times = Fraction(int(branch.group(1)), int(branch.group(2)))
        for name in re.findall(r"[\w.\-]+", names):
            yield Call(name, times)

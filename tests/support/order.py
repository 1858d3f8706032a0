"""Finds collectives that simulated devices may start in different orders; see `parallel/xla/ordered_collectives.py`."""

import re
from functools import cache

from spmdkit.parallel.xla.census import calls_of, collective_of, computations_of

RESULT = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = ")
OPERAND = re.compile(r"%([\w.\-]+)")


def unordered(compiled_text):
    """Returns the pairs (loop, what follows) of a program of which the second may start while the first runs."""
    assert "is_scheduled=true" in compiled_text
    computations, _ = computations_of(compiled_text)

    @cache
    def communicates(name):
        lines = computations.get(name, ())
        return any(collective_of(line) or any(communicates(call.name) for call in calls_of(line)) for line in lines)

    pairs = []
    for lines in computations.values():
        parents = {}
        before = None
        for line in lines:
            found = RESULT.match(line)
            if not found:
                continue
            name = found.group(1)
            parents[name] = set(OPERAND.findall(line[found.end() :])) - {name}
            loops = any(communicates(call.name) for call in calls_of(line))
            if not loops and not collective_of(line):
                continue
            if before and before[1] and not _needs(name, before[0], parents):
                pairs.append((before[0], name))
            before = (name, loops)
    return pairs


def _needs(name, wanted, parents):
    """Whether `name` is made of `wanted`."""
    seen, pending = set(), [name]
    while pending:
        each = pending.pop()
        if each == wanted:
            return True
        if each not in seen:
            seen.add(each)
            pending.extend(parents.get(each, ()))
    return False

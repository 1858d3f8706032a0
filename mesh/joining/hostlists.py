"""Slurm's short forms, written out: host lists ("n[1-4,7]") and counts of tasks ("2(x3),1")."""

import re

from ..errors import UserError

MOST_HOSTS = 2**16


def expand_hosts(text: str, variable: str = "the host list") -> list[str]:
    """Writes out a host list, in its order.

    Args:
        text: Such as "n[1-4,7]", "rack[01-02]n[1-2],login", "a,b".
        variable: Where it stands, for the message.

    Raises:
        UserError: Brackets do not match, a range is none, or there are too many hosts.
    """
    hosts: list[str] = []
    for item in _split(text, variable):
        hosts += _expand(item, variable)
        if len(hosts) > MOST_HOSTS:
            raise UserError(f"{variable}={text[:200]!r} names more than {MOST_HOSTS} hosts.")
    return hosts


def expand_counts(text: str, variable: str = "the counts") -> list[int]:
    """Writes out Slurm's tasks per node.

    Args:
        text: Such as "2(x3),1", three nodes with two tasks and one with one.
        variable: Where it stands, for the message.

    Raises:
        UserError: It is of another form.
    """
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", item.strip())
        if match is None or len(counts) > MOST_HOSTS:
            raise UserError(f"{variable}={text[:200]!r} must hold counts such as 2(x3),1; {item[:50]!r} is none.")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _split(text: str, variable: str) -> list[str]:
    """The items of a list, at commas outside brackets."""
    items, depth, item = [], 0, ""
    for character in text:
        depth += {"[": 1, "]": -1}.get(character, 0)
        if depth not in (0, 1):
            break
        if character == "," and not depth:
            items.append(item)
            item = ""
        else:
            item += character
    items = [each.strip() for each in (*items, item)]
    if depth or not all(items):
        raise UserError(f"{variable}={text[:200]!r} is no host list: give hosts such as n[1-4,7],login.")
    return items


def _expand(item: str, variable: str) -> list[str]:
    """The hosts of one item: every bracket of it is written out, the last one fastest."""
    match = re.match(r"([^\[]*)\[([^\]]*)\](.*)", item)
    if match is None:
        return [item]
    before, ranges, after = match.groups()
    rests = _expand(after, variable)
    found = []
    for each in ranges.split(","):
        first, dash, last = each.strip().partition("-")
        last = last if dash else first
        numbers = first.isascii() and first.isdecimal() and last.isascii() and last.isdecimal()
        if not numbers or len(last) > 9 or not 0 <= int(last) - int(first) < MOST_HOSTS:
            raise UserError(f"{variable}={item[:200]!r}: {each[:50]!r} is no range of hosts; write n[1-4,7].")
        found += [
            f"{before}{number:0{len(first)}d}{rest}" for number in range(int(first), int(last) + 1) for rest in rests
        ]
        if len(found) > MOST_HOSTS:
            raise UserError(f"{variable}={item[:200]!r} names more than {MOST_HOSTS} hosts.")
    return found

"""Which runs a sweep has: values of keys as they are typed, and every combination of them, with a name.

    strategy=data,fsdp                  two values
    'strategy={data: 8},{fsdp: 8}'      two: commas inside brackets, braces and quotes part nothing
    'data.files=["a.txt","b.txt"]'      one
    optimizer.learning_rate=1e-3        one, the same in all runs

What a value means is the config's matter: it is laid over the file as any `key=value` is.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import count, product
from math import prod
from typing import NamedTuple

from ...configs.errors import ConfigError

MOST = 1000
"""Combinations of one sweep."""
LONGEST = 100
"""Characters of a name, which is that of a folder."""
MARK = re.compile(r"""(?:^|(?<=[,:\[{]))\s*(?:"(?:\\.|[^"\\])*"|'(?:[^']|'')*')|[\[{\]},]""")
"""A quoted text, where YAML lets one begin, or a sign that opens, closes or parts."""
UNSAFE = re.compile(r"[^\w.+-]+", re.ASCII)
"""What a name has a dash for."""


class Combination(NamedTuple):
    """One run of a sweep.

    Attributes:
        name: Of its values, such as "strategy=fsdp,learning_rate=1e-3"; no other run of the sweep has it.
        values: Key -> value as it was typed, of the keys that have several.
        overrides: Every `key=value` of the run, those that all runs share first.
    """

    name: str
    values: Mapping[str, str]
    overrides: tuple[str, ...]


def combine(words: Sequence[str], *, zipped: bool = False) -> list[Combination]:
    """Combines the values of all keys.

    Args:
        words: `key=V1,V2,...` or `key=value` each.
        zipped: Take the first values of all keys, then the second ones, and so on, in place of every combination.

    Returns:
        At least one; the last key changes fastest.

    Raises:
        ConfigError: No key has several values, or they cannot be combined: everything that is wrong.
    """
    swept, shared = _parted(words)
    problems = [*_problems(swept, shared, zipped=zipped)]
    if problems:
        raise ConfigError(problems, "the sweep")
    rows = zip(*swept.values(), strict=True) if zipped else product(*swept.values())
    combined = [dict(zip(swept, row, strict=True)) for row in rows]
    names = _names(combined)
    return [
        Combination(name, values, (*shared, *(f"{key}={value}" for key, value in values.items())))
        for name, values in zip(names, combined, strict=True)
    ]


def split_values(text: str) -> list[str]:
    """Parts a value at its commas, but for those inside brackets, braces and quotes.

    Args:
        text: What stands behind the `=`.
    """
    parts, depth, begin = [], 0, 0
    for mark in MARK.finditer(text):
        depth = max(0, depth + (mark[0] in "[{") - (mark[0] in "]}"))
        if mark[0] == "," and depth == 0:
            parts.append(text[begin : mark.start()])
            begin = mark.end()
    return [part.strip() for part in (*parts, text[begin:])]


def _parted(words: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Key -> values of the keys that have several, and the words of all others as they are."""
    swept: dict[str, list[str]] = {}
    shared = []
    for word in words:
        key, _, text = word.partition("=")
        values = split_values(text)
        if len(values) > 1 and key not in swept:
            swept[key] = values
        else:
            shared.append(word)
    return swept, shared


def _problems(swept: Mapping[str, Sequence[str]], shared: Sequence[str], *, zipped: bool) -> Iterator[str]:
    if not swept:
        yield "no key has several values. Part them by commas, such as strategy=data,fsdp; one run is spmdkit train."
    for key in sorted({word.partition("=")[0] for word in shared} & swept.keys()):
        yield f"{key} is given twice, once with several values. Give all of them at once: {key}={','.join(swept[key])}."
    for key, values in swept.items():
        yield from _key_problems(key, values)
    counts = {key: len(values) for key, values in swept.items()}
    number, told = prod(counts.values()), " and ".join(f"{key} has {each}" for key, each in counts.items())
    if zipped and len({*counts.values()}) > 1:
        yield f"--zip takes one value of each key for a run: {told}. Give as many of each, or leave --zip out."
    elif not zipped and number > MOST:
        arithmetic = " x ".join(map(str, counts.values()))
        yield f"{arithmetic} = {number:,} combinations, and a sweep has {MOST:,} at most: {told}. Give fewer values."


def _key_problems(key: str, values: Sequence[str]) -> Iterator[str]:
    """What is wrong with the values of one key."""
    given = f"{key}={','.join(values)}"
    if key == "run.dir":
        yield f"{given}: each run gets a folder of its own in run.dir. Give one folder, or leave run.dir out."
    if not all(values):
        yield f"{given}: a value is empty. Give one on both sides of each comma, or put a value with commas in quotes."
    twice = [value for value, times in Counter(values).items() if times > 1 and value]
    if twice:
        yield f"{given}: {twice[0]} is given twice. Give each value once."


def _names(combined: Sequence[Mapping[str, str]]) -> list[str]:
    """Names the combinations by their values; the same name a second time gets a number."""
    short = _short_keys([*combined[0]])
    found: list[str] = []
    for each in combined:
        name = _cut(",".join(f"{short[key]}={_safe(value)}" for key, value in each.items()))
        numbered = (name if number == 1 else f"{name}-{number}" for number in count(1))
        found.append(next(free for free in numbered if free not in found))
    return found


def _short_keys(keys: Sequence[str]) -> dict[str, str]:
    """Key -> its last word, or all of it where several end alike."""
    last = {key: key.rpartition(".")[2] for key in keys}
    count_of = Counter(last.values())
    return {key: _safe(word if count_of[word] == 1 else key) for key, word in last.items()}


def _safe(text: str) -> str:
    """A text that every file system and shell takes as part of a name."""
    return UNSAFE.sub("-", text.strip(" []{}\"'")) or "none"


def _cut(name: str) -> str:
    if len(name) <= LONGEST:
        return name
    return f"{name[: LONGEST - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"

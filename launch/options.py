"""What is said of words that a command does not take: `--steps 3` for `train.steps=3`, `--stpe 3` for `--step 3`."""

import os
import shlex
from collections.abc import Iterable, Sequence

from ..mesh.errors import UserError
from ..mesh.near_miss import nearest

NEAR, VERY_NEAR = 0.82, 0.9
"""How alike an option has to be to one that exists, to be taken for it; where it is the name of a key as well."""


def is_override(word: str) -> bool:
    """Whether a word lays a value over a config: `key=value`, of a key in a section that there is."""
    from ..configs.reading.keys import sections

    key, equals, _ = word.partition("=")
    return bool(equals) and key.partition(".")[0] in sections()


def refuse_overrides(words: Iterable[str], command: str, remedy: str) -> None:
    """Makes sure that no value is laid over a config where none is read.

    Args:
        words: What was given.
        command: What reads none, such as "spmdkit report of a folder".
        remedy: What to give instead.

    Raises:
        UserError: One of the words is `key=value`.
    """
    given = next(filter(is_override, words), None)
    if given is not None:
        raise UserError(f"{given}: {command} reads no config, so key=value changes nothing. {remedy}")


def explain_unknown(
    unknown: Sequence[str], words: Sequence[str], *, options: Sequence[str] = (), reads_config: bool = True
) -> str:
    """Returns what is wrong with arguments that a command does not know, and what to write instead.

    Args:
        unknown: The arguments that argparse could not place.
        words: All arguments, in the order typed.
        options: Those that the command has.
        reads_config: Whether it takes `key=value`.
    """
    said, stray, left = [], [], list(unknown)
    while left:
        word = left.pop(0)
        value = "" if "=" in word else _value_after(word, words)
        explained = _explained(word, value, options, reads_config)
        if not explained:
            stray.append(word)
            continue
        said.append(explained)
        if value and left and left[0] == value:
            left.pop(0)
    if stray:
        said.append(f"unrecognized arguments: {' '.join(stray)}")
    return "\n  ".join(said)


def _explained(word: str, value: str, options: Sequence[str], reads_config: bool) -> str:
    """What a word is meant for, where that is known."""
    if not word.startswith("--"):
        is_lost = not reads_config and is_override(word) and not os.path.lexists(word)
        return f"{word}: this command reads no config, so key=value changes nothing; leave it out" if is_lost else ""
    option, equals, given = word.partition("=")
    is_key = reads_config and bool(_keys(option, exact=True))
    near = nearest(option, options, cutoff=VERY_NEAR if is_key else NEAR)
    if near:
        return f"{option} is not an option; did you mean {near[0]}?"
    return _as_key(option, given if equals else value) if reads_config else ""


def _keys(option: str, *, exact: bool = False) -> list[str]:
    """The keys of the config that an option stands for."""
    from ..configs.reading.keys import keys_meant_by

    return keys_meant_by(option.removeprefix("--"), exact=exact)


def _as_key(option: str, value: str) -> str:
    """What to write in place of an option; "" where it stands for no key."""
    from ..configs.reading.synonyms import remark

    remarked, keys = remark(option), _keys(option)
    meant = " or ".join(shlex.quote(f"{key}={value}") if value and not remarked else f"{key}=..." for key in keys)
    return f"{option} is not an option; values of the config are given as key=value: {meant}{remarked}" if keys else ""


def _value_after(option: str, words: Sequence[str]) -> str:
    """The word after an option, where that may be its value; otherwise an empty text."""
    following = list(words[words.index(option) + 1 :])[:1]
    return "".join(word for word in following if not word.startswith("--") and "=" not in word)

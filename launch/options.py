"""`--steps 3` where `train.steps=3` is meant: what is said of an option that does not exist."""

import shlex
from collections.abc import Sequence


def explain_unknown(unknown: Sequence[str], words: Sequence[str]) -> str:
    """Returns what is wrong with arguments that a command with a config does not know, and what to write instead.

    Args:
        unknown: The arguments that argparse could not place.
        words: All arguments, in the order typed.
    """
    from ..configs.reading.keys import keys_meant_by
    from ..configs.reading.synonyms import remark

    said, stray, left = [], [], list(unknown)
    while left:
        word = left.pop(0)
        option, equals, value = word.partition("=")
        keys = keys_meant_by(option.removeprefix("--")) if option.startswith("--") else []
        if not keys:
            stray.append(word)
            continue
        if not equals:
            value = _value_after(word, words)
            if left and left[0] == value:
                left.pop(0)
        words_of = remark(option)
        meant = " or ".join(shlex.quote(f"{key}={value}") if value and not words_of else f"{key}=..." for key in keys)
        said.append(f"{option} is not an option; values of the config are given as key=value: {meant}{words_of}")
    if stray:
        said.append(f"unrecognized arguments: {' '.join(stray)}")
    return "\n  ".join(said)


def _value_after(option: str, words: Sequence[str]) -> str:
    """The word after an option, where that may be its value; otherwise an empty text."""
    following = list(words[words.index(option) + 1 :])[:1]
    return "".join(word for word in following if not word.startswith("--") and "=" not in word)

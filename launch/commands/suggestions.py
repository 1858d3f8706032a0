"""Error messages for unrecognized arguments, such as `--steps 3` for `train.steps=3`."""

import os
import shlex
from collections.abc import Iterable, Sequence

from ...mesh.errors import UserError, nearest

MIN_SIMILARITY, MIN_SIMILARITY_TO_KEY = 0.82, 0.9
"""The similarity of an option to an existing one that counts as a typo; the second if it is also the name of a key."""


def is_override(word: str) -> bool:
    """Returns whether an argument is `key=value` with a key of an existing section."""
    from ...configs.key_names import sections

    key, equals, _ = word.partition("=")
    return bool(equals) and key.partition(".")[0] in sections()


def reject_overrides(words: Iterable[str], command: str, fix: str) -> None:
    """Checks that there is no `key=value` for a command that does not read a config.

    Args:
        words: The arguments.
        command: The command, such as "spmdkit report".
        fix: The advice in the message.

    Raises:
        UserError: One of the arguments is `key=value`.
    """
    given = next(filter(is_override, words), None)
    if given is not None:
        raise UserError(f"{given}: {command} does not read a config, so key=value is ignored. {fix}")


def explain_unknown(
    unknown: Sequence[str], words: Sequence[str], *, options: Sequence[str] = (), reads_config: bool = True
) -> str:
    """Returns the error message for arguments that a command does not have.

    Args:
        unknown: The arguments that argparse did not recognize.
        words: All arguments in order.
        options: The options of the command.
        reads_config: If it takes `key=value`.
    """
    explanations, stray, left = [], [], list(unknown)
    while left:
        word = left.pop(0)
        value = "" if "=" in word else _value_after(word, words)
        explanation = _explain(word, value, options, reads_config)
        if not explanation:
            stray.append(word)
            continue
        explanations.append(explanation)
        if value and left and left[0] == value:
            left.pop(0)
    if stray:
        explanations.append(f"unrecognized arguments: {' '.join(stray)}")
    return "\n  ".join(explanations)


def _explain(word: str, value: str, options: Sequence[str], reads_config: bool) -> str:
    """Returns the message for one argument; "" if nothing similar exists."""
    if not word.startswith("--"):
        is_lost = not reads_config and is_override(word) and not os.path.lexists(word)
        return f"{word}: this command does not read a config, so key=value is ignored; remove it" if is_lost else ""
    option, equals, given = word.partition("=")
    is_key = reads_config and bool(_find_keys(option, exact=True))
    near = nearest(option, options, cutoff=MIN_SIMILARITY_TO_KEY if is_key else MIN_SIMILARITY)
    if near:
        return f"{option} is not an option; did you mean {near[0]}?"
    return _suggest_key(option, given if equals else value) if reads_config else ""


def _find_keys(option: str, *, exact: bool = False) -> list[str]:
    from ...configs.key_names import suggest_keys

    return suggest_keys(option.removeprefix("--"), exact=exact)


def _suggest_key(option: str, value: str) -> str:
    """Returns the message for an option that is a key of the config; "" if it is not."""
    from ...configs.key_names import find_remark

    note, keys = find_remark(option), _find_keys(option)
    keys_text = " or ".join(shlex.quote(f"{key}={value}") if value and not note else f"{key}=..." for key in keys)
    return f"{option} is not an option; set values of the config as key=value: {keys_text}{note}" if keys else ""


def _value_after(option: str, words: Sequence[str]) -> str:
    """Returns the argument after an option if it may be its value; otherwise ""."""
    following = list(words[words.index(option) + 1 :])[:1]
    return "".join(word for word in following if not word.startswith("--") and "=" not in word)

"""Error messages for unrecognized options, such as `--steps 3` for `train.steps=3`."""

from collections.abc import Sequence

from ...mesh.errors import nearest

MIN_SIMILARITY = 0.82
"""The similarity of an option to an existing one that counts as a typo."""


def is_override(word: str) -> bool:
    """Returns True if an argument is `key=value` with a key of an existing section."""
    from ...configs.key_names import sections

    key, equals, _ = word.partition("=")
    return bool(equals) and key.partition(".")[0] in sections()


def explain_unknown(unknown: Sequence[str], options: Sequence[str], reads_config: bool) -> str:
    """Returns the error message for arguments that a command does not have.

    Args:
        unknown: The arguments that argparse did not recognize.
        options: The options of the command.
        reads_config: If it takes `key=value`.
    """
    explained = {word: _explain(word.partition("=")[0], options, reads_config) for word in unknown}
    stray = [word for word, explanation in explained.items() if not explanation]
    lines = list(filter(None, explained.values()))
    return "\n  ".join(lines + ([f"unrecognized arguments: {' '.join(stray)}"] if stray else []))


def _explain(option: str, options: Sequence[str], reads_config: bool) -> str:
    """Returns the message for one option; "" if nothing similar exists."""
    from ...configs.key_names import find_remark, suggest_keys

    if not option.startswith("--"):
        return ""
    if near := nearest(option, options, cutoff=MIN_SIMILARITY):
        return f"{option} is not an option; did you mean {near[0]}?"
    keys = suggest_keys(option.removeprefix("--")) if reads_config else []
    if not keys:
        return ""
    keys_text = " or ".join(f"{key}=..." for key in keys)
    return f"{option} is not an option; set values of the config as key=value: {keys_text}{find_remark(option)}"

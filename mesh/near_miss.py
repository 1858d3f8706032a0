"""Names that do not exist: the known one that is meant, for the end of an error's message."""

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: object, known: Iterable[str], *, count: int = 1, cutoff: float = 0.6) -> list[str]:
    """Finds the known names that most resemble a name; capitals do not count.

    Args:
        name: What was given.
        known: The names that exist.
        count: How many to find at most.
        cutoff: How alike they have to be, from 0 to 1.

    Returns:
        The names, the most alike first; none where nothing is near.
    """
    by_small_letters = {each.lower(): each for each in known}
    close = get_close_matches(str(name).lower(), by_small_letters, n=count, cutoff=cutoff)
    return [by_small_letters[each] for each in close]


def did_you_mean(
    name: object, known: Iterable[str], *, count: int = 1, cutoff: float = 0.6, prefix: str = "", otherwise: str = ""
) -> str:
    """Ends a message about an unknown name.

    Args:
        name: What was given.
        known: The names that exist.
        count: How many to propose at most.
        cutoff: See `nearest`.
        prefix: What stands before a proposed name, such as "train.".
        otherwise: Where nothing is near: the words before the list of all known names; "" = no list.

    Returns:
        ` Did you mean train.steps?`, ` Choose from a, b.`, or "".
    """
    known = list(known)
    near = nearest(name, known, count=count, cutoff=cutoff)
    if near:
        return f" Did you mean {' or '.join(prefix + each for each in near)}?"
    return f" {otherwise} {', '.join(known) or 'none'}." if otherwise else ""


def unknown_name(kind: str, name: object, known: Iterable[str]) -> str:
    """Says that a name is unknown, lists those that exist, and proposes the nearest.

    Args:
        kind: What is named: "mesh axis".
        name: What was given.
        known: The names that exist.
    """
    known = list(known)
    hint = "".join(f" Did you mean {each!r}?" for each in nearest(name, known))
    return f"Unknown {kind} {name!r}; known: {', '.join(known)}.{hint}"


def unknown_options(unknown: Iterable[str], known: Iterable[str], key: str, of: str = "") -> list[str]:
    """Returns one problem for each unknown option of a config section, with the nearest that exists.

    Args:
        unknown: The options that do not exist.
        known: Those that do.
        key: The config section.
        of: What the options are of: "wsd".
    """
    known, what = list(known), f"an option of {of}" if of else "an option"
    return [f"{key}.{name} is not {what}.{did_you_mean(name, known, otherwise='The options are')}" for name in unknown]

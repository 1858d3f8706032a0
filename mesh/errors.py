"""UserError, the class of errors that users can correct; similar names, links, and printable text for messages."""

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path

from .exit_codes import INVALID_INPUT, TRY_AGAIN

SITE = "https://spmdkit.github.io/spmdkit/"
"""The site of the documentation, also in pyproject.toml and mkdocs.yml."""


def docs_url(page: str, heading: str = "") -> str:
    """Returns the URL of a page of the documentation.

    Args:
        page: Its file in docs/ without the extension: "models", "coming-from/keras".
        heading: The id of a heading: lowercase, dashes for spaces.
    """
    return f"{SITE}{page}.html{'#' * bool(heading)}{heading}"


class UserError(ValueError):
    """A mistake in a config, a file, an argument or a model: its message has the value, the rule and the fix.

    The command line prints only the message and exits with `exit_code`. Other errors are printed with a traceback.
    """

    exit_code = INVALID_INPUT


class TryAgain(RuntimeError):
    """A failure that is not the user's mistake: the same command may succeed later."""

    exit_code = TRY_AGAIN


class TooLateError(UserError, RuntimeError):
    """A setting that JAX fixes once was requested too late."""


def nearest(name: object, known: Iterable[str], *, count: int = 1, cutoff: float = 0.6) -> list[str]:
    """Returns the known names that are most similar to a name, ignoring case.

    Args:
        name: The unknown name.
        known: The known names.
        count: The maximum number of results.
        cutoff: The minimum similarity, from 0 to 1.
    """
    by_lowercase = {candidate.lower(): candidate for candidate in known}
    close = get_close_matches(str(name).lower(), by_lowercase, n=count, cutoff=cutoff)
    return [by_lowercase[lowercase] for lowercase in close]


def did_you_mean(
    name: object, known: Iterable[str], *, count: int = 1, cutoff: float = 0.6, prefix: str = "", otherwise: str = ""
) -> str:
    """Returns the end of a message about an unknown name.

    Args:
        name: The unknown name.
        known: The known names.
        count: The maximum number of proposals.
        cutoff: See `nearest`.
        prefix: A prefix of proposed names, such as "train.".
        otherwise: Without a similar name, the words before the list of all known names; "" = no list.

    Returns:
        ` Did you mean train.steps?`, ` Choose from a, b.`, or "".
    """
    known = list(known)
    proposals = [prefix + candidate for candidate in nearest(name, known, count=count, cutoff=cutoff)]
    if proposals:
        return f" Did you mean {' or '.join(proposals)}?"
    if not otherwise:
        return ""
    return f" {otherwise} {', '.join(known) or 'none'}."


def unknown_name(kind: str, name: object, known: Iterable[str]) -> str:
    """Returns a message about an unknown name of a kind such as "mesh axis", with the known and nearest names."""
    known = list(known)
    message = f"Unknown {kind} {name!r}; known: {', '.join(known)}."
    for candidate in nearest(name, known):
        message += f" Did you mean {candidate!r}?"
    return message


def unknown_options(unknown: Iterable[str], known: Iterable[str], key: str, of: str = "") -> list[str]:
    """Returns one problem for each unknown option of a config section, with the nearest known one.

    Args:
        unknown: The unknown options.
        known: The known options.
        key: The config section.
        of: The owner of the options, such as "wsd".
    """
    known = list(known)
    kind = f"an option of {of}" if of else "an option"
    problems = []
    for name in unknown:
        hint = did_you_mean(name, known, otherwise="The options are")
        problems.append(f"{key}.{name} is not {kind}.{hint}")
    return problems


def raise_problems(problems: Iterable[str], heading: str = "", most: int = 1000) -> None:
    """Raises a UserError with all problems, one on each line, if there are any.

    Args:
        problems: Messages.
        heading: The first line, before indented problems; "" = none.
        most: The maximum number of listed problems.
    """
    lines = first_lines(list(problems), most)
    if not lines:
        return
    if heading:
        raise UserError("\n  ".join([heading, *lines]))
    raise UserError("\n".join(lines))


def first_lines(lines: Sequence[str], most: int) -> list[str]:
    """Returns the first of some lines, and a line with the number of the others."""
    if len(lines) <= most:
        return list(lines)
    return [*lines[:most], f"... and {len(lines) - most} more"]


def first_line(error: BaseException) -> str:
    """Returns the type and the first line of an error from another library."""
    line = str(error).strip().partition("\n")[0][:200].rstrip(".")
    if not line:
        return type(error).__name__
    return f"{type(error).__name__}: {line}"


HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def hub_hint(path: Path | str, kind: str = "model") -> str:
    """Returns, after a space, how to download what looks like a name on the Hugging Face Hub, or "".

    Args:
        path: The path that does not exist: "org/name", perhaps below a directory.
        kind: "model" or "dataset".
    """
    path = Path(path)
    name = "/".join(path.parts[-2:])
    if path.exists() or path.parent.exists() or not HUB_NAME.fullmatch(name):
        return ""
    option = "--repo-type dataset " if kind == "dataset" else ""
    return (
        f" If it is the name of a {kind} on the Hugging Face Hub, download it first, and give its directory: "
        f"hf download {option}{name} --local-dir {path.name}."
    )


HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # controls, except tab and newline
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # these change the direction of text
    "\u2028\u2029"  # separators of lines and paragraphs
    "\ud800-\udfff\ue000-\uf8ff\U000f0000-\U0010ffff]"  # lone surrogates and private use
)
"""Characters that are escaped in messages."""


def counted(number: int, noun: str, several: str = "") -> str:
    """Formats a count with its noun: "1 array", "1,024 devices"; the default plural adds an "s"."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {several or noun + 's'}"


def printable(text: str) -> str:
    """Returns a text with control characters and bidirectional overrides as escapes, except newline and tab."""
    return HIDDEN.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def is_printable(text: str) -> bool:
    """Returns True if a text has no control characters at all."""
    return HIDDEN.search(text) is None and "\n" not in text and "\t" not in text

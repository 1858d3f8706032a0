"""Warnings as one line each: what is the matter, and whose it is; not where in which package's code it was noticed."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

PACKAGE, OWN = Path(__file__).resolve().parents[1], __name__.partition(".")[0]
INSTALLED = ("site-packages", "dist-packages")
PYTHONS_OWN = (UserWarning, Warning)
"""Classes that say nothing of what a warning is about."""


@contextmanager
def plain_warnings() -> Iterator[None]:
    """For the duration of a `with` block Python's warnings are printed as `warning: ...`, one line each."""
    before = warnings.formatwarning
    warnings.formatwarning = one_line
    try:
        yield
    finally:
        warnings.formatwarning = before


def one_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """The text of a warning; the arguments are those of `warnings.formatwarning`.

    Returns:
        A line. A warning of spmdkit is its text alone; one of an installed package names that, and one of the user's
        own code the file and the line.
    """
    from ..mesh.text import printable  # here, as help waits for no JAX

    text = " ".join(str(message).split())
    whose = "" if category.__module__.partition(".")[0] == OWN else _whose(filename, lineno)
    kind = "" if category in PYTHONS_OWN or not whose else f"{category.__name__} "
    return printable(f"warning: {text}{f' ({kind}of {whose})' if whose else ''}") + "\n"


def _whose(filename: str, lineno: int) -> str:
    """Whose code gave a warning; "" of spmdkit's own."""
    path = Path(filename)
    after = [part for before, part in pairwise(path.parts) if before in INSTALLED]
    if after:
        return after[-1].removesuffix(".py") if after[-1] != OWN else ""
    return "" if path.is_relative_to(PACKAGE) else f"{filename}, line {lineno}"

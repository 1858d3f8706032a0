"""Files by glob, in an order and under names that do not depend on the machine."""

import glob
import os
from pathlib import Path
from typing import NamedTuple

from ...mesh.errors import UserError
from ...mesh.near_miss import nearest
from ...mesh.text import counted

STARTS = "Paths in a YAML file start from its folder (run.root), those in key=value from the working directory."
MOST_NAMED = 5
"""Files or patterns of one mistake, in a message."""


class FoundFile(NamedTuple):
    """A file, and the name that stands for it on every machine.

    Attributes:
        path: Where it is here.
        name: Its path below the folder in which its pattern's wildcards begin, with forward slashes.
    """

    path: Path
    name: str


def find_files(patterns: tuple[str, ...], *, key: str, suffixes: tuple[str, ...] = ()) -> tuple[FoundFile, ...]:
    """All files that the patterns match, each once, sorted by name.

    Args:
        patterns: Paths or globs, relative to the working directory; `**` spans folders, `~` is the home folder.
        key: Config key the patterns come from, for messages.
        suffixes: The extensions this source can read; () for any.

    Returns:
        The files; never empty.

    Raises:
        UserError: a pattern matches no file, or a file has an extension that this source cannot read.
    """
    found: dict[Path, FoundFile] = {}
    missing: dict[str, list[str]] = {}
    for pattern in patterns:
        matches = _matches(pattern)
        if not matches:
            missing.setdefault(_why_none(pattern), []).append(pattern)
        for file in matches:
            found.setdefault(file.path.resolve(), file)
    problems = [f"{key}: {_some(those, 'matches', 'match')} no file. {why}" for why, those in missing.items()]
    unreadable: dict[str, list[str]] = {}
    for file in found.values():
        if suffixes and file.path.suffix not in suffixes:
            unreadable.setdefault(file.path.suffix, []).append(str(file.path))
    problems += [_unreadable(suffix, sorted(those), suffixes, key) for suffix, those in unreadable.items()]
    if problems:
        raise UserError("\n".join(problems))
    return tuple(sorted(found.values(), key=lambda file: (file.name, str(file.path))))


def _matches(pattern: str) -> list[FoundFile]:
    """The files that one pattern matches, in any order."""
    pattern = os.path.expanduser(pattern)
    if os.path.isfile(pattern):
        return [FoundFile(Path(pattern), os.path.basename(pattern))]
    root = _fixed_folder(pattern)
    paths = [Path(match) for match in glob.glob(pattern, recursive=True) if os.path.isfile(match)]
    return [FoundFile(path, path.relative_to(root).as_posix()) for path in paths]


def _fixed_folder(pattern: str) -> Path:
    """The part of a pattern before the first component with a wildcard."""
    parts = Path(pattern).parts
    fixed = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts) - 1)
    return Path(*parts[:fixed])


def _some(names: list[str], one_does: str, several_do: str) -> str:
    """The first of some files or patterns, and a verb."""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"{', '.join(map(repr, names[:MOST_NAMED]))}{more} {one_does if len(names) == 1 else several_do}"


def _why_none(pattern: str) -> str:
    """Why nothing matched, as far as the file system can tell."""
    folder = _fixed_folder(os.path.expanduser(pattern)).absolute()
    if os.path.isdir(os.path.expanduser(pattern)):  # pathlib raises for a name that is too long
        return f"It is a folder; to read the files below it, write {pattern.rstrip('/') + '/**/*'!r}."
    if os.path.isdir(folder):
        return f"The folder {folder} exists and holds {_entries(folder)}. {STARTS}"
    existing = next(parent for parent in folder.parents if os.path.isdir(parent))
    missing = folder.relative_to(existing).parts[0]
    hint = "".join(f" Did you mean {each!r} for {missing!r}?" for each in nearest(missing, os.listdir(existing)))
    there = f"The folder {folder} does not exist; {existing} does, and holds {_entries(existing)}."
    return f"{there}{hint} {STARTS}"


def _entries(folder: Path) -> str:
    """How many entries a folder has, and the first few."""
    names = sorted(os.listdir(folder))
    if not names:
        return "nothing"
    return f"{counted(len(names), 'entry', 'entries')}: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"


def _unreadable(suffix: str, files: list[str], suffixes: tuple[str, ...], key: str) -> str:
    """What is wrong with the extension of files."""
    return (
        f"{key}: {_some(files, 'has', 'have')} the extension {suffix!r}; this source reads {', '.join(suffixes)} "
        "(data.source chooses the source)."
    )

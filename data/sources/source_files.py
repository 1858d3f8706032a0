"""Files of a source: found by glob, in an order and under names that do not depend on the machine; bad records."""

import glob
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from ...mesh.errors import UserError, counted, did_you_mean, raise_problems
from ...mesh.processes import print_progress

STARTS = "Paths in a YAML file start from its directory (run.root), those in key=value from the working directory."
MAX_NAMED = 5
"""Files or problems listed in a message."""


class FoundFile(NamedTuple):
    """A file, and the name that stands for it on every machine.

    Attributes:
        path: Its path on this machine.
        name: Its path below the directory in which its pattern's wildcards begin, with forward slashes.
    """

    path: Path
    name: str


class BadRecords:
    """The records of one source that were left out because they cannot be read; each is logged.

    Args:
        limit: `data.bad_records`, the maximum number; 0: the first one is an error.
        error_class: The exception to raise if there are more.
    """

    def __init__(self, limit: int, error_class: type[UserError] = UserError) -> None:
        self._limit, self._error_class = limit, error_class
        self._seen: set[str] = set()
        self._lock = threading.Lock()
        self.count = 0

    def leave_out(self, where: str, reason: str, records: int = 1) -> None:
        """Counts and logs records that cannot be read, each only once.

        Args:
            where: The file, and record, line or offset in it.
            reason: The reason, and the fix.
            records: The number of records.

        Raises:
            UserError: There are more than the limit allows; of type `error_class`.
        """
        with self._lock:
            if where in self._seen:
                return
            self._seen.add(where)
            self.count += records
            count = self.count
        if not self._limit:
            raise self._error_class(f"{where}: {reason}")
        so_far = f"{counted(count, 'bad record')} so far, data.bad_records={self._limit:,}"
        if count > self._limit:
            raise self._error_class(f"{where}: {reason} That makes {so_far}. Fix it, or raise data.bad_records.")
        print_progress(f"data: left out {where}: {reason} ({so_far})")

    def description(self) -> str:
        """Returns "" or ", 3 bad records left out", for descriptions of the data."""
        return f", {counted(self.count, 'bad record')} left out" if self.count else ""


@contextmanager
def explain_missing(needed_by: str, package: str, extra: str) -> Iterator[None]:
    """Raises a UserError in place of the ImportError of a package that only one source needs."""
    try:
        yield
    except ImportError as error:
        fix = f"pip install 'spmdkit[{extra}]'"
        raise UserError(f"{needed_by} needs {package}, which is not installed: {fix}") from error


def raise_system_error(error: BaseException) -> None:
    """Raises an error of the file system again; other errors come from the content of a file."""
    if getattr(error, "errno", None) is not None or isinstance(error, UserError | MemoryError):
        raise error


def reason_of(error: BaseException) -> str:
    """Returns the message of another library's error in one line, without a final period."""
    return " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__


def find_files(patterns: tuple[str, ...], *, key: str, suffixes: tuple[str, ...] = ()) -> tuple[FoundFile, ...]:
    """Returns all files that the patterns match, each once, sorted by name.

    Args:
        patterns: Paths or globs, relative to the working directory; `**` spans directories, `~` is the home directory.
        key: Config key of the patterns, for messages.
        suffixes: The extensions that this source can read; () for any.

    Returns:
        The files; never empty.

    Raises:
        UserError: A pattern does not match any file, or a file has an extension that this source cannot read.
    """
    found: dict[Path, FoundFile] = {}
    problems = []
    for pattern in patterns:
        matches = _matches(pattern)
        if not matches:
            problems.append(f"{key}: no file matches {pattern!r}. {_explain_no_match(pattern)}")
        for file in matches:
            found.setdefault(file.path.resolve(), file)
    if unreadable := [str(file.path) for file in found.values() if suffixes and file.path.suffix not in suffixes]:
        problems.append(
            f"{key}: {', '.join(sorted(unreadable)[:MAX_NAMED])}{', ...' if len(unreadable) > MAX_NAMED else ''}: "
            f"invalid extension; this source reads {', '.join(suffixes)} (data.source selects the source)."
        )
    raise_problems(problems, most=MAX_NAMED)
    return tuple(sorted(found.values(), key=lambda file: (file.name, str(file.path))))


def _matches(pattern: str) -> list[FoundFile]:
    """Returns the files that one pattern matches, in any order."""
    pattern = os.path.expanduser(pattern)
    if os.path.isfile(pattern):
        return [FoundFile(Path(pattern), os.path.basename(pattern))]
    root = _fixed_directory(pattern)
    paths = [Path(match) for match in glob.glob(pattern, recursive=True) if os.path.isfile(match)]
    return [FoundFile(path, path.relative_to(root).as_posix()) for path in paths]


def _fixed_directory(pattern: str) -> Path:
    """Returns the part of a pattern before the first component with a wildcard."""
    return Path(*takewhile(lambda part: not glob.has_magic(part), Path(pattern).parts[:-1]))


def _explain_no_match(pattern: str) -> str:
    """Returns the reason why a pattern does not match: a directory, or the first part of the path that is missing."""
    path = Path(os.path.expanduser(pattern)).absolute()
    if path.is_dir():
        return f"It is a directory; to read the files below it, write {pattern.rstrip('/') + '/**/*'!r}."
    existing = next(parent for parent in path.parents if parent.is_dir())
    missing = path.relative_to(existing).parts[0]
    return f"{existing} does not contain {missing}.{did_you_mean(missing, os.listdir(existing))} {STARTS}"

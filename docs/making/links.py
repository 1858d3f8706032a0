"""Links out of docs/: where the site shows what they lead to.

On a code host `[loop.py](../training/loop.py)` opens the file. The site holds nothing but docs/, so it gets a page for
each file that is linked: a Markdown file becomes a page like others, any other its text with colors.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from posixpath import dirname, normpath, relpath

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(?<=\]\()(?P<target>[^)#\s:]+)(?P<part>#[^)\s]*)?(?=\))")
CODE = re.compile(r"^```.*?^```$|(?<!`)`[^`\n]+`(?!`)", re.MULTILINE | re.DOTALL)
MOVED = {"README.md": "index.md", "docs/README.md": "pages.md"}
"""Pages that the site shows elsewhere: its home is the project's README, and the list of pages stands beside it."""
PROJECT, SOURCE = "project", "source"
"""Folders of the site: Markdown files from outside docs/, and sources."""


def place_of(path: str) -> str:
    """Tells where the site shows a file or folder of the repository.

    Args:
        path: From the root of the repository, such as `docs/data.md` or `training/loop.py`.

    Returns:
        From the root of the site's pages: `data.md`, `project/CHANGELOG.md`, `source/training/loop.py.html`.
    """
    if path in MOVED:
        return MOVED[path]
    if in_docs(path):
        return path.removeprefix("docs/")
    if path.endswith(".md"):
        return f"{PROJECT}/{path}"
    return f"{SOURCE}/{path}/index.html" if (ROOT / path).is_dir() else f"{SOURCE}/{path}.html"


def in_docs(path: str) -> bool:
    """Whether a path is that of a page or picture of docs/, not of a program or folder that makes them."""
    return path.startswith("docs/") and Path(path).suffix not in ("", ".py")


def linked(text: str, path: str) -> Iterator[str]:
    """Yields what the links of a page lead to, as paths from the root of the repository.

    Args:
        text: The page.
        path: Where it is, from the root of the repository.
    """
    for match in LINK.finditer(CODE.sub("", text)):
        yield _absolute(match["target"], path)


def for_the_site(text: str, path: str) -> str:
    """Rewrites the links of a page for the place that the site gives it. Code stays as it is.

    Args:
        text: The page.
        path: Where it is, from the root of the repository.
    """
    here = dirname(place_of(path))

    def moved(match: re.Match) -> str:
        return relpath(place_of(_absolute(match["target"], path)), here or ".") + (match["part"] or "")

    parts, end = [], 0
    for code in CODE.finditer(text):
        parts += [LINK.sub(moved, text[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, LINK.sub(moved, text[end:])])


def _absolute(target: str, path: str) -> str:
    return normpath(f"{dirname(path)}/{target}".lstrip("/"))

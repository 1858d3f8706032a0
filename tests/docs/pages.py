"""The user's documents, cut into pages and fenced blocks."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block: its language, its text, and the line of the page on which the text begins."""

    language: str
    text: str
    line: int


def name(page: Path) -> str:
    """The page's path from the root, which is also the id of its tests."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, *languages: str) -> list[Block]:
    """The fenced blocks of a page in one of these languages."""
    text = page.read_text(encoding="utf-8")
    found = [Block(m[1], m[2], text.count("\n", 0, m.start()) + 2) for m in _FENCE.finditer(text)]
    return [block for block in found if block.language in languages]


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def commands(page: Path) -> Iterator[list[str]]:
    """The `spmdkit` commands of a page, as words: all lines of sh blocks, those after a $ of console blocks."""
    for block in blocks(page, "sh", "console"):
        lines = block.text.splitlines()
        typed = lines if block.language == "sh" else [line[2:] for line in lines if line.startswith("$ ")]
        for words in (shlex.split(line, comments=True) for line in typed):
            if words and Path(words[0]).name == "spmdkit":
                yield words[1:]

"""The user's documents, cut into pages and fenced blocks."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import figures

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^\n]+) -->\n)?"
    r"(?:^<!-- exit code (?P<code>\d+) -->\n)?(?:^<!-- figure[^\n]*-->\n)?"
    r"^```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    text: str
    line: int
    reason: str
    code: int

    @property
    def file(self) -> str:
        """The file that a reader saves the block as, named in its first line (`# my.yaml`); else empty."""
        named = figures.FILE.fullmatch(f"```{self.language}\n{self.text}```")
        return named["name"] if named else ""


def name(page: Path) -> str:
    """The page's path from the root, which is also the id of its tests."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, *languages: str) -> list[Block]:
    """The fenced blocks of a page in one of these languages."""
    text = page.read_text(encoding="utf-8")
    found = [
        Block(
            m["language"], m["text"], text.count("\n", 0, m.start("text")) + 1, m["reason"] or "", int(m["code"] or 0)
        )
        for m in _FENCE.finditer(text)
    ]
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


def runnable(page: Path) -> list[dict]:
    """The blocks of a page that run on a laptop, in their order, as tests/support/run_page.py reads them."""
    parts = []
    for block in blocks(page, "python", "yaml", "sh", "console"):
        part = {
            "language": block.language,
            "text": block.text,
            "line": block.line,
            "file": block.file,
            "code": block.code,
        }
        if block.reason:
            continue
        if block.language != "console":
            parts.append(part)
            continue
        for command, shown in figures.console(block.text):
            if command.startswith("cat "):
                file = {"language": "text", "file": command.split()[1], "text": "\n".join([*shown, ""])}
                parts.append(part | file)
            else:
                parts.append(part | {"text": command})
    return parts


CODE = re.compile(r"`([^`\n]+)`")
PACKAGES = [path.parent.name for path in ROOT.glob("*/__init__.py")]


def code_of_the_package():
    """All sources as one text, strings over several lines joined."""
    sources = [path.read_text(encoding="utf-8") for folder in PACKAGES for path in (ROOT / folder).rglob("*.py")]
    return "\n".join(re.sub(r'"\s*\n\s*f?"', "", text) for text in sources)


def quoted_messages(text, column):
    """What the rows of a page's tables quote in a column, from 1."""
    rows = [row for row in text.splitlines() if row.startswith("|") and not row.startswith("|---")]
    return [quoted for row in rows for quoted in CODE.findall(row.split("|")[column])]

"""The frame of the report page: a whole HTML file that needs nothing from elsewhere."""

from collections.abc import Iterable
from html import escape
from importlib.resources import files
from pathlib import Path

from ...mesh.files import write_text
from ...mesh.text import printable


def write_page(path: Path, title: str, sections: Iterable[str]) -> None:
    """Writes a page; the file is replaced as a whole.

    Args:
        path: The HTML file.
        title: Plain text.
        sections: HTML, one under the other.
    """
    footer = "<footer>Written by spmdkit. This page is one file and loads nothing.</footer>"
    write_text(path, page(title, "\n".join([*sections, footer])))


def page(title: str, body: str) -> str:
    """Puts a body into a whole page that needs nothing from elsewhere.

    Args:
        title: Plain text.
        body: HTML.

    Returns:
        HTML.
    """
    folder = files(__package__ or "spmdkit.training")
    style, script = (folder.joinpath(name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{visible(title)}</title><style>{style}</style></head>\n"
        f"<body><main>{body}</main><script>{script}</script></body></html>\n"
    )


def visible(text: str) -> str:
    """Escapes text for HTML; control characters and those that turn a line around are written as `\\x1b`."""
    return escape(printable(text))

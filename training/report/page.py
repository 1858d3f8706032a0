"""The frame of the report page: a whole HTML file that needs nothing from elsewhere."""

from html import escape
from importlib.resources import files

from ...mesh.text import printable


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

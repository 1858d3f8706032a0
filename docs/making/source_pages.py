"""Pages that show a source file or a folder of the repository."""

import ast
from html import escape
from pathlib import Path

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_for_filename
from pygments.util import ClassNotFound

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{path}</title><link rel="stylesheet" href="{top}assets/source.css"></head>
<body><header><a href="{top}index.html">spmdkit</a> {path}</header><main>{body}</main></body></html>
"""


def file_page(root: Path, path: str) -> str:
    """Shows a file with colors and numbered lines.

    Args:
        root: The repository.
        path: The file, from there.

    Returns:
        HTML that loads one style sheet of the site.
    """
    text = (root / path).read_text(encoding="utf-8")
    try:
        lexer = get_lexer_for_filename(path)
    except ClassNotFound:
        return _page(path, f"<pre>{escape(text)}</pre>", depth=path.count("/"))
    formatter = HtmlFormatter(linenos="inline", lineanchors="line", cssclass="highlight")
    return _page(path, highlight(text, lexer, formatter), depth=path.count("/"))


def folder_page(root: Path, path: str, shown: set[str]) -> str:
    """Lists the files of a folder, each with the first sentence of its docstring.

    Args:
        root: The repository.
        path: The folder, from there.
        shown: Paths of the files and folders that have a page.
    """
    rows = []
    for entry in sorted((root / path).iterdir(), key=lambda entry: (entry.is_file(), entry.name)):
        if entry.name.startswith((".", "__")) or (entry.is_dir() and not list(entry.glob("*.*"))):
            continue
        name = escape(entry.name + "/" * entry.is_dir())
        if f"{path}/{entry.name}" in shown:
            name = f'<a href="{entry.name}{"/index" * entry.is_dir()}.html">{name}</a>'
        rows.append(f"<tr><td><code>{name}</code></td><td>{escape(first_line(entry))}</td></tr>")
    return _page(path + "/", f"<table>{''.join(rows)}</table>", depth=path.count("/") + 1)


def first_line(entry: Path) -> str:
    """The first line of the docstring of a Python file, or of a package's `__init__.py`; else nothing."""
    file = entry / "__init__.py" if entry.is_dir() else entry
    if file.suffix != ".py" or not file.is_file():
        return ""
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    return docstring.splitlines()[0] if docstring else ""


def _page(path: str, body: str, depth: int) -> str:
    return PAGE.format(path=escape(path), body=body, top="../" * (depth + 1))

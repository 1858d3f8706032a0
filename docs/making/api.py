"""The reference of the API: the public names of `spmdkit`, shown by mkdocstrings from their docstrings."""

import ast
from itertools import groupby
from pathlib import Path

API = "api.md"
ENTRY = """\
<a id="spmdkit.{name}"></a>

::: {module}.{name}
    options: {{heading: spmdkit.{name}, toc_label: {name}}}
"""
HEAD = """\
# API

The public names of `spmdkit`, from their docstrings. Import them from `spmdkit` itself: `spmdkit.DeviceMesh`.
"""


def api_page(root: Path) -> str:
    """Writes the page as Markdown with the directives of mkdocstrings.

    Args:
        root: The repository.
    """
    parts = [HEAD]
    for package, names in groupby(public_names(root), key=lambda name: name[1].partition(".")[0]):
        parts.append(f"## {package.capitalize()}\n")
        parts += [ENTRY.format(name=name, module=module) for name, module in names]
    return "\n".join(parts)


def public_names(root: Path) -> list[tuple[str, str]]:
    """Reads the names that `spmdkit` exports, each with its module from the root of the repository, by package.

    Args:
        root: The repository; spmdkit/__init__.py imports the names from where they are, for type checkers.
    """
    tree = ast.parse((root / "spmdkit" / "__init__.py").read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module]
    found = [(alias.name, node.module or "") for node in imports for alias in node.names]
    return sorted(found, key=lambda name: (name[1].partition(".")[0], name[0].lower()))

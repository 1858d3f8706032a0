"""The order of the pages: docs/README.md lists them, and the site's navigation is that list.

## Bring your data            a group
| [Data](data.md) | ... |    a page of it: title and file
### Sources                   a group inside that group
"""

import re
from pathlib import Path

INDEX = "README.md"
_LINE = re.compile(r"^(?P<depth>##|###) (?P<heading>.+)$|^\| \[(?P<title>[^\]]+)\]\((?P<file>[^)#:]+)\) \|")


def navigation(index: str) -> list[dict]:
    """Reads the groups and pages of docs/README.md.

    Args:
        index: The text of docs/README.md.

    Returns:
        What `nav` of mkdocs.yml would hold: title -> file or title -> list of such; files relative to docs/.

    Raises:
        ValueError: A page stands above the first heading, or two rows list the same file.
    """
    groups: list[dict] = [{"Documentation": INDEX}]
    where: list | None = None
    outer: list = []
    for match in filter(None, map(_LINE.match, index.splitlines())):
        if match["depth"] == "##":
            where = outer = []
            groups.append({match["heading"]: outer})
        elif match["depth"] == "###":
            where = []
            outer.append({match["heading"]: where})
        elif where is None:
            raise ValueError(f"docs/{INDEX} lists {match['file']} above its first heading `## `.")
        else:
            where.append({match["title"]: match["file"]})
    _no_page_twice(groups)
    return groups


def pages_of(groups: list[dict]) -> list[str]:
    """Returns the files of a navigation, in its order."""
    return [
        file
        for group in groups
        for item in group.values()
        for file in ([item] if isinstance(item, str) else pages_of(item))
    ]


def unlisted(docs: Path) -> list[str]:
    """Says of each page of docs/ that no row of docs/README.md lists what to write there.

    Args:
        docs: The folder docs/.
    """
    listed = set(pages_of(navigation((docs / INDEX).read_text(encoding="utf-8"))))
    files = sorted(path.relative_to(docs).as_posix() for path in docs.rglob("*.md"))
    return [
        f"docs/{file} is not in the navigation. Add a row to the table of docs/{INDEX} whose heading it fits:\n"
        f"| [Its title]({file}) | the question that it answers |"
        for file in files
        if file not in listed
    ]


def _no_page_twice(groups: list[dict]) -> None:
    files = pages_of(groups)
    twice = sorted({file for file in files if files.count(file) > 1})
    if twice:
        raise ValueError(f"docs/{INDEX} lists these pages in more than one row: {', '.join(twice)}. Keep one row each.")

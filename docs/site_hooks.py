"""What mkdocs calls while it builds the site: the navigation, the pages from outside docs/, the links to them."""

import re
from pathlib import Path

from making.links import ROOT, for_the_site, in_docs, linked, place_of
from making.navigation import INDEX, navigation
from making.source_pages import file_page, folder_page
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ABOUT = {
    "README": "README.md",
    "Changes": "CHANGELOG.md",
    "Contributing": "CONTRIBUTING.md",
    "What was measured": "benchmarks/RESULTS.md",
}
"""Title -> Markdown file outside docs/ that is a page of the site."""
NOTE = re.compile(r"^<!-- (?:figure|not run).*-->\n", re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Takes the navigation from docs/README.md."""
    about = [{title: place_of(path)} for title, path in ABOUT.items()]
    config.nav = [*navigation((ROOT / "docs" / INDEX).read_text(encoding="utf-8")), {"Project": about}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds a page for everything outside docs/ that is linked."""
    pages = [f"docs/{file.src_uri}" for file in files.documentation_pages()] + list(ABOUT.values())
    wanted = {target for page in pages for target in linked((ROOT / page).read_text(encoding="utf-8"), page)}
    outside = {path for path in wanted if not in_docs(path)} | set(ABOUT.values())
    for path in sorted(outside):
        files.append(File.generated(config, place_of(path), content=_content(path, outside)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns the links of a page to where the site has what they lead to."""
    path = next((path for path in ABOUT.values() if place_of(path) == page.file.src_uri), f"docs/{page.file.src_uri}")
    return NOTE.sub("", for_the_site(markdown, path))


def _content(path: str, shown: set[str]) -> str:
    place: Path = ROOT / path
    if place.is_dir():
        return folder_page(ROOT, path, shown)
    return place.read_text(encoding="utf-8") if path.endswith(".md") else file_page(ROOT, path)

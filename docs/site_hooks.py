"""The hooks of mkdocs: the navigation, the pages from outside docs/, the links to them, the reference of the API."""

import json
import re
from pathlib import Path

from making.api import API, api_page
from making.links import MOVED, ROOT, for_the_site, in_docs, linked, place_of
from making.navigation import INDEX, navigation
from making.source_pages import file_page, folder_page
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from spmdkit.configs.config_text import config_schema

ABOUT = {
    "Changes": "CHANGELOG.md",
    "Contributing": "CONTRIBUTING.md",
    "Benchmark results": "benchmarks/RESULTS.md",
}
"""Title -> Markdown file outside docs/ that is a page of the site."""
SCHEMA = "schema.json"
"""The JSON schema of a config, which the first line of presets refers to."""
NOTE = re.compile(r"^<!-- (?:figure|not run|exit code).*-->\n", re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Takes the navigation from docs/README.md, between the README and what is not in docs/."""
    about = [{title: place_of(path)} for title, path in ABOUT.items()]
    groups = navigation((ROOT / "docs" / INDEX).read_text(encoding="utf-8"))[1:]
    first = [{"Home": place_of("README.md")}, {"All pages": place_of(f"docs/{INDEX}")}]
    config.nav = [*first, *groups, {"API": API}, {"Project": about}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the home page, pages for linked files outside docs/, the reference of the API and the JSON schema."""
    index = files.get_file_from_path(INDEX)
    if index is not None:
        files.remove(index)
    pages = [f"docs/{file.src_uri}" for file in files.documentation_pages()] + [*MOVED, *ABOUT.values()]
    wanted = {target for page in pages for target in linked((ROOT / page).read_text(encoding="utf-8"), page)}
    outside = {path for path in wanted if not in_docs(path)} | {*MOVED, *ABOUT.values()}
    for path in sorted(outside):
        files.append(File.generated(config, place_of(path), content=_content(path, outside)))
    files.append(File.generated(config, API, content=api_page(ROOT)))
    files.append(File.generated(config, SCHEMA, content=json.dumps(config_schema(), indent=2)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns the links of a page to where the site has what they lead to."""
    if page.file.src_uri == API:
        return markdown
    moved = {place_of(path): path for path in (*MOVED, *ABOUT.values())}
    path = moved.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    return NOTE.sub("", for_the_site(markdown, path))


def _content(path: str, shown: set[str]) -> str:
    place: Path = ROOT / path
    if place.is_dir():
        return folder_page(ROOT, path, shown)
    return place.read_text(encoding="utf-8") if path.endswith(".md") else file_page(ROOT, path)

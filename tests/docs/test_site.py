"""The site: docs/README.md is its navigation, links lead somewhere in it, and it builds without the network."""

import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from making.api import public_names
from making.links import for_the_site, linked, place_of
from making.navigation import INDEX, navigation, pages_of, unlisted
from support.pages import PAGES, ROOT

import spmdkit

DOCS = ROOT / "docs"
INDEX_TEXT = (DOCS / INDEX).read_text(encoding="utf-8")


def test_every_page_is_in_the_navigation():
    assert "docs/README.md" in set(linked(PAGES[0].read_text(encoding="utf-8"), "README.md"))
    missing = unlisted(DOCS)
    assert missing == [], "\n".join(missing)


def test_navigation_groups_match_headings():
    groups = [title for group in navigation(INDEX_TEXT) for title in group]
    assert groups == ["Documentation", *re.findall(r"^## (.+)$", INDEX_TEXT, re.MULTILINE)]
    assert [file for file in pages_of(navigation(INDEX_TEXT)) if not (DOCS / file).is_file()] == []


def test_rewrites_links_out_of_docs():
    text = "[a](../training/loop.py) [b](../README.md#limits) [c](data.md) `[d](../x.py)` [e](https://x.org/) [f](#g)"
    assert for_the_site(text, "docs/metrics.md") == (
        "[a](source/training/loop.py.html) [b](index.md#limits) [c](data.md) `[d](../x.py)` [e](https://x.org/) [f](#g)"
    )
    assert for_the_site("[a](../../mesh/) [b](../data.md)", "docs/strategies/fsdp.md") == (
        "[a](../source/mesh/index.html) [b](../data.md)"
    )
    assert for_the_site("[a](docs/data.md) [b](LICENSE)", "README.md") == "[a](data.md) [b](source/LICENSE.html)"
    assert for_the_site("[a](README.md) [b](../README.md)", "docs/data.md") == "[a](pages.md) [b](index.md)"
    assert place_of("docs/figures.py") == "source/docs/figures.py.html"
    assert place_of("docs/making") == "source/docs/making/index.html"
    assert list(linked("```\n[a](b.md)\n```\n[c](../d/e.py#f)", "docs/x.md")) == ["d/e.py"]


def test_the_reference_has_every_public_name():
    assert {name for name, _ in public_names(ROOT)} == set(spmdkit.__all__) - {"__version__"}


class Loaded(HTMLParser):
    """What a page makes a browser load."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        if tag in ("script", "img", "iframe") and values.get("src"):
            self.found.append(values["src"])
        if tag == "link" and values.get("rel") in ("stylesheet", "preconnect", "icon"):
            self.found.append(values["href"])


@pytest.mark.long
@pytest.mark.slow
def test_builds_strictly_without_external_files(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]  # as `make docs` does
    environment = {"NO_MKDOCS_2_WARNING": "1", "PATH": "/nowhere"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > len(PAGES)
    for page in pages:
        parser = Loaded()
        parser.feed(page.read_text(encoding="utf-8"))
        assert [target for target in parser.found if "//" in target] == [], page
    shown = (tmp_path / "source" / "training" / "loop.py.html").read_text(encoding="utf-8")
    assert "run_steps" in shown
    home = (tmp_path / "index.html").read_text(encoding="utf-8").partition("<article")[2]
    assert 0 < home.index("pictures/mesh.svg") < home.index("Your model on 8 devices")
    reference = (tmp_path / "api.html").read_text(encoding="utf-8")
    assert [name for name in spmdkit.__all__ if f'id="spmdkit.{name}"' not in reference] == []
    assert "A grid of devices with one name per axis" in reference

"""docs/strategies/: a page for each strategy, as its docstring, its options and its cost make it."""

import pytest
from making import strategy_pages
from making.strategy_pages import EXAMPLES, drawing_path, page_path
from spmdkit.parallel import STRATEGIES
from support.pages import ROOT

DOCS = ROOT / "docs"


def test_every_strategy_has_a_page():
    files = {strategy.__name__.rpartition(".")[2] for strategy in STRATEGIES.values()}
    assert set(EXAMPLES) == files, "docs/making/strategy_pages.py: EXAMPLES has one entry a strategy"
    assert {path.stem for path in page_path(DOCS, "data").parent.glob("*.md")} == files
    assert {path.stem for path in drawing_path(DOCS, "data").parent.glob("*.svg")} == files


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_page_is_current(name):
    made = strategy_pages.make(name)
    assert page_path(DOCS, name).read_text(encoding="utf-8") == made.page, "`make figures` renews it"
    assert drawing_path(DOCS, name).read_text(encoding="utf-8") == made.drawing, "`make figures` renews it"

"""docs/strategies/: a page for each strategy, as its docstring, its options and its cost make it."""

import pytest
from making import strategy_pages
from making.strategy_pages import EXAMPLES, drawing_path, page_path
from pages import ROOT
from spmdkit.configs.presets import preset_names
from spmdkit.parallel import STRATEGIES

DOCS = ROOT / "docs"


def test_every_strategy_has_a_page():
    files = {strategy.__name__.rpartition(".")[2] for strategy in STRATEGIES.values()}
    assert set(EXAMPLES) == files, "docs/making/strategy_pages.py: EXAMPLES has one entry a strategy"
    assert {path.stem for path in page_path(DOCS, "data").parent.glob("*.md")} == files
    assert {path.stem for path in drawing_path(DOCS, "data").parent.glob("*.svg")} == files


def test_their_presets_exist():
    assert {example.preset for example in EXAMPLES.values()} <= set(preset_names())


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_page_is_the_one_that_is_made(name):
    made = strategy_pages.make(name)
    assert page_path(DOCS, name).read_text(encoding="utf-8") == made.page, "`make figures` renews it"
    assert drawing_path(DOCS, name).read_text(encoding="utf-8") == made.drawing, "`make figures` renews it"


def test_a_docstring_that_leaves_something_out_is_an_error():
    with pytest.raises(ValueError, match=r"'A: b\.' has no paragraph on: use, bytes, source"):
        strategy_pages.paragraphs("A: b.\n\nSyntax.")


def test_code_and_lists_of_a_docstring_become_markdown():
    text = "Syntax:\n\n    a = b\n      c\n\n1. one\n   more:\n\n       x > y\n\n   so\n2. two"
    assert strategy_pages.as_markdown(text) == (
        "Syntax:\n\n```text\na = b\n  c\n```\n\n"
        "1.  one\n    more:\n\n    ```text\n    x > y\n    ```\n\n    so\n2.  two"
    )

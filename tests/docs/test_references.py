"""What the documents name exists: links, config keys, messages; what they count is right."""

import re

import pytest
from spmdkit.configs.key_names import config_keys
from support.pages import CODE, PAGES, ROOT, code_of_the_package, name, prose, quoted_messages

LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=name)
def test_links_exist(page):
    targets = [target for target in LINK.findall(prose(page)) if not target.startswith("https://")]
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_config_keys_exist(page):
    known = config_keys()
    sections = {key.split(".")[0] for key in known}
    named = re.findall(r"(?:^|[\s`('])([a-z]+\.[a-z_]+(?:\.[a-z_]+)?)(?![\w/(.])", "\n".join(CODE.findall(prose(page))))
    wrong = [key for key in named if key.split(".")[0] in sections and not is_file(key) and key not in known]
    assert wrong == []


def is_file(key: str) -> bool:
    return key.rpartition(".")[2] in ("py", "md", "yaml", "json", "jsonl", "html")


def test_quoted_messages_match_code():
    """The first column of the table of messages quotes them."""
    table = prose(ROOT / "docs" / "troubleshooting.md").split("## Messages")[1].split("## ")[0]
    quoted, code = quoted_messages(table, 1), code_of_the_package()
    assert quoted
    assert [text for text in quoted if text not in code] == []


def test_listed_checks_match_code():
    """The second column of every table of the page of checks quotes what each check says."""
    quoted, code = quoted_messages(prose(ROOT / "docs" / "checks.md"), 2), code_of_the_package()
    assert len(quoted) > 50
    assert [text for text in quoted if text not in code] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_powers_are_formatted_as_code(page):
    """Outside code, Markdown renders the text between two `**` in bold."""
    assert re.findall(r".*\w\*\*\w.*", CODE.sub("", prose(page))) == []


def test_no_file_names_this_machine():
    texts = {name(page): page.read_text(encoding="utf-8") for page in PAGES}
    assert [page for page, text in texts.items() if re.search(r"/(home|work|root|tmp)/", text)] == []


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=name)
def test_link_anchors_exist(page):
    """`page.md#heading` as GitHub spells it: small letters, dashes for spaces, no other signs."""
    targets = re.findall(r"\]\(((?!https:)[^)#\s]*)#([^)]+)\)", prose(page))
    assert [
        f"{file}#{part}" for file, part in targets if part not in headings(page.parent / file if file else page)
    ] == []


def headings(page):
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}

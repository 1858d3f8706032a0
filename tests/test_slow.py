"""The lists of slow and of long cases name tests that there are, each once, in order."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("name", ["slow.txt", "long.txt"])
def test_every_line_names_a_test(name):
    listed = (ROOT / "tests" / name).read_text(encoding="utf-8").splitlines()
    assert sorted(set(listed)) == listed
    for line in listed:
        file, name = re.fullmatch(r"(tests/[\w/]+\.py)::(\w+)(?:\[.*\])?", line).groups()
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), line

"""The list of slow cases names tests that there are, each once, in order."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LISTED = (ROOT / "tests" / "slow.txt").read_text(encoding="utf-8").splitlines()


def test_every_line_names_a_test():
    assert sorted(set(LISTED)) == LISTED
    for line in LISTED:
        file, name = re.fullmatch(r"(tests/[\w/]+\.py)::(\w+)(?:\[.*\])?", line).groups()
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), line

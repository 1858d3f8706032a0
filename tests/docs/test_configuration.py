"""docs/configuration.md holds what `spmdkit train --help-config` prints.

`python tests/docs/test_configuration.py` renews it.
"""

import re
from pathlib import Path

from spmdkit.configs import describe_config
from spmdkit.configs.presets import preset_names

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"
BEGIN, END = "```text\n", "```\n"


def renewed() -> str:
    """The page with the present reference in it."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return before + BEGIN + describe_config() + END + rest.partition(END)[2]


def test_the_reference_is_the_schemas_own():
    assert PAGE.read_text(encoding="utf-8") == renewed(), __doc__


def test_every_preset_is_listed():
    section = PAGE.read_text(encoding="utf-8").partition("## The presets\n")[2].partition("\n## ")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == preset_names()


if __name__ == "__main__":
    PAGE.write_text(renewed(), encoding="utf-8")

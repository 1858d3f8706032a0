"""docs/joining.md: the order of the sources, their variables, the messages."""

import re

import pytest
from spmdkit.launch.startup.variables import SOURCES, read_source
from support.pages import CODE, ROOT, code_of_the_package, prose, quoted_messages

PAGE = ROOT / "docs" / "joining.md"


def rows(heading: str) -> list[list[str]]:
    part = prose(PAGE).split(f"## {heading}")[1].split("\n## ")[0]
    return [row.split("|")[1:-1] for row in part.splitlines() if row.startswith("| `")]


def test_sources_are_listed_in_their_order():
    first = [CODE.findall(row[0])[0] for row in rows("Sources, in order") if len(row) == 4]
    assert first == list(SOURCES)


@pytest.mark.parametrize("row", [row for row in rows("Sources, in order") if len(row) == 4], ids=lambda row: row[0])
def test_variables_are_read(row):
    source = CODE.findall(row[0])[0]
    named = [name for cell in row[1:] for name in CODE.findall(cell)]
    values = {name: "n1:1" if "ADDRESS" in name else "n1" if "LIST" in name else "2" for name in named}
    count = "".join(CODE.findall(row[2]))
    values |= {count: "4"} if count else {}
    within = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0"} if source == "Slurm" else {}
    facts = read_source(source, {**values, **within})
    assert facts is not None
    assert set(named) <= set(facts.variables.values())
    assert facts.process_id == 2
    assert facts.num_processes == (4 if count else 0)


def test_messages_match_code():
    text = prose(PAGE)
    tables = [
        text.split(heading)[1].split("\n## ")[0] for heading in ("## Errors before the start", "## The rendezvous")
    ]
    quoted = [message for table in tables for message in quoted_messages(table, 2)]
    code = re.sub(r"\{[^{}]*\}", "", code_of_the_package())
    assert len(quoted) > 12
    assert [message for message in quoted if message not in code] == []

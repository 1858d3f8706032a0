"""report.json: a read returns what was written, without the devices; a corrupt file is None."""

import json
from dataclasses import replace

import pytest
from spmdkit.parallel.schedule.builders import make_schedule
from spmdkit.report.run_facts import NAME, read_facts, write_facts
from support.reports import COSTS, make_facts


def test_read_returns_what_was_written(tmp_path):
    end = {"finished": 7, "figures": {"bigram_loss": 2.5}, "measured": {"device": 99}, "sample": "text é"}
    costs = replace(COSTS, unexpected=("all-reduce over data: none predicted",), schedule=make_schedule("zbv", 2, 4))
    written = make_facts(**end, costs=costs)
    write_facts(tmp_path, make_facts())
    before = (tmp_path / NAME).open()
    write_facts(tmp_path, written)
    with before:
        assert '"finished":30' in before.read(), "replaced, not overwritten: a reader sees one or the other"
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
    found = read_facts(tmp_path)
    assert found is not None
    for name in ("model", "parameters", "data", *end):
        assert getattr(found, name) == getattr(written, name), name
    assert found.table.mesh == written.table.mesh
    assert found.table.to_json() == written.table.to_json()
    assert [row.layout for row in found.table.rows] == [row.layout for row in written.table.rows]
    assert found.costs == costs


@pytest.mark.parametrize("damage", [b"", b"[]", b"\xff", b'{"model": 1}'])
def test_corrupt_or_missing_file_is_none(tmp_path, damage):
    assert read_facts(tmp_path) is None
    (tmp_path / NAME).write_bytes(damage)
    assert read_facts(tmp_path) is None


@pytest.mark.parametrize(
    "damage",
    [
        {"parameters": "many"},
        {"figures": {"bigram_loss": "low"}},
        {"table": {"axes": {"data": 1}, "devices": ["cpu:0"], "rows": [{"path": "w"}]}},
        {"table": {"axes": {"data": 2}, "devices": ["cpu:0"], "rows": []}},
        {"costs": {"schedule": {"name": "mine", "csv": "F0,<script>"}}},
        {"costs": {"found": [1]}},
    ],
    ids=str,
)
def test_value_of_wrong_type_is_none(tmp_path, damage):
    write_facts(tmp_path, make_facts())
    plain = json.loads((tmp_path / NAME).read_text())
    costs = {**plain["costs"], **damage.get("costs", {})}
    (tmp_path / NAME).write_text(json.dumps({**plain, **damage, "costs": costs}))
    assert read_facts(tmp_path) is None

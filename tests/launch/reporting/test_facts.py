"""report.json: what is read is what was written, on devices that need not be there; damage is no error."""

import json
from dataclasses import replace

import pytest
from left_runs import COSTS, a_table, some_facts
from spmdkit.launch.drawing.schedule_svg import draw_svg
from spmdkit.launch.reporting.facts import NAME, facts_of, read_facts, write_facts
from spmdkit.parallel.schedule.builders import make_schedule


def test_what_is_read_is_what_was_written(tmp_path):
    end = {"finished": 7, "figures": {"bigram_loss": 2.5}, "measured": {"device": 99}, "sample": "text \ud800 é"}
    write_facts(tmp_path, replace(some_facts(), **end))
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
    found, table = read_facts(tmp_path), a_table()
    assert found is not None
    assert (found.model, found.parameters, found.data, found.finished) == ("mlp", 128, "digits", 7)
    assert (found.figures, found.measured) == ({"bigram_loss": 2.5}, {"device": 99})
    assert found.device_mesh == table.mesh
    assert found.table.to_json() == table.to_json()
    assert [row.layout for row in found.table.rows] == [row.layout for row in table.rows]
    assert found.step_costs == COSTS._replace(measured={"device": 99})


@pytest.mark.parametrize("unexpected", [(), ("all-reduce over data: none predicted",)])
def test_what_is_not_as_predicted_is_kept(tmp_path, unexpected):
    costs = COSTS._replace(unexpected=unexpected)
    write_facts(tmp_path, facts_of("mlp", 128, "digits", a_table(), costs))
    assert read_facts(tmp_path).step_costs == costs
    plain = json.loads((tmp_path / NAME).read_text())
    del plain["costs"]["unexpected"]  # as earlier versions wrote it
    (tmp_path / NAME).write_text(json.dumps(plain))
    assert read_facts(tmp_path).step_costs.unexpected is None


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"\xff", b'{"model": 1}'])
def test_damage_and_absence_are_none(tmp_path, damage):
    assert read_facts(tmp_path) is None
    (tmp_path / NAME).write_bytes(damage)
    assert read_facts(tmp_path) is None


def test_a_layout_of_another_form_is_none(tmp_path):
    write_facts(tmp_path, some_facts())
    plain = json.loads((tmp_path / NAME).read_text())
    plain["layouts"][0]["layout"] = [["no such axis"]]
    (tmp_path / NAME).write_text(json.dumps(plain))
    assert read_facts(tmp_path) is None


def test_the_picture_of_a_schedule_is_drawn_anew(tmp_path):
    """What a file gives for one gets into no page, nor does what it gives for a name, but as text."""
    schedule = make_schedule("zbv", 2, 4)
    facts = facts_of("mlp", 128, "digits", a_table(), COSTS._replace(schedule_svg=draw_svg(schedule)), schedule)
    write_facts(tmp_path, facts)
    assert read_facts(tmp_path).step_costs.schedule_svg == draw_svg(schedule)
    plain = json.loads((tmp_path / NAME).read_text())
    plain["costs"]["schedule_svg"] = "<script>alert(1)</script>"
    plain["schedule"]["name"] = "<script>"
    (tmp_path / NAME).write_text(json.dumps(plain))
    drawn = read_facts(tmp_path).step_costs.schedule_svg
    assert "<script" not in drawn
    assert "&lt;script&gt;: 2 stages" in drawn
    del plain["schedule"]  # as earlier versions wrote it
    (tmp_path / NAME).write_text(json.dumps(plain))
    assert read_facts(tmp_path).step_costs.schedule_svg == ""

"""A value of report.json that is of another form makes it damaged."""

import json

import pytest
from left_runs import some_facts
from spmdkit.launch.reporting.facts import NAME, read_facts, write_facts


@pytest.mark.parametrize(
    "damage",
    [
        {"model": 5},
        {"parameters": "many"},
        {"finished": "x"},
        {"figures": [1]},
        {"figures": {"bigram_loss": "low"}},
        {"measured": {"a": "b"}},
        {"sample": 3},
        {"schedule": {"name": "mine", "csv": "F0,<script>"}},
        {"schedule": {"csv": "F0,B0,W0"}},
        *(
            {"costs": damage}
            for damage in ({"held": [1]}, {"held": {"a": "b"}}, {"notes": [1]}, {"unexpected": [1]}, {"found": [1]})
        ),
        {"costs": {"schedule_text": 1}},
    ],
    ids=str,
)
def test_a_value_of_another_form_is_none(tmp_path, damage):
    write_facts(tmp_path, some_facts())
    plain = json.loads((tmp_path / NAME).read_text())
    costs = {**plain["costs"], **damage.get("costs", {})}
    (tmp_path / NAME).write_text(json.dumps({**plain, **damage, "costs": costs}))
    assert read_facts(tmp_path) is None

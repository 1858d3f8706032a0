"""The table of a soak; `python -m spmdkit.testing.soak` itself takes minutes and is run by hand (docs/failures.md)."""

import json

from spmdkit.testing.faults import Fault
from spmdkit.testing.journal import Journal
from spmdkit.testing.plans import Planned
from spmdkit.testing.recovery import recoveries
from spmdkit.testing.soak import as_markdown, summary

PLAN = [
    Planned("killed in a step", [Fault(kind="kill", rank=1, step=7)]),
    Planned("stands still for a second", [Fault(kind="pause", rank=0, step=9)]),
    Planned("checkpoint with cut files", [Fault(kind="damage", step=11), Fault(kind="kill", step=11)]),
]
EVENTS = [
    {"event": "attempt", "time": 0},
    {"event": "training", "time": 5, "rank": 0, "step": 1},
    {"event": "fault", "time": 10, "index": 0, "kind": "kill", "rank": 1, "step": 7, "phase": "step"},
    {"event": "ended", "time": 11.5, "cause": [1, "killed by SIGKILL", 75, 1], "code": 75, "exits": []},
    {"event": "attempt", "time": 12},
    {"event": "training", "time": 16, "rank": 0, "step": 5},
    {"event": "fault", "time": 18, "index": 1, "kind": "pause", "rank": 0, "step": 9, "phase": "step"},
    {"event": "fault", "time": 20, "index": 2, "kind": "damage", "rank": 0, "step": 11, "phase": "step"},
    {"event": "fault", "time": 20, "index": 3, "kind": "kill", "rank": 0, "step": 11, "phase": "step"},
    {"event": "ended", "time": 22, "cause": [0, "killed by SIGKILL", 75, 0], "code": 75, "exits": []},
    {"event": "training", "time": 26, "rank": 0, "step": 5},
    {"event": "ended", "time": 40, "cause": None, "code": 0, "exits": []},
]


def test_the_table(tmp_path):
    path = tmp_path / "journal.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in EVENTS))
    found = recoveries(Journal(path))
    assert as_markdown(PLAN, found)[2:] == [
        "| 1 | killed in a step | rank 1, step 7 | 1.5 s | 6.0 s | 2 | rank 1 killed by SIGKILL | 75 |",
        "| 2 | stands still for a second | rank 0, step 9 | - | - | - | went on | - |",
        "| 3 | checkpoint with cut files | rank 0, step 11 | 2.0 s | 6.0 s | 6 | rank 0 killed by SIGKILL | 75 |",
    ]
    assert summary(PLAN, found, 60).startswith("3 faults of 3 kinds in 1.0 minutes; detected and all ended after 2.0 s")

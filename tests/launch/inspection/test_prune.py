import os
import re

import pytest
from small_checkpoints import damage
from spmdkit.launch.inspection.finding import find
from spmdkit.launch.inspection.prune import carry_out, plan
from spmdkit.launch.run.directory.ownership import DirectoryInUse, Ownership
from spmdkit.mesh.errors import UserError
from spmdkit.training.checkpointing.errors import CheckpointError


def left(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("rule", "removed"),
    [
        ({"keep": 1}, ["10", "20"]),
        ({"keep": 2}, ["10"]),
        ({"keep": 5}, []),
        ({"every": 20}, ["10"]),  # the newest stays, whatever its number
        ({"every": 7}, ["10", "20"]),
        ({"keep": 1, "every": 10}, []),
        ({"keep": 1, "every": 20}, ["10"]),
        ({"leftovers": True}, []),
    ],
)
def test_what_no_rule_keeps_goes(run, rule, removed):
    before = left(run)
    planned = plan(find(str(run)), **rule)
    assert list(planned.removed) == removed
    assert left(run) == before, "to plan changes nothing"
    if removed:
        assert f"{len(removed)} to remove, " in str(planned)
        assert "; step 30 is the newest that is whole" in str(planned)
    else:
        assert f"nothing to remove; kept: {', '.join(map(str, planned.kept))}" in str(planned)
    assert carry_out(planned, print) == sum(planned.removed.values())
    assert left(run) == [name for name in before if name not in removed]
    assert not (run / "owner.json").exists()


def test_the_newest_that_is_whole_stays(run):
    damage(run / "checkpoints" / "30")
    planned = plan(find(str(run)), keep=1)
    assert (planned.newest, planned.kept, list(planned.removed)) == (20, (20, 30), ["10"])
    damage(run / "checkpoints" / "20")
    damage(run / "checkpoints" / "10")
    with pytest.raises(CheckpointError, match=r"No checkpoint in .* is whole; none is removed"):
        plan(find(str(run)), keep=1)


def test_leftovers_go_where_that_is_said(run):
    checkpoints = run / "checkpoints"
    for name in ("damaged-5", "40.orbax-checkpoint-tmp", "removed-7"):
        (checkpoints / name).mkdir()
        (checkpoints / name / "file").write_bytes(bytes(100))
    assert list(plan(find(str(run)), keep=3).removed) == []
    planned = plan(find(str(run)), leftovers=True)
    assert planned.removed == {"damaged-5": 100, "40.orbax-checkpoint-tmp": 100, "removed-7": 100}
    carry_out(planned, print)
    assert left(run) == ["10", "20", "30"]


def test_a_run_in_use_is_refused(run, monkeypatch):
    planned = plan(find(str(run)), keep=1)
    with Ownership(run) as ownership:
        ownership.take()
        monkeypatch.setattr(os, "getpid", lambda: 1)  # as another process sees it
        with pytest.raises(DirectoryInUse, match="is in use by another job"):
            plan(find(str(run)), keep=1)
        with pytest.raises(DirectoryInUse, match="is in use by another job"):
            carry_out(planned, print)
        monkeypatch.undo()
    assert left(run) == ["10", "20", "30"]


def test_what_changed_meanwhile_is_not_touched(run):
    planned = plan(find(str(run)), keep=1)
    (run / "checkpoints" / "40").mkdir()
    with pytest.raises(CheckpointError, match="has changed meanwhile; nothing was removed"):
        carry_out(planned, print)
    assert left(run) == ["10", "20", "30", "40"]


@pytest.mark.parametrize(
    ("place", "rule", "message"),
    [
        ("", {}, "prune needs a rule: --keep N, --every K or --leftovers"),
        ("", {"keep": 0}, "--keep 0 must be at least 1"),
        ("", {"every": -2}, "--every -2 must be at least 1"),
        ("checkpoints/20", {"keep": 1}, "give the folder of the run, "),
    ],
)
def test_rules_that_are_none(original, place, rule, message):
    with pytest.raises(UserError, match=re.escape(message)):
        plan(find(str(original / place)), **rule)

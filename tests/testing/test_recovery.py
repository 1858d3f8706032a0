from spmdkit.testing.journal import Journal
from spmdkit.testing.recovery import recoveries


def test_an_attempt_that_a_fault_did_not_end(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    journal.note("attempt")
    journal.note("fault", index=0, kind="flip", rank=0, step=3, phase="step")
    journal.note("ended", exits=[[0, 0, False]], cause=None, code=0)
    (found,) = recoveries(journal)
    assert (found.detected, found.recovered, found.lost, str(found)) == (None, None, None, "flip: went on")


def test_a_fault_after_its_step_loses_one_more(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    for phase in ("step", "save"):
        journal.note("fault", index=0, kind="kill", rank=0, step=8, phase=phase)
        journal.note("ended", exits=[[0, -9, False]], cause=[0, "killed by SIGKILL", 75, 0], code=75)
        journal.note("training", rank=0, step=5)
    before, after = recoveries(journal)
    assert (before.lost, after.lost) == (3, 4)
    assert before.detected is not None
    assert before.recovered is not None
    assert before.detected <= before.recovered
    assert "steps lost, rank 0 killed by SIGKILL, code 75" in str(before)


def test_an_attempt_that_was_cut_off_says_nothing(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    journal.note("fault", index=2, kind="hang", rank=0, step=8, phase="step")
    journal.note("attempt")
    journal.note("ended", exits=[], cause=[0, "x", 75, 0], code=75)
    assert recoveries(journal)[0].detected is None
    assert recoveries(Journal(None)) == []

import pytest

from spmdkit.testing.actions import InjectedFault
from spmdkit.testing.faults import Fault, Moment
from spmdkit.testing.injector import Injector
from spmdkit.testing.journal import Journal


def injected(injector: Injector, **moment) -> bool:
    try:
        injector.at(Moment(**moment))
    except InjectedFault:
        return True
    return False


def test_a_fault_comes_at_its_moment_and_once(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    faults = [Fault(kind="raise", rank=1, step=3, phase="data")]
    injector = Injector(faults, 1, journal)
    assert not injected(injector, phase="data", step=2)
    assert not injected(injector, phase="step", step=3)
    assert not injected(Injector(faults, 0, journal), phase="data", step=3)
    assert injected(injector, phase="data", step=3)
    assert not injected(injector, phase="data", step=3)
    (event,) = journal.events("fault")
    assert (event["index"], event["kind"], event["rank"], event["step"], event["phase"]) == (0, "raise", 1, 3, "data")
    assert not injected(Injector(faults, 1, journal), phase="data", step=3), "nor in the next attempt"


def test_every_rank_and_several_times(tmp_path):
    faults = [Fault(kind="raise", rank=None, times=2)]
    journal = Journal(tmp_path / "journal.jsonl")
    for rank in (0, 1):
        injector = Injector(faults, rank, journal)
        assert [injected(injector, phase="step", step=number) for number in range(1, 5)] == [True, True, False, False]


def test_a_slow_rank_stays_slow(monkeypatch, tmp_path):
    slept = []
    monkeypatch.setattr("time.sleep", slept.append)
    injector = Injector([Fault(kind="slow", step=3, seconds=0.5)], 0, Journal(tmp_path / "journal.jsonl"))
    for number in range(1, 7):
        injector.at(Moment(phase="step", step=number))
    assert slept == [0.5] * 4


def test_an_error_of_the_system():
    with pytest.raises(OSError, match="No space left on device"):
        Injector([Fault(kind="raise", error="ENOSPC")], 0, Journal(None)).at(Moment(phase="step", step=1))

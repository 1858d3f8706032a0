"""What goes wrong with the data, the numbers and the memory of one rank (rows 16, 17, 20 and 21)."""

import pytest
from matrix import DEADLINE, UnderFaults, assert_same

from spmdkit.testing import Fault

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess, pytest.mark.faults]


@pytest.mark.parametrize(("error", "code", "says"), [("EIO", 75, "Input/output error"), ("", 1, "InjectedFault")])
def test_a_reader_that_raises(error, code, says, undisturbed, tmp_path):
    run = UnderFaults(tmp_path, [Fault(kind="raise", rank=1, phase="read", step=9, error=error)])
    ended = run.launch()
    assert ended.code == code, ended.stderr
    assert says in ended.stderr.rpartition("rank 1 failed first")[0]
    assert run.launch().code == 0
    assert_same(run, undisturbed(2))


def test_a_slow_reader_changes_nothing(undisturbed, tmp_path):
    run = UnderFaults(tmp_path, [Fault(kind="slow", rank=1, phase="read", step=5, seconds=0.3)])
    assert run.launch().code == 0
    assert_same(run, undisturbed(2))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_value_that_is_not_a_number(rank, undisturbed, tmp_path):
    run = UnderFaults(tmp_path, [Fault(kind="nan", rank=rank, phase="batch", step=7)])
    ended = run.launch(restarts=3)
    assert ended.code == 3, ended.stderr
    assert "error: Step 7: the loss is nan" in ended.stderr
    assert run.launch().code == 0
    assert_same(run, undisturbed(2))


def test_a_machine_without_memory(undisturbed, tmp_path):
    run = UnderFaults(tmp_path, [Fault(kind="raise", rank=1, step=7, error="ENOMEM")])
    ended = run.launch(restarts=1)
    assert ended.code == 0, ended.stderr
    assert run.causes() == [(1, "exit code 75", 75)]
    assert "not enough memory" in ended.stderr or "Cannot allocate memory" in ended.stderr
    assert_same(run, undisturbed(2))


def test_a_crash_loop_ends(tmp_path):
    """It dies at the same step for ever, before there is a checkpoint."""
    run = UnderFaults(tmp_path, [Fault(kind="kill", rank=1, step=3, times=99)], timeouts={"step": DEADLINE})
    ended = run.launch(restarts=2)
    assert ended.code == 75
    assert len(run.causes()) == 3
    assert "not started again: 2 restarts made no newer checkpoint" in ended.stderr

"""What goes wrong with the data, the numbers and the memory of one rank (rows 16, 17 and 20)."""

import re

import pytest
from support.faults import Fault
from support.matrix import UnderFaults, assert_same

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess, pytest.mark.faults, pytest.mark.timeout(900)]


def test_reports_bad_reader_nan_and_lack_of_memory(undisturbed, tmp_path):
    """An error of the machine (75) restarts; any other error (1) and a value that is not a number (3) do not."""
    faults = [
        Fault(kind="raise", rank=1, phase="read", step=2),
        Fault(kind="raise", rank=1, phase="read", step=2, error="EIO"),
        Fault(kind="raise", rank=1, step=6, error="ENOMEM"),
        Fault(kind="nan", rank=0, phase="batch", step=11),
    ]
    run = UnderFaults(tmp_path, faults)
    endings = (1, "InjectedFault"), (3, "error: Step 11: the loss is nan"), (0, "")
    _, restarted, _ = run.launch_until_done(*endings, restarts=3)
    assert run.causes()[:-1] == [(1, "exit code 1", 1), (1, "exit code 75", 75), (1, "exit code 75", 75)]
    for said in (r"Input/output error[\s\S]*rank 1 failed first", "not enough memory|Cannot allocate memory"):
        assert re.search(said, restarted.stderr), restarted.stderr
    assert_same(run, undisturbed(2))

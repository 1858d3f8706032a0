"""The ledger of a run that is killed: every second of it has a name, and the steps computed again are told."""

import time

import pytest
from spmdkit.runtime.goodput import read_goodput
from support.faults import Fault
from support.matrix import UnderFaults

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess, pytest.mark.faults, pytest.mark.timeout(1200)]


def test_accounts_for_time_of_killed_run(tmp_path):
    """Rank 1 dies two steps after a checkpoint; a batch takes a quarter of a second."""
    late = Fault(kind="slow", phase="read", rank=None, seconds=0.25)
    data = {"source": "synthetic", "prefetch": 1}
    run = UnderFaults(tmp_path, [Fault(kind="kill", rank=1, step=11), late], data=data)
    before = time.time()
    ended = run.launch(restarts=2)
    took = time.time() - before
    assert ended.code == 0, ended.stderr
    found = read_goodput(tmp_path / "run" / "goodput.jsonl")
    assert found.starts == 2
    assert 0 <= found.lost_steps <= 6
    assert {"step", "data", "save", "compile", "start", "restart"} <= found.seconds.keys()
    assert took / 2 < found.total < took, "but for the launcher itself, and the end with its report"
    assert found.seconds["data"] > 1, "batches are late"
    assert str(found) in ended.stdout
    assert f"goodput {100 * found.share:.1f} %" in (tmp_path / "run" / "report.html").read_text()

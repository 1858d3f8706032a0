"""A run in two real processes: watched, disturbed, and gone in the end."""

import os
import signal
import time
from pathlib import Path

import pytest
from runs import environment, write_config
from spmdkit.mesh.errors import UserError

from spmdkit.testing import Fault, cluster

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess, pytest.mark.faults]
LONG = {"train": {"steps": 100_000, "global_batch": 16}, "checkpoint": {"every": 0}}
SHORT = {"train": {"steps": 8, "global_batch": 16}, "checkpoint": {"every": 2, "keep": 2}}
TWO = {"strategy": {"fsdp": {"size": 2, "floor_bytes": 256}, "data": 2}, "run": {"log_every": 1}}


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_it_is_watched_and_cleaned_up(tmp_path):
    config = write_config(tmp_path, **TWO, **LONG)
    with cluster(config, processes=2, devices=2, environment=environment()) as run:
        run.wait_for_step(3)
        pids = run.pids
        assert sorted(pids) == [0, 1]
        assert all(map(alive, pids.values()))
        assert run.metrics[0]["step"] == 1
        assert "process" in run.log(1)
        run.signal(1, signal.SIGSTOP)
    assert not any(map(alive, pids.values())), "also one that is stopped"


def test_how_it_ended_and_what_was_injected(tmp_path):
    config = write_config(tmp_path, **TWO, **SHORT)
    fault = Fault(kind="kill", rank=1, step=5)
    journal = tmp_path / "journal.jsonl"
    with cluster(config, processes=2, devices=2, faults=[fault], environment=environment(), journal=journal) as run:
        ended = run.wait()
    assert (ended.code, ended.exits[1]) == (75, -9), ended.stderr
    assert run.checkpoints in ([2], [2, 4])
    (event,) = run.journal.events("fault")
    assert (event["rank"], event["step"], event["kind"]) == (1, 5, "kill")
    assert "rank 1 failed first: killed by SIGKILL" in ended.stderr


def test_a_wait_that_is_too_long_says_what_was_printed(tmp_path):
    config = write_config(tmp_path, **TWO, **LONG)
    with cluster(config, processes=2, devices=2, environment=environment()) as run:
        run.wait_for_step(1)
        begin = time.monotonic()
        with pytest.raises(TimeoutError, match="did not end within 1 s"):
            run.wait(1)
        assert time.monotonic() - begin < 20
        with pytest.raises(TimeoutError, match="the run has ended"):
            run.wait_for_step(10**6)
    assert not any(alive(pid) for pid in run.pids.values())


def test_a_config_that_cannot_be_used(tmp_path):
    with (
        pytest.raises(UserError, match="global_batch"),
        cluster(write_config(tmp_path, **TWO), processes=2, devices=2, overrides=["train.global_batch=0"]),
    ):
        raise AssertionError


def test_the_product_has_no_hook():
    """The variable means nothing to `spmdkit` itself."""
    root = Path(__file__).parents[2]
    files = [
        path for room in ("launch", "training", "mesh", "data", "parallel") for path in (root / room).rglob("*.py")
    ]
    assert files
    assert not [path for path in files if "SPMDKIT_FAULT" in path.read_text() or "spmdkit.testing" in path.read_text()]
    assert os.environ.get("SPMDKIT_FAULT") is None

"""A process that hangs is noticed within the deadline and a few seconds, named with its phase, and the run ends."""

import time

import pytest
from support.processes import start, wait
from support.runs import losses, metrics, source_module, trained, write_config

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess, pytest.mark.faults]
STEPS, DEADLINE = 40, 3

HANGING = source_module(
    """
    import ctypes, os, time
    from pathlib import Path

    def hang():
        if os.environ["HOW"] == "lock":
            ctypes.PyDLL(None).sleep(600)  # holds Python's lock
        time.sleep(600)
    """,
    take="""
    saved = Path(__file__).with_name("run").joinpath("checkpoints", "5").exists()
    if saved and "HOW" in os.environ and os.environ["SPMDKIT_PROCESS_ID"] == "1":
        hang()
    """,
)


def hanging_run(folder):
    (folder / "hanging.py").write_text(HANGING)
    return write_config(
        folder,
        data={"source": "hanging:rows", "threads": 1},
        train={"steps": STEPS, "global_batch": 16},
        checkpoint={"every": 5, "keep": 2},
        eval={"every": 0, "batches": 2},
        timeouts={"step": DEADLINE},
    )


@pytest.mark.parametrize("how", ["sleep", "lock"])
def test_names_hanging_rank(how, tmp_path):
    config = hanging_run(tmp_path)
    processes = start(config, [[], []], variables={"HOW": how})
    saved, deadline = tmp_path / "run" / "checkpoints" / "5", time.monotonic() + 120
    while not saved.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    begin = time.monotonic()
    code = processes[0].wait(60)
    assert time.monotonic() - begin < DEADLINE + 5 + 10, "ten seconds for a machine with much else to do"
    processes[1].kill()
    first, second = wait(processes)
    assert code == 75, first.stderr
    expected = (
        "rank 1 at step " if how == "sleep" else "no longer answers: stopped, dead, or Python's lock is held there"
    )
    said = first.stderr + second.stderr  # of ranks that notice in the same second, the first to end says it
    assert expected in said, said
    assert "Rank 0 waits at step" in said
    assert "--- stacks of rank 0" in first.stderr
    if how == "sleep":
        assert "--- stacks of rank 1" in second.stderr, second.stderr
        assert 'hanging.py", line' in second.stderr, "the stacks of the rank that hangs show where"
    if how != "sleep":
        return  # what comes after is the same
    ended = trained("launch", config, "--on", "local:2x4")
    assert "Resuming" in ended.stdout
    assert metrics(tmp_path / "run")[-1]["step"] == STEPS
    assert list(losses(tmp_path / "run")) == list(range(1, STEPS + 1))

"""Two processes go back together, are killed, and what one process makes of it is the run without the batches."""

import json
import time

import numpy as np
import pytest
from spmdkit.launch.cli import main
from support.processes import start, wait
from support.runs import losses, rows_of_files, write_config

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]
STEPS, BATCH, BAD = 40, 16, (5, 30)


def write_run(folder, *, deleted):
    """A run over rows of which BAD batches hold a NaN in the part of one process, or are not there."""
    folder.mkdir()
    random = np.random.default_rng(0)
    inputs = random.normal(size=(STEPS + 20, BATCH, 64)).astype(np.float32)
    targets = random.integers(0, 10, (STEPS + 20, BATCH)).astype(np.int32)
    inputs[BAD[0], 1, 5] = inputs[BAD[1], 15, 5] = np.nan
    gone = BAD if deleted else ()
    np.save(folder / "inputs.npy", np.delete(inputs, gone, axis=0).reshape(-1, 64))
    np.save(folder / "targets.npy", np.delete(targets, gone, axis=0).reshape(-1))
    (folder / f"rows_{folder.name}.py").write_text(rows_of_files(pause=0.005))  # so that a kill comes before the end
    return write_config(
        folder,
        run={"simulate": 8, "log_every": 1},
        data={"source": f"rows_{folder.name}:make", "shuffle": False},
        train={"steps": STEPS, "global_batch": BATCH, "not_finite": "roll_back"},
        eval={"every": 20, "batches": 1},
        checkpoint={"every": 12},
        callbacks=[{"name": "csv"}, {"name": "best_checkpoint"}],
    )


@pytest.mark.long
def test_two_processes_roll_back_together(tmp_path):
    reference = write_run(tmp_path / "without", deleted=True)
    assert main(["train", str(reference)]) == 0
    config = write_run(tmp_path / "rows", deleted=False)
    processes = start(config, [[], []])
    run = tmp_path / "rows" / "run"
    while not ((run / "metrics.jsonl").exists() and '"rollbacks": 2' in (run / "metrics.jsonl").read_text()):
        assert all(process.poll() is None for process in processes), wait(processes, 10)
        time.sleep(0.02)
    for process in processes:
        process.kill()
    wait(processes, 30)
    told = [(each["step"], each["batch"]) for each in json.loads((run / "rollbacks.json").read_text())["rollbacks"]]
    assert told == [(6, 5), (30, 30)]
    assert main(["train", str(config)]) == 0  # one process adds up in another order than two
    assert losses(run) == pytest.approx(losses(tmp_path / "without" / "run"), rel=1e-4)
    assert [*losses(run)] == list(range(1, STEPS + 1))
    rows = (run / "metrics.csv").read_text().splitlines()
    assert len(rows) == STEPS + 1, "each step once, there too"

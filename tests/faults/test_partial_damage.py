"""A checkpoint that is damaged where one process of several reads it: all go back to the one before."""

import pytest
from runs import metrics, spmdkit, write_config

pytestmark = [pytest.mark.slow, pytest.mark.faults, pytest.mark.multiprocess]


@pytest.mark.parametrize("rank", [0, 1])
def test_all_go_back_where_one_has_to(rank, tmp_path):
    """Whoever finds no damage does not wait in a collective for who does."""
    model = {"name": "mlp", "classes": 10, "widths": [256]}  # its shards are too large to stand among the descriptions
    strategy = {"fsdp": {"size": 8, "floor_bytes": 64}}
    config = write_config(tmp_path, model=model, strategy=strategy, checkpoint={"every": 4, "keep": 3})
    launch = ["launch", config, "--on", "local:2x4"]
    first = spmdkit(*launch, "train.steps=8")
    assert first.returncode == 0, first.stderr
    own = tmp_path / "run" / "checkpoints" / "8" / "state" / f"ocdbt.process_{rank}"
    files = [path for path in own.rglob("d/*") if path.is_file()]
    assert files
    for path in files:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    ended = spmdkit(*launch, timeout=150)  # a barrier would hold it up for 20 minutes
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "checkpoints/8 is damaged: " in ended.stdout
    assert f"Resuming {tmp_path / 'run'} at step 4 of 12." in ended.stdout
    assert (tmp_path / "run" / "checkpoints" / "damaged-8").is_dir()
    assert [record["step"] for record in metrics(tmp_path / "run")] == list(range(1, 13))

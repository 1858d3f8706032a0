"""A checkpoint that is damaged where one process of several reads it: all go back to the one before."""

import pytest
from support.runs import metrics, spmdkit, write_config

pytestmark = [pytest.mark.slow, pytest.mark.faults, pytest.mark.multiprocess]


def test_all_ranks_fall_back_if_one_must(tmp_path):
    """Whoever finds no damage does not wait in a collective for who does."""
    model = {"name": "mlp", "classes": 10, "widths": [256]}  # its shards are too large to stand among the descriptions
    strategy = {"fsdp": {"size": 8, "floor_bytes": 64}}
    config = write_config(tmp_path, model=model, strategy=strategy, checkpoint={"every": 4, "keep": 3})
    launch = ["launch", config, "--on", "local:2x4"]
    first = spmdkit(*launch, "train.steps=8")
    assert first.returncode == 0, first.stderr
    checkpoints = tmp_path / "run" / "checkpoints"
    for rank, step in enumerate((8, 12)):
        files = [path for path in (checkpoints / f"{step}/state/ocdbt.process_{rank}").rglob("d/*") if path.is_file()]
        assert files
        for path in files:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        ended = spmdkit(*launch, f"train.steps={step + 4}", timeout=150)  # a barrier would wait for 20 minutes
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert f"checkpoints/{step} is damaged: " in ended.stdout
        assert f"Resuming {tmp_path / 'run'} at step {step - 4} of {step + 4}." in ended.stdout
        assert (checkpoints / f"damaged-{step}").is_dir()
        assert [record["step"] for record in metrics(tmp_path / "run")] == list(range(1, step + 5))

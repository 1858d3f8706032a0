"""A checkpoint written on 8 devices (fsdp 8) goes on anywhere, exactly."""

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from spmdkit.checkpoints.manager import Checkpoints
from spmdkit.configs import load_config
from spmdkit.launch.startup.worker import job_environment
from spmdkit.launch.supervision.workers import Start, free_port, run_processes
from spmdkit.layouts.paths import leaves_with_paths
from spmdkit.mesh import DeviceMesh
from spmdkit.parallel import build_step, lay_out
from spmdkit.runtime.build_run import build
from support.runs import assert_same_arrays, environment, losses, state_arrays, trained, write_config

FSDP = {"fsdp": {"size": 8, "floor_bytes": 64}}
WRITTEN, STEPS = 4, 8

COPY = """
import sys
from pathlib import Path
from spmdkit.configs import load_config
from spmdkit.runtime.build_run import build, prepare_devices
from spmdkit.checkpoints.manager import Checkpoints
from spmdkit.launch.startup.worker import joins_processes
config = load_config(sys.argv[1], sys.argv[4:], num_processes=2, simulate=int(sys.argv[3]))
prepare_devices(config.run, config.precision, int(sys.argv[3]))
with joins_processes(config.timeouts):
    import jax
    assert jax.process_count() == 2
    abstract = build(config).step.abstract_state()
    with Checkpoints(Path(config.run.dir) / "checkpoints", keep=1, abstract_state=abstract) as checkpoints:
        state = checkpoints.restore()
    kernel = state.params["layers"][0]["kernel"]
    rows, columns = kernel.addressable_shards[0].data.shape
    print(f"shard {rows} {columns};")  # in one write: Gloo writes to the same log
    with Checkpoints(Path(sys.argv[2]), keep=1, abstract_state=abstract) as checkpoints:
        checkpoints.save(4, state)
"""


def options(**sections) -> dict:
    return {"strategy": FSDP, "optimizer": {"learning_rate": 0.01}, "eval": {"every": 0, "batches": 1}, **sections}


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """The config of a run whose first half was trained on 8 devices."""
    config = write_config(tmp_path_factory.mktemp("written"), **options())
    trained("train", config, f"train.steps={WRITTEN}")
    return config


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, written) -> dict[int, float]:
    """The losses of both halves on 8 devices."""
    config = write_config(tmp_path_factory.mktemp("uninterrupted"), **options())
    trained("train", config, f"train.steps={STEPS}")
    return losses(config.parent / "run")


@pytest.mark.long_cases("mesh0")
@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"data": 2}, {"data": 1}, {"fsdp": 2}])
def test_fewer_devices_restore_it_exactly(mesh, written):
    expected = state_arrays(written, WRITTEN)
    built = build(load_config(written))
    (size,) = mesh.values()
    layouts = lay_out(built.model, DeviceMesh.of([f"cpu:{index}" for index in range(size)], **mesh), rules=_rules(mesh))
    step = build_step(built.model, built.step.optimizer, layouts)
    folder = written.parent / "run" / "checkpoints"
    with Checkpoints(folder, keep=1, abstract_state=step.abstract_state()) as checkpoints:
        state = checkpoints.restore()
    assert len(state.params["layers"][0]["kernel"].sharding.device_set) == size
    assert_same_arrays({path: np.asarray(leaf) for path, leaf in leaves_with_paths(state)}, expected)


def _rules(mesh: dict[str, int]) -> dict | None:
    return {"layers/0/kernel": [None, "fsdp"]} if "fsdp" in mesh else None


@pytest.mark.long_cases("1-{data: 2}-64 32", "4-{fsdp: {size: 8, floor_bytes: 64}}-8 32")
@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("devices", "strategy", "shard"), [(4, "{fsdp: {size: 8, floor_bytes: 64}}", "8 32"), (1, "{data: 2}", "64 32")]
)
def test_two_processes_restore_it_exactly(devices, strategy, shard, written, tmp_path):
    address = f"127.0.0.1:{free_port()}"
    environments = [environment(**job_environment(address, 2, rank, devices)) for rank in range(2)]
    copy = tmp_path / "copy"
    command = [sys.executable, "-c", COPY, str(written), str(copy), str(devices), f"strategy={strategy}"]
    outcome = run_processes([Start(command, each) for each in environments], tmp_path)
    assert outcome.exit_code == 0, outcome.tails
    assert f"shard {shard};" in (tmp_path / "rank-1.log").read_text()
    assert_same_arrays(state_arrays(written, WRITTEN, copy), state_arrays(written, WRITTEN))


@pytest.mark.long_cases("1 device", "2 processes x 1 device", "2 processes x 4 devices")
@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "command",
    [
        ["train", "run.simulate=2", "strategy={data: 2}"],
        ["train", "run.simulate=1", "strategy={data: 1}"],
        ["launch", "--on", "local:2x4"],
        ["launch", "strategy={data: 2}", "--on", "local:2x1"],
    ],
    ids=["2 devices", "1 device", "2 processes x 4 devices", "2 processes x 1 device"],
)
def test_training_resumes(command, written, uninterrupted, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(written.parent / "run", folder)
    name, *rest = command
    printed = trained(name, written, f"run.dir={folder}", f"train.steps={STEPS}", *rest).stdout
    assert f"Resuming {folder} at step {WRITTEN} of {STEPS}." in printed
    assert losses(folder) == pytest.approx(uninterrupted, rel=1e-5)

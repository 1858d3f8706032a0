"""Processes that would train different things together end before the first step, and say what differs where."""

import time

import pytest
from support.processes import start, wait
from support.runs import write_config

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]


def test_rejects_different_config_on_one_rank(tmp_path):
    config = write_config(tmp_path)
    before = time.monotonic()
    for each in wait(start(config, [[], ["optimizer.learning_rate=0.02"]])):
        assert each.code == 2, each.stderr
        assert "The 2 processes of this run differ" in each.stderr
        assert "optimizer.learning_rate: 0.01 on rank 0, 0.02 on rank 1" in each.stderr
    assert time.monotonic() - before < 200, "no rank waits for timeouts.rendezvous"
    assert not (tmp_path / "run").exists(), "nothing was trained, nothing was written"


def test_rejects_different_jax_setting_on_one_rank(tmp_path):
    config = write_config(tmp_path)
    for each in wait(start(config, [[], []], own={1: {"XLA_FLAGS": "--xla_cpu_enable_fast_math=true"}})):
        assert each.code == 2, each.stderr
        assert "XLA_FLAGS --xla_cpu_enable_fast_math: not set on rank 0, true on rank 1" in each.stderr
    assert not (tmp_path / "run").exists(), "nothing was trained, nothing was written"


RANDOM_INIT = """
import jax, numpy as np
from spmdkit.parallel import Model

def init(key):
    return {"w": np.random.standard_normal((64, 10)).astype(np.float32)}

def loss(params, batch, key):
    wrong = jax.nn.one_hot(batch["targets"], 10) - batch["inputs"] @ params["w"]
    return ((wrong**2).mean(axis=1) * batch["weights"]).sum(), batch["weights"].sum()

def make():
    return Model(init=init, loss=loss)
"""


@pytest.mark.faults
def test_rejects_an_init_that_differs_between_processes_without_shared_arrays(tmp_path):
    """Every device holds its own part of the parameters, so no comparison of values can find it."""
    (tmp_path / "random_init.py").write_text(RANDOM_INIT)
    strategy = {"fsdp": {"size": 2, "floor_bytes": 1}}
    config = write_config(tmp_path, model={"name": "random_init:make", "check": "off"}, strategy=strategy)
    for each in wait(start(config, [["run.simulate=0"], ["run.simulate=0"]], devices=1)):
        assert each.code == 2, each.stderr
        assert "the program that creates the parameters (StableHLO): " in each.stderr
        assert "init is not deterministic" in each.stderr
    assert not (tmp_path / "run").exists(), "nothing was trained, nothing was written"


@pytest.mark.parametrize(
    ("rank", "own", "says"),
    [
        (1, {"SPMDKIT_SIMULATE": "2"}, "Rank 1 (process "),
        pytest.param(0, {"SPMDKIT_SIMULATE": "2"}, "Rank 0 (process ", marks=pytest.mark.faults),
        pytest.param(1, {"SPMDKIT_NUM_PROCESSES": "3"}, "Rank 1 (process ", marks=pytest.mark.faults),
    ],
)
def test_rejects_different_device_or_process_counts(rank, own, says, tmp_path):
    """That rank finds that its mesh does not fit before it has joined, and tells the other."""
    ended = wait(start(write_config(tmp_path), [[], []], own={rank: own}))
    assert [each.code for each in ended] == [2, 2], ended
    assert says in ended[1 - rank].stderr
    assert "cannot start, so no process of this run can: " in ended[1 - rank].stderr
    assert not (tmp_path / "run").exists(), "nothing was trained, nothing was written"


@pytest.mark.long
def test_rejects_different_data_on_one_rank(tmp_path):
    """The config is the same; what stands in the file is not: each process has a working directory of its own."""
    config = write_config(tmp_path, data={"source": "data:rows"}, run={"simulate": 8, "log_every": 1})
    (tmp_path / "data.py").write_text(
        "import os\nfrom spmdkit.data import open_splits\nfrom spmdkit.data.config import DataConfig\n"
        "def rows(config):\n"
        "    found = open_splits(DataConfig(source='synthetic'))\n"
        "    return found._replace(fingerprint=found.fingerprint + os.environ['SPMDKIT_PROCESS_ID'])\n"
    )
    ended = wait(start(config, [[], []]))
    assert ended[0].code == 2, ended[0].stderr
    assert "the data (fingerprint): " in ended[0].stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()

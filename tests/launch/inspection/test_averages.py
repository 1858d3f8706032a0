"""A checkpoint whose averages are read as its parameters, merged with adapters or not."""

import numpy as np
import pytest
from small_checkpoints import ABOUT, State, write
from spmdkit.launch.inspection.averages import AveragedCheckpoint, averages_in
from spmdkit.launch.inspection.export import export
from spmdkit.launch.inspection.stored import StoredCheckpoint
from spmdkit.mesh.errors import UserError
from spmdkit.training.checkpointing.errors import CheckpointError

RANDOM = np.random.default_rng(0)
SCALE = 0.5


def drawn(*shape):
    return RANDOM.normal(size=shape).astype(np.float32)


PARAMS = {"first": {"kernel": drawn(16, 8)}, "lora": {"first": {"kernel": {"a": drawn(16, 2), "b": drawn(2, 8)}}}}
AVERAGE = {"lora": {"first": {"kernel": {"a": drawn(16, 2), "b": drawn(2, 8)}}}}
"""The kernel was frozen: it has none."""


def saved(folder, opt_state):
    state = State(np.int32(4), PARAMS, opt_state, np.array([0, 1], np.uint32))
    run = write(folder / "run", state, about={**ABOUT, "lora_scale": SCALE})
    return StoredCheckpoint(run / "checkpoints" / "4")


def read(folder):
    return {path.relative_to(folder).with_suffix("").as_posix(): np.load(path) for path in folder.rglob("*.npy")}


def test_the_averages_stand_under_the_names_of_the_parameters(tmp_path):
    stored = saved(tmp_path, {"average": AVERAGE})
    averaged = AveragedCheckpoint(stored)
    a = averaged.read("params/lora/first/kernel/a")
    assert np.array_equal(a, AVERAGE["lora"]["first"]["kernel"]["a"])
    assert np.array_equal(averaged.read("params/first/kernel"), PARAMS["first"]["kernel"])
    assert averaged.names == stored.names
    assert averaged.step == 4


def test_adapters_are_merged_from_their_averages(tmp_path):
    stored = saved(tmp_path, {"average": AVERAGE})
    export(stored, tmp_path / "merged", ema=True)
    found, pair = read(tmp_path / "merged"), AVERAGE["lora"]["first"]["kernel"]
    assert sorted(found) == ["first/kernel"]
    expected = PARAMS["first"]["kernel"] + SCALE * (pair["a"] @ pair["b"])
    np.testing.assert_allclose(found["first/kernel"], expected, rtol=1e-6, atol=1e-6)
    with pytest.raises(UserError, match="--whole-state holds parameters and averages"):
        export(stored, tmp_path / "whole", whole_state=True, ema=True)


def test_a_checkpoint_without_averages(tmp_path):
    with pytest.raises(CheckpointError, match=r"holds no averages of its parameters.*optimizer\.ema"):
        averages_in(saved(tmp_path, {"mu": PARAMS}))

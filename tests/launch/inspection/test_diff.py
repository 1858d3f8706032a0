import json
from math import inf

import jax.numpy as jnp
import numpy as np
import pytest
from small_checkpoints import damage, host_state, write
from spmdkit.launch.inspection.diff import diff
from spmdkit.launch.inspection.stored import StoredCheckpoint
from spmdkit.training.checkpointing.errors import DamagedCheckpoint


def saved(folder, state):
    return StoredCheckpoint(write(folder, state) / "checkpoints" / str(int(state.step)))


@pytest.fixture
def first(original):
    return StoredCheckpoint(original / "checkpoints" / "20")


def test_a_copy_is_equal(first, run):
    found = diff(first, StoredCheckpoint(run / "checkpoints" / "20"))
    assert str(found) == "equal: 7 arrays, bit for bit"
    assert found.to_json() == {"equal": True, "compared": 7, "differences": []}


def test_changed_elements_are_counted_and_measured(first, tmp_path):
    state = host_state(20)
    kernel = state.params["blocks"]["kernel"].copy()
    kernel[1, 2, 3] *= 1.5
    kernel[2, 0, 0] = -kernel[2, 0, 0]
    found = diff(first, saved(tmp_path, state._replace(params={**state.params, "blocks": {"kernel": kernel}})))
    (difference,) = found.found
    assert (difference.path, difference.elements) == ("params/blocks/kernel", 2)
    was = host_state(20).params["blocks"]["kernel"].astype(np.float64)
    gaps = abs(was[1, 2, 3]) / 2, 2 * abs(was[2, 0, 0])
    assert difference.absolute == pytest.approx(max(gaps), rel=1e-6)
    assert difference.relative == pytest.approx(2.0)
    assert "params/blocks/kernel  2 of 384 elements, at most " in str(found)
    assert str(found).endswith("different: 1 array; 6 of 7 compared are equal")


def test_zeros_of_two_signs_and_numbers_that_are_none(first, tmp_path):
    state = host_state(20)
    kernels = [np.zeros((3, 16, 8), np.float32) for _ in range(2)]
    kernels[0][0, 0, 0], kernels[1][0, 0, 0] = 0.0, -0.0
    kernels[0][0, 0, 1], kernels[1][0, 0, 1] = np.nan, np.nan
    states = [state._replace(params={"kernel": kernel}) for kernel in kernels]
    one, two = (saved(tmp_path / name, each) for name, each in zip("ab", states, strict=True))
    (difference,) = diff(one, two).found
    assert (difference.elements, difference.absolute, difference.relative) == (1, 0.0, 0.0)
    kernels[1][0, 0, 2] = np.inf
    three = saved(tmp_path / "c", state._replace(params={"kernel": kernels[1]}))
    found = diff(one, three)
    assert found.found[0].absolute == found.found[0].relative == inf
    assert json.loads(json.dumps(found.to_json()))["differences"][0]["absolute"] == "inf"


def test_missing_extra_reshaped_and_of_another_dtype(first, tmp_path):
    state = host_state(20)
    params = {
        "blocks": {"kernel": np.zeros((3, 16, 4), np.float32)},
        "norm": np.zeros(16, np.float32),
        "new": jnp.ones(2),
    }
    found = diff(first, saved(tmp_path, state._replace(params=params, opt_state={})))
    told = {each.path: each.what for each in found.found}
    assert told["params/blocks/kernel"] == "float32[3, 16, 8] in the first, float32[3, 16, 4] in the second"
    assert told["params/norm"] == "bfloat16[16] in the first, float32[16] in the second"
    assert told["params/new"] == "only in the second: float32[2]"
    assert told["opt_state/count"] == "only in the first: int32[]"
    assert found.compared == 2


def test_of_two_steps_the_parameters_alone(original, first):
    other = StoredCheckpoint(original / "checkpoints" / "30")
    assert {each.path.split("/")[0] for each in diff(first, other).found} == {"step", "params", "opt_state", "key"}
    assert {each.path.split("/")[0] for each in diff(first, other, only_parameters=True).found} == {"params"}


@pytest.mark.parametrize("which", [0, 1])
def test_damage_is_told_and_is_no_difference(first, run, which):
    damage(run / "checkpoints" / "20")
    broken = StoredCheckpoint(run / "checkpoints" / "20")
    with pytest.raises(DamagedCheckpoint):
        diff(*((first, broken) if which else (broken, first)))

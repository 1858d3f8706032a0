"""A state's shapes and shardings, and seeds that keys can be made of."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from spmdkit.parallel import FSDPConfig
from spmdkit.parallel.pipeline import PipelineConfig
from spmdkit.parallel.sharding.stored_order import store_blocks, stored_order
from spmdkit.parallel.step.state import StepMetrics, place_params, reduce_model_state, with_means
from support import toy
from support.verification import BLOCK_MODEL


@pytest.fixture(scope="module")
def step():
    return toy.build({"fsdp": FSDPConfig(size=2, floor_bytes=256)}, optax.adamw(1e-3), BLOCK_MODEL)


def test_devices_agree_on_the_mean_of_numbers_and_the_maximum_of_counts():
    found, before = {"mean": jnp.array([1.0, 2.0]), "count": jnp.array([3, 5])}, {"mean": 0.0, "count": 0}
    agree = partial(reduce_model_state, state=jax.tree.map(jnp.asarray, before), axes=("data",), typed=False)
    state = jax.vmap(agree, axis_name="data")(found)
    assert {name: leaf.tolist() for name, leaf in state.items()} == {"mean": [1.5, 1.5], "count": [5, 5]}


def test_means_of_metrics_have_any_weight_and_are_0_without_one():
    sums = {"light": (1.0, 0.5), "none": (0.0, 0.0)}
    found = with_means(StepMetrics(1.0, 1.0, 1.0, sums))  # pyright: ignore[reportArgumentType]
    assert {name: float(mean) for name, mean in found.model.items()} == {"light": 2.0, "none": 0.0}


def test_an_abstract_state_is_that_of_the_first_one(step):
    promised = jax.tree.leaves(step.abstract_state())
    given = jax.tree.leaves(step.init(0, jax.tree.map(lambda leaf: jnp.ones(leaf.shape), step.abstract_state().params)))
    assert [(leaf.shape, leaf.dtype, leaf.sharding) for leaf in promised] == [
        (leaf.shape, leaf.dtype, leaf.sharding) for leaf in given
    ]


GIVEN = {
    "data": {"data": 4},
    "fsdp x data": {"fsdp": FSDPConfig(size=4, floor_bytes=0), "data": 2},
    "zero 1": {"data": {"size": 4, "zero": 1}},
    "local steps": {"data": {"size": 2, "local_steps": 2}},
    "uneven stages": {"pipe": PipelineConfig(size=2, microbatches=2), "fsdp": FSDPConfig(size=2, floor_bytes=0)},
}


def step_on(name):
    return toy.build(GIVEN[name], optax.adamw(1e-2))


@pytest.fixture(scope="module")
def drawn():
    """The model's parameters for seed 7, whole and on the host."""
    return jax.device_get(jax.jit(toy.init)(jax.random.key(7)))


@pytest.mark.slow_cases("fsdp x data", "local steps", "uneven stages")
@pytest.mark.parametrize("name", GIVEN)
def test_given_parameters_start_as_drawn_ones(name, drawn):
    step = step_on(name)
    given, own = step.init(7, drawn), step.init(7)
    assert jax.tree.map(lambda leaf: leaf.sharding, given) == jax.tree.map(lambda leaf: leaf.sharding, own)
    assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(np.asarray(a), np.asarray(b)), given, own))


def test_given_parameters_are_stored_in_the_order_of_the_stages(drawn):
    order = stored_order((step := step_on("uneven stages")).plan)
    placed = place_params(drawn, step.abstract_state().params, order)
    jax.tree.map(np.testing.assert_array_equal, placed, drawn | {"blocks": store_blocks(drawn["blocks"], order.stages)})


@pytest.mark.slow_cases("fsdp x data", "uneven stages")
@pytest.mark.parametrize("name", ["fsdp x data", "uneven stages"])
def test_accepts_parameters_that_are_laid_out_already(name, monkeypatch):
    """As a checkpoint restores them: blocks in the model's order, on the devices of the step, in any float."""
    step = step_on(name)
    own, order = step.init(7), stored_order(step.plan)
    restored = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), order.to_model(own.params))
    halves = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), restored)
    monkeypatch.setattr(jax, "make_array_from_callback", None)  # nothing passes through the host
    for given in (restored, halves):
        before = jax.device_get(given)
        state, _ = step(step.init(7, given), toy.batch(0))
        assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {np.dtype("float32")}
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(given), before)
    given = step.init(7, restored)
    assert jax.tree.map(lambda leaf: leaf.sharding, given) == jax.tree.map(lambda leaf: leaf.sharding, own)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(given), jax.device_get(own))


def test_training_leaves_the_given_arrays_alone(drawn):
    """The state is donated; what was given is not, be it NumPy's or JAX's."""
    step = step_on("data")
    on_device = jax.tree.map(jnp.asarray, drawn)
    before = jax.tree.map(np.copy, drawn)
    for given in (drawn, on_device):
        state, _ = step(step.init(0, given), toy.batch(0))
        assert jax.tree.all(jax.tree.map(lambda leaf, start: np.array_equal(np.asarray(leaf), start), given, before))
        assert not np.array_equal(np.asarray(state.params["embed"]["table"]), before["embed"]["table"])


def test_a_memory_map_is_read_part_by_part(tmp_path, drawn):
    """No shard is made from more than its own rows."""

    class Watched(np.ndarray):
        largest = 0

        def __getitem__(self, index):
            part = np.asarray(super().__getitem__(index))
            Watched.largest = max(Watched.largest, part.size)
            return part

    table = drawn["embed"]["table"]
    np.save(tmp_path / "table.npy", table)
    mapped = np.load(tmp_path / "table.npy", mmap_mode="r").view(Watched)
    state = step_on("fsdp x data").init(0, {**drawn, "embed": {"table": mapped}})
    assert Watched.largest == table.size // 4
    assert np.array_equal(np.asarray(state.params["embed"]["table"]), table)


def test_floats_are_cast_to_the_stored_dtype(drawn):
    halves = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), drawn)
    state = step_on("fsdp x data").init(0, halves)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {np.dtype("float32")}
    same = jax.tree.map(
        lambda leaf, half: np.array_equal(np.asarray(leaf), half.astype(np.float32)), state.params, halves
    )
    assert jax.tree.all(same)


def test_reports_all_problems(drawn):
    blocks = {**drawn["blocks"], "up": drawn["blocks"]["up"][:2], "scale": 1.0}
    wrong = {"embed": {"tabel": drawn["embed"]["table"]}, "blocks": blocks, "head": {"out": np.zeros((16, 32), int)}}
    with pytest.raises(ValueError, match="do not fit the model") as error:
        step_on("uneven stages").init(0, wrong)
    text = str(error.value)
    assert "embed/table is missing, expected float32[32, 16]" in text
    assert "embed/tabel is not a parameter of the model. Did you mean embed/table?" in text
    assert "blocks/up is float32[2, 16, 64], expected float32[3, 16, 64]" in text
    assert "blocks/scale is a float, expected float32[3, 16]" in text
    assert "head/out is int64[16, 32], expected float32[16, 32]" in text

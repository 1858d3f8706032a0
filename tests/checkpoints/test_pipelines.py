"""Checkpoints of pipelines, saved from Python: the blocks come back in their places on every mesh."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from spmdkit.checkpoints.damage import CheckpointError
from spmdkit.checkpoints.export import export
from spmdkit.checkpoints.manager import Checkpoints
from spmdkit.checkpoints.restore import StoredCheckpoint
from spmdkit.layouts.paths import leaves_with_paths, map_with_path
from spmdkit.mesh.errors import UserError
from spmdkit.training.callbacks.fit import fit
from spmdkit.training.optimizing.averaging import averaged
from spmdkit.training.trainer import Trainer
from support import toy

BLOCKS = 4
EMPTY = -1


def pipe(schedule, microbatches=2, **options):
    return {"pipe": {"size": 2, "schedule": schedule, "microbatches": microbatches, **options}}


SCHEDULES = {
    "interleaved": (pipe("interleaved_1f1b", virtual=2), (0, 2, 1, 3)),
    "zbv": (pipe("zbv"), (0, 3, 1, 2)),
    "uneven": (pipe("1f1b", layers=[3, 1]), (0, 1, 2, 3, EMPTY, EMPTY)),
    "uneven chunks": (
        pipe("interleaved_1f1b", virtual=2, layers=[2, 1, 0, 1]),
        (0, 1, EMPTY, EMPTY, 2, EMPTY, 3, EMPTY),
    ),
}
"""Name -> the strategy, and the block in each slot that its stages store."""
FACTORED = optax.adafactor(1e-2, min_dim_size_to_factor=16, momentum=0.9)
ADAM = optax.adamw(1e-2)
MOMENTUM = optax.sgd(1e-2, momentum=0.9)


def init(key):
    """Four blocks, each of which holds its own number."""
    numbers = jnp.arange(BLOCKS, dtype=jnp.float32)[:, None, None]
    blocks = {"up": jnp.broadcast_to(numbers, (BLOCKS, toy.WIDTH, 2 * toy.WIDTH))}
    table = jnp.ones((toy.VOCABULARY, toy.WIDTH))
    return {"embed": {"table": table}, "blocks": blocks, "head": {"out": table.T}}


def block(params, x, key):
    return x + jnp.tanh(x @ params["up"]) @ params["up"].T / 100


MODEL = replace(toy.BLOCK_MODEL, init=init, block=block, num_blocks=BLOCKS)


def step_on(strategy, optimizer=MOMENTUM):
    return toy.build(strategy, optimizer, MODEL)


def numbers(state):
    """The number of the block in each slot."""
    return np.asarray(state.params["blocks"]["up"])[:, 0, 0].tolist()


def filled(step):
    """A state in which no two numbers of an array are the same."""
    state = step.init(0)

    def fill(path, leaf):
        if path in ("step", "key") or not leaf.size:
            return leaf
        random = np.random.default_rng(len(path))
        values = random.permutation(leaf.size).reshape(leaf.shape).astype(leaf.dtype)
        return jax.device_put(values, leaf.sharding)

    return map_with_path(fill, state)


def save(folder, step, state):
    with Checkpoints(folder, keep=1, abstract_state=step.abstract_state()) as checkpoints:
        checkpoints.save(0, state)


def restore(folder, step):
    with Checkpoints(folder, keep=1, abstract_state=step.abstract_state()) as checkpoints:
        return checkpoints.restore()


def moved(folder, step, state, other):
    """The state as another step restores it from a checkpoint."""
    save(folder, step, state)
    return restore(folder, other)


def assert_same(state, expected):
    for (path, leaf), value in zip(leaves_with_paths(state), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(value), err_msg=path)


def rows_of_blocks(state):
    """Path -> the array with its blocks on dim 0, of every array that has blocks."""
    found = {}
    for path, leaf in leaves_with_paths(state):
        if "blocks" not in path.split("/") or leaf.ndim == 0:
            continue
        array = np.asarray(leaf)
        if path.startswith("extra/copies/") or (state.extra and path.startswith("opt_state/")):
            array = np.moveaxis(array, 1, 0) if array.ndim > 1 else array
        found[path] = array
    return found


def assert_blocks_in_slots(piped, natural, order):
    """Each slot of a state of stages holds the block that the schedule says, in every array."""
    slots, blocks = rows_of_blocks(piped), rows_of_blocks(natural)
    compared = [path for path, array in blocks.items() if len(array) == BLOCKS]
    assert {path.split("/")[0] for path in compared} >= {"params", "opt_state"}
    for path in compared:
        assert len(slots[path]) == len(order), path
        for slot, block in enumerate(order):
            if block != EMPTY:
                np.testing.assert_array_equal(slots[path][slot], blocks[path][block], err_msg=path)


@pytest.mark.slow_cases("interleaved", "uneven chunks")
@pytest.mark.parametrize("name", SCHEDULES)
def test_blocks_of_a_pipeline_keep_their_numbers_on_another_mesh(tmp_path, name):
    strategy, order = SCHEDULES[name]
    piped, natural = step_on(strategy), step_on({"data": 2})
    state = piped.init(0)
    there = moved(tmp_path / "there", piped, state, natural)
    assert numbers(there) == [0, 1, 2, 3]
    back = moved(tmp_path / "back", natural, there, piped)
    assert_same(back, state)
    stored = numbers(back)
    assert [stored[slot] for slot, block in enumerate(order) if block != EMPTY] == [
        block for block in order if block != EMPTY
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(
    ("optimizer", "local_steps"),
    [(FACTORED, 0), (optax.contrib.muon(1e-2), 0), (averaged(ADAM, 0.9), 0), (ADAM, 2), (FACTORED, 2)],
    ids=["adafactor", "muon", "averages", "local steps", "local steps of adafactor"],
)
def test_every_array_of_the_state_follows_its_blocks(tmp_path, name, optimizer, local_steps):
    strategy, order = SCHEDULES[name]
    data = {"data": {"size": 2, "local_steps": local_steps}}
    natural, piped = step_on(data, optimizer), step_on({**strategy, **data}, optimizer)
    state = filled(natural)
    there = moved(tmp_path / "there", natural, state, piped)
    assert_blocks_in_slots(there, state, order)
    assert_same(moved(tmp_path / "back", piped, there, natural), state)


@pytest.mark.slow
def test_one_schedule_restores_what_another_saved(tmp_path):
    steps = {name: step_on(strategy) for name, (strategy, _) in SCHEDULES.items()}
    interleaved = steps["interleaved"].init(0)
    zbv = moved(tmp_path / "1", steps["interleaved"], interleaved, steps["zbv"])
    assert numbers(zbv) == [0, 3, 1, 2]
    uneven = moved(tmp_path / "2", steps["zbv"], zbv, steps["uneven"])
    assert_same(moved(tmp_path / "3", steps["uneven"], uneven, steps["interleaved"]), interleaved)


@pytest.mark.slow
def test_restores_the_newest_in_the_order_of_the_stages(tmp_path):
    piped = step_on(SCHEDULES["zbv"][0])
    state = piped.init(0)
    with Checkpoints(tmp_path, keep=1, abstract_state=piped.abstract_state()) as checkpoints:
        checkpoints.save(0, state)
        checkpoints.wait()
        checkpoints.check_fits()
        assert_same(checkpoints.restore_newest(5).state, state)


@pytest.mark.slow
def test_saves_two_states_of_different_pipelines_together(tmp_path):
    """As for the two models of a GAN."""
    first, second, natural = (step_on(each) for each in (SCHEDULES["zbv"][0], SCHEDULES["interleaved"][0], {"data": 2}))
    states = {"generator": first.init(0), "critic": second.init(0)}
    abstract = {"generator": first.abstract_state(), "critic": second.abstract_state()}
    with Checkpoints(tmp_path, keep=1, abstract_state=abstract) as checkpoints:
        checkpoints.save(0, states)
        checkpoints.wait()
        assert_same(checkpoints.restore(), states)
    elsewhere = {name: natural.abstract_state() for name in states}
    with Checkpoints(tmp_path, keep=1, abstract_state=elsewhere) as checkpoints:
        restored = checkpoints.restore()
    for state in restored.values():
        assert numbers(state) == [0, 1, 2, 3]


def test_saves_a_part_of_a_state(tmp_path):
    piped, natural = step_on(SCHEDULES["zbv"][0]), step_on({"data": 2})

    def part(state):
        return state._replace(opt_state=())

    with Checkpoints(tmp_path, keep=1, abstract_state=part(piped.abstract_state())) as checkpoints:
        checkpoints.save(0, part(piped.init(0)))
    with Checkpoints(tmp_path, keep=1, abstract_state=part(natural.abstract_state())) as checkpoints:
        restored = checkpoints.restore()
    assert numbers(restored) == [0, 1, 2, 3]


def test_rejects_blocks_of_stages_outside_of_a_state(tmp_path):
    """A tree of parameters alone does not say in which order its blocks are."""
    piped, natural = step_on(SCHEDULES["zbv"][0]), step_on({"data": 2})
    words = r"params/blocks/up is split over the stages .* only a TrainState records this order.*_replace"
    with pytest.raises(UserError, match=words):
        Checkpoints(tmp_path, keep=1, abstract_state={"params": piped.abstract_state().params})
    with Checkpoints(tmp_path, keep=1, abstract_state={"params": natural.abstract_state().params}) as checkpoints:
        with pytest.raises(UserError, match=words):
            checkpoints.save(0, {"params": piped.init(0).params})
        assert checkpoints.steps() == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["interleaved", "uneven"])
def test_fit_and_the_trainer_save_in_the_order_of_the_model(tmp_path, name):
    """And export reads what they saved."""
    strategy = {**SCHEDULES[name][0], "data": 4}
    piped = step_on(strategy, optax.sgd(0.0))
    with Checkpoints(tmp_path / "fit", keep=1, abstract_state=piped.abstract_state()) as checkpoints:
        fit(piped, piped.init(0), [toy.batch(0)], checkpoints=checkpoints, folder=tmp_path, say=lambda line: None)
    trainer = Trainer(MODEL, optax.sgd(0.0), strategy, global_batch=toy.ROWS)
    with Checkpoints(tmp_path / "trainer", keep=1, abstract_state=trainer.step.abstract_state()) as checkpoints:
        trainer.fit(toy.batch(0), checkpoints=checkpoints, folder=tmp_path, say=lambda line: None)
        trained = trainer.state
        assert_same(checkpoints.restore(), trained)
    assert numbers(trainer) == [0, 1, 2, 3]
    for folder in (tmp_path / "fit", tmp_path / "trainer"):
        target = folder.with_name(f"{folder.name} exported")
        export(StoredCheckpoint(folder / "1"), target)
        assert np.load(target / "blocks/up.npy")[:, 0, 0].tolist() == [0, 1, 2, 3]


def test_a_step_rejects_the_state_of_another_pipeline():
    zbv, interleaved = step_on(SCHEDULES["zbv"][0]), step_on(SCHEDULES["interleaved"][0])
    with pytest.raises(UserError, match=r"order of another pipeline.*restore it with spmdkit\.Checkpoints"):
        interleaved(zbv.init(0), toy.batch(0))


# Checkpoints of earlier versions


def without_order(folder: Path):
    """Makes a checkpoint look like one of an earlier version, which recorded neither order nor mesh."""
    file = folder / "description.json"
    content = json.loads(file.read_text())
    for name in ("order", "mesh", "packing"):
        del content["description"][name]
    text = json.dumps(content["description"], sort_keys=True).encode()
    content["sha256"] = hashlib.sha256(text).hexdigest()
    file.write_text(json.dumps(content))


def test_reads_checkpoints_of_earlier_versions_whose_order_is_known(tmp_path):
    """Those of a mesh without stages, and those of a run of a config."""
    piped, natural = step_on(SCHEDULES["zbv"][0]), step_on({"data": 2})
    save(tmp_path / "natural", natural, natural.init(0))
    without_order(tmp_path / "natural/0")
    assert numbers(restore(tmp_path / "natural", piped)) == [0, 3, 1, 2]
    about = {"mesh": {"pipe": 2}}
    with Checkpoints(tmp_path / "run", keep=1, abstract_state=piped.abstract_state(), about=about) as checkpoints:
        checkpoints.save(0, piped.init(0))
    without_order(tmp_path / "run/0")
    assert numbers(restore(tmp_path / "run", natural)) == [0, 1, 2, 3]


def test_rejects_a_checkpoint_whose_order_is_unknown(tmp_path):
    """Earlier versions saved the stages' order from Python, and recorded nothing."""
    piped, natural = step_on(SCHEDULES["zbv"][0]), step_on({"data": 2})
    save(tmp_path, piped, piped.init(0))
    without_order(tmp_path / "0")
    words = "saved from Python on 2 pipeline stages, by a version"
    for step in (piped, natural):
        with pytest.raises(CheckpointError, match=words):
            restore(tmp_path, step)
    with pytest.raises(CheckpointError, match=words):
        export(StoredCheckpoint(tmp_path / "0"), tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


# States of which only the mesh has changed


@pytest.mark.parametrize("option", [{"local_steps": 2}, {"compress": "int8"}])
def test_names_the_mesh_if_only_the_mesh_has_changed(tmp_path, option):
    two, four = (step_on({"data": {"size": size, **option}}) for size in (2, 4))
    save(tmp_path, two, two.init(0))
    with pytest.raises(CheckpointError) as caught:
        restore(tmp_path, four)
    message = str(caught.value)
    assert "The mesh has changed from data 2, which wrote the checkpoint" in message
    assert "to data 4, and so has the state" in message
    assert "Restore the checkpoint on data 2, or start a new run from its parameters" in message
    assert "model" not in message


def test_errors_of_compression_do_not_return_to_stages_of_another_schedule(tmp_path):
    """Arrays of the same shapes hold errors of other blocks there."""
    data = {"data": {"size": 2, "compress": "int8"}}
    first, other = (step_on({**strategy, **data}) for strategy in (pipe("1f1b"), SCHEDULES["interleaved"][0]))
    shapes = [leaf.shape for leaf in jax.tree.leaves(first.abstract_state())]
    assert shapes == [leaf.shape for leaf in jax.tree.leaves(other.abstract_state())]
    state = filled(first)
    save(tmp_path, first, state)
    assert_same(restore(tmp_path, first), state)
    with pytest.raises(CheckpointError, match="each device keeps the rounding errors of its own part"):
        restore(tmp_path, other)

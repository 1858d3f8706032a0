"""A run built from its config: everything is abstract until it starts."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from spmdkit.configs import ConfigError, load_config
from spmdkit.configs.schema import RunConfig
from spmdkit.data import Splits, from_arrays, open_splits
from spmdkit.data.value_ranges import Limit, Limits
from spmdkit.mesh.errors import UserError
from spmdkit.parallel import BlockModel, Precision
from spmdkit.runtime import build_run
from spmdkit.runtime.build_run import build, choose_evenly, data_facts, model_limits, prepare_devices
from support.runs import write_config, write_language_config


def test_nothing_is_computed(tmp_path):
    before = len(jax.live_arrays())
    built = build(load_config(write_config(tmp_path)))
    assert len(jax.live_arrays()) == before
    vectors = dict.fromkeys(("targets", "weights", "example"), (16,))
    assert {name: leaf.shape for name, leaf in built.batch.items()} == {"inputs": (16, 64), **vectors}
    assert built.layouts.mesh.axis_size("fsdp") == 4
    state = built.step.abstract_state()
    kernel = state.params["layers"][0]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) == (16, 32)
    assert not (tmp_path / "run").exists()


def test_chooses_as_many_devices_of_each_process(monkeypatch):
    devices = [SimpleNamespace(platform="cpu", id=number, process_index=number // 4) for number in range(8)]
    monkeypatch.setattr(build_run, "physical_order", lambda _: devices)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert choose_evenly(4) == ["cpu:0", "cpu:1", "cpu:4", "cpu:5"]


def test_devices_of_the_launcher_replace_those_of_the_config(monkeypatch):
    simulated = []
    monkeypatch.setattr(build_run, "simulate", simulated.append)
    for instead in (4, None):
        prepare_devices(RunConfig(simulate=8), Precision(), instead)
    assert simulated == [4, 8]


def test_only_numbers_are_features():
    tokens = Splits([{"inputs": np.zeros(8, np.int32)}], None, 256, "")
    assert data_facts(tokens, 8) == {"vocabulary": 256, "length": 8}
    numbers = Splits([{"inputs": np.zeros(5, np.float32)}], None, None, "")
    assert data_facts(numbers, 8) == {"length": 8, "features": 5}


def test_the_data_tells_sizes(tmp_path):
    built = build(load_config(write_config(tmp_path)))
    assert built.layouts.table.row("layers/0/kernel").shape == (64, 32)
    language = build(load_config(write_language_config(tmp_path / "text")))
    assert isinstance(language.model, BlockModel)
    assert language.layouts.table.row("embed/tokens").shape == (256, 16)
    assert language.model.flops_per_row == 6 * (2 * (4 * 16 * 16 + 3 * 16 * 32) + 16 * 256) * 16 + 12 * 2 * 16 * 16**2


def test_what_trains_alone_has_optimizer_state(tmp_path):
    """Frozen and adapted parameters have none, on the mesh as in the optimizer."""
    path = write_config(tmp_path, model={"name": "mlp", "classes": 10, "widths": [32, 32]})

    def slots(*overrides):
        rows = build(load_config(path, overrides)).step.optimizer_table.rows
        return {row.path.partition("/mu/")[2] for row in rows if "/mu/" in row.path}

    assert slots('optimizer.freeze=["layers/0/.*", ".*/bias"]') == {"layers/1/kernel", "layers/2/kernel"}
    lora = "model.lora={rank: 2, match: [layers/1/kernel], train: [layers/2/bias]}"
    assert slots(lora) == {"lora/layers/1/kernel/a", "lora/layers/1/kernel/b", "layers/2/bias"}
    groups = "optimizer.groups={layers/0/.*: {name: sgd}, layers/1/.*: {learning_rate: 0.1}}"
    assert slots(groups) == {f"layers/{layer}/{name}" for layer in (1, 2) for name in ("kernel", "bias")}


def test_slots_of_a_group_lie_as_their_parameter(tmp_path):
    groups = "optimizer.groups={layers/0/.*: {learning_rate: 0.1}}"
    built = build(load_config(write_config(tmp_path), [groups]))
    table, params = built.step.optimizer_table, built.layouts.update_table
    found = [(row.path, row.layout) for row in table.rows if "/mu/" in row.path or "/nu/" in row.path]
    assert len(found) == 2 * len(params.rows)
    for path, layout in found:
        assert layout == params.row(path.rpartition("u/")[2]).layout


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("strategy={fsdp: 3, data: -1}", "strategy: fsdp 3 x data -1, but there are 8 devices: 8 % 3 = 2"),
        ("strategy={data: 16}", "strategy: data 16, but there are 8 devices"),
    ],
)
def test_the_real_devices_are_counted(override, message, tmp_path):
    config = load_config(write_config(tmp_path), ["run.simulate=0", "train.global_batch=48", override])
    with pytest.raises(ConfigError, match=message):
        build(config)


def test_the_rest_of_the_real_devices(tmp_path):
    built = build(load_config(write_config(tmp_path), ["run.simulate=0", "strategy.fsdp.size=2", "strategy.data=-1"]))
    assert (built.layouts.mesh.axis_size("fsdp"), built.layouts.mesh.axis_size("data")) == (2, 4)


@pytest.fixture
def x64_as_before():
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.mark.parametrize(("override", "x64"), [("run.seed=0", False), ("precision.params=float64", True)])
@pytest.mark.usefixtures("x64_as_before")
def test_64_bit_types_where_asked_for(override, x64, tmp_path):
    config = load_config(write_config(tmp_path), [override])
    prepare_devices(config.run, config.precision)
    assert jax.config.jax_enable_x64 == x64


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("{inputs: [null, fdsp]}", r"data.layout\['inputs'\]: unknown axis 'fdsp'; .* Did you mean fsdp"),
        ("{inputs: [null, fsdp]}", r"data.layout splits dim 1 of inputs \(16, 63\) over fsdp = 4 parts"),
    ],
)
def test_rejects_invalid_batch_layouts_before_compilation(tmp_path, layout, message):
    """The held-out ones too: their rows are a value shorter."""
    config = load_config(write_config(tmp_path), [f"data.layout={layout}"])
    splits = open_splits(config.data)
    held_out = from_arrays({"inputs": np.zeros((8, 63), np.float32), "targets": np.zeros(8, np.int32)}).train
    with pytest.raises(UserError, match=message):
        build(config, splits=splits._replace(evaluation=held_out))


CLASSES = Limit("model.classes", 10)
OF_MODEL, OF_DATA = Limit("model.vocabulary", 300), Limit("vocabulary", 256)


@pytest.mark.parametrize(
    ("model", "vocabulary", "limits"),
    [
        ({"name": "mlp", "classes": 10, "widths": [8]}, None, Limits(targets=CLASSES)),
        ({"name": "transformer", "vocabulary": 300}, None, Limits(inputs=OF_MODEL, targets=OF_MODEL)),
        ({"name": "transformer", "vocabulary": 300}, 256, Limits(inputs=OF_DATA, targets=OF_DATA)),
        ({"name": "transformer"}, None, Limits()),
        ({"name": "mine:model", "vocabulary": 300}, None, Limits(inputs=OF_MODEL)),
        ({"name": "mine:model"}, 256, Limits(inputs=OF_DATA)),
        ({"name": "mine:model"}, None, Limits()),
    ],
)
def test_what_is_known_of_a_model(model, vocabulary, limits, tmp_path):
    config = load_config(write_config(tmp_path, model=model))
    assert model_limits(config.model, vocabulary) == limits

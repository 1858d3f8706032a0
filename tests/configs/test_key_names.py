import pytest
from spmdkit.configs.key_names import SYNONYMS, config_keys, find_synonym, suggest_keys
from spmdkit.mesh import axes
from spmdkit.parallel.sharding.strategies import read_strategy


def test_lists_keys_of_every_kind_once():
    some = {"run.seed", "model.name", "model.check", "model.experts", "strategy.fsdp", "strategy.fsdp.keep"}
    assert some <= set(config_keys())
    assert len(config_keys()) == len(set(config_keys()))


def test_every_synonym_is_of_an_existing_key_and_not_a_key_itself():
    keys = set(config_keys())
    assert set(SYNONYMS) <= keys
    assert [
        key for key, names in SYNONYMS.items() for name in names.split() if f"{key.split('.')[0]}.{name}" in keys
    ] == []
    assert set(axes.SYNONYMS.values()) == set(axes.AXES)


@pytest.mark.parametrize(
    ("unknown", "key"),
    [
        ("strategy.dp", "strategy.data"),
        ("strategy.DDP", "strategy.data"),
        ("strategy.tp", "strategy.tensor"),
        ("strategy.zero3", "strategy.fsdp"),
        ("strategy.zero", "strategy.data.zero"),
        ("optimizer.lr", "optimizer.learning_rate"),
        ("train.lr", "optimizer.learning_rate"),
        ("lr", "optimizer.learning_rate"),
        ("data.batch_size", "train.global_batch"),
        ("train.epochs", "train.steps"),
        ("dp", "strategy.data"),
        ("model.n_layers", "model.layers"),
        ("strategy.pipe.stages", "strategy.pipe.size"),
        ("strategy.tensor.tp", "strategy.tensor.size"),
        ("strategy.fsdp.fsdp", "strategy.fsdp.size"),
        ("strategy.fsdp.min_num_params", "strategy.fsdp.floor_bytes"),
        ("strategy.pipe.tp", None),
        ("strategy.lr", None),
        ("train.nonsense", None),
    ],
)
def test_finds_the_key_of_a_synonym(unknown, key):
    assert find_synonym(unknown) == key


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("train.steps", ["train.steps"]),
        ("steps", ["train.steps"]),
        ("global-batch", ["train.global_batch"]),
        ("lr", ["optimizer.learning_rate"]),
        ("tp", ["strategy.tensor"]),
        ("fsdp", ["strategy.fsdp"]),
        ("every", ["eval.every", "checkpoint.every"]),
        ("train.stpes", ["train.steps"]),
        ("bacth_size", ["train.global_batch"]),
        ("frobnicate", []),
    ],
)
def test_suggests_keys_for_a_name(name, keys):
    assert suggest_keys(name) == keys


def test_suggests_at_most_three_keys():
    assert len(suggest_keys("size")) == 3


def test_python_api_suggests_axes_too():
    with pytest.raises(ValueError, match=r"strategy\.dp: .* \(did you mean data\?\)"):
        read_strategy({"dp": 8})

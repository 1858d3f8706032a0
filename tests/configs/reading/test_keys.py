import pytest
from spmdkit.configs.reading.keys import config_keys, keys_meant_by


def test_keys_of_every_kind_are_there():
    some = {"run.seed", "model.name", "model.check", "model.experts", "strategy.fsdp", "strategy.fsdp.keep"}
    assert some <= set(config_keys())
    assert len(config_keys()) == len(set(config_keys()))


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
        ("learning_rat", ["optimizer.learning_rate"]),
        ("bacth_size", ["train.global_batch"]),
        ("frobnicate", []),
    ],
)
def test_what_a_name_may_stand_for(name, keys):
    assert keys_meant_by(name) == keys


def test_few_are_named():
    assert len(keys_meant_by("size")) == 3

import pytest
from spmdkit.configs import load_config
from spmdkit.configs.errors import ConfigError
from spmdkit.configs.reading.synonyms import OF_KEYS, meant_by
from spmdkit.configs.schema import Config
from spmdkit.mesh.axes import AXES, SYNONYMS
from spmdkit.models.catalog import MODELS
from spmdkit.parallel.sharding.strategies import option_types, read_strategy


def exists(key: str) -> bool:
    section, name, *option = key.split(".")
    if section == "model":
        return any(name in kind.__dataclass_fields__ for kind, _ in MODELS.values())
    if section == "strategy":
        return name in option_types() and not set(option) - set(option_types()[name].__dataclass_fields__)
    return hasattr(getattr(Config(), section), name)


def test_every_key_that_is_meant_exists():
    assert [key for key in OF_KEYS if not exists(key)] == []
    assert set(SYNONYMS.values()) == set(AXES)


def test_no_synonym_is_a_key_of_its_own():
    keys = [f"{key.split('.')[0]}.{name}" for key, names in OF_KEYS.items() for name in names]
    assert [key for key in keys if exists(key)] == []


@pytest.mark.parametrize(
    ("unknown", "meant"),
    [
        ("strategy.dp", "strategy.data"),
        ("strategy.DDP", "strategy.data"),
        ("strategy.tp", "strategy.tensor"),
        ("strategy.pp", "strategy.pipe"),
        ("strategy.cp", "strategy.context"),
        ("strategy.sp", "strategy.context"),
        ("strategy.ep", "strategy.expert"),
        ("strategy.zero3", "strategy.fsdp"),
        ("strategy.zero", "strategy.data.zero"),
        ("optimizer.lr", "optimizer.learning_rate"),
        ("train.lr", "optimizer.learning_rate"),
        ("lr", "optimizer.learning_rate"),
        ("data.batch_size", "train.global_batch"),
        ("train.epochs", "train.steps"),
        ("optimizer.warmup_steps", "optimizer.schedule"),
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
def test_what_is_meant(unknown, meant):
    assert meant_by(unknown) == meant


def test_the_error_names_it(tmp_path):
    (tmp_path / "a.yaml").write_text("strategy: {dp: 8}\ntrain: {epochs: 3}\nlr: 1e-3\n")
    with pytest.raises(ConfigError) as info:
        load_config(tmp_path / "a.yaml")
    assert sorted(info.value.problems) == [
        "line 1: strategy.dp is not a key. Did you mean strategy.data?",
        "line 2: train.epochs is not a key. Did you mean train.steps? It counts optimizer steps; an epoch is the "
        "number of training examples / train.global_batch of them.",
        "line 3: lr is not a section. Did you mean optimizer.learning_rate?",
    ]


def test_also_from_python():
    with pytest.raises(ValueError, match=r"strategy\.dp: there is no such strategy \(did you mean data\?\)"):
        read_strategy({"dp": 8})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "strategy: {fsdp: 8, floor_bytes: 1}",
            "Did you mean strategy.fsdp.floor_bytes? Write fsdp: {size: ..., ",
        ),
        ("strategy: {data: 8, keep: step}", "Did you mean strategy.fsdp.keep? Write fsdp: {size: ..., keep: ...}."),
        (
            "strategy: {data: 8, zero: 3}",
            "Did you mean strategy.data.zero? Write data: {size: ..., zero: ...}. It is",
        ),
        ("strategy: {fsdp: 8, fsdp.keep: step}", "dots do not part keys. Write fsdp: {size: ..., keep: ...}."),
        ("strategy.fsdp.keep: step", "dots do not part keys. Write strategy: {fsdp: {keep: ...}}."),
        ("strategy:\n  fsdp: 8\n    keep: step", "write fsdp: {size: 4, floor_bytes: 64KiB}"),
        ("optimizer: {schedule: warmup_cosine}", "not 'warmup_cosine' (text). Write {name: warmup_cosine}."),
        ("optimizer: {warmup_steps: 9}", "It is a mapping: {name: warmup_cosine, warmup_steps: 100}."),
    ],
)
def test_an_option_in_the_wrong_place_is_told_its_own(text, said, tmp_path):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError) as info:
        load_config(tmp_path / "a.yaml")
    assert said in str(info.value)

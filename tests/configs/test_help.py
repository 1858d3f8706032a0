import dataclasses

import pytest
from spmdkit.configs.help import field_help
from spmdkit.configs.schema import (
    CheckpointConfig,
    Config,
    EvalConfig,
    LayoutsConfig,
    RunConfig,
    SampleConfig,
    TrainConfig,
)
from spmdkit.data.config import DataConfig
from spmdkit.models.catalog import MODELS
from spmdkit.parallel.precision import Precision
from spmdkit.parallel.sharding.strategies import option_types
from spmdkit.training.optimizing.optimizer_config import OptimizerConfig
from spmdkit.training.worker import Timeouts

SECTIONS = [RunConfig, LayoutsConfig, TrainConfig, EvalConfig, CheckpointConfig, SampleConfig, DataConfig]
ELSEWHERE = [
    OptimizerConfig,
    Precision,
    Timeouts,
    *option_types().values(),
    *(options for options, _ in MODELS.values()),
]


@dataclasses.dataclass
class Documented:
    """A class."""

    first: int = 1
    """Two
    lines."""
    second: int = 2
    third: int = 3
    """Third."""


def test_reads_the_literal_under_a_field():
    assert field_help(Documented) == {"first": "Two lines.", "third": "Third."}


@dataclasses.dataclass
class Derived(Documented):
    """Another."""

    first: int = 3
    """First again."""
    fourth: int = 4
    """Fourth."""


def test_reads_what_bases_document():
    assert field_help(Derived) == {"first": "First again.", "third": "Third.", "fourth": "Fourth."}


@pytest.mark.parametrize("cls", [*SECTIONS, *ELSEWHERE], ids=lambda cls: cls.__name__)
def test_every_key_has_help(cls):
    missing = {field.name for field in dataclasses.fields(cls)} - set(field_help(cls))
    assert not missing, f"{cls.__name__}: no help under {sorted(missing)}"


def test_sections_without_a_class_have_help():
    assert {"model", "strategy"} <= set(field_help(Config))

"""All strategies have the same functions with the same arguments, in the order of the mesh axes."""

import inspect

import pytest
from spmdkit.mesh.axes import AXES
from spmdkit.mesh.errors import UserError
from spmdkit.parallel import DataParallelConfig, FSDPConfig
from spmdkit.parallel.pipeline import PipelineConfig
from spmdkit.parallel.sharding.strategies import (
    STRATEGIES,
    Strategy,
    axes_that_split,
    axis_names,
    option_types,
    read_strategy,
)

FUNCTIONS = [name for name, member in vars(Strategy).items() if inspect.isfunction(member) and name[0] != "_"]


@pytest.mark.parametrize("name", STRATEGIES)
def test_strategies_have_the_same_interface(name):
    strategy = STRATEGIES[name]
    assert len(FUNCTIONS) == 8
    for function in FUNCTIONS:
        wanted = [each for each in inspect.signature(getattr(Strategy, function)).parameters if each != "self"]
        found = list(inspect.signature(getattr(strategy, function)).parameters)
        assert len(found) == len(wanted), function
        assert found == wanted or function in ("begin", "finish"), function  # `unchanged` is both
    assert strategy.AXIS in AXES
    assert set(strategy.SPLITS) <= {"rows", "parameters", "work"}
    assert (strategy.OPTIONS is None) == (name not in AXES)


def test_the_axes_are_those_of_a_mesh_made_by_hand():
    assert axis_names() == tuple(option_types()) == AXES
    assert axes_that_split("rows") == ("data", "fsdp", "expert")
    assert axes_that_split("work") == ("expert", "context", "tensor")


def test_zero_and_diloco_are_not_config_strategies():
    for name in ("zero", "diloco", "compression"):
        with pytest.raises(ValueError, match=f"strategy.{name}: unknown strategy"):
            read_strategy({name: 2})


def test_sizes_mappings_and_dataclasses_are_one():
    given = {"fsdp": 4, "data": {"size": 2, "zero": 1}, "pipe": PipelineConfig(size=2)}
    assert read_strategy(given) == {
        "fsdp": FSDPConfig(size=4),
        "data": DataParallelConfig(size=2, zero=1),
        "pipe": PipelineConfig(size=2),
    }
    assert list(read_strategy(given)) == list(given)


@pytest.mark.parametrize(
    ("strategy", "text"),
    [
        ({"fdsp": 2}, r"strategy\.fdsp: unknown strategy.*fsdp"),
        ({"ddp": 2}, r"strategy\.ddp: unknown strategy.*data"),
        ({"fsdp": {"size": 2, "prefech": 1}}, r"strategy\.fsdp\.prefech: unknown option.*prefetch"),
        ({"fsdp": True}, r"strategy\.fsdp=True: give a size \(an integer\) or a mapping of options"),
        ({"fsdp": "4"}, r"strategy\.fsdp='4': give a size"),
        ({"fsdp": DataParallelConfig(size=2)}, r"strategy\.fsdp=DataParallelConfig\(.*give a size"),
    ],
)
def test_rejects_unknown_strategies(strategy, text):
    with pytest.raises(UserError, match=text):
        read_strategy(strategy)


def test_reports_all_problems():
    with pytest.raises(UserError) as raised:
        read_strategy({"fdsp": 2, "data": {"zeero": 1, "sizes": 2}, "tensor": None})
    assert len(str(raised.value).splitlines()) == 4

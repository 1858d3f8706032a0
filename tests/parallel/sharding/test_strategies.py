"""Reading `strategy:`: sizes, mappings and options dataclasses are one; all mistakes are told at once."""

import pytest
from spmdkit.mesh.axes import AXES
from spmdkit.mesh.errors import UserError
from spmdkit.parallel import STRATEGIES, DataParallelConfig, FSDPConfig
from spmdkit.parallel.pipeline import PipelineConfig
from spmdkit.parallel.sharding.strategies import read_strategy


def test_each_axis_of_the_mesh_is_a_strategy():
    assert set(STRATEGIES) == set(AXES)
    for name, kind in STRATEGIES.items():
        assert kind().size == 1, name


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
        ({"fdsp": 2}, r"strategy\.fdsp: there is no such strategy.*fsdp"),
        ({"ddp": 2}, r"strategy\.ddp: there is no such strategy.*data"),
        ({"fsdp": {"size": 2, "prefech": 1}}, r"strategy\.fsdp\.prefech: there is no such option.*prefetch"),
        ({"fsdp": True}, r"strategy\.fsdp=True: give a size \(an int\) or a mapping of options"),
        ({"fsdp": "4"}, r"strategy\.fsdp='4': give a size"),
        ({"fsdp": DataParallelConfig(size=2)}, r"strategy\.fsdp=DataParallelConfig\(.*give a size"),
    ],
)
def test_what_is_no_strategy(strategy, text):
    with pytest.raises(UserError, match=text):
        read_strategy(strategy)


def test_all_mistakes_are_told_at_once():
    with pytest.raises(UserError) as raised:
        read_strategy({"fdsp": 2, "data": {"zeero": 1, "sizes": 2}, "tensor": None})
    assert len(str(raised.value).splitlines()) == 4

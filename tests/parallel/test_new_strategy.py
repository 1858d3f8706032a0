"""A new strategy is one file (`toy_strategy.py`, `work_strategy.py`) and one line in `STRATEGIES`."""

import pytest
from spmdkit.configs import ConfigError, load_config
from spmdkit.parallel import FSDPConfig, census, verify
from spmdkit.parallel.sharding.parallel_context import parallel_context
from spmdkit.parallel.sharding.strategies import STRATEGIES, axis_names
from support import toy, toy_strategy, work_strategy

FSDP = FSDPConfig(size=2, floor_bytes=64)
ABSTRACT = toy.abstract(toy.batch(0))
BATCHES, OPTIONS = [toy.batch(1), toy.batch(2)], {"optimizer": toy.SGD, "devices": toy.devices(4), "clip_norm": 0.5}


@pytest.fixture(autouse=True)
def added(monkeypatch):
    """Adds the line of each."""
    monkeypatch.setitem(STRATEGIES, "toy", toy_strategy)
    monkeypatch.setitem(STRATEGIES, "columns", work_strategy)


def test_lays_out_parameters_with_other_strategies():
    found = toy.plan({"toy": 2, "fsdp": FSDP})
    assert axis_names()[-2:] == found.mesh.axis_names[-2:] == ("toy", "columns")
    assert found.batch_axes == ("fsdp", "toy")
    stored, used = ({row.path: row.layout.axes for row in table.rows} for table in (found.table, found.used_table))
    assert (stored["blocks/up"], used["blocks/up"]) == ((None, "toy", "fsdp"), (None, None, "fsdp"))
    assert stored["blocks/scale"] == used["blocks/scale"] == (None, "fsdp")
    assert "fsdp: dim 2; toy: dim 1" in str(found)


def test_reports_its_own_check():
    with pytest.raises(ValueError, match=r"head/out has the layout .*Name toy last in this rule"):
        toy.plan({"toy": 2, "fsdp": FSDP}, rules={"head/out": (("toy", "fsdp"), None), ".*": ()})


@pytest.mark.slow
def test_cost_equals_the_census_of_the_compiled_step():
    step = toy.build({"toy": 2, "data": 2}, accumulate=2)
    predicted = step.cost(ABSTRACT)
    assert census(step.compile(ABSTRACT).as_text() or "", step.plan.mesh) == predicted
    over_toy = {line.kind: line.count for line in predicted if line.axes == ("toy",)}
    assert over_toy["all-gather"] == over_toy["reduce-scatter"] == 4  # embed, up, down, out: once a step


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [{"toy": 2, "fsdp": FSDP}, {"toy": 2, "data": {"size": 2, "zero": 2, "floor_bytes": 1024}}],
    ids=["fsdp", "zero2"],
)
def test_trains_like_one_device(strategy):
    result = verify(toy.BLOCK_MODEL, strategy, BATCHES, **OPTIONS)
    assert result.ok, str(result)
    assert result.collectives.found == result.collectives.predicted


def test_config_accepts_it(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("strategy: {toy: 2, data: 2}\nrun: {simulate: 4}\ntrain: {global_batch: 8}\n", encoding="utf-8")
    config = load_config(path)
    assert config.strategy["toy"] == toy_strategy.ToyConfig(size=2)
    with pytest.raises(ConfigError, match=r"strategy\.data 2 x strategy\.toy 2 .* = 4, and 6 % 4 = 2"):
        load_config(path, ["train.global_batch=6"])
    with pytest.raises(ConfigError, match=r"strategy\.toy\.sise"):
        load_config(path, ["strategy.toy={sise: 2}"])


def test_splits_the_work_of_a_model():
    """The parallel context, the layouts, remat and the batch axes follow from its `SPLITS`."""
    found = toy.plan({"columns": 2, "fsdp": FSDP}, work_strategy.MODEL)
    assert parallel_context(found).added == {"columns": work_strategy.ColumnsConfig(size=2)}
    assert (found.batch_axes, found.gather_axes) == (("fsdp",), ("fsdp",))
    assert found.manual_axes == ("fsdp", "columns")
    assert found.table.row("blocks/up").layout.axes == (None, "fsdp", "columns")


@pytest.mark.slow
def test_trains_with_split_work_like_one_device():
    result = verify(work_strategy.MODEL, {"columns": 2, "data": 2}, BATCHES, **OPTIONS)
    assert result.ok, str(result)
    assert result.collectives.found == result.collectives.predicted

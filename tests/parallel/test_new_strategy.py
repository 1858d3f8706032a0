"""A new strategy is one file (`toy_strategy.py`) and one line in `STRATEGIES`: everything else follows."""

import optax
import pytest
import toy
import toy_strategy
from spmdkit.configs import ConfigError, load_config
from spmdkit.parallel import FSDPConfig, build_step, census, lay_out, verify
from spmdkit.parallel.sharding.strategies import STRATEGIES, axis_names

FSDP = FSDPConfig(size=2, floor_bytes=64)
ABSTRACT = toy.abstract(toy.batch(0))


@pytest.fixture(autouse=True)
def one_line(monkeypatch):
    """The line."""
    monkeypatch.setitem(STRATEGIES, "toy", toy_strategy)


def plan(**strategy):
    return lay_out(toy.BLOCK_MODEL, strategy, devices=toy.devices(4))


def test_it_is_laid_out_beside_others():
    found = plan(toy=2, fsdp=FSDP)
    assert axis_names()[-1] == "toy"
    assert (found.batch_axes, found.mesh.axis_names[-1]) == (("fsdp", "toy"), "toy")
    stored, used = ({row.path: row.layout.axes for row in table.rows} for table in (found.table, found.used_table))
    assert (stored["blocks/up"], used["blocks/up"]) == ((None, "toy", "fsdp"), (None, None, "fsdp"))
    assert stored["blocks/scale"] == used["blocks/scale"] == (None, "fsdp")
    assert "fsdp: dim 2; toy: dim 1" in str(found)


def test_its_own_check_is_told():
    with pytest.raises(ValueError, match=r"head/out has the layout .*Name toy last in this rule"):
        lay_out(
            toy.BLOCK_MODEL,
            {"toy": 2, "fsdp": FSDP},
            rules={"head/out": (("toy", "fsdp"), None), ".*": ()},
            devices=toy.devices(4),
        )


def test_its_cost_is_that_of_the_compiled_step():
    step = build_step(toy.BLOCK_MODEL, optax.sgd(0.1), plan(toy=2, data=2), accumulate=2)
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
def test_it_trains_as_one_device(strategy):
    batches = [toy.batch(seed) for seed in (1, 2)]
    result = verify(toy.BLOCK_MODEL, strategy, batches, devices=toy.devices(4), clip_norm=0.5)
    assert result.ok, str(result)  # its collectives are the predicted ones, too


def test_a_config_names_it(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("strategy: {toy: 2, data: 2}\nrun: {simulate: 4}\ntrain: {global_batch: 8}\n", encoding="utf-8")
    config = load_config(path)
    assert config.strategy["toy"] == toy_strategy.ToyConfig(size=2)
    with pytest.raises(ConfigError, match=r"strategy\.data 2 x strategy\.toy 2 .* = 4, and 6 % 4 = 2"):
        load_config(path, ["train.global_batch=6"])
    with pytest.raises(ConfigError, match=r"strategy\.toy\.sise"):
        load_config(path, ["strategy.toy={sise: 2}"])

"""`strategy: auto`: the choice for the devices of a run, and its record."""

import pytest
from spmdkit.configs import ConfigError, load_config, resolved_yaml
from spmdkit.mesh.errors import UserError
from spmdkit.mesh.targets import parse_target
from spmdkit.planning import auto_strategy, explain_run
from spmdkit.planning.auto_strategy import choose_strategy
from spmdkit.runtime.build_run import build

SMALL = ["model.layers=2", "model.width=64", "model.heads=4", "data.length=32", "train.global_batch=16"]


def auto(*overrides):
    return load_config("quickstart", ["strategy=auto", *SMALL, *overrides])


def sizes(config):
    return {axis: options.size for axis, options in config.strategy.items()}


def test_auto_is_a_strategy_of_a_config(tmp_path):
    (tmp_path / "again.yaml").write_text(resolved_yaml(auto()))
    assert load_config(tmp_path / "again.yaml") == auto()
    with pytest.raises(ConfigError, match="must be the only entry"):
        load_config("quickstart", ["strategy={auto: -1, data: 2}"])


def test_choice_is_that_of_the_search_and_can_be_built():
    chosen = choose_strategy(auto())
    assert choose_strategy(auto()) == chosen
    assert build(chosen).layouts.mesh.size == 8


def test_only_auto_is_replaced():
    config = load_config("quickstart", SMALL)
    assert choose_strategy(config) is config
    assert choose_strategy(config, parse_target("h100:1x8")) is config


def test_explain_chooses_for_its_target(monkeypatch):
    def choose(config, target=None):
        raise UserError(f"for {target and target.text}")

    monkeypatch.setattr(explain_run, "choose_strategy", choose)
    with pytest.raises(UserError, match="for h100:1x8"):
        explain_run.explain(auto(), "h100:1x8")


def test_resume_has_the_recorded_mesh(tmp_path):
    config = auto(f"run.dir={tmp_path}")
    other = load_config("quickstart", [*SMALL, "strategy={data: 2, fsdp: 4}", "train.remat=full", "train.accumulate=2"])
    (tmp_path / "config.yaml").write_text(resolved_yaml(other))
    (tmp_path / "metrics.jsonl").write_text("")
    resumed = choose_strategy(config)
    assert sizes(resumed) == {"data": 2, "fsdp": 4}
    assert (resumed.train.remat, resumed.train.accumulate) == ("full", 2)
    assert resumed.run.dir == config.run.dir
    assert sizes(choose_strategy(config, fresh=True)) != sizes(resumed)
    (tmp_path / "config.yaml").write_text(
        resolved_yaml(load_config("quickstart", [*SMALL, "strategy={data: 4}"], sizes=False))
    )
    assert sizes(choose_strategy(config)) == sizes(choose_strategy(config, fresh=True))


def test_choice_of_process_0_counts(monkeypatch):
    text = '[{"fsdp": {"size": 8}}, 2, "dots"]'
    monkeypatch.setattr(auto_strategy, "broadcast_text", lambda name, own, *, seconds: text)
    chosen = choose_strategy(auto())
    assert (sizes(chosen), chosen.train.accumulate, chosen.train.remat) == ({"fsdp": 8}, 2, "dots")


def test_other_commands_reject_auto(cli):
    error = cli(2, "verify", "quickstart", "strategy=auto", *SMALL).err
    assert "strategy: auto is for train, launch, explain and plan" in error

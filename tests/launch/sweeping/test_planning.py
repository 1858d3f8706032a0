"""The config and the folder of each run of a sweep; nothing is started."""

import json
from dataclasses import replace

import pytest
import yaml
from left_runs import some_facts
from runs import write_config
from spmdkit.configs import ConfigError, load_config
from spmdkit.configs.write import as_plain
from spmdkit.launch.local import LocalTarget
from spmdkit.launch.reporting.facts import write_facts
from spmdkit.launch.sweeping.planning import Asked, plan


def planned(config, *words, **options):
    return plan(Asked(str(config), words, **options))


@pytest.fixture
def config(tmp_path):
    return write_config(tmp_path)


def leave(config, run, steps=0, **changes):
    """Leaves the folder of a run that has logged a step; `steps` of a finished one."""
    run.folder.mkdir(parents=True)
    written = as_plain(run.config)
    for key, value in changes.items():
        section, _, name = key.partition("__")
        written[section][name] = value
    (run.folder / "config.yaml").write_text(yaml.safe_dump(written))
    (run.folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')


def test_each_has_a_folder_in_that_of_the_config(config, tmp_path):
    runs = planned(config, "strategy=data,fsdp", "train.steps=4")
    assert [run.folder for run in runs] == [tmp_path / "run" / f"strategy={name}" for name in ("data", "fsdp")]
    assert [[*run.config.strategy] for run in runs] == [["data"], ["fsdp"]]
    assert [run.problem for run in runs] == ["", ""]


def test_what_a_run_is_trained_with_gives_its_config_again(config, tmp_path):
    folder = tmp_path / "a b: 'c' #d"
    for run in planned(config, "optimizer.learning_rate=1e-3,3e-4", f"run.dir={json.dumps(str(folder))}"):
        assert load_config(config, run.overrides) == run.config
        assert run.folder == folder / run.name


@pytest.mark.parametrize(
    ("words", "devices"),
    [
        (["strategy={data: 2},{data: 2, fsdp: 2}"], [2, 4]),
        (["strategy.data=1,4"], [4, 16]),  # fsdp 4 of the file
        (["strategy=data,fsdp"], [8, 8]),  # the rest of those of the file
        (["run.simulate=2,4", "strategy=data"], [2, 4]),
        (["strategy=data,fsdp", "run.simulate=4"], [4, 4]),
    ],
)
def test_devices_are_those_of_the_mesh(config, words, devices):
    runs = planned(config, *words)
    assert [run.problem for run in runs] == ["", ""]
    assert [run.config.run.simulate for run in runs] == devices


def test_a_mistake_in_what_is_not_swept_is_told_as_train_tells_it(config):
    runs = planned(config, "strategy.data=3", "run.seed=0,1")
    with pytest.raises(ConfigError) as caught:
        load_config(config, ["strategy.data=3", "run.seed=0"])
    assert [run.problem for run in runs] == [str(caught.value)] * 2
    assert "12 != 8" in runs[0].problem
    assert [run.config for run in runs] == [None, None]


def test_devices_of_real_machines_and_of_launched_runs_stay(config):
    real = planned(config, "strategy={data: 2},{data: 4}", "run.simulate=0")
    assert [run.config.run.simulate for run in real] == [0, 0]
    launched = planned(config, "strategy={data: 4},{data: 8}", on=LocalTarget(2, 4))
    assert "2 processes with 4 devices each give 8" in launched[0].problem
    assert launched[1].problem == ""


def test_one_bad_value_leaves_the_others(config):
    bad, good = planned(config, "train.global_batch=15,16")
    assert bad.problem.startswith("1 problem on the command line:")
    assert (bad.exit_code, bad.folder, good.problem) == (2, None, "")


def test_a_folder_of_another_config_is_not_compared(config):
    run, _ = planned(config, "strategy=data,fsdp")
    leave(config, run, optimizer__learning_rate=0.5)
    again, other = planned(config, "strategy=data,fsdp")
    assert "holds a run of another config: optimizer.learning_rate: 0.5 then, 0.01 now." in again.problem
    assert again.exit_code == 2
    assert other.problem == ""
    assert planned(config, "strategy=data,fsdp", fresh=True)[0].problem == ""


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"checkpoint__start_from": "runs/a"}, "checkpoint.start_from: 'runs/a' then, '' now"),
        ({"checkpoint__start_fresh": ["head"]}, "checkpoint.start_fresh: ['head'] then, [] now"),
        ({"eval__batches": 4}, "eval.batches: 4 then, 2 now"),
        ({"train__steps": 200}, "train.steps: 200 then, 12 now"),
    ],
)
def test_what_figures_of_the_table_depend_on_counts(config, changes, said):
    """Also where a restart may change it."""
    run, _ = planned(config, "strategy=data,fsdp")
    leave(config, run, **changes)
    again, other = planned(config, "strategy=data,fsdp")
    assert said in again.problem
    assert (again.exit_code, again.is_finished, other.problem) == (2, False, "")


def test_which_parameters_are_evaluated_counts(config):
    run, _ = planned(config, "strategy=data,fsdp", "optimizer.ema={decay: 0.9, evaluate: true}")
    leave(config, run)
    again, _ = planned(config, "strategy=data,fsdp", "optimizer.ema={decay: 0.9, evaluate: false}")
    assert "optimizer.ema.evaluate: True then, False now" in again.problem


@pytest.mark.parametrize("changes", [{}, {"train__steps": 3}, {"run__log_every": 7}, {"eval__every": 9}])
def test_what_changes_no_number_may_differ_and_steps_may_be_more(config, changes):
    run, _ = planned(config, "strategy=data,fsdp")
    leave(config, run, **changes)
    assert [each.problem for each in planned(config, "strategy=data,fsdp")] == ["", ""]


def test_a_key_that_an_earlier_version_did_not_write_has_its_default(config):
    run, _ = planned(config, "strategy=data,fsdp")
    leave(config, run)
    path = run.folder / "config.yaml"
    written = yaml.safe_load(path.read_text())
    del written["train"]["remat"]
    path.write_text(yaml.safe_dump(written))
    assert planned(config, "strategy=data,fsdp")[0].problem == ""
    assert (
        "train.remat: nothing then, 'full' now" in planned(config, "strategy=data,fsdp", "train.remat=full")[0].problem
    )


def test_finished_is_what_holds_all_steps(config):
    run, _ = planned(config, "strategy=data,fsdp")
    leave(config, run)
    for finished, expected in ((0, False), (11, False), (12, True)):
        write_facts(run.folder, replace(some_facts(), finished=finished))
        assert [each.is_finished for each in planned(config, "strategy=data,fsdp")] == [expected, False]
    assert not planned(config, "strategy=data,fsdp", fresh=True)[0].is_finished
    assert not planned(config, "strategy=data,fsdp", "train.steps=13")[0].is_finished

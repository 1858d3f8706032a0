import subprocess
import sys

import pytest
from spmdkit.configs import ConfigError, load_config
from spmdkit.configs.load import find_config
from spmdkit.configs.presets import preset_names
from spmdkit.parallel.data import DataParallelConfig
from spmdkit.parallel.fsdp import FSDPConfig

GOOD = """
run: {simulate: 8}
strategy: {fsdp: 4, data: 2}
train:
  steps: 20
  global_batch: 16
"""


@pytest.fixture
def write(tmp_path):
    def write_file(text: str, name: str = "my.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write_file


def problems_of(path, *overrides: str, **options) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as info:
        load_config(path, overrides, **options)
    return info.value.problems


def test_defaults_and_differences(write):
    config = load_config(write(GOOD))
    assert config.strategy == {"fsdp": FSDPConfig(size=4), "data": DataParallelConfig(size=2)}
    assert (config.train.steps, config.train.accumulate, config.run.simulate) == (20, 1, 8)
    assert config.model["name"] == "transformer"


def test_folder_is_named_after_the_file(write):
    path = write(GOOD, "wide.yaml")
    assert load_config(path).run.dir == "runs/wide"
    assert load_config(path, ["run.dir=elsewhere"]).run.dir == "elsewhere"
    assert load_config(path).source == path


def test_an_empty_file_is_all_defaults(write):
    config = load_config(write("# nothing\n"))
    assert config.strategy == {"data": DataParallelConfig(size=-1)}


def test_options_of_strategy_and_model(write):
    config = load_config(write(GOOD), ["strategy.fsdp.floor_bytes=1KiB", "model.layers=3"])
    assert config.strategy["fsdp"] == FSDPConfig(size=4, floor_bytes=1024)
    assert config.model["layers"] == 3


def test_models_own_options_are_complete(write):
    assert set(load_config(write("model: {name: mlp}")).model) > {"name"}


def test_users_own_model_is_kept_as_given(write):
    config = load_config(write("model: {name: 'mine:make', width: 3}"))
    assert config.model == {"name": "mine:make", "check": "error", "width": 3}


@pytest.mark.parametrize("model", ["name: 'mine:make', width: 3", "name: mlp"])
def test_the_check_of_a_model_is_a_key_of_every_model(model, write):
    config = load_config(write(f"model: {{{model}, check: off}}"))
    assert config.model["check"] == "off"
    assert load_config(write(f"model: {{{model}}}"), ["model.check=warn"]).model["check"] == "warn"
    with pytest.raises(ConfigError, match=r"line 1: model.check must be one of error, warn, off \(Did you mean warn"):
        load_config(write(f"model: {{{model}, check: warm}}"))


def test_layout_rules(write):
    config = load_config(write("layouts: {rules: {'a.*': [fsdp, null, [data, fsdp]]}, unmatched_floor: 64KiB}"))
    assert config.layouts.rules == {"a.*": ("fsdp", None, ("data", "fsdp"))}
    assert config.layouts.unmatched_floor == 65536


def test_everything_wrong_is_told_at_once_with_its_line(write):
    path = write(
        "run: {simulate: 8}\nmodel:\n  layrs: 8\nstrategy: {fsdp: four}\ntrain:\n  steps: ten\n  remat: ful\n"
        "stepz: 1\nlayouts:\n  rules: {'a.*': [fsdpp]}\ndata:\n  length: 0\n  source: stdlb\n"
    )
    problems = problems_of(path, "optimizer.lernin_rate=1", "train.steps=3", "seed=1")
    expected = [
        "line 3: model.layrs is not a key. Did you mean model.layers?",
        "line 4: strategy.fsdp.size must be a whole number, not 'four' (text).",
        "line 7: train.remat must be one of none, dots, full (Did you mean full?), not 'ful' (text).",
        "line 8: stepz is not a section. The sections here: run, model, ",
        "line 10: layouts.rules: 'a.*' names 'fsdpp', which is not a mesh axis",
        "line 12: data.length=0: ",
        "line 13: data.source='stdlb': ",
        "the command line: optimizer.lernin_rate=1: optimizer.lernin_rate is not a key. Did you mean optimizer.learn",
        "the command line: seed=1: seed is not a section. Did you mean run.seed?",
    ]
    for start in expected:
        assert any(problem.startswith(start) for problem in problems), (start, problems)
    assert len(problems) == len(expected)


def test_sizes_are_checked_where_the_devices_are_known(write):
    (problem,) = problems_of(write(GOOD), "strategy.fsdp=2")
    assert problem == (
        "strategy.fsdp=2: strategy: fsdp 2 x data 2, but run.simulate=8 gives 8 devices: 4 != 8. "
        "Set strategy.fsdp=4, strategy.data=4 or run.simulate=4."
    )


def test_sizes_are_left_alone_where_they_are_not(write):
    config = load_config(write(GOOD), ["run.simulate=0", "strategy.fsdp=100", "train.global_batch=200"])
    assert config.strategy["fsdp"].size == 100


def test_several_processes(write):
    assert load_config(write(GOOD), num_processes=2, simulate=4)
    assert load_config(write(GOOD), ["run.simulate=4"], num_processes=2)
    (problem,) = problems_of(write(GOOD), num_processes=2, simulate=2)
    assert "but 2 processes with 2 devices each give 4: 8 != 4. Set strategy.fsdp=2 or strategy.data=1." in problem


def test_batch_and_strategy(write):
    (problem,) = problems_of(write(GOOD), "train.global_batch=20")
    assert problem.startswith("train.global_batch=20: train.global_batch=20 rows cannot be split evenly: ")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("- a", "the file must be a mapping of sections, not ['a'] (a list)."),
        ("train: {steps: 1, steps: 2}", "line 1: train.steps is given twice, first on line 1. Keep one of them."),
        ("a: [", "not valid YAML: line 1, column 5: "),
        ("train: 3", "line 1: train must be a mapping (key: value), not 3 (a whole number)."),
        ("model: mlp", "line 1: model must be a mapping such as {name: transformer}, not 'mlp' (text)."),
        ("strategy: [fsdp]",
         "line 1: strategy must be a mapping of mesh axes to sizes, such as {fsdp: 4, data: 2}, or one axis, such as "
         "fsdp, not ['fsdp'] (a list)."),
        ("strategy: fsdp 4", "line 1: strategy must be a mapping of mesh axes to sizes, such as {fsdp: 4, data: 2}, "),
        ("strategy: fsd", "line 1: strategy.fsd is not a key. Did you mean strategy.fsdp?"),
        ("strategy: {fsd: 2}", "line 1: strategy.fsd is not a key. Did you mean strategy.fsdp?"),
        ("model: {name: transfomer}",
         "line 1: model.name must be hugging_face, mlp, moe, transformer, or your own as module:function, not "
         "'transfomer' (text). Did you mean transformer?"),
        ("model: {name: my_model.make}",
         "line 1: model.name must be hugging_face, mlp, moe, transformer, or your own as module:function, not "
         "'my_model.make' (text). Did you mean my_model:make?"),
        ("model: {name: my_model.py}",
         "line 1: model.name must be hugging_face, mlp, moe, transformer, or your own as module:function, not "
         "'my_model.py' (text). Did you mean my_model:make?"),
        ("strategy: {fsdp: -2}", "line 1: strategy.fsdp=-2 must be at least 1, or -1 for the rest of the devices."),
        ("precision: {compute: bf16}", "line 1: precision.compute='bf16' is not one of "),
        ("run: {seed: 4294967296}", "line 1: run.seed=4294967296 has to be from 0 to 2**32 - 1 = 4294967295: "),
        ("run: {seed: 1e300}", "line 1: run.seed=a number of 997 bits has to be from 0 to 2**32 - 1"),
        ("run: {seed: -1}", "line 1: run.seed must be at least 0, not -1 (a whole number)."),
        ("train: {clip_norm: .nan}", "line 1: train.clip_norm must be a number, and finite, not nan (a number)."),
        ("train: {clip_norm: .inf}", "line 1: train.clip_norm must be a number, and finite, not inf (a number)."),
        ("optimizer: {learning_rate: .nan}", "line 1: optimizer.learning_rate must be a number, and finite, not nan"),
        ("model: {name: moe, capacity_factor: .nan}", "line 1: model.capacity_factor must be a number, and fin"),
        ("strategy: {data: {size: 2, outer_momentum: .inf}}", "line 1: strategy.data.outer_momentum must be a number"),
        ("timeouts: {heartbeat: 0}", "line 1: timeouts.heartbeat=0 must be at least 1 second."),
    ],
)  # fmt: skip
def test_bad_files(write, text, problem):
    (found,) = problems_of(write(text))
    assert found.startswith(problem)


def test_one_axis_alone_has_all_devices(write):
    assert load_config(write("strategy: fsdp", "one.yaml")).strategy == {"fsdp": FSDPConfig(size=-1)}
    path = write(GOOD)
    assert load_config(path, ["strategy=tensor"]).strategy == load_config(path, ["strategy={tensor: -1}"]).strategy
    given = load_config(path, ["strategy.fsdp.floor_bytes=1", "strategy=fsdp"]).strategy
    assert {axis: (options.size, options.floor_bytes) for axis, options in given.items()} == {"fsdp": (-1, 1)}


def test_preset_by_name_with_or_without_its_ending():
    assert find_config("quickstart") == find_config("quickstart.yaml")
    assert find_config("quickstart").parent.name == "configs"


def test_a_file_goes_before_a_preset(write, monkeypatch, tmp_path):
    write(GOOD, "quickstart.yaml")
    monkeypatch.chdir(tmp_path)
    assert load_config("quickstart.yaml").train.global_batch == 16
    assert find_config("quickstart").parent.name == "configs"


def test_unknown_presets(tmp_path):
    (problem,) = problems_of("quickstrat")
    assert problem.startswith("there is no such file, nor a preset of that name. Did you mean quickstart?")
    assert f"Presets: {', '.join(preset_names())}." in problem
    assert "no such file" in problems_of(tmp_path / "quickstart.yaml")[0]


def test_a_file_that_cannot_be_read(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_bytes(b"\xff\xfe\xff")
    assert "cannot be read" in problems_of(path)[0]


def test_no_device_is_touched(write):
    code = """if True:
        import sys
        from spmdkit.configs import ConfigError, load_config
        from spmdkit.mesh.simulate import backend_started
        try:
            load_config(sys.argv[1])
        except ConfigError:
            pass
        assert not backend_started()
    """
    for text in (GOOD, "stepz: 1"):
        subprocess.run([sys.executable, "-c", code, str(write(text))], check=True, timeout=60)


def test_sizes_need_not_fit_where_the_mesh_is_chosen_later(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("run: {simulate: 4}\nstrategy: {fsdp: 8}\ntrain: {global_batch: 3}\nlaunch: {elastic: [tensor]}\n")
    with pytest.raises(ConfigError):
        load_config(path)
    assert load_config(path, sizes=False).train.global_batch == 3
    with pytest.raises(ConfigError, match=r"train\.stps is not a key"):
        load_config(path, ["train.stps=1"], sizes=False)

"""Loading a config: defaults, overrides and the messages of invalid configs."""

import pytest
from spmdkit.configs import ConfigError, load_config, resolved_yaml
from spmdkit.parallel.data import DataParallelConfig
from spmdkit.parallel.fsdp import FSDPConfig
from support.runs import write_config

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


def test_merges_file_and_defaults(write):
    config = load_config(write(GOOD))
    assert config.strategy == {"fsdp": FSDPConfig(size=4), "data": DataParallelConfig(size=2)}
    assert (config.train.steps, config.train.accumulate, config.run.simulate) == (20, 1, 8)
    assert config.model["name"] == "transformer"
    assert load_config(write("# nothing\n")).strategy == {"data": DataParallelConfig(size=-1)}


def test_names_the_run_directory_after_the_file(write):
    path = write(GOOD, "wide.yaml")
    assert load_config(path).run.dir == "runs/wide"
    assert load_config(path, ["run.dir=elsewhere"]).run.dir == "elsewhere"
    assert load_config(path).source == path


def test_completes_a_catalog_model_and_keeps_a_user_model(write):
    assert set(load_config(write("model: {name: mlp}")).model) > {"name"}
    config = load_config(write("model: {name: 'mine:make', width: 3}"))
    assert config.model == {"name": "mine:make", "check": "error", "width": 3}


@pytest.mark.parametrize("model", ["name: 'mine:make', width: 3", "name: mlp"])
def test_every_model_has_the_key_check(model, write):
    assert load_config(write(f"model: {{{model}}}"), ["model.check=warn"]).model["check"] == "warn"
    with pytest.raises(ConfigError, match=r"line 1: model.check must be one of error, warn, off \(Did you mean warn"):
        load_config(write(f"model: {{{model}, check: warm}}"))


def test_completes_callbacks(tmp_path):
    given = ["csv", {"name": "early_stopping", "patience": 7}, {"name": "mine:make", "width": [1, 2]}]
    config = load_config(write_config(tmp_path, callbacks=given))
    csv, early, own = config.callbacks
    assert csv == {"name": "csv", "path": "metrics.csv"}
    assert early == {"name": "early_stopping", "monitor": "eval_loss", "patience": 7, "min_delta": 0.0, "mode": "min"}
    assert own == {"name": "mine:make", "width": [1, 2]}
    (tmp_path / "resolved.yaml").write_text(resolved_yaml(config))
    assert load_config(tmp_path / "resolved.yaml") == config
    assert load_config("quickstart", ["callbacks=[csv]"]).callbacks == (csv,)
    (never,) = load_config("quickstart", [f"callbacks=[{{name: early_stopping, patience: {10**400}}}]"]).callbacks
    assert never["patience"] == 10**400


def test_reads_layout_rules(write):
    config = load_config(write("layouts: {rules: {'a.*': [fsdp, null, [data, fsdp]]}, unmatched_floor: 64KiB}"))
    assert config.layouts.rules == {"a.*": ("fsdp", None, ("data", "fsdp"))}
    assert config.layouts.unmatched_floor == 65536


def test_gives_all_devices_to_a_single_axis(write):
    assert load_config(write("strategy: fsdp", "one.yaml")).strategy == {"fsdp": FSDPConfig(size=-1)}
    path = write(GOOD)
    assert load_config(path, ["strategy=tensor"]).strategy == load_config(path, ["strategy={tensor: -1}"]).strategy
    given = load_config(path, ["strategy.fsdp.floor_bytes=1", "strategy=fsdp"]).strategy
    assert {axis: (options.size, options.floor_bytes) for axis, options in given.items()} == {"fsdp": (-1, 1)}


def test_reports_all_problems_at_once_with_lines(write):
    path = write(
        "run: {simulate: 8}\nmodel:\n  layrs: 8\nstrategy: {fsdp: four}\ntrain:\n  steps: ten\n  remat: ful\n"
        "stepz: 1\nlayouts:\n  rules: {'a.*': [fsdpp]}\ndata:\n  length: 0\n  source: stdlb\n"
    )
    problems = problems_of(path, "optimizer.lernin_rate=1", "train.steps=3", "seed=1")
    expected = [
        "line 3: model.layrs is not a valid key. Did you mean model.layers?",
        "line 4: strategy.fsdp.size must be an integer, got 'four' (string).",
        "line 7: train.remat must be one of none, dots, selective, local, full (Did you mean full?), "
        "got 'ful' (string).",
        "line 8: stepz is not a valid section. Valid sections: run, model, ",
        "line 10: layouts.rules: 'a.*' names 'fsdpp', which is not a mesh axis",
        "line 12: data.length must be at least 1",
        "line 13: data.source='stdlb'",
        "the command line: optimizer.lernin_rate=1: optimizer.lernin_rate is not a valid key. Did you mean optimizer",
        "the command line: seed=1: seed is not a valid section. Did you mean run.seed?",
    ]
    for start in expected:
        assert any(problem.startswith(start) for problem in problems), (start, problems)
    assert len(problems) == len(expected)


NAMES = "model.name must be hugging_face, mlp, moe, transformer, or your own as module:function, got "


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("train: 3", "line 1: train must be a mapping (key: value), got 3 (integer). Did you mean train.steps=3 (in a "
                     "file, train: {steps: 3})?"),
        ("model: mlp", "line 1: model must be a mapping such as {name: transformer}, got 'mlp' (string). Did you mean "
                       "model.name=mlp (in a file, model: {name: mlp})?"),
        ("precision: bf16", "line 1: precision must be a mapping (key: value), got 'bf16' (string). Did you mean "
                            "precision.compute=bfloat16 (in a file, "),
        ("optimizer: adam", "line 1: optimizer must be a mapping (key: value), got 'adam' (string). Did you mean "
                            "optimizer.name=adam (in a file, "),
        ("guards: true", "line 1: guards must be a mapping (key: value), got true (boolean)."),
        ("callbacks: csv", "line 1: callbacks must be a list such as [csv, {name: early_stopping, patience: 3}], got "
                           "'csv' (string). Did you mean [csv]?"),
        ("strategy: 'fsdp:8'",
         "line 1: strategy must be a mapping of mesh axes to sizes, such as {fsdp: 4, data: 2}, or one axis, such as "
         "fsdp, got 'fsdp:8' (string). Write strategy.fsdp=8, or quote a mapping: 'strategy={fsdp: 4, "),
        ("strategy: [fsdp]",
         "line 1: strategy must be a mapping of mesh axes to sizes, such as {fsdp: 4, data: 2}, or one axis, such as "
         "fsdp, got ['fsdp'] (list)."),
        ("strategy: fsd", "line 1: strategy.fsd is not a valid key. Did you mean strategy.fsdp?"),
        ("strategy: {fsd: 2}", "line 1: strategy.fsd is not a valid key. Did you mean strategy.fsdp?"),
        ("strategy: {fsdp: -2}", "line 1: strategy.fsdp=-2 "),
        ("strategy: {fsdp: 8, floor_bytes: 1}",
         "line 1: strategy.floor_bytes is not a valid key. Did you mean strategy.data.floor_bytes or strategy.fsdp.fl"),
        ("strategy: {data: 8, keep: step}", "line 1: strategy.keep is not a valid key. Did you mean strategy.fsdp."),
        ("strategy: {fsdp: 8, fsdp.keep: step}",
         "line 1: strategy.fsdp.keep is not a valid key. In a file, dots do not separate keys: write fsdp: {keep: "),
        ("strategy.fsdp.keep: step",
         "strategy.fsdp.keep is not a valid section. In a file, dots do not separate keys: write strategy: {fsdp: {k"),
        ("strategy:\n  fsdp: 8\n    keep: step", "invalid YAML: line 3, column 9: mapping values are not allowed here"),
        ("lr: 1e-3", "line 1: lr is not a valid section. Did you mean optimizer.learning_rate?"),
        ("train: {epochs: 3}",
         "line 1: train.epochs is not a valid key. Did you mean train.steps? It counts optimizer steps; an epoch is "),
        ("optimizer: {schedule: warmup_cosine}",
         "line 1: optimizer.schedule must be a mapping (key: value), got 'warmup_cosine' (string). Write {name: war"),
        ("model: {name: transfomer}", f"line 1: {NAMES}'transfomer' (string). Did you mean transformer?"),
        ("model: {name: my_model.make}", f"line 1: {NAMES}'my_model.make' (string). Did you mean my_model:make?"),
        ("model: {name: my_model.py}", f"line 1: {NAMES}'my_model.py' (string). Did you mean my_model:make?"),
        ("model: {name: moe, capacity_factor: .nan}", "line 1: model.capacity_factor must be a finite number, got nan"),
        ("precision: {compute: bf16}", "line 1: precision.compute must be one of float64, float32, bfloat16, float16"),
        ("run: {seed: 4294967296}", "line 1: run.seed must be at most 4294967295, got 4294967296 (integer)."),
        ("run: {seed: -1}", "line 1: run.seed must be at least 0, got -1 (integer)."),
        ("run: {allow: [my-package]}", "line 1: run.allow: 'my-package' is not a valid module name"),
        ("run: {cache: 'gs://bucket/x'}", "line 1: run.cache: 'gs://bucket/x' is not a directory of a file system."),
        ("run: {xla: fast}", "line 1: run.xla must be one of default, none or a list, got 'fast' (string)."),
        ("run: {xla: [fast]}", "line 1: run.xla: 'fast' is not an XLA option such as xla_gpu_autotune"),
        ("precision: {loss_scale_initial: 1.0e-320}",
         "line 1: precision.loss_scale_initial must be positive in float32, got 1e-320 (number)."),
        ("precision: {loss_scale: 1.0e+300}", "line 1: precision.loss_scale must be a number of float32, at most"),
        ("train: {clip_norm: .inf}", "line 1: train.clip_norm must be a finite number, got inf (number)."),
        ("train: {not_finite: rollback}", "line 1: train.not_finite must be one of stop, skip, roll_back (Did you"),
        ("train: {not_finite: roll_back}\nprecision: {compute: float16}",
         "line 1: train.not_finite=roll_back with precision.compute=float16 and precision.loss_scale=auto: dynamic "),
        ("checkpoint: {start_fresh: [head/.*]}", "line 1: checkpoint.start_fresh names parameters that are not read "),
        ("checkpoint: {start_from: a, start_fresh: ['(']}", "line 1: checkpoint.start_fresh: '('"),
        ("guards: {replicas_every: -1}", "line 1: guards.replicas_every must be at least 0, got -1 (integer)."),
        ("guards: {stragglers: 1.0}", "line 1: guards.stragglers must be less than 1, got 1.0 (number)."),
        ("guards: {straggler_steps: 1}", "line 1: guards.straggler_steps must be at least 2, got 1 (integer)."),
        ("timeouts: {heartbeat: 0}", "line 1: timeouts.heartbeat"),
        ("launch: {nodes: 0}", "line 1: launch.nodes must be at least 1, got 0 (integer)."),
        ("launch: {time: '1:99:00'}", "line 1: launch.time='1:99:00' is not a valid time limit."),
        ("launch: {environment: {A B: x}}", "line 1: launch.environment: 'A B' is not a valid name of an environment"),
        ('launch: {environment: {A: "x\\ny"}}', "line 1: launch.environment.A must not contain control characters"),
        ('launch: {setup: ["a\\nb"]}', "line 1: launch.setup must not contain control characters, got 'a\\nb'."),
        ("launch: {slurm: {options: ['-C h100']}}",
         "line 1: launch.slurm.options: '-C h100' must be one long option with its value, such as '--con"),
        ("launch: {slurm: {srun_options: [label]}}", "line 1: launch.slurm.srun_options: 'label' must be one long opt"),
        ("callbacks: csv", "line 1: callbacks must be a list such as [csv, {name: early_stopping, patience: 3}], go"),
        ("callbacks: [{patience: 3}]", "line 1: callbacks.0 must be a name or a mapping with a name"),
        ("callbacks: [early_stoping]", "line 1: callbacks.0.name must be early_stopping, reduce_on_plateau, "),
        ("callbacks: [csv, {name: csv, file: x}]", "line 1: callbacks.1.file is not a valid key. Valid keys: path."),
        ("callbacks: [{name: early_stopping, patience: x}]",
         "line 1: callbacks.0.patience must be an integer, got 'x' (string)."),
        ("callbacks: [{name: early_stopping, patience: 0}]", "line 1: callbacks.0.patience"),
        ("callbacks: [time_limit]", "line 1: callbacks.0.after is required."),
        ("callbacks: [{name: time_limit, after: '3'}]", "line 1: callbacks.0.after='3' "),
        ("callbacks: [{name: 'os:system', command: ls}]", "line 1: callbacks.0.name='os:system' would import os, whi"),
    ],
)  # fmt: skip
def test_rejects_invalid_files(write, text, problem):
    (found,) = problems_of(write(text))
    assert found.startswith(problem)


@pytest.mark.parametrize(
    ("policy", "skips", "rollbacks"),
    [("stop", 0, 0), ("skip", 3, 0), ("skip\ntrain.most_not_finite=7", 7, 0), ("roll_back", 0, 3)],
)
def test_limits_skipped_updates_and_rollbacks_by_policy(policy, skips, rollbacks):
    train = load_config("mlp", f"train.not_finite={policy}".splitlines()).train
    assert (train.max_skips, train.max_rollbacks) == (skips, rollbacks)


def test_allows_rollbacks_with_a_fixed_loss_scale():
    given = ["precision.compute=float16", "train.not_finite=roll_back", "precision.loss_scale=1024"]
    assert load_config("mlp", given).train.not_finite == "roll_back"


def test_ignores_sizes_if_the_mesh_is_chosen_later(write):
    path = write("run: {simulate: 4}\nstrategy: {fsdp: 8}\ntrain: {global_batch: 3}\nlaunch: {elastic: [tensor]}\n")
    with pytest.raises(ConfigError):
        load_config(path)
    assert load_config(path, sizes=False).train.global_batch == 3
    with pytest.raises(ConfigError, match=r"train\.stps is not a valid key"):
        load_config(path, ["train.stps=1"], sizes=False)


def test_counts_devices_of_all_processes(write):
    assert load_config(write(GOOD), num_processes=2, simulate=4)
    assert load_config(write(GOOD), ["run.simulate=4"], num_processes=2)
    (problem,) = problems_of(write(GOOD), num_processes=2, simulate=2)
    assert "but 2 processes with 2 devices each give 4: 8 != 4. Set strategy.fsdp=2 or strategy.data=1." in problem
    sizes = ["launch.nodes=2", "launch.processes_per_node=4"]
    assert load_config("quickstart", [*sizes, "run.simulate=1"], num_processes=None).launch.num_processes == 8
    with pytest.raises(ValueError, match="8 processes with 8 devices each give 64"):
        load_config("quickstart", sizes, num_processes=None)


def test_counts_gpus_as_devices():
    words = ["run.simulate=0", "launch.nodes=2", "launch.gpus_per_process=4"]
    load_config("quickstart", words, num_processes=None)
    with pytest.raises(ValueError, match="gives 4 GPUs"):
        load_config("quickstart", [*words[:2], "launch.gpus_per_process=2", "strategy.data=8"], num_processes=None)


def test_rejects_null_in_place_of_sections(tmp_path):
    (tmp_path / "comments.yaml").write_text("# run: {}\n")
    (tmp_path / "null.yaml").write_text("null\n")
    load_config(tmp_path / "comments.yaml", sizes=False)
    with pytest.raises(ValueError, match="the file must be a mapping of sections, got null"):
        load_config(tmp_path / "null.yaml", sizes=False)

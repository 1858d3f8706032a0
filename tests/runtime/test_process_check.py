"""Settings that change numbers are compared between processes; those that only differ by place are not."""

import json
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
from spmdkit.configs import load_config
from spmdkit.configs.schema import Config
from spmdkit.mesh.compat import jax_settings
from spmdkit.parallel import Model, build_step, lay_out
from spmdkit.runtime import ownership
from spmdkit.runtime import process_check as agreement
from spmdkit.runtime.process_check import (
    Disagreement,
    NotShared,
    agree_on_config,
    agree_on_init,
    agree_on_start,
    check_shared,
    numeric_settings,
)
from spmdkit.runtime.provenance import Provenance
from support.runs import write_config

BUILT = SimpleNamespace(
    config=None,
    batch=None,
    layouts=SimpleNamespace(table=SimpleNamespace(to_json=dict)),
    step=SimpleNamespace(lower=lambda batch: SimpleNamespace(as_text=str)),
)
MADE_OF = Provenance("", "")


@pytest.fixture
def ranks(monkeypatch):
    """Two processes: what this one gives, and the same with other values in place of some."""
    monkeypatch.setattr(agreement, "coordination_client", object)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(agreement, "wait_until_all_know", lambda: None)

    def other(**values):
        def exchange(name, text, **options):
            theirs = json.loads(text) | values
            return [text, json.dumps({key: each for key, each in theirs.items() if each is not None})]

        monkeypatch.setattr(agreement, "exchange", exchange)

    return other


@pytest.mark.parametrize(
    ("setting", "value", "says"),
    [
        ("XLA_FLAGS --xla_cpu_enable_fast_math", "true", "not set on rank 0, true on rank 1"),
        ("XLA_FLAGS --xla_set_on_rank_0", None, "7 on rank 0, not set on rank 1"),
        ("jax.config.jax_threefry_partitionable", "False", "True on rank 0, False on rank 1"),
        ("jax.config.jax_default_prng_impl", "rbg", "threefry2x32 on rank 0, rbg on rank 1"),
        ("jax.config.jax_default_matmul_precision", "highest", "None on rank 0, highest on rank 1"),
        ("jax.config.jax_enable_x64", "True", "False on rank 0, True on rank 1"),
        ("NVIDIA_TF32_OVERRIDE", "0", "not set on rank 0, 0 on rank 1"),
    ],
)
@pytest.mark.parametrize("when", ["config", "start"])
def test_refuses_another_setting(setting, value, says, when, ranks, tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_set_on_rank_0=7")
    config = load_config(write_config(tmp_path))
    built = SimpleNamespace(**{**vars(BUILT), "config": config})
    ranks(**{setting: value})
    agree = {"config": lambda: agree_on_config({}, 1.0), "start": lambda: agree_on_start(built, MADE_OF)}  # pyright: ignore[reportArgumentType]
    with pytest.raises(Disagreement) as found:
        agree[when]()
    assert found.value.exit_code == 2
    assert f"\n  {setting}: {says}\n" in str(found.value)


def test_refuses_another_seed(ranks):
    ranks(**{"run.seed": "1"})
    with pytest.raises(Disagreement, match=r"\n  run\.seed: 0 on rank 0, 1 on rank 1\n"):
        agree_on_config({"run": {"seed": 0, "dir": "runs/a"}}, 1.0)


def test_hosts_may_have_roots_of_their_own(ranks, monkeypatch):
    sent = []
    ranks()
    monkeypatch.setattr(agreement, "agree", lambda name, found, seconds: sent.append(found))
    for root in ("/scratch/a", "/scratch/b"):
        agree_on_config({"run": {"root": root, "dir": "runs/a"}}, 1.0)
    assert sent[0] == sent[1]
    assert sent[0]["run.dir"] == '"runs/a"'


def test_compares_only_the_modules_that_the_config_names(ranks, tmp_path, monkeypatch):
    config = load_config(write_config(tmp_path, model={"name": "net_of_mine:make"}))
    built = SimpleNamespace(**{**vars(BUILT), "config": config})
    sent = []
    ranks()
    monkeypatch.setattr(agreement, "agree", lambda name, found, seconds: sent.append(found))
    for code in ({"net_of_mine": "1"}, {"net_of_mine": "1", "imported_on_rank_0": "1"}, {"net_of_mine": "2"}):
        made_of = Provenance("", "", {module: (f"{module}.py", hashed) for module, hashed in code.items()})
        agree_on_start(built, made_of)  # pyright: ignore[reportArgumentType]
    assert sent[0] == sent[1] != sent[2]


def random_init(key):
    return {"w": jax.random.normal(key, (4,)) + np.random.standard_normal(4)}


def seeded_init(key):
    return {"w": jax.random.normal(key, (4,)) + np.random.default_rng(0).standard_normal(4)}


def built_with(init, optimizer=None):
    model = Model(init=init, loss=lambda params, batch, key: (params["w"].sum(), 1.0))
    step = build_step(model, optimizer or optax.sgd(0.1), lay_out(model, {"data": 8}))
    return SimpleNamespace(step=step, config=Config())


def process(init, optimizer, monkeypatch):
    """Returns the text that a process with this model and optimizer sends."""
    sent = []
    monkeypatch.setattr(agreement, "exchange", lambda name, text, **options: sent.append(text) or [text])
    agree_on_init(built_with(init, optimizer), "init, 0", draws=True)  # pyright: ignore[reportArgumentType]
    return sent[0]


def drawn_by_numpy(params):
    return jax.tree.map(lambda leaf: leaf + np.random.standard_normal(leaf.shape), params)


NOISY = optax.GradientTransformation(drawn_by_numpy, lambda updates, state, params=None: (updates, state))


@pytest.mark.parametrize(
    ("init", "optimizer", "program"),
    [(random_init, None, "the parameters"), (seeded_init, NOISY, "the optimizer's state")],
)
def test_refuses_an_init_that_draws_numbers_outside_its_key(init, optimizer, program, ranks, monkeypatch):
    ranks()
    other = process(init, optimizer, monkeypatch)
    monkeypatch.setattr(agreement, "exchange", lambda name, text, **options: [text, other])
    with pytest.raises(Disagreement) as caught:
        agree_on_init(built_with(init, optimizer), "init, 0", draws=True)  # pyright: ignore[reportArgumentType]
    assert caught.value.exit_code == 2
    (line,) = [line for line in str(caught.value).splitlines() if line.startswith("  ")]
    assert line.startswith(f"  the program that creates {program} (StableHLO): ")
    assert "init is not deterministic: it takes numbers from something else than its key" in str(caught.value)


def test_an_init_that_follows_from_its_key_is_the_same_program_everywhere(ranks, monkeypatch):
    ranks()
    assert process(seeded_init, None, monkeypatch) == process(seeded_init, None, monkeypatch)


def test_given_parameters_are_not_drawn(ranks, monkeypatch):
    ranks()
    sent = []
    monkeypatch.setattr(agreement, "exchange", lambda name, text, **options: sent.append(text) or [text])
    agree_on_init(built_with(random_init), "init, 0", draws=False)  # pyright: ignore[reportArgumentType]
    assert list(json.loads(sent[0])) == ["the program that creates the optimizer's state (StableHLO)"]


def test_names_the_fix_of_the_caller(ranks):
    ranks(step="2")
    with pytest.raises(Disagreement, match=r"\n  step: 1 on rank 0, 2 on rank 1\nName a step, and start them again; "):
        agreement.agree("which", {"step": "1"}, 1.0, "Name a step")


def test_reads_flags_as_xla_does(tmp_path):
    text = "--xla_a=1  --xla_b --xla_a=2 --xla_dump_to=/x --xla_force_host_platform_device_count=8"
    expected = {"XLA_FLAGS --xla_a": "2", "XLA_FLAGS --xla_b": "true"}
    (tmp_path / "flags").write_text(text)
    assert numeric_settings({"XLA_FLAGS": text}, {}) == expected
    assert numeric_settings({"XLA_FLAGS": str(tmp_path / "flags")}, {}) == expected
    assert numeric_settings({"NVIDIA_TF32_OVERRIDE": "0"}, {}) == {"NVIDIA_TF32_OVERRIDE": "0"}


def test_refuses_the_directory_of_another_run(tmp_path, monkeypatch):
    (tmp_path / ownership.NAME).write_text(json.dumps(ownership.this_process()._asdict()))
    owner = json.dumps(["another token", ownership.this_place()])
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(agreement, "broadcast_text", lambda *_, **options: owner)
    monkeypatch.setattr(agreement, "exchange", lambda _, text, **options: ["yes", text])
    with pytest.raises(NotShared, match="is not shared between ranks 0 and 1"):
        check_shared(tmp_path, 1.0)


@pytest.mark.parametrize(
    "name",
    ["jax_compilation_cache_dir", "jax_num_cpu_devices", "jax_log_compiles", "jax_dump_ir_to", "jax_debug_log_modules"],
)
def test_ignores_settings_of_one_place(name):
    assert name in jax_settings()
    assert not numeric_settings({}, {name: "anything"})

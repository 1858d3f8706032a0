"""`spmdkit plan`: the figures of a run on a cluster that is not here."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from spmdkit.configs import load_config
from spmdkit.layouts.sizes import format_bytes
from spmdkit.mesh import list_devices
from spmdkit.planning import run_plan
from spmdkit.planning.kernel_time import EFFICIENCY
from spmdkit.planning.run_plan import plan_run, time_lines, tokens_per_device
from spmdkit.planning.timeline import Exchange, Timeline
from spmdkit.runtime.build_run import build
from spmdkit.runtime.compilation import DOUBLE_BUFFERING

SIZES = "model.layers=2 model.width=64 model.heads=4 data.length=32 train.global_batch=16 precision.compute=bfloat16"
KEYS = {
    *("target", "devices", "mesh", "compiled", "compile_seconds", "memory", "traffic", "step_seconds"),
    *("tokens_per_second_per_device", "mfu", "exposed_communication", "bubble", "efficiency", "remedies", "notes"),
}
CARD = """
name: a small card
compute_capability: "9.0"
cores: 1
clock_ghz: 1.0
memory_bytes: 100000000
memory_bandwidth: 1.0e+9
l2_bytes: 1000
shared_memory: 1000
shared_memory_per_block: 1000
flops: {bfloat16: 1.0e+12, float32: 0.5e+12}
gpus_per_host: 8
link: 8.0e+9
network: 1.0e+9
"""


@pytest.mark.parametrize(("shape", "tokens"), [((16, 32), 64), ((16,), 0)])
def test_classes_of_rows_are_not_tokens(shape, tokens):
    layouts = SimpleNamespace(mesh=SimpleNamespace(size=8))
    built = SimpleNamespace(batch={"targets": jax.ShapeDtypeStruct(shape, "int32")}, layouts=layouts)
    assert tokens_per_device(built) == tokens


@pytest.fixture
def card(tmp_path):
    path = tmp_path / "card.yaml"
    path.write_text(CARD)
    return path


def planned(target, *overrides):
    config = load_config("fsdp", [*SIZES.split(), *overrides], sizes=False)
    return plan_run(config, str(target))


def test_prints_collectives_that_expose_more_than_a_hundredth():
    collectives = {"long": 0.5, "short": 0.004}
    exchanges = [Exchange(name, "all-gather", "", 1, 1.0, 1.0, time, 0, 0, "") for name, time in collectives.items()]
    lines = time_lines(Timeline(1.0, 0.496, 2.0, 0.504, 0.0, tuple(exchanges), {}), 1.0, tokens=0)
    assert [line.rpartition(": ")[2] for line in lines if line.startswith("  exposed")] == ["long"]


def test_analytic_plan_has_the_state_of_each_device(without_compiler):
    """AdamW keeps two moments for each parameter, and a count; tokens and weights take 4 bytes each."""
    found = planned("h100:1x8", "strategy={fsdp: {size: 8, floor_bytes: 0}}", "optimizer.name=adamw")
    memory = found.to_json()["memory"]
    assert not found.to_json()["compiled"]
    assert 0 <= memory["optimizer"] - 2 * memory["parameters"] <= 64
    assert memory["gradients"] == memory["parameters"]
    assert memory["temporaries"] is None
    kept = memory["parameters"] + memory["optimizer"] + memory["batch"]
    assert memory["peak_bytes"] == memory["analytic_peak_bytes"] >= kept + memory["gradients"]
    assert memory["headroom_bytes"] == round(0.95 * memory["capacity_bytes"]) - memory["peak_bytes"]
    assert f"  headroom       {format_bytes(memory['headroom_bytes']):>10}   of the 95% that" in str(found)
    assert memory["fits"] is None
    assert "ANALYTIC" in str(found)
    assert "pip install 'spmdkit[targets]'" in str(found)


def test_traffic_has_the_slowest_link_of_each_exchange(without_compiler, card):
    """A ring of 8 at 8 GB/s in a host moves 7/8 of the bytes; 2 hosts exchange 2 x 1/2 of them at 1 GB/s."""
    found = planned(f"{card}:2x8", "strategy={data: 2, fsdp: {size: 8, floor_bytes: 0}}")
    links = {(each.kind, each.axes): each for each in found.traffic}
    gathers, sums = links["all-gather", ("fsdp",)], links["all-reduce", ("data",)]
    assert (gathers.link, sums.link) == ("host", "network")
    assert gathers.least_seconds == pytest.approx(gathers.bytes * 7 / 8 / 8e9)
    assert sums.least_seconds == pytest.approx(sums.bytes / 1e9)


def test_one_group_across_hosts_is_enough_for_the_network(without_compiler, card):
    """Of 4 groups of 3 devices on hosts of 4, the first is within a host."""
    overrides = "train.global_batch=24", "layouts.indivisible=replicate"
    found = planned(f"{card}:3x4", "strategy={data: 4, fsdp: {size: 3, floor_bytes: 0}}", *overrides)
    (gathers,) = (each for each in found.traffic if (each.kind, each.axes) == ("all-gather", ("fsdp",)))
    assert gathers.link == "network"
    assert gathers.least_seconds > gathers.bytes * 2 / 3 / 8e9


def test_generated_tokens_have_enough_rows_for_every_device(without_compiler):
    rows = ["data.source=synthetic_tokens", "train.global_batch=8192", "strategy={data: 1024, fsdp: 8}"]
    found = planned("h100:1024x8", *rows)
    assert (found.target.size, found.tokens) == (8192, 32)


def test_tpus_exchange_over_the_links_of_the_slice(without_compiler):
    """8 chips of a 2 x 2 x 2 slice have 3 links of 100 GB/s each; fsdp 4 spans a square, with 2 of them."""
    whole = planned("v5p:2x2x2", "strategy={fsdp: {size: 8, floor_bytes: 0}}")
    square = planned("v5p:2x2x2", "strategy={data: 2, fsdp: {size: 4, floor_bytes: 0}}")
    for found, members, links in ((whole, 8, 3), (square, 4, 2)):
        (gathers,) = (each for each in found.traffic if (each.kind, each.axes) == ("all-gather", ("fsdp",)))
        assert gathers.link == "host"
        assert gathers.least_seconds == pytest.approx(gathers.bytes * (members - 1) / members / (links * 100e9))
    assert "pip install 'spmdkit[tpu-targets]'" in str(whole)


@pytest.mark.slow
def test_step_that_the_compiler_refuses_does_not_fit(monkeypatch):
    def refuse(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory on HBM")

    monkeypatch.setattr(run_plan, "_compiled", refuse)
    found = planned("v5p:2x2x2", "strategy={fsdp: 8}")
    assert found.fits is False
    assert "the compiler refuses: JaxRuntimeError: RESOURCE_EXHAUSTED: Ran out of memory on HBM" in str(found)


def test_names_missing_peak_of_card(without_compiler, card):
    found = planned(f"{card}:1x8", "strategy={fsdp: 8}", "precision.compute=float16")
    assert found.step_seconds is None
    assert "unknown: the card of the target has no peak for float16 (flops)" in str(found)


@pytest.mark.parametrize(("accumulate", "buffers"), [(1, None), (2, True)])
def test_default_options_know_the_microbatches(without_compiler, accumulate, buffers):
    """With microbatches, gradients are summed at the end, not in the loop over blocks."""
    overrides = "strategy={data: 2, fsdp: 4}", f"train.accumulate={accumulate}"
    config = load_config("fsdp", [*SIZES.split(), *overrides], sizes=False)
    built = build(config, devices=list_devices(target="h100:1x8"))
    assert dict(built.step.plan.options.xla).get(DOUBLE_BUFFERING) is built.xla.used.get(DOUBLE_BUFFERING) is buffers


def test_mfu_is_the_share_of_the_peak(without_compiler, card):
    found = planned(f"{card}:1x8", "strategy={fsdp: 8}")
    assert found.mfu == pytest.approx(found.model_flops / (8 * found.step_seconds * 1e12))
    assert found.tokens_per_second_per_device == pytest.approx(16 * 32 / 8 / found.step_seconds)
    twice = planned(f"{card}:1x8", "strategy={fsdp: 8}", "train.global_batch=32")
    assert twice.model_flops == 2 * found.model_flops


@pytest.mark.slow_cases("none-0", "full-1")
@pytest.mark.parametrize(("remat", "again"), [("none", 0), ("selective", 0.6), ("full", 1)])
def test_idle_stages_take_their_share_of_the_time(without_compiler, card, remat, again):
    """1F1B with 2 stages and 4 microbatches is idle for 1/5 of the time (Narayanan et al. 2021, section 2.2).

    With links and memory that take no time, products and attention take the rest, at their share of 1 TFLOP/s: 8 rows
    of 32 positions pass through one block of 53,248 weights and 4 heads of width 16, and a head of 64 x 256.
    """
    card.write_text(re.sub(r"[18].0e\+9", "1.0e+21", CARD))
    strategy = "strategy={pipe: {size: 2, microbatches: 4, schedule: 1f1b}, fsdp: 4}"
    found = planned(f"{card}:1x8", strategy, f"train.remat={remat}", "train.global_batch=32")
    assert found.bubble == pytest.approx(1 / 5)
    product, head = 2 * 8 * 32 * 53_248 / EFFICIENCY.matmul, 2 * 8 * 32 * 64 * 256 / EFFICIENCY.matmul
    scores = 8 * 4 * 32 * 32 / 2 * 16 * 128 / 16
    forward = product + 4 * scores / EFFICIENCY.attention
    kernels = (1 + again) * forward + 2 * product + 10 * scores / EFFICIENCY.attention_backward + 3 * head
    assert found.step_seconds == pytest.approx(kernels / 1e12 / (1 - 1 / 5))


@pytest.mark.slow
def test_estimated_products_wait_for_tensor_but_not_for_fsdp(without_compiler, tmp_path):
    """With kernels that take no time, both take as long as the bytes over the links."""
    fast = re.sub("e.12", "e+21", CARD.replace("memory_bandwidth: 1.0e+9", "memory_bandwidth: 1.0e+21"))
    seconds = {}
    for name, text in {"links": fast, "kernels": CARD.replace("8.0e+9", "8.0e+21"), "both": CARD}.items():
        (tmp_path / f"{name}.yaml").write_text(text)
        for axis in ("fsdp", "tensor"):
            seconds[name, axis] = planned(f"{tmp_path / name}.yaml:1x4", f"strategy={{{axis}: 4}}").step_seconds
    assert seconds["both", "fsdp"] == pytest.approx(max(seconds["links", "fsdp"], seconds["kernels", "fsdp"]))
    assert seconds["both", "tensor"] == pytest.approx(seconds["links", "tensor"] + seconds["kernels", "tensor"])


@pytest.mark.slow
def test_estimates_stages_of_a_model_without_known_sizes(without_compiler):
    """With LoRA, only the operations of the model are known."""
    lora = "model.lora={rank: 4, match: ['blocks/attention/.*']}"
    found = planned("h100:1x8", lora, "strategy={pipe: {size: 2, microbatches: 4}, fsdp: 4}", "train.global_batch=32")
    assert found.step_seconds > found.model_flops / (8 * EFFICIENCY.matmul * found.target.card.flops["bfloat16"])


def test_rejects_models_that_are_too_large_for_every_mesh(without_compiler, card, cli):
    """Two layers of width 64 and AdamW's moments take over 8 x 95,000 bytes."""
    card.write_text(CARD.replace("100000000", "50000"))
    (line,) = cli(2, "plan", "fsdp", *SIZES.split(), "--target", f"{card}:1x8", "strategy={fsdp: 8}").err.splitlines()
    assert re.search(
        r"card.yaml:1x8 is too small for every mesh: parameters .* \+ optimizer .* = .*, and 8 x 95%", line
    )
    assert re.search(r"Plan for more than \d+ devices", line)


def test_command_prints_the_plan_as_json(without_compiler, cli):
    found = json.loads(cli(0, "plan", "fsdp", *SIZES.split(), "--target", "h100:1x8", "--json").out)
    assert found.keys() == KEYS
    assert (found["target"], found["devices"], found["mesh"]["fsdp"]) == ("h100:1x8", 8, 8)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("h100", "expected CARD:HOSTSxGPUS"),
        (
            "h100:3x8",
            "strategy: data 2 x fsdp 8, but there are 24 devices: 16 != 24. Set strategy.data=3 or strategy.fsdp=12",
        ),
        ("h100:1x1", "16 != 1. Set sizes whose product is 1.\n"),
        ("none.yaml:1x8", "none.yaml"),
    ],
)
def test_rejects_targets_that_do_not_fit(target, message, cli):
    assert message in cli(2, "plan", "fsdp", "--target", target, "strategy={data: 2, fsdp: 8}").err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_compilation_leaves_nothing_behind(tmp_path, number):
    """SIGKILL ends the process that compiles, as the system does if memory runs out; SIGTERM ends the command."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    command = [sys.executable, "-m", "spmdkit", "plan", "fsdp", "--target", "h100:1x8", "strategy={fsdp: 8}"]
    environment = {**os.environ, "TMPDIR": str(folder)}
    with subprocess.Popen(command, env=environment, stdout=-1, stderr=-1, text=True, cwd=tmp_path) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        deadline = time.monotonic() + 60
        while not (child := children.read_text().split()) and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(int(child[0]) if number == signal.SIGKILL else process.pid, number)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 2
    assert f"{number.name}" in error
    assert error.count("\n") == 1
    assert not os.path.exists(f"/proc/{child[0]}")
    assert list(tmp_path.iterdir()) == [folder]
    assert not list(folder.iterdir())


@pytest.mark.targets
@pytest.mark.slow
@pytest.mark.skipif(find_spec("libtpu") is None, reason="needs libtpu: pip install 'spmdkit[tpu-targets]'")
def test_libtpu_gives_the_memory_of_a_step():
    """The state of a step is a part of its memory, and the time is marked as an estimate."""
    sizes = "model.width=512", "data.length=256"
    found = planned("v5e:2x2", "strategy={fsdp: {size: 4, floor_bytes: 0}}", *sizes)
    plain = found.to_json()
    assert plain["compiled"]
    assert plain["exposed_communication"] is None
    state = sum(found.state[kind] for kind in ("parameters", "optimizer", "batch"))
    assert found.temporaries > 0
    assert found.peak_bytes >= state + found.temporaries
    assert found.fits
    assert "a program for TPUs is not simulated" in str(found)
    assert "optimal_seconds" in str(found)


OWN = """
import jax, jax.numpy as jnp
def init(key):
    return {"w": jnp.zeros((64, 16))}
def loss(params, batch, key):
    outputs = batch["inputs"] @ params["w"]
    return (outputs.mean(1) ** 2 * batch["weights"]).sum(), batch["weights"].sum()
def searched(params, batch, key):
    total, weight = loss(params, batch, key)
    square = jax.lax.stop_gradient(params["w"].T @ params["w"])
    found = jax.lax.while_loop(lambda x: jnp.sum(x) < 1, lambda x: x @ x + 1, square)
    return total + 0 * found.sum(), weight
model = (init, loss)
unknown = (init, searched)
"""


@pytest.fixture
def own_model(tmp_path, monkeypatch):
    """Models without `flops_per_row`, of which one has a loop of unknown length, in a module of the user."""
    (tmp_path / "own_planned.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_planned", raising=False)
    options = [
        "data={source: synthetic}",
        "strategy={data: 8}",
        "train.global_batch=64",
        "run.allow=[own_planned]",
        "layouts.rules={}",
    ]
    return lambda name: load_config("mlp", [f"model={{name: own_planned:{name}, check: off}}", *options], sizes=False)


def test_own_models_have_a_utilization(own_model, without_compiler):
    found = plan_run(own_model("model"), "h100:1x8")
    assert found.model_flops == 4 * 64 * 16 * 64
    assert 0 < found.mfu < 1
    assert "  MFU  " in str(found)


def test_names_the_loop_whose_operations_are_unknown(own_model, without_compiler):
    found = plan_run(own_model("unknown"), "h100:1x8")
    assert found.mfu is found.step_seconds is None
    loop = r"a loop of unknown length with products in .*/own_planned.py:\d+ \(searched\)"
    assert re.search(f"unknown: the operations of {loop} cannot be counted: state flops_per_row", str(found))

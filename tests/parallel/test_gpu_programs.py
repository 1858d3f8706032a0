"""The step compiled for H100s that are not here: memory, collectives, kernels. `make test-targets` runs these."""

import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from spmdkit.mesh.targets import parse_target
from spmdkit.models import TransformerConfig, transformer
from spmdkit.parallel import census
from spmdkit.parallel.verification.collective_check import check_collectives
from spmdkit.planning.pipeline_time import pipeline_seconds, textbook_seconds
from spmdkit.planning.timeline import simulate
from spmdkit.runtime.compilation import (
    ANALYTICAL_LATENCY,
    DOUBLE_BUFFERING,
    LATENCY_HIDING,
    MEMORY_LIMIT,
    OVERLAP_LIMIT,
    default_options,
)

from spmdkit import Precision, build_step, lay_out, list_devices

pytestmark = [pytest.mark.targets, pytest.mark.slow]
BFLOAT16 = Precision(compute="bfloat16")
LLAMA_8B = {"layers": 32, "width": 4096, "heads": 32, "kv_heads": 8, "mlp_width": 14336, "rope_base": 500_000.0}
SCATTERED = ("reduce-scatter", ("fsdp",))
SMALL = {"layers": 4, "width": 1024, "heads": 8, "kv_heads": 4}


def lay_out_for(target, strategy, *, length=2048, vocabulary=1024, **sizes):
    model = transformer(TransformerConfig(length=length, vocabulary=vocabulary, **(sizes or SMALL)))
    return model, lay_out(model, strategy, precision=BFLOAT16, devices=list_devices(target=target))


def step_for(target, strategy, *, rows, length=2048, vocabulary=1024, remat="full", xla=(), **sizes):
    """A step for a target, and the shapes of its batch."""
    model, plan = lay_out_for(target, strategy, length=length, vocabulary=vocabulary, **sizes)
    xla = {"xla_gpu_enable_triton_gemm": False, **dict(xla)}
    step = build_step(model, optax.adamw(1e-3), plan, clip_norm=1.0, remat=remat, precision=BFLOAT16, xla=xla)
    shapes = {"inputs": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    batch = {name: jax.ShapeDtypeStruct((rows, length), dtype) for name, dtype in shapes.items()}
    return step, batch | {"example": jax.ShapeDtypeStruct((rows,), jnp.int32)}


@pytest.mark.parametrize(
    ("target", "strategy"),
    [
        ("h100:1x8", {"data": 8}),
        ("h100:2x8", {"data": 2, "fsdp": 8}),
        ("h100:1x8", {"data": 2, "tensor": 4}),
        ("h100:1x8", {"pipe": {"size": 4, "microbatches": 8, "schedule": "1f1b"}, "fsdp": 2}),
        ("h100:2x8", {"fsdp": 2, "tensor": 8}),
        ("h100:1x8", {"context": {"size": 2, "attention": "all_to_all"}, "fsdp": 4}),
        ("h100:1x8", {"context": 4, "fsdp": 2}),
        ("a100-80:1x8", {"fsdp": 8}),
        ("b200:1x8", {"fsdp": 8}),
        ("gb200:1x16", {"fsdp": 16}),
    ],
    ids=str,
)
def test_moves_predicted_bytes_and_uses_fused_attention(target, strategy):
    """XLA combines small collectives for GPUs, so their bytes are compared, not their number."""
    step, batch = step_for(target, strategy, rows=16)
    checked = check_collectives(step, batch)
    program = step.compile(batch).as_text()
    assert checked.found
    assert checked.unexpected == checked.fewer == ()
    assert "__cudnn$fmhaSoftmaxBackward" in program
    assert "trick." not in program, "what exists for simulated devices stays there"


def test_8b_step_holds_neither_scores_nor_logits():
    """Llama-3 8B, fsdp 8, 8,192 positions x 2 rows, remat full: 53.4 GB of temporaries with both, 14.0 without."""
    step, batch = step_for("h100:1x8", {"fsdp": 8}, rows=16, length=8192, vocabulary=128_256, **LLAMA_8B)
    compiled = step.compile(batch)
    memory = compiled.memory_analysis()
    parameters, moments = 8_030_261_248 * 4 // 8, 2
    assert memory.argument_size_in_bytes == pytest.approx((1 + moments) * parameters, rel=1e-3)
    assert memory.temp_size_in_bytes < 14e9
    assert not re.search(r"\[2,8,4,2048,8192\]|f32\[2,8192,128256\]", compiled.as_text())


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_stages_of_a_pipeline_wait_only_for_their_messages(schedule):
    """Llama-3 8B on pipe 4 x fsdp 8 x tensor 4, 32 microbatches: if all stages met in each tick, 1.43 times the
    textbook."""
    strategy = {
        "pipe": {"size": 4, "microbatches": 32, "schedule": schedule},
        "fsdp": {"size": 8, "keep": "step"},
        "tensor": 4,
    }
    sizes = {"rows": 256, "length": 8192, "vocabulary": 128_256, **LLAMA_8B}
    step, batch = step_for("h100:16x8", strategy, xla={LATENCY_HIDING: True}, **sizes)
    text, pipeline = step.compile(batch).as_text(), step.plan.pipeline
    found = simulate(text, parse_target("h100:16x8"), timetable=pipeline.timetable)
    textbook = textbook_seconds(pipeline.schedule, pipeline.timetable, found.parts)
    assert pipeline_seconds(pipeline.timetable, found.parts) < 1.05 * textbook
    skipped, ran = sorted(found.parts["backward_input"])
    assert skipped < 0.02 * ran, "a tick that skips a part copies no buffer"
    (gradients,) = (line for line in census(text, step.plan.mesh) if (line.kind, line.axes) == SCATTERED)
    assert gradients.count <= len(step.plan.table.rows), "not one for each microbatch"


def test_remat_policies_trade_memory_for_products_of_the_8b_step():
    """Llama-3 8B as above: peaks of 70, 41 and 26 GB of 80, and 0, 14 and 23 % more operations than without remat."""
    found, xla = {}, {MEMORY_LIMIT: 1000, DOUBLE_BUFFERING: True}
    for remat in ("dots", "selective", "full"):
        options = {"remat": remat, "xla": xla, "rows": 16, "length": 8192, "vocabulary": 128_256, **LLAMA_8B}
        step, batch = step_for("h100:1x8", {"fsdp": 8}, **options)
        compiled = step.compile(batch)
        text, memory = compiled.as_text(), compiled.memory_analysis()
        forwards, backwards = (text.count(f'"__cudnn$fmhaSoftmax{each}"') for each in ("", "Backward"))
        assert backwards
        repeats_attention = forwards > backwards
        found[remat] = memory.peak_memory_in_bytes, simulate(text, parse_target("h100:1x8")), repeats_attention
    peaks, steps, repeats = (dict(zip(found, each, strict=True)) for each in zip(*found.values(), strict=True))
    assert peaks["full"] < peaks["selective"] < 0.55 * 80e9 < peaks["dots"] < 0.95 * 80e9
    assert 1.12 * steps["dots"].flops < steps["selective"].flops < 0.94 * steps["full"].flops
    assert steps["dots"].step_seconds < 0.95 * steps["selective"].step_seconds < 0.95 * steps["full"].step_seconds
    assert repeats == {"dots": False, "selective": False, "full": True}


def test_two_collectives_overlap_if_fsdp_crosses_hosts_alone_or_exchanges():
    limits = {}
    for target, strategy in (
        ("h100:1x8", {"fsdp": 8}),
        ("h100:2x8", {"fsdp": 16}),
        ("h100:2x8", {"fsdp": 8, "tensor": 2}),
        ("h100:2x8", {"fsdp": 2, "tensor": 8}),
    ):
        step, _ = step_for(target, strategy, rows=16)
        options = default_options(step.plan)
        limits[target, *strategy.items()] = options.get(OVERLAP_LIMIT), options.get(ANALYTICAL_LATENCY)
    assert [*limits.values()] == [(None, None), (2, None), (None, None), (2, False)]


def test_hsdp_hides_most_of_its_sums_over_hosts():
    """Llama-3 8B, data 16 x fsdp 8: 199 ms of a simulated step are exposed with one sum at the end, 15 in backward."""
    sizes = {"rows": 256, "length": 8192, "vocabulary": 128_256, **LLAMA_8B}
    strategies = {when: {"data": {"size": 16, "reduce": when}, "fsdp": 8} for when in ("at_end", "auto")}
    found = {}
    for when, strategy in strategies.items():
        step, batch = step_for("h100:16x8", strategy, **sizes)
        compiled = step.compile(batch)
        assert compiled.memory_analysis().temp_size_in_bytes < 15e9
        found[when] = simulate(compiled.as_text(), parse_target("h100:16x8"))
    assert found["auto"].exposed_seconds < 0.25 * found["at_end"].exposed_seconds
    assert found["auto"].step_seconds < 0.95 * found["at_end"].step_seconds
    sums = [each for each in found["auto"].exchanges if each.kind == "all-reduce" and each.runs >= 30]
    assert sum(each.exposed for each in sums) < 0.1 * sum(each.seconds for each in sums)


def test_fsdp_between_hosts_with_tensor_inside_exposes_half():
    """Llama-3 8B, fsdp 16 x tensor 8: 188 ms were exposed when gradients crossed the network in float32, blocks were
    gathered twice, and backward repeated the collectives of `tensor`."""
    sizes = {"rows": 16, "length": 4096, "vocabulary": 128_256, **LLAMA_8B}
    strategy = {"fsdp": {"size": 16, "keep": "step"}, "tensor": 8}
    _, plan = lay_out_for("h100:16x8", strategy, length=4096, vocabulary=128_256, **LLAMA_8B)
    step, batch = step_for("h100:16x8", strategy, remat="local", xla=default_options(plan), **sizes)
    compiled = step.compile(batch)
    text = compiled.as_text()
    found = simulate(text, parse_target("h100:16x8"))
    moved = {(line.kind, line.axes): line.bytes for line in census(text, plan.mesh)}
    parameters = plan.table.num_elements / 8
    assert moved["all-to-all", ("fsdp",)] == pytest.approx(2 * parameters, rel=1e-3), "in bfloat16"
    assert moved["all-gather", ("fsdp",)] == pytest.approx(2 * parameters, rel=1e-3), "once"
    assert found.exposed_seconds < 0.5 * 0.188
    assert compiled.memory_analysis().temp_size_in_bytes < 6e9


def test_ends_of_the_step_run_beside_the_first_and_the_last_block():
    """Llama-3 8B: without this, 9.4 % of the communication of fsdp 128 and 10.8 % of data 16 x fsdp 8 were exposed,
    and 8.0 % with one row on each GPU, if forward gathered a block in the turn that needs it."""
    cases = {"one row": ({"fsdp": 128}, 128), "fsdp": ({"fsdp": 128}, 256), "hsdp": ({"data": 16, "fsdp": 8}, 256)}
    found = {}
    for name, (strategy, rows) in cases.items():
        sizes = {"rows": rows, "length": 8192, "vocabulary": 128_256, **LLAMA_8B}
        options = default_options(step_for("h100:16x8", strategy, **sizes)[0].plan)
        step, batch = step_for("h100:16x8", strategy, xla=options, **sizes)
        compiled = step.compile(batch)
        assert compiled.memory_analysis().temp_size_in_bytes < 14e9
        found[name] = simulate(compiled.as_text(), parse_target("h100:16x8"))
    assert max(each.exposed_share for each in found.values()) < 0.05
    assert found["hsdp"].step_seconds < 1.032 * found["fsdp"].step_seconds
    wide = [each for each in found["hsdp"].exchanges if each.kind == "all-reduce" and each.bytes > 2e8]
    assert len(wide) == 2, "the sums of the embedding and of the head, beside products"
    assert sum(each.exposed for each in wide) < 0.1 * sum(each.seconds for each in wide)


def test_explain_compiles_for_128_gpus(tmp_path):
    config = tmp_path / "8b.yaml"
    sizes = ", ".join(f"{name}: {value}" for name, value in LLAMA_8B.items())
    config.write_text(f"""
model: {{name: transformer, {sizes}}}
data: {{source: synthetic_tokens, vocabulary: 128256, length: 4096}}
strategy: {{data: -1, fsdp: 8}}
precision: {{compute: bfloat16}}
train: {{global_batch: 128, remat: full, steps: 10}}
""")
    words = ["explain", str(config), "--target", "h100:16x8", "--json", "--hlo", str(tmp_path / "step.hlo")]
    done = subprocess.run([sys.executable, "-m", "spmdkit", *words], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["target"] == "h100:16x8"
    assert (found["mesh"]["data"], found["mesh"]["fsdp"]) == (16, 8)
    assert found["as_predicted"]
    links = {tuple(line["axes"]): line["link"] for line in found["collectives"]}
    assert links["fsdp",] == "host"
    assert links["data",] == "network"
    assert 0 < found["timeline"]["exposed_seconds"] < found["timeline"]["step_seconds"] < 2
    assert "is_scheduled=true" in Path(tmp_path / "step.hlo").read_text()[:200]

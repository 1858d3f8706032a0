"""`spmdkit plan --search`: candidates, estimates, the compiled stage, and the written config."""

import json
import os
import re
import signal
import sys
import time
from collections import Counter
from dataclasses import replace
from itertools import combinations

import pytest
import yaml
from spmdkit.configs import load_config
from spmdkit.layouts.sizes import format_bytes
from spmdkit.mesh.errors import UserError
from spmdkit.mesh.targets import parse_target
from spmdkit.models.moe import MoEConfig
from spmdkit.models.transformer_config import TransformerConfig
from spmdkit.parallel import Precision
from spmdkit.parallel.schedule.builders import make_schedule
from spmdkit.parallel.schedule.timing import measure
from spmdkit.planning import search as search_module
from spmdkit.planning.candidates import POLICIES, Candidate, ModelSizes, enumerate_candidates, group_of, model_sizes
from spmdkit.planning.estimate import Estimate, Estimator, Pass, pipeline_time
from spmdkit.planning.kernel_time import EFFICIENCY, WIDE_HEAD
from spmdkit.planning.link_time import collective_seconds
from spmdkit.planning.run_plan import USABLE
from spmdkit.planning.search import Corrections, Row, rank, search
from spmdkit.planning.separate_process import Compilations
from spmdkit.runtime.build_run import build
from support.processes import assert_gone, wait_for

from spmdkit import list_devices

SMALL = "model.layers=4 model.width=64 model.heads=8 data.length=64 train.global_batch=16 precision.compute=bfloat16"
GIB = 2**30
LIMIT = USABLE * parse_target("h100:1x8").card.memory_bytes
TWO_AXES = (("fsdp", 4), ("tensor", 2))


def small(*overrides):
    return load_config("fsdp", [*SMALL.split(), *overrides], sizes=False)


def best(preset, target, *overrides):
    return rank(load_config(preset, overrides, sizes=False), parse_target(target))[0]


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)])
def test_every_candidate_can_be_planned(every, without_compiler):
    """The sizes of a candidate pass all checks of a run: of its strategies, its model and its batch."""
    config, target = small(), parse_target("h100:1x8")
    found = list(enumerate_candidates(model_sizes(config), target, 16))
    meshes = {candidate.mesh: candidate for candidate in found}  # the last variant of each
    assert {"pipe", "data", "fsdp", "context", "tensor"} <= {axis for mesh in meshes for axis, _ in mesh}
    sets = ({"pipe", "data", "fsdp"}, *({axis, "context", "tensor"} for axis in ("pipe", "data", "fsdp")))
    sample = [candidate for mesh, candidate in meshes.items() if dict(mesh).keys() in sets]
    assert len({pair for each in sample for pair in combinations(dict(each.mesh), 2)}) == 10, "all pairs of the 5 axes"
    for candidate in meshes.values() if every else sample:
        mesh = build(candidate.configure(config), devices=list_devices(target="h100:1x8")).layouts.mesh
        sizes = zip(mesh.axis_names, mesh.shape, strict=True)
        assert {axis: size for axis, size in sizes if size > 1} == dict(candidate.mesh)


def test_candidate_states_all_options_that_are_not_defaults():
    mesh = (("pipe", 2), ("data", 2), ("fsdp", 4))
    pipe = {"schedule": "interleaved_1f1b", "virtual": 2, "microbatches": 8, "recompute": True}
    found = Candidate(mesh=mesh, accumulate=2, remat="full", keep="step", zero=1, **pipe)
    data, fsdp = {"size": 2, "zero": 1}, {"size": 4, "keep": "step"}
    assert found.strategy == {"pipe": {"size": 2, **pipe}, "data": data, "fsdp": fsdp}
    assert str(found) == (
        "pipe 2 x data 2 x fsdp 4, interleaved_1f1b x 2 of 8, accumulate 2, remat full, recompute, keep step, zero 1"
    )
    plain = Candidate(mesh=mesh, schedule="1f1b", microbatches=8)
    pipe = {"size": 2, "schedule": "1f1b", "microbatches": 8}
    assert plain.strategy == {"pipe": pipe, "data": {"size": 2}, "fsdp": {"size": 4}}
    assert str(plain) == "pipe 2 x data 2 x fsdp 4, 1f1b of 8"
    assert (Candidate(mesh=()).strategy, str(Candidate(mesh=()))) == ({}, "one device")


@pytest.mark.parametrize(
    ("mesh", "policies"),
    [
        ((("fsdp", 8),), {*POLICIES} - {"local"}),
        (TWO_AXES, {*POLICIES}),
        ((("fsdp", 2), ("tensor", 4)), {*POLICIES}),
    ],
)
def test_blocks_are_gathered_once_or_twice_under_each_policy(mesh, policies):
    """`local` keeps what collectives of `tensor` return: without them it is the same as `full`."""
    found = enumerate_candidates(model_sizes(small()), parse_target("h100:1x8"), 16)
    split = [candidate for candidate in found if candidate.mesh == mesh and candidate.accumulate < 3]
    ways = {(candidate.keep, candidate.accumulate) for candidate in split}
    assert ways == {("block", 1), ("block", 2), ("step", 1), ("step", 2)}
    assert {candidate.remat for candidate in split} == policies


def test_short_rows_keep_what_collectives_return():
    """Llama-3 8B, one row of 4,096 for each 8 GPUs. Compiled: 169 ms, and 228 if nothing is kept (docs/gpu.md)."""
    estimator = estimator_of("llama3_8b", "h100:16x8", "data.length=4096", "train.global_batch=16")
    mesh = (("fsdp", 16), ("tensor", 8))
    kept, dropped = (
        estimator.estimate(Candidate(mesh=mesh, remat=remat, keep=keep)).step_seconds
        for remat, keep in (("local", "step"), ("full", "block"))
    )
    assert 0.6 < kept / dropped < 0.85


def test_a_model_without_split_work_splits_rows_only(without_compiler):
    rows, _ = rank(load_config("mlp", ["train.global_batch=64"], sizes=False), parse_target("h100:1x8"))
    assert {axis for row in rows for axis, _ in row.candidate.mesh} == {"data", "fsdp"}


def test_group_spans_the_stride_of_its_axes():
    mesh = Candidate(mesh=(("data", 2), ("fsdp", 4), ("tensor", 2)))
    target = parse_target("h100:2x8")
    assert group_of(mesh, ("tensor",), target) == (0, 1)
    assert group_of(mesh, ("fsdp",), target) == (0, 2, 4, 6)
    assert group_of(mesh, ("data", "tensor"), target) == (0, 1, 8, 9)


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "zbv"])
def test_long_schedules_are_timed_by_their_growth(name):
    costs, virtual = (1.0, 2.0, 1.5), 2 if name == "zbv" else 1
    exact = measure(make_schedule(name, 4, 64, virtual=virtual), costs)
    time, ticks = pipeline_time(name, 4, 64, virtual, False, costs)
    assert time == pytest.approx(exact.time, rel=0.01)
    assert ticks == pytest.approx(exact.ticks, rel=0.01)


def estimator_of(preset, target, *overrides):
    config = load_config(preset, overrides, sizes=False)
    return Estimator(model_sizes(config), parse_target(target), config.train.global_batch, config.precision)


def test_estimate_is_near_the_compiled_step():
    """Compiled for h100:8x8 by JAX 0.10.2: 16.9 s and 51.4 GiB, with tensor parallelism 19.4 s and 54.5 GiB."""
    estimator = estimator_of("llama3_70b", "h100:8x8")
    for mesh, seconds, gib in (((("fsdp", 64),), 16.9, 51.4), ((("fsdp", 16), ("tensor", 4)), 19.4, 54.5)):
        found = estimator.estimate(Candidate(mesh=mesh, remat="full"))
        assert found.step_seconds == pytest.approx(seconds, rel=0.25)
        assert found.peak_bytes / GIB == pytest.approx(gib, rel=0.25)


def by_hand(sizes, **counts):
    """An estimator of a model with so many parameters, 2 bytes each, for 4 devices and batches of 4 rows."""
    model = ModelSizes(sizes, 8, 4, **counts, bytes_per_parameter=2, optimizer_ratio=2.0, own=None)
    return Estimator(model, parse_target("h100:1x4"), 4, Precision(compute="bfloat16"))


EXPERTS = MoEConfig(vocabulary=16, length=8, layers=4, width=8, heads=4, experts=4, top_k=2)


def test_estimates_the_work_of_experts_beyond_their_products():
    """Mixtral 8x7B compiled for h100:4x8 by JAX 0.10.2: 10.5 s, with one microbatch."""
    estimated = estimator_of("mixtral_8x7b", "h100:4x8").estimate(
        Candidate(mesh=(("fsdp", 4), ("expert", 8)), remat="full")
    )
    assert estimated.step_seconds == pytest.approx(10.5, rel=0.15)


DENSE = TransformerConfig(vocabulary=16, length=8, layers=4, width=8, heads=2, mlp_width=32)


@pytest.mark.parametrize(
    ("axis", "stored"), [("fsdp", 750), ("tensor", 750), ("expert", 1800), ("pipe", 1500), ("context", 3000)]
)
def test_update_takes_as_long_as_the_parameters_of_a_device(axis, stored):
    """4 blocks of 100 parameters and 400 of experts, and 1,000 outside; the head of stages is not split."""
    estimator = by_hand(DENSE, block_parameters=100, expert_parameters=400, outer_parameters=1000)
    pipe = {"schedule": "1f1b", "microbatches": 4, "recompute": True} if axis == "pipe" else {"remat": "full"}
    alone, split = (estimator.estimate(Candidate(mesh=mesh, **pipe)).terms for mesh in ((), ((axis, 4),)))
    seconds = stored * 2 * (3 + 2 * 2) / (EFFICIENCY.memory * estimator.target.card.memory_bandwidth)
    assert split["update"] == pytest.approx(seconds)
    ratios = [split[name] / alone[name] for name in ("products and kernels", "recomputation", "head and embedding")]
    assert ratios == pytest.approx([0.25, 0.25, 1.0 if axis == "pipe" else 0.25])


@pytest.mark.parametrize(("sizes", "router"), [(DENSE, 0), (replace(EXPERTS, mlp_width=16), 32)])
def test_kernels_of_one_device_are_those_of_each_block(sizes, router):
    """4 rows of 8 positions and width 8, whose scores are half masked; an MLP of width 32, or 2 of 4 experts of 16."""
    estimator, one = by_hand(sizes, block_parameters=0, expert_parameters=0, outer_parameters=0), Candidate(mesh=())
    added = estimator._experts(one, sizes, 2.0) if hasattr(sizes, "experts") else Pass(0.0, 0.0, 0.0)
    speed, bandwidth = EFFICIENCY.matmul * estimator.peak, EFFICIENCY.memory * estimator.target.card.memory_bandwidth
    product = 2 * 32 * (4 * 64 + 24 * 32 + router) / speed
    scores = 4 * (4 * 8 * 8 / 2) * 8 / (sizes.head_size / WIDE_HEAD * estimator.peak)
    other = 32 * (12 * 8 + 4 * 8 + 6 * 32) * 2 / bandwidth
    forward = product + scores / EFFICIENCY.attention + other + 2 * added.forward
    backward = 2.5 * scores / EFFICIENCY.attention_backward + 2 * product + 2 * other + 2 * sum(added[1:])
    for remat, share in {"none": 0, "dots": 0.2, "selective": 0.6, "local": 1, "full": 1}.items():
        terms = estimator.estimate(replace(one, accumulate=2, remat=remat)).terms
        assert terms["products and kernels"] == pytest.approx(4 * (forward + backward))
        assert terms["recomputation"] == pytest.approx(share * 4 * forward)
        assert terms["head and embedding"] == pytest.approx(6 * 32 * 8 * 16 / speed)


@pytest.mark.parametrize("recompute", [False, True])
def test_stages_are_idle_while_a_pipeline_fills(recompute):
    estimator = by_hand(DENSE, block_parameters=100, expert_parameters=0, outer_parameters=100)
    estimator._block = lambda *_: Pass(1.0, 2.0, 1.0)
    pipe = {"schedule": "1f1b", "microbatches": 4, "recompute": recompute}
    found = estimator.estimate(Candidate(mesh=(("pipe", 4),), **pipe))
    timing = measure(make_schedule("1f1b", 4, 4, recompute=recompute), (1.0, 2.0, 1.0))
    share = timing.time / (4 * (4 + recompute))
    assert found.bubble == pytest.approx(1 - 1 / share)
    busy = sum(found.terms[name] for name in ("products and kernels", "recomputation", "head and embedding"))
    assert found.terms["idle stages"] == pytest.approx(busy * (share - 1))
    hop = collective_seconds("collective-permute", 8 * 8 * 2, [[0, 1, 2, 3]], estimator.target, EFFICIENCY)
    assert found.terms["traffic of pipe"] == pytest.approx(2 * timing.ticks * hop)


@pytest.mark.parametrize(
    ("axis", "accumulate", "exposed"), [("context", 1, 6), ("fsdp", 1, 5), ("fsdp", 2, 8.1), ("tensor", 1, 9)]
)
def test_kernels_hide_traffic(axis, accumulate, exposed):
    """3 s in forward and 6 s in backward, beside kernels of 1, 2 and 1 s; 1,000 parameters outside are reduced too."""
    estimator, block = by_hand(DENSE, block_parameters=0, expert_parameters=0, outer_parameters=1000), Pass(1, 2, 1)
    candidate = Candidate(mesh=((axis, 4),), accumulate=accumulate)
    assert estimator._exposed(candidate, axis, (3, 5, 1), block) == pytest.approx(exposed)
    estimator._once = lambda _: (20, 0.5)
    terms, _ = estimator._times(candidate, block, {"fsdp": (0, 0, 0)}, 1.0)
    assert terms["traffic of data"] == max(20 - 0.5 * accumulate * 4 * 4, 0)
    parts = [estimator._seconds(candidate, kind, 4000, "fsdp") for kind in ("reduce-scatter", "all-gather")]
    assert terms["traffic of fsdp"] == pytest.approx(accumulate * parts[0] + parts[1] / 2)


COLLECTIVES = {
    ("data", "full", "block"): [(1, "all-reduce", 8000)],
    ("fsdp", "full", "block"): [(4 * 2, "all-gather", 1000), (4, "reduce-scatter", 2000)],
    ("fsdp", "none", "step"): [(1, "all-gather", 4 * 1000), (4, "reduce-scatter", 2000)],
    ("expert", "none", "block"): [(4 * 4, "all-to-all", 512)],  # a block of 8 rows for each of 4 experts
    ("expert", "full", "block"): [(4 * 6, "all-to-all", 512)],
    ("tensor", "none", "block"): [(4 * 4, "all-gather", 512), (4 * 4, "reduce-scatter", 512)],
    ("tensor", "local", "block"): [(4 * 4, "all-gather", 512), (4 * 4, "reduce-scatter", 512)],
    ("tensor", "full", "block"): [(4 * 6, "all-gather", 512), (4 * 5, "reduce-scatter", 512)],
    ("context", "full", "block"): [
        (36, "collective-permute", 256),
        (12, "collective-permute", 512),
        (1, "all-reduce", 8000),
    ],
}


@pytest.mark.parametrize(("axis", "remat", "keep"), COLLECTIVES)
def test_communication_is_that_of_each_block_and_of_the_gradients(axis, remat, keep):
    """4 blocks of 500 parameters, 32 positions of width 8; gradients take 4 bytes, all else 2; `full` runs it again."""
    estimator = by_hand(EXPERTS, block_parameters=100, expert_parameters=400, outer_parameters=0)
    found = estimator.estimate(Candidate(mesh=((axis, 4),), remat=remat, keep=keep)).communication
    times = [
        count * collective_seconds(kind, size, [[0, 1, 2, 3]], estimator.target, EFFICIENCY)
        for count, kind, size in COLLECTIVES[axis, remat, keep]
    ]
    assert found == pytest.approx(sum(times), rel=1e-9)


@pytest.mark.parametrize(("axis", "sizes"), [("tensor", DENSE), ("context", DENSE), ("expert", EXPERTS)])
def test_stages_that_recompute_repeat_the_collectives_of_forward(axis, sizes):
    estimator = by_hand(sizes, block_parameters=100, expert_parameters=0, outer_parameters=0)
    mesh = (("pipe", 2), (axis, 2))
    kept, recomputed, full = (
        estimator._traffic(Candidate(mesh=mesh, microbatches=4, **options), 1.0)[axis]
        for options in ({}, {"recompute": True}, {"remat": "full"})
    )
    assert kept[2] == 0 < recomputed[2]
    assert recomputed == full


@pytest.mark.parametrize(("tensor", "kept"), [(1, [216, 112, 48, 16, 8]), (2, [124, 56, 24, 24, 4])])
def test_policies_keep_the_activations_of_each_block(tensor, kept):
    """Per position 4 x 8 of the width, 2 x 24 of the heads, 8 of their result, 4 x 32 of the MLP, divided by `tensor`,
    which adds 2 x 8: what it gathers."""
    estimator = by_hand(DENSE, block_parameters=0, expert_parameters=0, outer_parameters=0)
    mesh = (("tensor", tensor),) if tensor > 1 else ()

    def peak(layers, remat):
        estimator.model = estimator.model._replace(layers=layers)
        return estimator.peak_bytes(Candidate(mesh=mesh, remat=remat))

    positions, itemsize = 4 * 8, 2
    assert [(peak(2, remat) - peak(1, remat)) / (positions * itemsize) for remat in POLICIES] == kept


@pytest.mark.parametrize("tensor", [1, 2])
def test_logits_count_for_each_token(tensor):
    """32 positions, 4 bytes for each of 4,096 more words, and their gradients in half of that."""
    mesh = (("tensor", tensor),) if tensor > 1 else ()
    small, large = (
        by_hand(replace(DENSE, vocabulary=words), block_parameters=0, expert_parameters=0, outer_parameters=0)
        for words in (4096, 8192)
    )
    assert (
        large.peak_bytes(Candidate(mesh=mesh)) - small.peak_bytes(Candidate(mesh=mesh)) == 1.5 * 32 * 4096 * 4 / tensor
    )


def test_zero_divides_the_state_of_the_optimizer():
    """100 parameters of 2 bytes, and twice as many bytes of state: 400, or 100 on each of 4 devices."""
    estimator = by_hand(DENSE, block_parameters=0, expert_parameters=0, outer_parameters=100)
    whole, split = (estimator.peak_bytes(Candidate(mesh=(("data", 4),), zero=zero)) for zero in (0, 1))
    assert whole - split == 300


@pytest.mark.parametrize(
    ("options", "axis", "largest"),
    [
        *(({name: 4}, "tensor", 4) for name in ("heads", "mlp_width", "vocabulary", "length")),
        *(({}, "tensor", 8), ({"length": 8}, "context", 4), ({"layers": 2}, "pipe", 2)),
        *(({}, "expert", 1), ({"experts": 4}, "expert", 4)),
    ],
)
def test_each_axis_divides_the_sizes_that_it_splits(options, axis, largest):
    sizes = {"vocabulary": 64, "length": 64, "layers": 8, "width": 64, "heads": 8, "mlp_width": 64, **options}
    config = (MoEConfig if "experts" in sizes else TransformerConfig)(**sizes)
    model = ModelSizes(config, config.length, config.layers, 0, 0, 0, 2, 2.0, None)
    found = enumerate_candidates(model, parse_target("h100:1x8"), 8)
    assert max(each.size(axis) for each in found) == largest


def test_experts_are_counted_apart_from_their_block():
    found = model_sizes(small("model={name: moe, layers: 2, width: 64, heads: 8, experts: 4, mlp_width: 32}"))
    experts, attention, router, norms = 4 * 3 * 64 * 32, 4 * 64 * 64, 64 * 4, 2 * 64
    assert (found.expert_parameters, found.block_parameters) == (experts, attention + router + norms)
    assert found.outer_parameters == 2 * found.sizes.vocabulary * 64 + 64
    assert (found.layers, found.own) == (4, None)
    assert found.optimizer_ratio == pytest.approx(2, rel=1e-3)


def test_large_models_do_not_win_with_copies():
    """8B parameters and Adam's moments take 96 GB: too much for one device, so data parallelism alone does not fit."""
    rows = best("llama3_8b", "h100:1x8")
    peaks = [row.estimate.peak_bytes for row in rows]
    assert 1.09 * LIMIT < max(peaks) <= 1.1 * LIMIT, "estimates are not exact"
    over = [peak > LIMIT for peak in peaks]
    assert over == sorted(over) != [False] * len(over), "those that fit surely come first"
    assert all(row.candidate.mesh != (("data", 8),) for row in rows)
    assert dict(rows[0].candidate.mesh).keys() & {"fsdp", "tensor", "pipe"}


def test_analytic_search_prints_reasons_and_writes_a_config(without_compiler, tmp_path, cli):
    target, written = ["--target", "h100:1x8"], tmp_path / "best.yaml"
    found = json.loads(cli(0, "plan", "fsdp", *SMALL.split(), *target, "--search", "--write", written, "--json").out)
    winner, *others = found["ranked"]
    assert winner == found["winner"]
    assert winner["reason"] == ""
    times = [row["step_seconds"] / winner["step_seconds"] for row in others]
    assert min(times) >= 1
    assert all(row["reason"].startswith(f"{time:.2f} x the time") for time, row in zip(times, others, strict=True))
    assert "ANALYTIC" in found["notes"][0]
    config = load_config(written)
    assert {axis: options.size for axis, options in config.strategy.items()} == {
        axis: options["size"] for axis, options in winner["strategy"].items()
    }
    assert (config.train.remat, config.train.accumulate) == (winner["remat"], winner["accumulate"])
    assert config.train.global_batch == 16


def fake_plan(seconds, peak, fits):
    return {
        "step_seconds": seconds,
        "memory": {"peak_bytes": peak, "fits": fits},
        "exposed_communication": 0.1,
        "bubble": 0.25,
    }


def test_compiled_steps_correct_candidates_of_their_kind():
    candidate, estimate, corrections = Candidate(mesh=(("fsdp", 8),)), Estimate(1.0, 100.0, {}, 0.0, 0.0), Corrections()
    for peak in (50, 90):
        corrections.add(Row(candidate, estimate, search_module.Outcome(fake_plan(3.0, peak, True), "")))
    assert corrections.may_fit(Row(candidate, estimate), 60), "the smallest correction of memory counts"
    rows = [Row(candidate, estimate), Row(Candidate(mesh=(("tensor", 8),)), estimate)]
    [corrections.correct(row) for row in rows]
    assert [row.step_seconds for row in rows] == [3.0, 1.0]


@pytest.mark.parametrize(("gigabytes", "cores", "workers"), [(1, 8, 1), (13, 8, 2), (100, 8, 8)])
def test_compilations_have_a_core_and_6_gib_each(gigabytes, cores, workers, monkeypatch):
    names = {"SC_AVPHYS_PAGES": gigabytes * GIB // 4096, "SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2**40}
    monkeypatch.setattr(os, "sysconf", names.__getitem__)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(cores), raising=False)
    assert search_module._workers() == workers


class FakeCompilations(Compilations):
    """Compiles nothing: meshes with `tensor` do not fit, and all others take as long as they have FSDP shards."""

    def start(self, resolved_yaml):
        self.started += 1
        self.last = yaml.safe_load(resolved_yaml)["strategy"]
        return self.started

    def wait(self, deadline):
        size = self.last.get("fsdp", {"size": 1})["size"]
        return self.started, search_module.Outcome(fake_plan(size, 5 * GIB, "tensor" not in self.last), "")


def test_compiled_steps_decide(monkeypatch):
    monkeypatch.setattr(search_module, "Compilations", FakeCompilations)
    monkeypatch.setattr(search_module, "has_compiler", lambda _: True)
    monkeypatch.setattr(search_module, "_workers", lambda: 1)
    found = search(load_config("llama3_8b", sizes=False), "h100:1x8", compile=100, seconds=60)
    winner = found.rows[0]
    compiled = [row for row in found.rows if row.plan]
    fitting = [row for row in compiled if row.plan["memory"]["fits"]]
    assert winner.plan
    assert winner.step_seconds == min(row.step_seconds for row in fitting)
    assert winner.candidate.size("tensor") == 1
    (reason,) = {row.reason for row in compiled if row not in fitting}
    assert reason == f"does not fit: {format_bytes(5 * GIB)} of {format_bytes(int(LIMIT))}"
    assert {"peak_bytes": 5 * GIB, "exposed_communication": 0.1, "bubble": 0.25}.items() <= winner.to_json().items()
    assert len(fitting) < len(compiled) == found.counts["compiled"] <= found.counts["candidates"]
    assert len({row.candidate for row in found.rows}) == len(found.rows)
    assert max(Counter(row.candidate.mesh for row in compiled).values()) == search_module.MAX_PER_MESH


class EndlessCompilations(FakeCompilations):
    """The time limit ends every compilation."""

    def wait(self, deadline):
        return None


class FailingCompilations(FakeCompilations):
    """Every compiler ends with an error."""

    def wait(self, deadline):
        return self.started, search_module.Outcome(None, "exit code 3: error: no")


def search_with(compilations, monkeypatch, preset="quickstart", *overrides):
    monkeypatch.setattr(search_module, "Compilations", compilations)
    monkeypatch.setattr(search_module, "has_compiler", lambda _: True)
    monkeypatch.setattr(search_module, "_workers", lambda: 1)
    return search(load_config(preset, overrides, sizes=False), "h100:1x8", seconds=60)


def test_time_limit_before_anything_compiled_leaves_the_analytic_ranking(monkeypatch):
    analytic = best("quickstart", "h100:1x8")
    found = search_with(EndlessCompilations, monkeypatch)
    assert found.rows[0].candidate == analytic[0].candidate
    assert found.counts["compiled"] == 0
    (note,) = found.notes
    assert note.startswith(
        "ANALYTIC: no step that fits had compiled at the time limit of 60 s, which --seconds raises."
    )
    assert f"still compiling: {analytic[0].candidate}. not tried: {len(analytic) - 1:,}." in note
    (late,) = [row for row in found.rows if row.outcome]
    assert late.to_json()["compiled"] is False
    assert "estimated" in str(found)


def test_short_steps_are_not_shown_as_nothing(without_compiler):
    found = search(load_config("quickstart", sizes=False), "h100:1x8")
    assert found.rows[0].step_seconds < 0.5e-3
    assert not re.search(r"[ +]0 ms", str(found))


def test_compilers_that_fail_leave_the_analytic_ranking(monkeypatch):
    found = search_with(FailingCompilations, monkeypatch, "mlp", "train.global_batch=64")
    assert found.rows[0].outcome is None, "what could not be planned does not win"
    assert "the first of them data 8: exit code 3: error: no. not tried: " in found.notes[0]


def test_every_candidate_that_may_fit_is_compiled_before_nothing_fits(monkeypatch):
    """Three variants of a mesh are not enough for that: a fourth may need less."""
    started = []

    class LargeCompilations(FakeCompilations):
        def start(self, resolved_yaml):
            started.append(resolved_yaml)
            return len(started)

        def wait(self, deadline):
            return len(started), search_module.Outcome(fake_plan(1.0, 1000, False), "")

    with pytest.raises(UserError, match=r"no mesh of h100:1x8 fits: of all compiled candidates.*needs 1000 B of"):
        search_with(LargeCompilations, monkeypatch, "mlp", "train.global_batch=64")
    rows = best("mlp", "h100:1x8", "train.global_batch=64")
    assert len(set(started)) == len(rows) > 5 * search_module.MAX_PER_MESH


def test_nothing_fits_is_one_sentence(without_compiler, cli):
    error = cli(2, "plan", "llama3_405b", "--target", "h100:1x8", "--search").err
    assert "no mesh of h100:1x8 fits" in error
    config, target = load_config("llama3_405b", sizes=False), parse_target("h100:1x8")
    model, batch = model_sizes(config), config.train.global_batch
    estimator = Estimator(model, target, batch, config.precision)
    least = min(map(estimator.peak_bytes, enumerate_candidates(model, target, batch)))
    assert f"needs {format_bytes(int(least))} of" in error


LIMITS, ONLY = "--compile must be at least 0 and --seconds more than 0", "only with --search"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        *((words, LIMITS) for words in ("--search --compile -1", "--search --seconds 0")),
        *((words, ONLY) for words in ("--write x.yaml", "--compile 2", "--seconds 5")),
    ],
)
def test_rejects_invalid_options(words, message, cli):
    assert message in cli(2, "plan", "fsdp", "--target", "h100:1x8", *words.split()).err


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Puts a shell script in place of the processes that compile."""

    def put(commands):
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
        (tmp_path / "python").write_text(f"#!/bin/sh\n{commands}\n")
        (tmp_path / "python").chmod(0o700)

    return put


def test_processes_get_the_variables_of_the_config(tmp_path, compiler, monkeypatch):
    compiler(f'echo "$FLAGS $OTHER" > {tmp_path}/variables; echo {{}}')
    monkeypatch.setenv("FLAGS", "of the shell")
    monkeypatch.setenv("OTHER", "too")
    with Compilations("h100:1x8", {"FLAGS": "of the config"}) as compilations:
        compilations.start("")
        compilations.wait(time.monotonic() + 60)
    assert (tmp_path / "variables").read_text() == "of the config too\n"


def test_processes_are_killed_and_files_removed(tmp_path, compiler):
    """A compilation that hangs ends with the search, with everything that it started."""
    compiler(f"sleep 600 &\necho $! > {tmp_path}/child\nwait")
    with Compilations("h100:1x8", {}) as compilations:
        compilations.start("")
        (process,) = compilations.processes.values()
        wait_for(lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text())
        assert compilations.wait(time.monotonic() + 0.2) is None
    child = int((tmp_path / "child").read_text())
    assert process.returncode == -signal.SIGKILL
    assert not os.path.exists(compilations.folder.name)
    assert_gone(child, seconds=5)


ENDS = {
    "kill -9 $$": "the compiler was killed by SIGKILL",
    "echo 'error: no\nend' >&2; exit 3": "exit code 3: error: no",
}


@pytest.mark.parametrize("command", ENDS)
def test_a_compiler_that_ends_is_a_reason(compiler, command):
    compiler(command)
    with Compilations("h100:1x8", {}) as compilations:
        compilations.start("")
        _, outcome = compilations.wait(time.monotonic() + 60)
    assert outcome == (None, ENDS[command])

"""The simulation of small programs whose times can be computed by hand."""

import json
from itertools import pairwise

import pytest
from spmdkit.mesh.errors import UserError
from spmdkit.mesh.targets import Card, Target
from spmdkit.parallel.schedule.builders import make_schedule
from spmdkit.parallel.schedule.stages import assign
from spmdkit.parallel.schedule.timetable import make_timetable
from spmdkit.planning.kernel_time import Efficiency
from spmdkit.planning.link_time import collective_seconds
from spmdkit.planning.scheduled_program import parse_program
from spmdkit.planning.timeline import _Queues, simulate
from spmdkit.planning.trace import COMPUTE, HOST, QUEUES, Event, Recorder, write_trace

CARD = Card(
    name="a card with round figures",
    compute_capability="9.0",
    cores=1,
    clock_ghz=1.0,
    memory_bytes=1 << 30,
    memory_bandwidth=1e6,
    l2_bytes=1,
    shared_memory=1,
    shared_memory_per_block=1,
    flops={"bfloat16": 1e6, "float32": 0.5e6},
    gpus_per_host=4,
    link=1e6,
    network=0.25e6,
)
WITHOUT_LOSSES = Efficiency(*[1.0] * 8, *[0.0] * 4)
TARGET = Target("card:1x4", CARD, 1, 4)
HEADER = """HloModule step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

"""
MATMUL = 'custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{"dot_dimension_numbers":' + (
    '{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}'
)


def simulated(body: str, hosts: int = 1, computations: str = "", efficiency: Efficiency = WITHOUT_LOSSES):
    """Simulates a program on hosts with 4 devices."""
    text = f"{HEADER}{computations}ENTRY %main (x: f32[250]) -> f32[250] {{\n{body}\n}}\n"
    return simulate(text, Target("card:1x4", CARD, hosts, 4), efficiency)


def test_kernel_moves_its_operands_and_its_result():
    """1,000 bytes in and 1,000 out at 1 MB/s: 2 ms."""
    found = simulated("  %x = f32[250] parameter(0)\n  ROOT %y = f32[250] negate(%x)")
    assert found.step_seconds == pytest.approx(2e-3)
    assert found.communication_seconds == 0


def test_kernel_writes_all_of_its_results():
    """1,000 bytes in, 1,000 and 2,000 out."""
    found = simulated("  %x = f32[250] parameter(0)\n  ROOT %y = (f32[250], f32[500]) custom-call(%x)")
    assert found.step_seconds == pytest.approx(4e-3)


def test_slice_reads_and_writes_its_result_alone():
    """400 bytes twice at 1 MB/s."""
    found = simulated("  %x = f32[250] parameter(0)\n  ROOT %y = f32[100] slice(%x), slice={[0:100]}")
    assert found.step_seconds == pytest.approx(0.8e-3)


def test_update_of_a_slice_writes_it_alone():
    """200 bytes read and written in place at 1 MB/s."""
    body = """  %x = f32[250] parameter(0)
  %part = f32[50] parameter(1)
  %start = s32[] parameter(2)
  ROOT %y = f32[250] dynamic-update-slice(%x, %part, %start)"""
    assert simulated(body).step_seconds == pytest.approx(0.4e-3)


@pytest.mark.parametrize(("dtype", "seconds"), [("bf16", 2.0), ("f32", 4.0)])
def test_matrix_product_takes_its_flops_at_the_peak_of_its_dtype(dtype, seconds):
    """100 x 100 x 100: 2 MFLOP."""
    body = f"""  %x = {dtype}[100,100] parameter(0)
  ROOT %y = ({dtype}[100,100], s8[0]) custom-call(%x, %x), {MATMUL}"""
    found = simulated(body)
    assert found.flops == 2e6
    assert found.step_seconds == pytest.approx(seconds)
    filled = simulated(body, efficiency=WITHOUT_LOSSES._replace(product_seconds=0.25))
    assert filled.step_seconds == pytest.approx(seconds + 0.25)


PRODUCT_OF_BYTES = f"""  %x = s8[100,100] parameter(0)
  ROOT %y = (s32[100,100], s8[0]) custom-call(%x, %x), {MATMUL}"""


def test_rejects_products_without_a_peak():
    with pytest.raises(
        UserError, match=r"products in s8; the peaks of a card .* \(key flops of its file\) are of bfloat16"
    ):
        simulated(PRODUCT_OF_BYTES)


def test_takes_the_peak_of_the_card_for_any_dtype(monkeypatch):
    monkeypatch.setitem(CARD.flops, "s8", 4e6)
    assert simulated(PRODUCT_OF_BYTES).step_seconds == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("suffix", "mask", "flops"), [("", "CAUSAL", 1600), ("Backward", "CAUSAL", 4000), ("", "NO_MASK", 3200)]
)
def test_causal_attention_counts_half_of_its_scores(suffix, mask, flops):
    """2 products of 10 x 10 scores and width 8, 2 x 2 x 100 x 8 / 2; backward has 5."""
    scores = '"intermediate_tensor_shape":{"dimensions":["1","1","10","10"]}'
    config = f'{{"cudnn_fmha_backend_config":{{{scores},"mask_type":"{mask}"}}}}'
    call = f'custom_call_target="__cudnn$fmhaSoftmax{suffix}", backend_config={config}'
    body = f"""  %x = bf16[1,10,1,8] parameter(0)
  ROOT %y = (bf16[1,10,1,8], u8[0]) custom-call(%x, %x, %x), {call}"""
    assert simulated(body).flops == flops


@pytest.mark.parametrize(("suffix", "width", "seconds"), [("", 128, 0.512), ("", 64, 0.512), ("Backward", 128, 2.56)])
def test_attention_has_its_own_shares_of_the_peak(suffix, width, seconds):
    """Heads of 128: 2.56 MFLOP forward at 5 times the peak. Heads of 64: half of the work at half of the speed."""
    scores = '"intermediate_tensor_shape":{"dimensions":["1","1","100","100"]}'
    config = f'{{"cudnn_fmha_backend_config":{{{scores},"mask_type":"CAUSAL"}}}}'
    call = f'custom_call_target="__cudnn$fmhaSoftmax{suffix}", backend_config={config}'
    body = f"""  %x = bf16[1,10,1,{width}] parameter(0)
  ROOT %y = (bf16[1,10,1,{width}], u8[0]) custom-call(%x, %x, %x), {call}"""
    shares = WITHOUT_LOSSES._replace(attention=5.0, attention_backward=2.5)
    assert simulated(body, efficiency=shares).step_seconds == pytest.approx(seconds)


@pytest.mark.parametrize(("width", "seconds"), [(96, 2 * 96**3 / 1e6), (100, 8 * 100**3 / 1e6)])
def test_products_of_unaligned_rows_are_slow(width, seconds):
    """100 numbers of 2 bytes are not a multiple of 16 bytes."""
    body = f"""  %x = bf16[{width},{width}] parameter(0)
  ROOT %y = (bf16[{width},{width}], s8[0]) custom-call(%x, %x), {MATMUL}"""
    assert simulated(body, efficiency=WITHOUT_LOSSES._replace(unaligned=0.25)).step_seconds == pytest.approx(seconds)


def exchange(kernels: int, groups: str = "{{0,1,2,3}}") -> str:
    """An all-gather from 1,000 to 4,000 bytes beside kernels of 2 ms."""
    lines = [
        "  %x = f32[250] parameter(0)",
        f"  %start = (f32[250], f32[1000]) all-gather-start(%x), replica_groups={groups}, dimensions={{0}}",
        *(f"  %y.{number} = f32[250] negate(%x)" for number in range(kernels)),
        "  ROOT %done = f32[1000] all-gather-done(%start)",
    ]
    return "\n".join(lines)


@pytest.mark.parametrize(("kernels", "step", "exposed"), [(0, 3e-3, 3e-3), (1, 3e-3, 1e-3), (2, 4e-3, 0.0)])
def test_exposes_what_kernels_do_not_hide(kernels, step, exposed):
    """A ring of 4 moves 3/4 of 4,000 bytes at 1 MB/s: 3 ms."""
    found = simulated(exchange(kernels))
    assert found.step_seconds == pytest.approx(step)
    assert found.communication_seconds == pytest.approx(3e-3)
    assert found.exposed_seconds == pytest.approx(exposed)
    assert found.exposed_share == pytest.approx(exposed / 3e-3)
    (only,) = found.exchanges
    assert (only.kind, only.kernels, only.matmuls) == ("all-gather", kernels, 0)


def test_collectives_in_flight_take_turns():
    body = exchange(0).replace(
        "  ROOT %done", "  %other = f32[250] all-gather-start(%x), replica_groups={{0,1,2,3}}\n  %done"
    )
    found = simulated(f"{body}\n  ROOT %last = f32[1000] all-gather-done(%other)")
    assert found.step_seconds == found.communication_seconds == pytest.approx(6e-3)


@pytest.mark.parametrize(("speed", "step", "exposed"), [(0.8, 3e-3, 0.5e-3), (0.5, 3.5e-3, 0.0)])
def test_kernel_is_slower_while_a_collective_runs(speed, step, exposed):
    """A kernel of 2 ms beside 3 ms of communication: at 80 % it takes 2.5 ms; at 50 %, 1.5 of it are done after 3."""
    found = simulated(exchange(1), efficiency=WITHOUT_LOSSES._replace(overlapped=speed))
    assert found.step_seconds == pytest.approx(step)
    assert found.exposed_seconds == pytest.approx(exposed)


@pytest.mark.parametrize(
    ("groups", "seconds"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", 3e-3),  # inside a host: 3/4 of 4,000 bytes at 1 MB/s
        ("{{0,4},{1,5},{2,6},{3,7}}", 4e-3),  # one adapter of 0.25 MB/s each: 1/2 of 2,000 bytes
        ("{{0,1,2,3,4,5,6,7}}", 7e-3),  # 4 adapters: 7/8 of 8,000 bytes at 1 MB/s
    ],
)
def test_collective_uses_the_slowest_link_of_its_group(groups, seconds):
    assert simulated(exchange(0, groups), hosts=2).communication_seconds == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("collective", "seconds"),
    [
        ("f32[1000] all-reduce(%x), replica_groups={{0,1,2,3}}, to_apply=%add", 6e-3),  # its value goes round twice
        ("f32[250] reduce-scatter(%x), replica_groups={{0,1,2,3}}, to_apply=%add", 3e-3),
        ("f32[1000] collective-permute(%x), source_target_pairs={{0,1},{1,2}}", 4e-3),
    ],
)
def test_synchronous_collective_is_exposed_whole(collective, seconds):
    found = simulated(f"  %x = f32[1000] parameter(0)\n  ROOT %y = {collective}")
    assert found.exposed_seconds == found.communication_seconds == pytest.approx(seconds)


def test_recorder_keeps_events_up_to_its_limit():
    recorder, event = Recorder(1), Event(COMPUTE, "kernel", 0.0, 1.0, "")
    recorder.add(event)
    recorder.add(event)
    assert recorder.events == [event]


def test_each_network_has_its_own_time_to_start():
    slow, target = WITHOUT_LOSSES._replace(link_seconds=1.0, network_seconds=5.0), Target("card:2x4", CARD, 2, 4)
    found = [collective_seconds("all-gather", 0, [group], target, slow) for group in ([0, 1], [0, 4])]
    assert found == [1.0, 5.0]


def test_permute_between_hosts_uses_one_adapter():
    """All 4 adapters of a host together are as fast as its links."""
    kinds, target = ("all-gather", "collective-permute"), Target("card:2x4", CARD, 2, 4)
    found = [collective_seconds(kind, 1000, [[*range(8)]], target, WITHOUT_LOSSES) for kind in kinds]
    assert found == pytest.approx([0.875e-3, 4e-3])


LOOP = """%body (x: f32[250]) -> f32[250] {
  %p = f32[250] parameter(0)
  %start = (f32[250], f32[1000]) all-gather-start(%p), replica_groups={{0,1,2,3}}, dimensions={0}
  %y = f32[250] negate(%p)
  ROOT %done = f32[1000] all-gather-done(%start)
}

"""


def loop(turns: int) -> str:
    config = f'{{"known_trip_count":{{"n":"{turns}"}}}}'
    return f"""  %x = f32[250] parameter(0)
  ROOT %loop = f32[250] while(%x), condition=%add, body=%body, backend_config={config}"""


@pytest.mark.parametrize("turns", [1, 2, 7])
def test_loop_repeats_its_body(turns):
    """Each turn: 3 ms of communication, of which a kernel hides 2 ms."""
    found = simulated(loop(turns), computations=LOOP)
    assert found.step_seconds == pytest.approx(3e-3 * turns)
    assert found.compute_seconds == pytest.approx(2e-3 * turns)
    assert found.exposed_seconds == pytest.approx(1e-3 * turns)
    assert found.exchanges[0].runs == turns


@pytest.mark.parametrize(("scope", "turns"), [("turns_7_of_1", 7), ("jvp(turns_5_of_2)", 2.5), ("turns_3_of_2", 1.5)])
def test_loop_of_unknown_length_counts_by_its_expected_turns(scope, turns):
    """Its kernels and its collectives, also within a part of a pipeline's tick; it is not a part itself."""
    name = f'metadata={{op_name="forward.turns_1_of_9/cond/{scope}/while"}}'
    body = f"  %x = f32[250] parameter(0)\n  ROOT %loop = f32[250] while(%x), condition=%add, body=%body, {name}"
    found = simulated(body, computations=LOOP)
    assert found.step_seconds == pytest.approx(3e-3 * turns)
    assert found.compute_seconds == pytest.approx(2e-3 * turns)
    assert found.exposed_seconds == pytest.approx(1e-3 * turns)
    assert found.exchanges[0].runs == turns
    assert found.parts == {}


BRANCHES = """%short (a: f32[250]) -> f32[250] {
  %a.1 = f32[250] parameter(0)
  ROOT %a.2 = f32[250] negate(%a.1)
}

%long (b: f32[250]) -> f32[250] {
  %b.1 = f32[250] parameter(0)
  %b.2 = f32[250] negate(%b.1)
  ROOT %b.3 = f32[250] negate(%b.2)
}

"""


def branch(scope: str) -> str:
    called = f'true_computation=%long, false_computation=%short, metadata={{op_name="{scope}"}}'
    return f"""  %x = f32[250] parameter(0)
  %p = pred[] constant(true)
  ROOT %y = f32[250] conditional(%p, %x, %x), {called}"""


@pytest.mark.parametrize(("scope", "seconds"), [("other", 4e-3), ("turns_1_of_2/cond", 3e-3)])
def test_branches_count_by_their_share_of_turns(scope, seconds):
    """Of branches with 2 and 4 ms, the longer one counts if the program does not say how often each runs."""
    assert simulated(branch(scope), computations=BRANCHES).step_seconds == pytest.approx(seconds)


def test_a_part_in_a_loop_counts_for_the_stage_with_the_most_blocks():
    """3 turns of 3 ms in 2 ticks on the stage with the most; a tick with all 2 blocks takes 6 ms."""
    schedule = make_schedule("gpipe", 2, 2)
    timetable = make_timetable(schedule, assign(3, schedule))
    body = """  %x = f32[250] parameter(0)
  ROOT %loop = f32[250] while(%x), condition=%add, body=%body, metadata={op_name="forward.turns_3_of_2/while"}"""
    text = f"{HEADER}{LOOP}ENTRY %main (x: f32[250]) -> f32[250] {{\n{body}\n}}\n"
    queues = _Queues(parse_program(text), TARGET, WITHOUT_LOSSES, Recorder(), timetable.blocks_per_slot)
    queues.run(queues.program.computations[queues.program.entry])
    assert queues.parts == {"forward": [0.0, pytest.approx(6e-3)]}
    assert queues.compute == queues.totals.sums["parts"] == pytest.approx(4.5e-3)
    assert queues.totals.sums["compute"] == pytest.approx(3e-3)


RARELY = """%skip (a: f32[250]) -> f32[250] {
  ROOT %a.1 = f32[250] parameter(0)
}

%send (b: f32[250]) -> f32[250] {
  %b.1 = f32[250] parameter(0)
  ROOT %b.2 = f32[250] all-reduce(%b.1), replica_groups={{0,1,2,3}}, to_apply=%add
}

%body (c: f32[250]) -> f32[250] {
  %c.1 = f32[250] parameter(0)
  %p = pred[] constant(true)
  ROOT %c.2 = f32[250] conditional(%p, %c.1, %c.1), true_computation=%send, false_computation=%skip, SHARE
}

""".replace("SHARE", 'metadata={op_name="turns_1_of_4/cond"}')


def test_an_idle_communication_queue_is_ready_at_once():
    """A kernel of 2 s, 200 turns of which a quarter sum 1,000 bytes for 1.5 ms, and one more sum."""
    body = """  %x = f32[250] parameter(0)
  %large = f32[250000] parameter(1)
  %kernel = f32[250000] negate(%large)
  %loop = f32[250] while(%x), condition=%add, body=%body, backend_config={"known_trip_count":{"n":"200"}}
  ROOT %last = f32[250] all-reduce(%loop), replica_groups={{0,1,2,3}}, to_apply=%add"""
    found = simulated(body, computations=RARELY)
    assert found.step_seconds == pytest.approx(2.0 + (50 + 1) * 1.5e-3)
    assert [found.exposed_seconds, found.communication_seconds] == pytest.approx([(50 + 1) * 1.5e-3] * 2)


SLICED = """%fused (a: f32[1000], i: s32[]) -> f32[10] {
  %a.1 = f32[1000] parameter(0)
  %i.1 = s32[] parameter(1)
  %slice = f32[10] dynamic-slice(%a.1, %i.1), dynamic_slice_sizes={10}
  ROOT %r = f32[10] negate(%slice)
}

"""
UPDATED = """%fused (a: f32[1000], u: f32[10], i: s32[]) -> f32[1000] {
  %a.1 = f32[1000] parameter(0)
  %u.1 = f32[10] parameter(1)
  %i.1 = s32[] parameter(2)
  ROOT %r = f32[1000] dynamic-update-slice(%a.1, %u.1, %i.1)
}

"""


@pytest.mark.parametrize(
    ("computation", "result", "operands", "moved"),
    [(SLICED, "f32[10]", "%x, %i", 40 + 40), (UPDATED, "f32[1000]", "%x, %u, %i", 40 + 40)],
    ids=["slice", "update"],
)
def test_fusion_moves_only_the_part_that_it_uses(computation, result, operands, moved):
    """Besides the index, which has 4 bytes."""
    body = f"""  %x = f32[1000] parameter(0)
  %u = f32[10] parameter(1)
  %i = s32[] parameter(2)
  ROOT %y = {result} fusion({operands}), kind=kLoop, calls=%fused"""
    assert simulated(body, computations=computation).step_seconds == pytest.approx((moved + 4) / 1e6)


def recorded(body: str, computations: str, limit: int = 1000):
    text = f"{HEADER}{computations}ENTRY %main (x: f32[250]) -> f32[250] {{\n{body}\n}}\n"
    recorder = Recorder(limit)
    return simulate(text, TARGET, WITHOUT_LOSSES, recorder), recorder.events


def test_events_fill_the_queues_as_the_timeline_says():
    """Each turn has a gather of 3 ms, a kernel of 2 ms, and a wait of 1 ms."""
    timeline, events = recorded(loop(5), LOOP)
    assert [each.name for each in events[:3]] == ["all-gather", "y", "waits for all-gather"]
    assert len(events) == 3 * 5
    kernels, gathers = ([each for each in events if each.queue == queue] for queue in (COMPUTE, HOST))
    assert sum(each.seconds for each in gathers) == pytest.approx(timeline.communication_seconds)
    assert sum(each.seconds for each in kernels) == pytest.approx(timeline.step_seconds)
    for queue in (kernels, gathers):
        for one, after in pairwise(queue):
            assert one.begin + one.seconds == pytest.approx(after.begin)


def test_turns_beyond_the_limit_become_one_event():
    timeline, events = recorded(loop(1000), LOOP, limit=20)
    assert len(events) == 3 * 6 + 1
    assert events[-1].name == "994 more turns of this loop"
    assert events[-1].begin + events[-1].seconds == pytest.approx(timeline.step_seconds)


def test_a_branch_takes_the_time_that_counts():
    """Half of 4 ms and half of 2 ms: the longer branch, in 3 ms."""
    _, events = recorded(branch("turns_1_of_2/cond"), BRANCHES)
    assert [(each.name, each.begin, each.seconds) for each in events] == [
        ("b.2", 0.0, pytest.approx(1.5e-3)),
        ("b.3", pytest.approx(1.5e-3), pytest.approx(1.5e-3)),
    ]


def test_writes_the_format_of_perfetto(tmp_path):
    _, events = recorded(loop(2), LOOP)
    write_trace(tmp_path / "step.json", events, "a device")
    found = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    names = [each["args"]["name"] for each in found if each["ph"] == "M" and each["name"] == "thread_name"]
    assert names == list(QUEUES)
    second = [each for each in found if each["ph"] == "X"][3]
    assert (second["name"], second["tid"], second["ts"], second["dur"]) == ("all-gather", 1, 3000.0, 3000.0)


@pytest.mark.usefixtures("without_compiler")
def test_an_analytic_plan_has_no_trace(tmp_path, cli):
    words = ["--target", "h100:1x8", "--trace", tmp_path / "step.json"]
    assert "a trace needs a simulated step" in cli(2, "plan", "mlp", *words).err
    assert not list(tmp_path.iterdir())

"""The origin of the collectives of a compiled step: strategy and source line."""

import re
from collections import Counter

import pytest
from spmdkit.configs import load_config
from spmdkit.mesh import DeviceMesh
from spmdkit.mesh.targets import parse_target
from spmdkit.parallel.collectives import Collective, merge
from spmdkit.planning.run_plan import plan_run
from spmdkit.planning.timeline import simulate
from spmdkit.planning.traffic import PACKAGE, _source_lines, find_traffic
from spmdkit.runtime.build_run import build
from spmdkit.runtime.explain import explain_built

from spmdkit import list_devices

PROGRAM = f"""HloModule step, is_scheduled=true

FileNames
1 "{PACKAGE}/parallel/fsdp.py"
2 "/home/me/my_model.py"
3 "{PACKAGE}/parallel/collectives.py"
4 "{PACKAGE}/parallel/xla/ring_hop.py"

FunctionNames
1 "gather"

FileLocations
1 {{file_name_id=1 function_name_id=1 line=139 end_line=139 column=1 end_column=2}}
2 {{file_name_id=2 function_name_id=1 line=17 end_line=17 column=1 end_column=2}}
3 {{file_name_id=3 function_name_id=1 line=187 end_line=187 column=1 end_column=2}}
4 {{file_name_id=4 function_name_id=1 line=40 end_line=40 column=1 end_column=2}}

StackFrames
1 {{file_location_id=2 parent_frame_id=1}}
2 {{file_location_id=1 parent_frame_id=2}}
3 {{file_location_id=3 parent_frame_id=3}}
4 {{file_location_id=4 parent_frame_id=4}}
5 {{file_location_id=3 parent_frame_id=2}}

%body (x: f32[4]) -> f32[4] {{
  %p = f32[4] parameter(0)
  %g = (f32[4], f32[16]) all-gather-start(%p), replica_groups={{{{0,1,2,3}},{{4,5,6,7}}}}, metadata={{stack_frame_id=4}}
  %h = f32[16] all-gather-done(%g)
  ROOT %r = f32[4] slice(%h)
}}

ENTRY %main (x: f32[4]) -> f32[4] {{
  %x = f32[4] parameter(0)
  %loop = f32[4] while(%x), condition=%c, body=%body, backend_config={{"known_trip_count":{{"n":"3"}}}}
  %a = f32[4] all-reduce(%loop), replica_groups={{{{0,4}},{{1,5}},{{2,6}},{{3,7}}}}, metadata={{stack_frame_id=5}}
  ROOT %b = f32[4] all-reduce(%a), replica_groups={{{{0,4}},{{1,5}},{{2,6}},{{3,7}}}}
}}
"""


def test_collectives_have_their_strategy_and_source_line():
    target = parse_target("h100:1x8")
    mesh = DeviceMesh((2, 4), ("data", "fsdp"), list_devices(target="h100:1x8"))
    found = find_traffic(PROGRAM, simulate(PROGRAM, target), mesh)
    assert [(each.kind, each.axes, each.count, each.bytes, each.strategy, each.source) for each in found] == [
        ("all-gather", ("fsdp",), 3, 3 * 64, "fsdp", "parallel/fsdp.py:139"),
        ("all-reduce", ("data",), 1, 16, "data", ""),
        ("all-reduce", ("data",), 1, 16, "data", "my_model.py:17"),
    ]


@pytest.mark.parametrize("remat", ["none", pytest.param("full", marks=pytest.mark.slow)])
def test_collectives_of_fsdp_have_lines_of_its_file(remat):
    """In forward and in backward, also of blocks that are gathered in advance."""
    config = load_config("fsdp", ["model.layers=4", "strategy.fsdp={size: 8, prefetch: 1}", f"train.remat={remat}"])
    built = build(config)
    program = built.step.lower(built.batch).as_text("hlo", debug_info=True)
    lines = _source_lines(program)
    found = re.findall(r" (all-gather|reduce-scatter)\(.*\bstack_frame_id=(\d+)", program)
    files = {(kind, lines[frame].rpartition(":")[0]) for kind, frame in found}
    assert files == {(kind, f"{PACKAGE}/parallel/fsdp.py") for kind in ("all-gather", "reduce-scatter")}


@pytest.mark.targets
@pytest.mark.slow
def test_traffic_of_a_compiled_step_adds_up_to_its_census():
    overrides = "model.layers=4 model.width=256 data.length=128 train.global_batch=16 precision.compute=bfloat16"
    config = load_config("fsdp_tensor", [*overrides.split(), "strategy={fsdp: 4, tensor: 2}"], sizes=False)
    traffic = plan_run(config, "h100:1x8").traffic
    lines = merge(Collective(each.kind, each.axes, each.count, each.bytes) for each in traffic)
    assert lines == explain_built(build(config, devices=list_devices(target="h100:1x8"))).found
    moved = Counter()
    for each in traffic:
        moved[each.strategy] += each.bytes
    assert moved["fsdp"] > 0
    assert moved["tensor"] > 0
    assert moved["fsdp"] + moved["tensor"] > 0.99 * moved.total()
    assert all(each.source.startswith("parallel/") for each in traffic if each.kind in ("all-gather", "reduce-scatter"))

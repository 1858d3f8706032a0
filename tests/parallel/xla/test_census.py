"""What the compiled step communicates is what the strategies predict: kinds, axes, counts, bytes."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from spmdkit.mesh.device_mesh import DeviceMesh
from spmdkit.parallel import Collective, FSDPConfig, Precision, census
from spmdkit.parallel.xla.census import Call, calls_of, computations_of
from support import toy

BLOCK_BYTES = 2 * 16 * 64 * 4  # up and down, float32
OUTER_BYTES = 2 * 32 * 16 * 4  # the table and the head
SCALE_BYTES = 3 * 16 * 4  # the scales of three blocks, under the floor
SCALARS = 2 * 4  # loss and weight


def found(strategy, model=toy.BLOCK_MODEL, **options):
    step = toy.build(strategy, optax.adamw(1e-2), model, **options)
    compiled = step.lower(toy.abstract(toy.batch(0))).compile()
    lines = census(compiled.as_text(), step.plan.mesh)
    assert lines == step.cost()
    return list(lines)


def fsdp(size):
    return FSDPConfig(size=size, floor_bytes=1024)


def test_one_device_is_silent():
    assert found({"data": 1}) == []


@pytest.mark.slow_cases("dots", "none")
@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_fsdp_gathers_twice_and_scatters_once_a_block(remat):
    assert found({"fsdp": fsdp(8)}, remat=remat) == [
        Collective("all-gather", ("fsdp",), 2 * 2 * 3 + 2, 2 * 3 * BLOCK_BYTES + OUTER_BYTES),
        Collective("all-reduce", ("fsdp",), 1, SCALE_BYTES + SCALARS + 4),  # small gradients, the loss, the norm
        Collective("reduce-scatter", ("fsdp",), 2 * 3 + 2, 3 * BLOCK_BYTES + OUTER_BYTES),
    ]


def test_bfloat16_gathers_travel_as_float32_on_cpu():
    lines = found({"fsdp": fsdp(8)}, precision=Precision(compute="bfloat16"))
    assert lines[0].bytes == 2 * 3 * BLOCK_BYTES + OUTER_BYTES
    step = toy.build({"fsdp": fsdp(8)}, precision=Precision(compute="bfloat16"))
    assert step.cost(platform="cuda")[0].bytes == (2 * 3 * BLOCK_BYTES + OUTER_BYTES) // 2


HEADER = (
    "HloModule m\n\n%body (p: f32[8]) -> f32[8] {{\n  {line}\n}}\n\nENTRY %main (p: f32[8]) -> f32[8] {{\n{call}\n}}\n"
)
WHILE = '  %w = f32[8] while(%p), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"5"}}'


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", ("fsdp",)),
        ("{{0,4},{1,5},{2,6},{3,7}}", ("data",)),
        ("[2,4]<=[8]", ("fsdp",)),
        ("[4,2]<=[2,4]T(1,0)", ("data",)),
        ("{}", ("data", "fsdp")),
        ("mesh['data'=2,'fsdp'=4] {'fsdp'}", ("fsdp",)),
        ("mesh['x'=4,'y'=2], device_ids=([2,4]T(1,0)) {'y'}", ("data",)),
        ("mesh['all'=8] {'all':(1)2}", ("data",)),
    ],
)
def test_reads_groups_in_each_notation(groups, axes):
    text = HEADER.format(line=f"%a = f32[8]{{0}} all-reduce(%p), replica_groups={groups}", call=WHILE)
    assert census(text, DeviceMesh((2, 4), ("data", "fsdp"))) == (Collective("all-reduce", axes, 5, 160),)


GROUPS = "replica_groups={{0,1,2,3},{4,5,6,7}}"
RING = "source_target_pairs={{0,1},{1,2},{2,3},{3,0}}"


@pytest.mark.parametrize(
    ("line", "kind", "size"),
    [
        (f"(f32[8]{{0}}, bf16[4]{{0}}) all-reduce(%p, %q), {GROUPS}", "all-reduce", 200),
        (f"(f32[8]{{0}}, bf16[4]{{0}}) all-reduce-start(%p, %q), {GROUPS}", "all-reduce", 200),
        (f"(f32[2]{{0}}, f32[8]{{0}}) all-gather-start(%p), {GROUPS}", "all-gather", 160),
        (f"f32[2]{{0}} reduce-scatter(%p), {GROUPS}", "reduce-scatter", 160),
        (f"f32[8]{{0}} collective-permute(%p), {RING}", "collective-permute", 160),
        ("f32[8]{0} all-reduce-done(%p)", None, 0),
        ("f32[8]{0} all-reduce(%p), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}", None, 0),
    ],
)
def test_reads_kinds_and_bytes(line, kind, size):
    found = census(HEADER.format(line=f"%a = {line}", call=WHILE), DeviceMesh((2, 4), ("data", "fsdp")))
    assert found == ((Collective(kind, ("fsdp",), 5, size),) if kind else ())


def test_copies_of_an_unrolled_loop_add_up():
    """XLA unrolled 5 turns to 1 + 2 x 2; a branch that runs in 3 of 5 turns is then in three places."""
    branch = 'conditional(%p), branch_computations={%c, %d}, metadata={op_name="x/turns_3_of_5/cond"}'
    text = f"""
%body (p: (s32[])) -> (s32[]) {{
  %x = () {branch}
  %y = () {branch}
}}
%c (p: f32[8]) -> f32[8] {{
  %a = f32[8]{{0}} all-reduce(%p), {GROUPS}
}}
%d (p: f32[8]) -> f32[8] {{
}}
ENTRY %main (p: f32[8]) -> f32[8] {{
  %w = (s32[]) while(%t), condition=%e, body=%body, backend_config={{"known_trip_count":{{"n":"2"}}}}
  %z = () {branch}
}}
"""
    assert census(text, DeviceMesh((2, 4), ("data", "fsdp"))) == (Collective("all-reduce", ("fsdp",), 3, 96),)


@pytest.mark.parametrize(
    ("line", "calls"),
    [
        ('%w = () while(%t), condition=%c, body=%b.3, backend_config={"known_trip_count":{"n":"5"}}', [("b.3", 5)]),
        ('%w = () while(%t), body=%b, metadata={op_name="x/turns_3_of_8/while"}', [("b", Fraction(3, 8))]),
        ('%w = () while(%t), body=%b, metadata={op_name="f.turns_3_of_8/cond/jvp(turns_9_of_2)/while"}', [("b", 4.5)]),
        ('%w = () while(%t), body=%b, metadata={op_name="f.turns_3_of_8/cond/branch_1_fun/while"}', [("b", 1)]),
        ("%w = (s32[]) while(%t), condition=%c, body=%b", [("b", 1)]),
        ("%f = f32[] fusion(%x), kind=kLoop, calls=%fused", [("fused", 1)]),
        ("%i = f32[] conditional(%p), branch_computations={%one, %two}", [("one", 1), ("two", 1)]),
        ("%i = f32[] conditional(%p), true_computation=%t, false_computation=%f", [("t", 1), ("f", 1)]),
        (
            '%i = () conditional(%p), branch_computations={%a, %b, %c}, metadata={op_name="turns_1_6_0_of_8/cond"}',
            [("a", Fraction(1, 8)), ("b", Fraction(6, 8)), ("c", 0)],
        ),
        ("%a = f32[] add(%x, %y)", []),
    ],
)
def test_calls_of_instructions_and_their_counts(line, calls):
    assert list(calls_of(line)) == [Call(name, Fraction(times)) for name, times in calls]


def test_the_text_of_xla_is_still_written_so():
    """A loop of a real program, found with its trip count."""
    compiled = jax.jit(lambda x: lax.scan(lambda x, _: (jnp.sin(x @ x), None), x, length=7)[0])
    computations, entry = computations_of(compiled.lower(jnp.ones((4, 4))).compile().as_text())
    assert entry in computations
    calls = [call for lines in computations.values() for line in lines for call in calls_of(line)]
    assert any(call.times == 7 and call.name in computations for call in calls)

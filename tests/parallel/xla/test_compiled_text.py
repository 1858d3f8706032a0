"""A compiled program is taken apart into computations, collectives and how often they run."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from spmdkit.parallel.xla.compiled_text import Call, calls_of, collective_of, computations_of

TEXT = """HloModule jit_f, is_scheduled=true

%body.1 (arg: (s32[], f32[8])) -> (s32[], f32[8]) {
  %arg = (s32[], f32[8]{0}) parameter(0)
  ROOT %out = (s32[], f32[8]{0}) tuple(%arg)
}

ENTRY %main.2 (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %sum = f32[8]{0} all-reduce(%x), channel_id=1, to_apply=%add
}
"""


def test_computations_and_the_entry():
    computations, entry = computations_of(TEXT)
    assert entry == "main.2"
    assert [line.strip().split(" = ")[0] for line in computations["body.1"][:2]] == ["%arg", "ROOT %out"]
    assert "all-reduce(%x)" in computations["main.2"][1]


@pytest.mark.parametrize(
    ("line", "groups"),
    [
        ("%a = f32[8]{0} all-gather(%x), dimensions={0}", ("f32[8]{0}", "all-gather", None)),
        ("%a = (f32[4], f32[8]) all-gather-start(%x)", ("(f32[4], f32[8])", "all-gather", "-start")),
        ("%a = f32[4] ragged-all-to-all(%x, %y)", ("f32[4]", "ragged-all-to-all", None)),
    ],
)
def test_a_collective_has_a_type_and_a_kind(line, groups):
    assert collective_of(line).groups() == groups


@pytest.mark.parametrize(
    "line",
    [
        "%a = f32[8]{0} all-gather-done(%all-gather-start)",
        "%all-reduce.1 = f32[8]{0} add(%x, %y)",
        "%a = f32[8] fusion(%all-reduce), kind=kLoop, calls=%fused",
    ],
)
def test_what_only_names_a_collective_is_none(line):
    assert collective_of(line) is None


@pytest.mark.parametrize(
    ("line", "calls"),
    [
        (
            '%w = (s32[]) while(%t), condition=%c, body=%b.3, backend_config={"known_trip_count":{"n":"5"}}',
            [("b.3", Fraction(5))],
        ),
        (
            '%w = () while(%t), condition=%c, body=%b, metadata={op_name="x/turns_3_of_8/while"}',
            [("b", Fraction(3, 8))],
        ),
        ("%w = (s32[]) while(%t), condition=%c, body=%b", [("b", Fraction(1))]),
        ("%f = f32[] fusion(%x), kind=kLoop, calls=%fused", [("fused", Fraction(1))]),
        ("%i = f32[] conditional(%p), branch_computations={%one, %two}", [("one", 1), ("two", 1)]),
        ("%i = f32[] conditional(%p), true_computation=%t, false_computation=%f", [("t", 1), ("f", 1)]),
        ("%a = f32[] add(%x, %y)", []),
    ],
)
def test_what_an_instruction_runs_and_how_often(line, calls):
    assert list(calls_of(line)) == [Call(name, Fraction(times)) for name, times in calls]


def test_the_text_of_xla_is_still_written_so():
    """A loop of a real program, found with its trip count."""
    compiled = jax.jit(lambda x: lax.scan(lambda x, _: (jnp.sin(x @ x), None), x, length=7)[0])
    computations, entry = computations_of(compiled.lower(jnp.ones((4, 4))).compile().as_text())
    assert entry in computations
    calls = [call for lines in computations.values() for line in lines for call in calls_of(line)]
    assert any(call.times == 7 and call.name in computations for call in calls)

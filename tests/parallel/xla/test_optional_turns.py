"""A part that is skipped changes nothing, and one that runs has its turns: in a loop and behind a conditional."""

import jax
import jax.numpy as jnp
import pytest
from spmdkit.parallel.xla.optional_turns import Turns, run_in_conditional, run_in_loop, run_known

TURNS = {
    "once": (Turns(jnp.int32(0), 1, True, 3, 8), (0, 1)),
    "even": (Turns(jnp.int32(0), 3, True, 6, 8), (0, 3)),
    "uneven": (Turns(jnp.int32(0), 3, False, 5, 8), (0, 1, 2, 3)),
}


def turn(index, total):
    return total + 10 + index


def after(turns):
    return 5 + 10 * turns + sum(range(turns))


@pytest.mark.parametrize("name", TURNS)
@pytest.mark.parametrize("run", [run_in_loop, run_in_conditional])
def test_runs_the_given_number_of_turns(name, run):
    turns, given = TURNS[name]
    compiled = jax.jit(lambda now: run("forward", turns._replace(now=now), turn, jnp.int32(5)))
    assert [int(compiled(now)) for now in given] == [after(now) for now in given]


@pytest.mark.parametrize("number", [1, 3])
def test_runs_a_known_number_of_turns_without_a_conditional(number):
    lowered = jax.jit(lambda like: run_known(number, turn, jnp.int32(5), like=like)).lower(0)
    assert "stablehlo.case" not in lowered.as_text()
    assert int(lowered.compile()(0)) == after(number)


@pytest.mark.parametrize(
    ("name", "scopes"),
    [
        ("once", ["forward.turns_3_of_8/cond"]),
        ("even", ["forward.turns_2_of_8/cond"]),  # and each time the three turns of a loop that XLA knows
        ("uneven", ["forward.turns_8_of_8/cond", "forward.turns_5_of_24/cond"]),
    ],
)
def test_scopes_record_the_turns(name, scopes):
    turns, _ = TURNS[name]

    def text(run):
        lowered = jax.jit(lambda now: run("forward", turns._replace(now=now), turn, jnp.int32(5))).lower(0)
        return lowered.as_text(debug_info=True)

    assert all(scope in text(run_in_conditional) for scope in scopes)
    assert f"forward.turns_{turns.total}_of_8/while" in text(run_in_loop)

"""A part that is skipped changes nothing, and one that runs has its turns: in a loop and behind a conditional."""

from contextlib import nullcontext

import jax
import jax.numpy as jnp
import pytest
from spmdkit.parallel.xla.optional_turns import Turns, run_turns
from spmdkit.parallel.xla.platform import branches_of_gpus

TURNS = {
    "once": (Turns(jnp.int32(0), 1, True, 3, 8), (0, 1)),
    "even": (Turns(jnp.int32(0), 3, True, 6, 8), (0, 3)),
    "uneven": (Turns(jnp.int32(0), 3, False, 5, 8), (0, 1, 2, 3)),
}


def run(turns, now):
    return run_turns("forward", turns._replace(now=now), lambda index, total: total + 10 + index, jnp.int32(5))


@pytest.mark.parametrize("name", TURNS)
@pytest.mark.parametrize("in_loops", [True, False])
def test_runs_the_given_number_of_turns(name, in_loops):
    turns, given = TURNS[name]
    compiled = jax.jit(lambda now: run(turns, now))
    with nullcontext() if in_loops else branches_of_gpus():
        results = [int(compiled(now)) for now in given]
    assert results == [5 + 10 * now + sum(range(now)) for now in given]


@pytest.mark.parametrize(
    ("name", "scopes"),
    [
        ("once", ["forward.turns_3_of_8/cond"]),
        ("even", ["forward.turns_2_of_8/cond"]),  # and each time the three turns of a loop that XLA knows
        ("uneven", ["forward.turns_5_of_8/while"]),  # a conditional for each turn would copy the carry
    ],
)
def test_scopes_record_the_turns(name, scopes):
    turns, _ = TURNS[name]
    lowered = {
        platform: jax.jit(lambda now: run(turns, now)).trace(0).lower(lowering_platforms=(platform,))
        for platform in ("cpu", "cuda")
    }
    text = lowered["cuda"].as_text(debug_info=True)
    assert all(scope in text for scope in scopes)
    assert f"forward.turns_{turns.total}_of_8/while" in lowered["cpu"].as_text(debug_info=True)

"""The assertions that the library offers for users' own tests."""

import optax
import pytest
from support import toy

import spmdkit
from spmdkit.testing import CollectiveBudget, assert_collectives


@pytest.fixture(scope="module")
def step():
    layouts = spmdkit.lay_out(toy.PLAIN_MODEL, toy.mesh(data=8))
    return spmdkit.build_step(toy.PLAIN_MODEL, optax.sgd(0.1), layouts)


@pytest.mark.slow
@pytest.mark.parametrize("key", ["all_reduce@data", "all-reduce over data"])
def test_asserts_the_collectives_of_a_compiled_step(step, key):
    (line,) = step.cost()
    CollectiveBudget({key: line.count}, max_bytes=line.bytes).check(step, toy.batch(0))
    assert_collectives(step, toy.batch(0), {key: line.count}, max_bytes=line.bytes)
    differing = rf"all-gather over data: expected 1, found 0\nall-reduce over data: expected 0, found {line.count}\n"
    with pytest.raises(AssertionError, match=rf"{differing}.* has:\nall-reduce over data: \d+ moving"):
        CollectiveBudget({"all_gather@data": 1}).check(step, toy.batch(0))
    with pytest.raises(AssertionError, match=rf"{line.bytes:,} bytes exceed max_bytes={line.bytes - 1:,}"):
        assert_collectives(step, toy.batch(0), {key: line.count}, max_bytes=line.bytes - 1)


def test_axes_of_a_budget_are_in_any_order():
    layouts = spmdkit.lay_out(toy.PLAIN_MODEL, toy.mesh(data=2, fsdp=4))
    step = spmdkit.build_step(toy.PLAIN_MODEL, optax.sgd(0.1), layouts)
    counts = {f"{each.kind}@{','.join(reversed(each.axes))}": each.count for each in step.cost()}
    assert any("," in key for key in counts)
    CollectiveBudget(counts).check(step, toy.batch(0))


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"allgather@data": 0}, "'allgather@data': expected KIND@AXIS"),
        ({"all_gather": 0}, "'all_gather': expected KIND@AXIS"),
        ({"all_gather@fsbp": 0}, "no axis 'fsbp', only .*data"),
    ],
)
def test_rejects_keys_that_no_collective_can_have(step, counts, message):
    """A misspelled key with the number 0 would never fail."""
    with pytest.raises(ValueError, match=message):
        CollectiveBudget(counts).check(step, toy.batch(0))

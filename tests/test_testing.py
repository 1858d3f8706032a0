"""The assertions that the library offers for users' own tests."""

import optax
import pytest
from support import toy

import spmdkit
from spmdkit.testing import assert_collectives


@pytest.mark.slow
def test_asserts_the_collectives_of_a_compiled_step():
    layouts = spmdkit.lay_out(toy.PLAIN_MODEL, toy.mesh(data=8))
    step = spmdkit.build_step(toy.PLAIN_MODEL, optax.sgd(0.1), layouts)
    (line,) = step.cost()
    assert_collectives(step, toy.batch(0), {"all-reduce over data": line.count}, max_bytes=line.bytes)
    with pytest.raises(AssertionError, match=r"expected .*all-gather.* has:\nall-reduce over data: \d+ moving"):
        assert_collectives(step, toy.batch(0), {"all-gather over data": 1})
    with pytest.raises(AssertionError, match=rf"{line.bytes:,} bytes exceed max_bytes={line.bytes - 1:,}"):
        assert_collectives(step, toy.batch(0), {"all-reduce over data": line.count}, max_bytes=line.bytes - 1)

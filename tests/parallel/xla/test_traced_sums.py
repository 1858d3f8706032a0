"""Collectives read from a traced program are those of the compiled one."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec
from spmdkit.parallel.collectives import Collective, merge, strategy_scope, vary
from spmdkit.parallel.xla.census import census
from spmdkit.parallel.xla.graph import trace
from spmdkit.parallel.xla.traced_sums import SumKey, all_reduces, other_collectives, sum_key
from support import toy

MESH = toy.mesh(data=2, fsdp=2)
SIZES = {"data": 2, "fsdp": 2}
BOTH = ("data", "fsdp")
LAST = sum_key(BOTH, "float32", "cpu")


def chain(x):
    """The second waits for the first."""
    return lax.psum(x * lax.psum(x, BOTH), BOTH)


def beside(x):
    """Neither waits for the other."""
    return lax.psum(x, BOTH) + lax.psum(jnp.sin(x).sum(), BOTH)


def unused(x):
    dead = lax.psum(jnp.cos(x), BOTH)
    return lax.psum(x, BOTH), dead


def looped(x):
    def turn(carry, _):
        return jnp.sin(lax.psum(vary(carry, BOTH), BOTH)), None

    return lax.scan(turn, lax.psum(x, BOTH), length=3)[0]


def of_several(x):
    """Two kinds, two sets of axes, whole numbers and others: none is combined with another."""
    return (lax.psum(x, "data") * lax.pmax(x, "data"), lax.psum(x, "fsdp"), lax.psum(x.astype(jnp.int32), "fsdp"))


def gradient(x):
    """The gradient of a mean that is used by every device is summed as well."""
    return jax.grad(lambda x: jnp.sin(x - lax.pmean(x, BOTH)).sum())(x)


def compiled(function):
    mapped = jax.shard_map(
        function, mesh=MESH.backend_mesh, in_specs=PartitionSpec(BOTH), out_specs=PartitionSpec(BOTH), check_vma=True
    )
    return census(jax.jit(mapped).lower(jnp.ones((8, 3))).compile().as_text(), MESH)


def spread(function):
    """The same function with results that vary over the mesh, without what is not used."""

    def call(x):
        results = function(x)
        results = results[:1] if function is unused else jax.tree.leaves(results)
        return [vary(each, BOTH) * x for each in results]

    return call


NONE = SumKey("", (), "")


def traced(function, first=None, after=NONE):
    def sums(graph):
        return all_reduces(graph, graph.outputs[:first], after, sizes=SIZES, platform="cpu")

    return read(function, sums)


def read(function, lines_of):
    """What is read from the traced program of a function on the mesh."""
    found = []

    def look(x):
        graph, _ = trace(function, x)
        found[:] = lines_of(graph)
        return x

    spec = PartitionSpec(BOTH)
    mapped = jax.shard_map(look, mesh=MESH.backend_mesh, in_specs=spec, out_specs=spec, check_vma=True)
    jax.eval_shape(mapped, jnp.ones((8, 3)))
    return found


@pytest.mark.parametrize(
    ("function", "counts"),
    [(chain, 2), (beside, 1), (unused, 1), (looped, 4), (of_several, 4), (gradient, 2)],
    ids=lambda given: getattr(given, "__name__", given),
)
def test_they_are_those_of_the_compiled_program(function, counts):
    found = merge(traced(spread(function)))
    assert found == compiled(spread(function))
    assert sum(line.count for line in found) == counts


def gathered_gradient(x):
    """The gradient of gathered rows is scattered; a gather that nobody reads is removed."""

    def loss(x):
        of_all = lax.all_gather(x, BOTH, tiled=True)
        unused = lax.all_gather(jnp.cos(x), BOTH, tiled=True)
        del unused
        return jnp.sin(x @ of_all.T).sum()

    return jax.grad(loss)(x)


def exchanged(x):
    """One exchange, and a permute in each of three turns."""

    def turn(carry, _):
        return jnp.sin(lax.ppermute(carry, "data", [(0, 1), (1, 0)])), None

    swapped = lax.all_to_all(x, "fsdp", 0, 0, tiled=True)
    return lax.scan(turn, swapped, length=3)[0]


@pytest.mark.parametrize(
    ("function", "counts"),
    [
        (gathered_gradient, {"all-gather": 1, "reduce-scatter": 1}),
        (exchanged, {"all-to-all": 1, "collective-permute": 3}),
    ],
    ids=lambda given: getattr(given, "__name__", None),
)
def test_gathers_and_exchanges_are_those_of_the_compiled_program(function, counts):
    found = merge(read(spread(function), partial(other_collectives, sizes=SIZES, platform="cpu")))
    assert found == compiled(spread(function))
    assert {line.kind: line.count for line in found} == counts


def test_does_not_count_collectives_of_strategies():
    def gathered(x):
        with strategy_scope():
            whole = lax.all_gather(x, BOTH, tiled=True)
            summed = lax.psum(x, BOTH)
        return whole[: len(x)] + summed

    assert read(gathered, partial(other_collectives, sizes=SIZES, platform="cpu")) == []
    assert traced(gathered) == []


def test_what_is_waited_for_comes_before_the_last_one_and_the_rest_goes_with_it():
    def sums(x):
        mean = lax.pmean(x, BOTH)
        return x * mean, lax.psum(jnp.cos(x), BOTH), lax.psum(jnp.sin(x * mean), BOTH)

    size = 4 * 2 * 3
    assert traced(sums, 1, LAST) == [Collective("all-reduce", BOTH, 1, 3 * size)]
    assert traced(sums, 0, LAST) == [Collective("all-reduce", BOTH, 1, 3 * size)]
    assert traced(sums, 1, sum_key(BOTH, "float64", "cpu")) == [Collective("all-reduce", BOTH, 2, 3 * size)]
    assert traced(lambda x: (x, lax.psum(x, BOTH)), 1, LAST) == [Collective("all-reduce", BOTH, 0, size)]


def test_numbers_are_those_on_the_wire():
    assert sum_key(("data",), "bfloat16", "cpu") == SumKey("sum", ("data",), "f4")
    assert sum_key(("data",), "bfloat16", "cuda") == SumKey("sum", ("data",), "f2")
    assert sum_key(("data",), "float64", "cpu") != LAST

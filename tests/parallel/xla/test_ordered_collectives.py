"""On simulated devices, no collective may start during a loop of others; `order.py` finds those that may."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec
from spmdkit.parallel.blocks.gathered_block import save_arithmetic
from spmdkit.parallel.xla.ordered_collectives import order_after, order_block, scatter_first
from support import rows, toy
from support.order import unordered

ROWS = ("transformer-fsdp4", "fsdp-prefetch-full", "transformer-fsdp2-context4", "moe-fsdp2-expert2")


def compiled_text(function):
    """A function of one array per device, over four devices."""
    mesh = toy.mesh(fsdp=4).backend_mesh
    spec = PartitionSpec("fsdp")
    split = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=(spec, spec), out_specs=spec))
    shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    return split.lower(shape, shape).compile().as_text()


def sums(x):
    """A loop of collectives."""
    return lax.scan(lambda x, _: (jnp.sin(lax.psum_scatter(lax.all_gather(x, "fsdp"), "fsdp")), None), x, length=5)[0]


def test_finds_independent_loops():
    assert unordered(compiled_text(lambda x, y: sums(lax.all_gather(y, "fsdp", tiled=True)[:2] + x))) == []
    found = unordered(compiled_text(lambda x, y: sums(x) + sums(jnp.cos(y))))
    assert len(found) == 1
    assert all(name.startswith("while") for name in found[0])


def test_order_after_orders_loops():
    def waits(x, y):
        first = sums(x)
        return first + sums(order_after(first, y))

    assert unordered(compiled_text(waits)) == []


@pytest.mark.slow
def test_order_after_returns_the_value():
    value = {"x": jnp.asarray([1.5, jnp.nan, -jnp.inf]), "n": jnp.arange(3)}
    for done in ((), [jnp.zeros((0, 2))], [jnp.asarray([jnp.nan])], [jnp.ones(2), -jnp.ones((1, 1))]):
        found = order_after(done, value)
        assert all(
            map(lambda one, other: jnp.array_equal(one, other, equal_nan=True), *map(jax.tree.leaves, (found, value)))
        )
    gradient, of_done = jax.grad(lambda x, done: jnp.sum(order_after(done, x) ** 2), (0, 1))(jnp.ones(3), jnp.ones(2))
    assert gradient.tolist() == [2, 2, 2]
    assert of_done.tolist() == [0, 0]


def test_remat_does_not_keep_ordered_values():
    """Gathered parameters pass through `order_block`: kept for backward, they would be whole on every device."""
    for equation in jax.make_jaxpr(lambda x: order_block([x], order_after([x], x)))(jnp.ones(2)).eqns:
        assert not save_arithmetic(equation.primitive, **equation.params)


def test_scatter_first_leaves_gradients_unchanged():
    def loss(shards, x):
        shards, value = scatter_first(shards, {"x": x, "n": jnp.arange(2)})
        return jnp.sum(shards * value["x"] * value["n"])

    gradients = jax.grad(loss, (0, 1))(jnp.asarray([3.0, 4.0]), jnp.asarray([5.0, 6.0]))
    assert [leaf.tolist() for leaf in gradients] == [[0, 6], [0, 4]]


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_evaluation_is_ordered(name):
    """The table checks the step of every row; this checks the evaluation of rows that need ordering."""
    row = rows.row_named(name)
    own = rows.model(row.kind, row.layers, row.dropout)
    step = toy.build(row.strategy, rows.optimizer(), own, remat=row.remat)
    batch = toy.abstract(rows.batches(row.kind == "mlp")[0])
    evaluate = jax.jit(step.evaluate).lower(step.abstract_state().params, batch)
    assert unordered(evaluate.compile().as_text()) == []

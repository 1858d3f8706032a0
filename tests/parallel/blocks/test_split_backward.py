"""One block in three parts: the parts are autodiff's own numbers, share the work out evenly, and hold little."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec
from spmdkit.layouts.tensor_layout import TensorLayout
from spmdkit.models.transformer import transformer
from spmdkit.models.transformer_config import TransformerConfig
from spmdkit.parallel.blocks.gathered_block import remat_block
from spmdkit.parallel.blocks.split_backward import split_block
from spmdkit.parallel.fsdp import attach, gather
from spmdkit.parallel.model import split_differentiable
from spmdkit.parallel.options import Precision
from support import toy

B, L, D, F = 2, 8, 64, 128
MODEL = transformer(
    TransformerConfig(vocabulary=32, length=L, layers=1, width=D, heads=4, kv_heads=2, mlp_width=F, dropout=0.1)
)


def example(dtype=jnp.float32):
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf[0], dtype), toy.first_params(MODEL)["blocks"])
    hidden = jax.random.normal(jax.random.key(1), (B, L, D), dtype)
    return params, {"hidden": hidden, "example": jnp.arange(B)}, jax.random.key(2)


def run_parts(block, params, x, key):
    parts = split_block(block, params, x, key)
    y, residuals = jax.jit(parts.forward)(params, x, key)
    dy = [jnp.cos(leaf) for leaf in split_differentiable(y)[0]]
    dx, deferred = jax.jit(parts.backward_input)(params, key, residuals, dy)
    return y, dx, jax.jit(parts.backward_weight)(params, key, residuals, deferred)


def whole(block, params, x, key):
    def run(params, hidden):
        return block(params, {**x, "hidden": hidden}, key)["hidden"]

    @jax.jit
    def both(params, hidden):
        y, pull = jax.vjp(run, params, hidden)
        return y, *pull(jnp.cos(y))

    y, gradients, dx = both(params, x["hidden"])
    return y, dx, gradients


@pytest.mark.slow_cases("all recomputed", "plain", "within a jit")
@pytest.mark.parametrize(
    "wrap", [lambda block: block, jax.checkpoint, jax.jit], ids=["plain", "all recomputed", "within a jit"]
)
def test_the_parts_are_the_whole(float64, wrap):
    params, x, key = example(jnp.float64)
    y, dx, gradients = run_parts(wrap(MODEL.block), params, x, key)
    y_whole, dx_whole, gradients_whole = whole(MODEL.block, params, x, key)
    assert jnp.array_equal(y["example"], x["example"])
    assert jnp.array_equal(y["hidden"], y_whole)
    assert jnp.array_equal(dx[0], dx_whole)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, gradients, gradients_whole))


def products(function, *arguments):
    """The operations of each product of matrices in a function; of a choice by platform, those of the last way."""
    return list(_products(jax.make_jaxpr(function)(*arguments).jaxpr))


def _products(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "cond":
            yield from _products(eqn.params["branches"][-1].jaxpr)
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            yield 2 * eqn.outvars[0].aval.size * int(np.prod([eqn.invars[0].aval.shape[d] for d in contracted]))


def test_the_work_falls_into_equal_thirds():
    params, x, key = example()
    parts = split_block(MODEL.block, params, x, key)
    residuals, deferred = parts.residuals, parts.deferred
    in_forward = products(parts.forward, params, x, key)
    in_input = products(parts.backward_input, params, key, residuals, [x["hidden"]])
    in_weight = products(parts.backward_weight, params, key, residuals, deferred)
    assert len(in_weight) == 7  # one for each matrix
    # Attention's two products, and in backward four for their operands and the scores once more: none is done twice.
    assert (len(in_forward), len(in_input)) == (7 + 2, 7 + 5)
    assert len(products(parts.recompute, params, x, key)) == 7 + 2 - 1  # the last is for the output alone
    thirds = [sum(each) for each in (in_forward, in_input, in_weight)]
    assert max(thirds) / min(thirds) < 1.2


@pytest.mark.slow
def test_little_is_held():
    """Forward leaves each operand once, no parameter; B leaves the gradients that W's products read."""
    params, x, key = example()
    parts = split_block(MODEL.block, params, x, key)
    tokens, heads = B * L, D // 2  # as wide as the key-value heads
    numbers = sum(leaf.size for leaf in parts.residuals if leaf.dtype == jnp.float32)
    x_in, normed, query, key_value, mixed, hidden, normed_again, mlp = D, D, D, 2 * heads, D, D, D, 3 * F
    assert numbers == tokens * (x_in + normed + query + key_value + mixed + hidden + normed_again + mlp)
    masks = [leaf for leaf in parts.residuals if leaf.dtype == jnp.bool]
    assert [leaf.shape for leaf in masks] == [(B, L, D)] * 2
    outputs = D + 2 * heads + D + 2 * F + D  # of query, key and value, out, gate and up, down
    sums = 2 * D  # the norms' gradients
    assert sum(leaf.size for leaf in parts.deferred) == tokens * outputs + sums
    checkpointed = split_block(jax.checkpoint(MODEL.block), params, x, key)
    assert sorted(leaf.shape for leaf in checkpointed.residuals) == [(B,), (B, L, D)]
    residuals, recomputed = jax.jit(parts.forward)(params, x, key)[1], jax.jit(parts.recompute)(params, x, key)
    assert [(leaf.shape, leaf.dtype) for leaf in recomputed] == [(leaf.shape, leaf.dtype) for leaf in parts.residuals]
    assert jax.tree.all(jax.tree.map(jnp.array_equal, residuals, recomputed))


@pytest.mark.slow
def test_gathers_are_made_again_and_gradients_scattered_last():
    """Under FSDP: gathers in F and B, none in W; the reduce-scatter in W alone; no gathered parameter is held."""
    mesh = toy.mesh(fsdp=2)
    layouts = {"w": TensorLayout(("fsdp", None), mesh), "v": TensorLayout(("fsdp", None), mesh)}
    seen = {}

    def block(params, x, key):
        whole = gather(params, layouts, ("fsdp",), Precision())
        ready = attach(params, whole, layouts, ("fsdp",), Precision())
        return x + jnp.tanh(x @ ready["w"]) @ ready["v"]

    def local(params, x):
        parts = split_block(block, params, x, None)
        y, residuals = parts.forward(params, x, None)
        dx, deferred = parts.backward_input(params, None, residuals, [y])
        counted = {
            "forward": (parts.forward, params, x, None),
            "input": (parts.backward_input, params, None, residuals, [y]),
            "weight": (parts.backward_weight, params, None, residuals, deferred),
        }
        for name, (function, *arguments) in counted.items():
            names = [eqn.primitive.name for eqn in jax.make_jaxpr(function)(*arguments).jaxpr.eqns]
            seen[name] = (names.count("all_gather"), names.count("reduce_scatter"))
        assert all(leaf.shape[0] == x.shape[0] for leaf in (*parts.residuals, *parts.deferred))
        return y, dx[0], parts.backward_weight(params, None, residuals, deferred)

    def reference(params, x):
        y, pull = jax.vjp(lambda params, x: block(params, x, None), params, x)
        gradients, dx = pull(y)
        return y, dx, gradients

    params = {"w": jax.random.normal(jax.random.key(0), (8, 16)), "v": jax.random.normal(jax.random.key(1), (16, 8))}
    x, spec = jax.random.normal(jax.random.key(2), (4, 8)), PartitionSpec("fsdp")
    ours, theirs = (
        jax.jit(jax.shard_map(each, mesh=mesh.backend_mesh, in_specs=(spec, spec), out_specs=spec))(params, x)
        for each in (local, reference)
    )
    assert seen == {"forward": (2, 0), "input": (2, 0), "weight": (0, 2)}
    assert jax.tree.all(jax.tree.map(jnp.array_equal, ours, theirs))


def test_a_recomputed_norm_is_not_gathered_again_in_w():
    """Under `dots` only W needs the normed activations once more: B makes them, with the scale that it gathers."""
    mesh = toy.mesh(fsdp=2)
    layouts = {"scale": TensorLayout(("fsdp",), mesh), "w": TensorLayout((None, None), mesh)}
    seen = []

    def block(params, x, key):
        whole = gather(params, layouts, ("fsdp",), Precision())
        ready = attach(params, whole, layouts, ("fsdp",), Precision())
        return jnp.tanh((jnp.sin(x) * ready["scale"][None]) @ ready["w"])

    def local(params, x):
        params = {**params, "w": lax.pcast(params["w"], "fsdp", to="varying")}
        parts = split_block(remat_block(block, "dots", makes_copies=True, in_loop=True), params, x, None)
        y, residuals = parts.forward(params, x, None)
        _, deferred = parts.backward_input(params, None, residuals, [y])
        jaxpr = jax.make_jaxpr(parts.backward_weight)(params, None, residuals, deferred).jaxpr
        seen.append([equation.primitive.name for equation in jaxpr.eqns])
        return x

    params, x = {"scale": jnp.ones(8), "w": jnp.ones((8, 8))}, jnp.ones((4, 8))
    specs = {"scale": PartitionSpec("fsdp"), "w": PartitionSpec()}, PartitionSpec("fsdp")
    jax.eval_shape(jax.shard_map(local, mesh=mesh.backend_mesh, in_specs=specs, out_specs=specs[1]), params, x)
    assert "all_gather" not in seen[0]
    assert "dot_general" in seen[0]


@pytest.mark.slow
def test_random_keys_are_made_again():
    """A key of each row cannot lie in a buffer: it is folded again from the rows' indices."""

    def block(params, x, key):
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, x["example"])
        noise = jax.checkpoint(lambda hidden: hidden * jax.vmap(lambda key: jax.random.uniform(key, (L, D)))(keys))
        return {**x, "hidden": noise(x["hidden"] * params["scale"])}

    x, key = example()[1:]
    params = {"scale": jnp.float32(2.0)}
    parts = split_block(block, params, x, key)
    assert all(not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in parts.residuals)
    y, dx, gradients = run_parts(block, params, x, key)
    y_whole, dx_whole, gradients_whole = whole(block, params, x, key)
    for ours, theirs in ((y["hidden"], y_whole), (dx[0], dx_whole), (gradients, gradients_whole)):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), ours, theirs)


def test_a_loop_inside_a_block_is_one_operation():
    def block(params, x, key):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params)[0]

    params, x = jnp.stack([jnp.eye(4) * 0.5] * 3), jnp.ones((2, 4))
    parts = split_block(block, params, x, None)
    y, residuals = parts.forward(params, x, None)
    dx, deferred = parts.backward_input(params, None, residuals, [jnp.ones_like(y)])
    gradients = jax.grad(lambda params, x: block(params, x, None).sum(), (0, 1))(params, x)
    np.testing.assert_allclose(parts.backward_weight(params, None, residuals, deferred), gradients[0], rtol=1e-6)
    np.testing.assert_allclose(dx[0], gradients[1], rtol=1e-6)

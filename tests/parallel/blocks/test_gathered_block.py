"""The residuals that each remat policy keeps, and the operations that it repeats."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec
from spmdkit.models import TransformerConfig, transformer
from spmdkit.models.frozen import freeze, frozen_paths
from spmdkit.parallel import FSDPConfig, lay_out
from spmdkit.parallel.blocks.backward_gathers import find_backward_gathers
from spmdkit.parallel.blocks.gathered_block import (
    REMAT_POLICIES,
    remat_block,
    save_arithmetic,
    save_narrowing_products,
    save_products,
)
from spmdkit.parallel.xla.primitives import FUSED_ATTENTION
from support import toy

X, W = jnp.ones((2, 3)), jnp.ones((3, 3))


def block(x, w):
    return jnp.sin(x.reshape(3, 2).T @ w)


def kept(remat):
    """Shapes of what backward gets from forward, besides the inputs."""
    run = remat_block(block, remat, makes_copies=True, in_loop=True)
    pull = jax.eval_shape(lambda x, w: jax.vjp(run, x, w)[1], X, W)
    return sorted(leaf.shape for leaf in jax.tree.leaves(pull))


def products(remat):
    """The number of products in forward and backward."""
    run = remat_block(block, remat, makes_copies=True, in_loop=True)
    text = str(jax.make_jaxpr(jax.grad(lambda x, w: run(x, w).sum(), (0, 1)))(X, W))
    return text.count(" dot_general[") + text.count(" dot_general ")


def test_each_policy_keeps_more():
    assert kept("full") == [(2, 3), (3, 3)]
    assert kept("dots") == [(2, 3), (2, 3), (3, 3)]
    assert products("full") == products("dots") + 1
    assert len(kept("none")) > len(kept("full"))
    assert remat_block(block, "none", makes_copies=False, in_loop=True) is block
    assert remat_block(block, "none", makes_copies=True, in_loop=True) is not block


def test_results_of_fused_attention_are_kept_like_products():
    """Its primitive exists only on GPUs."""
    fused, other = (SimpleNamespace(name=name) for name in (FUSED_ATTENTION, "exp"))
    for policy in (save_products, save_narrowing_products):
        assert (policy(fused), policy(other)) == (True, False)


NARROW = [(2, 8, 8), (2, 8, 8), *[(2, 8, 16)] * 3]
"""The input of a block, its query, key and value, and the product after attention."""
KEPT = {
    "full": [(2, 8, 16)],
    "local": [(2, 8, 16)],
    "selective": NARROW,
    "dots": [*NARROW, *[(2, 8, 48)] * 2],  # gate and up
    # two norms and the residual stream between; rotated query and key, value; attention in groups; gate, up and both
    "none": [*[(2, 8, 16)] * 4, (2, 8, 4, 4), (2, 8, 2, 4), (2, 8, 8), (2, 2, 16, 4), *[(2, 8, 48)] * 3],
}


@pytest.mark.parametrize("remat", REMAT_POLICIES)
def test_what_each_policy_keeps_of_a_transformer_is_in_the_compute_dtype(remat):
    config = TransformerConfig(vocabulary=8, length=8, layers=1, width=16, heads=4, kv_heads=2, mlp_width=48)
    model = transformer(config)
    params = jax.eval_shape(lambda: jax.tree.map(lambda leaf: leaf[0], model.init(jax.random.key(0))["blocks"]))
    params, x = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, jnp.bfloat16), (params, jax.ShapeDtypeStruct((2, 8, 16), jnp.float32))
    )
    block = remat_block(
        lambda x, params: model.block(params, {"hidden": x}, None)["hidden"], remat, makes_copies=True, in_loop=True
    )
    pull = jax.eval_shape(lambda x, params: jax.vjp(block, x, params)[1], x, params)
    activations = [leaf for leaf in jax.tree.leaves(pull) if leaf.ndim > 2]
    assert sorted(leaf.shape for leaf in activations) == sorted(KEPT[remat])
    assert {str(leaf.dtype) for leaf in activations} == {"bfloat16"}


@pytest.mark.parametrize("remat", REMAT_POLICIES)
@pytest.mark.parametrize("in_loop", [True, False])
def test_gradients_equal_those_of_the_plain_block(remat, in_loop):
    def gradients(run):
        return jax.jit(jax.grad(lambda x, w: run(x, w).sum(), (0, 1)))(X, W)

    found = gradients(remat_block(block, remat, makes_copies=True, in_loop=in_loop))
    assert jax.tree.all(jax.tree.map(jnp.allclose, found, gradients(block)))


def saved(function, *arguments, axis=None):
    """Which operations of a function are kept."""
    if axis:
        mesh = toy.mesh(**{axis: 2}).backend_mesh
        function = jax.shard_map(function, mesh=mesh, in_specs=PartitionSpec(axis), out_specs=PartitionSpec(axis))
    jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    equations = jaxpr.eqns[0].params["jaxpr"].eqns if axis else jaxpr.eqns
    return {each.primitive.name: save_arithmetic(each.primitive, **each.params) for each in equations}


def test_saves_arithmetic_but_not_moves():
    found = saved(lambda x: jnp.sin(x).reshape(-1).astype("bfloat16")[:2] * 2, X)
    assert {name for name, keeps in found.items() if keeps} == {"sin", "mul"}


@pytest.mark.parametrize(("axis", "keeps"), [("fsdp", False), ("data", False), ("tensor", True), ("context", True)])
def test_saves_gathered_activations_but_not_parameters(axis, keeps):
    found = saved(lambda x: lax.all_gather(x, axis, tiled=True)[:1], X, axis=axis)
    assert [value for name, value in found.items() if name.startswith("all_gather")] == [keeps]


def test_saves_calls_that_compute():
    @jax.custom_vjp
    def moves(x):
        return x.reshape(-1)

    @jax.custom_vjp
    def computes(x):
        return jnp.sin(x.reshape(-1))

    for function in (moves, computes):
        function.defvjp(lambda x: (x, None), lambda _, gradient: (gradient,))
    assert list(saved(moves, X).values()) == [False]
    assert list(saved(computes, X).values()) == [True]


FSDP = {"fsdp": FSDPConfig(size=2, floor_bytes=0)}
AHEAD = {"fsdp": FSDPConfig(size=2, floor_bytes=0, prefetch=1)}
IN_STAGES = FSDP | {"pipe": {"size": 2, "layers": [2, 1]}}
MATRICES = {"scale", "up", "down"}


def reads(strategy=FSDP, remat="none", frozen=(), **changes):
    """Returns the names that are gathered again: in the inner blocks, in the first."""
    model = freeze(replace(toy.BIASED_MODEL, **changes), frozen)
    shapes = jax.eval_shape(toy.biased_init, jax.random.key(0))
    devices = toy.devices(4 if "pipe" in strategy else 2)
    plan = lay_out(model, strategy, devices=devices, frozen=frozen_paths(frozen, shapes))
    rows = {name: jax.ShapeDtypeStruct((2, *leaf.shape[1:]), leaf.dtype) for name, leaf in toy.batch(0).items()}
    found = find_backward_gathers(model, toy.with_options(plan, remat=remat), rows)
    assert all(path.startswith("blocks/") for paths in found for path in paths)
    return tuple({path.removeprefix("blocks/") for path in paths} for paths in found)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, MATRICES),
        ({"remat": "full"}, MATRICES | {"b_up"}),  # hidden is made again, and b is added after all products
        ({"strategy": IN_STAGES}, MATRICES),
        ({"strategy": IN_STAGES, "remat": "full"}, MATRICES | {"b_up"}),
        ({"strategy": AHEAD}, MATRICES),
        ({"strategy": AHEAD, "remat": "full"}, MATRICES | {"b_up"}),
        ({"frozen": ("blocks/(down|b.*)",)}, MATRICES),  # the gradient goes through them
        ({"strategy": IN_STAGES, "frozen": ("blocks/(down|b.*)",)}, MATRICES),
    ],
    ids=["none", "full", "stages", "stages full", "ahead", "ahead full", "frozen", "stages frozen"],
)
def test_backward_gathers_matrices_but_not_biases(options, expected):
    assert reads(**options) == (expected, expected)


def test_first_block_gathers_less_if_its_input_has_no_gradient():
    """In a loop of one turn: no gradient leaves the first block, so parameters that lead only there are not read."""
    given = {"frozen": ("embed/.*", "blocks/(up|scale)")}
    assert reads(**given) == (MATRICES, MATRICES)
    assert reads(**given, scan_unroll=toy.BLOCKS) == (MATRICES, {"down"})

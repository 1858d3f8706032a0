"""A ring gives what one device gives, moves what its cost says, and does equal work on every device."""

import functools
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec
from spmdkit.models.attention import causal_attention
from spmdkit.parallel.blocks.attention import cudnn_parts, online_softmax
from spmdkit.parallel.blocks.attention.methods import ATTENTION
from spmdkit.parallel.collectives import Collective, merge
from spmdkit.parallel.context import METHODS, ContextConfig, traffic
from support import toy
from support.attention_case import HEAD_SIZE, HEADS, LENGTH, ROWS, make_case, mixing, on_mesh, on_one_device, predicted
from support.attention_case import with_gradients as gradients_of


def ring(size):
    return ContextConfig(size=size)


def assert_equals_one_device(config, case, kv_heads, **other_axes):
    """Compares outputs, gradients and traffic; returns the traffic."""
    results, moved = on_mesh(gradients_of(mixing(config)), config, case, **other_axes)
    for found, expected in zip(results, on_one_device(case), strict=True):
        assert toy.relative(found, expected) < 1e-12
    moves = predicted(config, kv_heads, rows=ROWS // other_axes.get("data", 1))
    assert moved == merge(moves.forward + moves.backward)
    return moved


@pytest.mark.slow
@pytest.mark.parametrize(("size", "kv_heads", "packed"), [(2, 2, False), (4, 8, True), (4, 1, False), (8, 2, True)])
def test_equals_one_device_and_moves_what_it_says(float64, size, kv_heads, packed):
    assert_equals_one_device(ring(size), make_case(kv_heads, packed=packed), kv_heads)


def test_queries_see_their_own_document_alone():
    case = make_case(2, packed=True, dtype=np.float32)
    case = case._replace(arrays=case.arrays[:3])
    (found,), _ = on_mesh(lambda *arrays: (mixing(ring(2))(*arrays),), ring(2), case, num_outputs=1)
    expected = jax.jit(causal_attention)(*case.arrays, case.segment)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.slow
def test_long_rows_are_worked_on_in_slices(float64, monkeypatch):
    monkeypatch.setattr(online_softmax, "SLICE", 2)
    assert_equals_one_device(ring(2), make_case(2, packed=True), 2)


@pytest.mark.slow
def test_bfloat16_is_summed_in_float32():
    """Gradients of keys and values travel in float32; the output is off by its own rounding alone."""
    case = make_case(2, dtype=jnp.bfloat16)
    results, moved = on_mesh(gradients_of(mixing(ring(4))), ring(4), case)
    exact = on_one_device(case._replace(arrays=tuple(x.astype(np.float32) for x in case.arrays)))
    for found, expected in zip(results, exact, strict=True):
        assert found.dtype == jnp.bfloat16
        assert toy.relative(found, expected) < 1e-2
    moves = predicted(ring(4), 2, dtype="bfloat16")
    assert moved == merge(moves.forward + moves.backward)


def test_on_a_gpu_bfloat16_keys_travel_as_such_and_their_gradients_in_float32():
    head = ROWS * (LENGTH // 4) * HEAD_SIZE
    elements = 3 * 2 * 2 * head
    lines = [Collective("collective-permute", ("context",), 3, elements * width) for width in (2, 4)]
    assert traffic(ring(4), head=head, heads=HEADS, kv_heads=2, dtype="bfloat16", platform="cuda") == (
        tuple(lines[:1]),
        tuple(lines),
        tuple(lines[:1]),
    )


def products(jaxpr, times=1):
    """Multiplications and additions in all matrix products of a program, and the names of its other operations."""
    flops, names = 0, set()
    for equation in jaxpr.eqns:
        names.add(equation.primitive.name)
        if equation.primitive.name == "dot_general":
            contracted = equation.params["dimension_numbers"][0][0]
            shape = equation.invars[0].aval.shape
            flops += 2 * times * prod(equation.outvars[0].aval.shape) * prod(shape[dim] for dim in contracted)
        for inner in jaxprs_in_params(equation.params):
            found = products(inner, times * equation.params.get("length", 1))
            flops, names = flops + found[0], names | found[1]
    return flops, names


@pytest.mark.parametrize("size", [2, 4])
def test_every_device_computes_half_of_the_square_and_a_bit(size):
    """2 N + 1 products of chunks out of 4 N, in a program without branches: the same work on every device."""
    run = gradients_of(mixing(ring(size)))
    part = PartitionSpec(None, "context")
    mesh = toy.mesh(context=size).backend_mesh
    mapped = jax.shard_map(run, mesh=mesh, in_specs=(part,) * 4, out_specs=(part,) * 4)
    arrays = make_case(2, dtype=np.float32).arrays
    flops, names = products(jax.make_jaxpr(mapped)(*arrays).jaxpr)
    chunk = LENGTH // (2 * size)
    one_product = 2 * ROWS * HEADS * HEAD_SIZE * chunk**2
    assert flops == (2 * size + 1) * (2 + 5) * one_product  # scores and outputs; scores again and four gradients
    assert "while" not in names
    assert "conditional(" not in jax.jit(mapped).lower(*arrays).compile().as_text()


def test_only_one_devices_keys_are_kept():
    """What forward hands to backward: its inputs, its output, one number a query and head."""
    config = ring(4)
    mesh = toy.mesh(context=4).backend_mesh
    part = PartitionSpec(None, "context")

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(part,) * 3, out_specs=part)
    def forward(query, key, value):
        _, backward = jax.vjp(mixing(config), query, key, value)
        kept.append(sorted(x.size for x in jax.tree.leaves(backward) if jnp.ndim(x)))
        return query

    kept = []
    jax.eval_shape(forward, *make_case(2, dtype=np.float32).arrays[:3])
    tokens = ROWS * LENGTH // 4
    sizes = [tokens * HEADS, *[tokens * 2 * HEAD_SIZE] * 2, *[tokens * HEADS * HEAD_SIZE] * 2]
    assert kept == [sorted(sizes)]


def test_every_method_has_a_function_and_its_costs():
    assert ATTENTION.keys() == METHODS.keys()


@pytest.mark.slow_cases("True")
@pytest.mark.parametrize("packed", [False, True])
def test_parts_by_cudnn_give_the_same_attention(monkeypatch, packed):
    """JAX's own implementation and the formula of the gradients stand in for cuDNN's two kernels, which need a GPU."""
    plain = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *a, implementation, **k: plain(*a, **k))
    monkeypatch.setattr(cudnn_parts, "cudnn_attention_and_logarithm", softmax_with_logarithm)
    monkeypatch.setattr(cudnn_parts, "cudnn_attention_gradients", gradients_of_softmax)
    case = make_case(2, packed=packed, dtype=np.float32)
    results, _ = on_mesh(gradients_of(mixing(ring(4), implementation="cudnn")), ring(4), case)
    for found, expected in zip(results, on_one_device(case), strict=True):
        assert toy.relative(found, expected) < 1e-5


def softmax_with_logarithm(query, key, value, *, mask, is_causal):
    """Attention (B, S, H, K), and the logarithm of its divisor (B, H, S)."""
    out, log_weight = jax.nn.dot_product_attention(
        *(query, key, value),
        **{"mask": mask, "is_causal": is_causal, "implementation": "xla", "return_residual": True},
    )
    return out, log_weight.swapaxes(1, 2)


def gradients_of_softmax(query, key, value, *, log_weight, out, gradient, mask, is_causal):
    """Gradients of attention, given its output (B, S, H, K) and the logarithm of its divisor (B, H, S)."""
    groups = query.shape[2] // key.shape[2]
    keys, values = (jnp.repeat(x, groups, axis=2) for x in (key, value))
    scale = query.shape[-1] ** -0.5
    score = jnp.einsum("bshk,bthk->bhst", query, keys) * scale
    visible = jnp.tril(jnp.ones(score.shape[-2:], bool)) if is_causal else jnp.ones(score.shape[-2:], bool)
    visible = visible[None, None] if mask is None else visible[None, None] & mask
    weight = jnp.where(visible, jnp.exp(score - log_weight[..., None]), 0)
    dweight = jnp.einsum("bshk,bthk->bhst", gradient, values)
    dscore = weight * (dweight - jnp.sum(out * gradient, axis=-1).transpose(0, 2, 1)[..., None]) * scale
    of_heads = jnp.einsum("bhst,bshk->bthk", dscore, query), jnp.einsum("bhst,bshk->bthk", weight, gradient)
    dkey, dvalue = (x.reshape(*key.shape[:3], groups, -1).sum(axis=3) for x in of_heads)
    return jnp.einsum("bhst,bthk->bshk", dscore, keys), dkey, dvalue

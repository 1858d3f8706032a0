"""The choice between cuDNN's attention and our own form, and what the lowered program contains."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spmdkit.mesh.targets import compiling_for, parse_target
from spmdkit.models.attention import causal_attention, choose_attention, cudnn_attention
from spmdkit.parallel.blocks.attention.cudnn_parts import Saved, attend, attend_backward
from spmdkit.parallel.blocks.attention.online_softmax import Marks

from spmdkit import UserError

KERNELS = ("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward")


def arrays(heads=4, kv_heads=2, size=64, dtype=jnp.bfloat16):
    shapes = [(2, 128, heads, size), (2, 128, kv_heads, size), (2, 128, kv_heads, size)]
    return [jax.random.normal(jax.random.key(seed), shape, dtype) for seed, shape in enumerate(shapes)]


def lowered(function, *operands, target="h100:1x8"):
    """The program for GPUs, forward and backward."""
    total = jax.grad(lambda *each: function(*each).astype(jnp.float32).sum(), argnums=(0, 1, 2))
    with compiling_for(parse_target(target)):
        return jax.jit(total).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("implementation", ["auto", "xla", "cudnn"])
def test_uses_own_form_on_cpu(implementation):
    assert choose_attention(implementation, "cpu") is causal_attention


@pytest.mark.parametrize("implementation", ["auto", "cudnn"])
def test_uses_cudnn_on_gpus(implementation):
    program = lowered(choose_attention(implementation, "gpu"), *arrays())
    assert all(program.count(f"@{kernel}(") == 1 for kernel in KERNELS), "one kernel in each direction"
    assert "x128x128x" not in program, "no scores"


def test_own_form_can_be_chosen_on_gpus():
    assert choose_attention("xla", "gpu") is causal_attention


@pytest.mark.parametrize(
    "wrong", [{"dtype": jnp.float32}, {"size": 20}, {"size": 288}], ids=["float32", "width 20", "width 288"]
)
def test_auto_falls_back_where_cudnn_does_not_apply(wrong):
    program = lowered(choose_attention("auto", "gpu"), *arrays(**wrong))
    assert "__cudnn" not in program
    with pytest.raises(UserError, match=r"model.attention=cudnn: cuDNN does not support queries \(2, 128, 4, "):
        lowered(choose_attention("cudnn", "gpu"), *arrays(**wrong))


@pytest.mark.parametrize("documents", [False, True])
def test_auto_falls_back_without_cudnn(documents):
    operands = [*arrays(), *[jnp.asarray(np.repeat([[0, 1], [0, 0]], 64, axis=1))] * documents]
    found = jax.jit(choose_attention("auto", "gpu"))(*operands)
    np.testing.assert_array_equal(found, jax.jit(causal_attention)(*operands))


def test_wide_heads_need_hopper():
    assert "__cudnn" in lowered(choose_attention("auto", "gpu"), *arrays(size=256))
    assert "__cudnn" not in lowered(choose_attention("auto", "gpu"), *arrays(size=256), target="a100-80:1x8")


def test_documents_become_a_mask():
    segments = jnp.asarray(np.repeat([[0, 1], [0, 0]], 64, axis=1))
    program = lowered(lambda *each: cudnn_attention(*each, segments), *arrays())
    assert "__cudnn$fmhaScaleBiasSoftmax" in program
    assert "tensor<2x1x128x128xbf16>" in program


@pytest.mark.parametrize("documents", [False, True])
def test_odd_lengths_fall_back(documents):
    operands = [*(array[:, :127] for array in arrays()), *[jnp.zeros((2, 127), jnp.int32)] * documents]
    assert "__cudnn" not in lowered(choose_attention("auto", "gpu"), *operands)


@pytest.mark.parametrize(("marks", "kernel"), [((), ""), ((jnp.zeros((2, 128), jnp.int32),), "ScaleBias")])
def test_gradient_of_a_part_of_a_ring_is_one_kernel(marks, kernel):
    queries, keys = (jnp.ones((2, 2, *shape, 64), jnp.bfloat16) for shape in ((2, 128), (128,)))
    saved = Saved(queries, queries, queries, jnp.ones(queries.shape[:-1]))
    with compiling_for(parse_target("h100:1x8")):
        step = jax.jit(lambda *each: attend_backward(*each, Marks(None, *marks), Marks(None, *marks)))
        program = step.trace(saved, keys, keys).lower(lowering_platforms=("cuda",)).as_text()
    assert program.count(f"@__cudnn$fmha{kernel}SoftmaxBackward(") == 1
    assert "x128x128xf32" not in program, "no scores"


@pytest.mark.parametrize("is_causal", [False, True])
def test_part_of_a_ring_keeps_the_logarithm_in_float32(is_causal):
    """cuDNN's backward kernel reads float32, whatever its operand's dtype. `jax.nn` returns bfloat16."""
    queries, keys = (jnp.ones((2, 2, *shape, 64), jnp.bfloat16) for shape in ((2, 128), (128,)))
    marks = Marks(jnp.arange(128) if is_causal else None)
    with compiling_for(parse_target("h100:1x8")):
        part = jax.eval_shape(lambda *each: attend(*each, marks, marks), queries, keys, keys)
    assert [x.dtype for x in part] == [jnp.float32] * 3
    assert [x.shape for x in part] == [(2, 2, 2, 128, 64), (2, 2, 2, 128), (2, 2, 2, 128)]


def test_same_function_as_own_form(monkeypatch):
    """cuDNN's call with JAX's own implementation in its place: scale, causality, groups and documents agree."""
    segments = jnp.asarray(np.repeat([[0, 1], [0, 0]], 64, axis=1))
    plain = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *a, implementation, **k: plain(*a, **k))
    operands = arrays(dtype=jnp.float32)
    for extra in ((), (segments,)):
        np.testing.assert_allclose(
            jax.jit(cudnn_attention)(*operands, *extra),
            jax.jit(causal_attention)(*operands, *extra),
            rtol=1e-4,
            atol=1e-5,
        )

"""The operations of a traced program, counted by hand: 2 for each multiplication with its addition."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from spmdkit.parallel.xla.program_work import PARAMETER, ROWS, Origin, count_work

ROW_COUNT, WIDTH, LENGTH, HEADS, HEAD = 5, 6, 7, 2, 3


def work_of(loss, params, rows, *others):
    """The work of `loss(params, rows, ...)` for arrays of these shapes."""
    shapes = [jax.tree.map(lambda shape: jnp.zeros(shape), tree, is_leaf=is_shape) for tree in (params, rows, *others)]
    program = jax.make_jaxpr(loss)(*shapes).jaxpr
    kinds = [PARAMETER, ROWS, *(Origin() for _ in others)]
    leaves = [len(jax.tree.leaves(tree)) for tree in shapes]
    return count_work(program, [kind for kind, number in zip(kinds, leaves, strict=True) for _ in range(number)])


def is_shape(value):
    return isinstance(value, tuple)


def passes(loss, params, rows, *others):
    found = work_of(loss, params, rows, *others)
    assert not found.uncounted
    return found.forward, found.backward


SQUARE, INPUT = (WIDTH, WIDTH), (ROW_COUNT, WIDTH)
PRODUCT = 2 * ROW_COUNT * WIDTH * WIDTH


def test_first_layer_has_no_gradient_of_its_inputs():
    """Layers 6 -> 8 -> 3 on 5 rows: both gradients of the second, and that of the first one's kernel."""

    def loss(params, x):
        first, second = params
        return jnp.sum(jax.nn.relu(x @ first) @ second)

    first = 2 * 5 * 6 * 8
    second = 2 * 5 * 8 * 3
    assert passes(loss, [(6, 8), (8, 3)], (5, 6)) == (first + second, first + 2 * second)


def test_bytes_of_products_leave_out_parameters_and_count_each_value_once():
    def loss(params, x):
        first, second = params
        return jnp.sum((x @ first) * (x @ second))

    found = work_of(loss, [(6, 8), (6, 8)], (5, 6))
    assert (found.products, found.touched) == (2, 4 * (5 * 6 + 2 * 5 * 8))


@pytest.mark.parametrize(
    ("options", "size", "taps"),
    [
        ({"window_strides": (2, 2), "padding": "SAME"}, 2 * 4 * 4 * 8, 3 * 3 * 4),
        ({"window_strides": (1, 1), "padding": "VALID"}, 2 * 6 * 6 * 8, 3 * 3 * 4),
        ({"window_strides": (1, 1), "padding": "SAME", "feature_group_count": 2}, 2 * 8 * 8 * 8, 3 * 3 * 2),
    ],
)
def test_convolution_counts_the_taps_of_each_result(options, size, taps):
    """Images of 8 x 8 with 4 channels, kernels of 3 x 3 to 8 channels; the first layer again."""
    kernel = (8, 4 // options.get("feature_group_count", 1), 3, 3)
    found = passes(lambda w, x: jnp.sum(lax.conv_general_dilated(x, w, **options)), kernel, (2, 4, 8, 8))
    assert found == (2 * size * taps, 2 * size * taps)


def test_transposed_convolution_does_not_count_inserted_zeros():
    """4 x 4 images to 8 x 8 with a kernel of 2 x 2 and stride 2: one tap for each result."""

    def loss(w, x):
        return jnp.sum(lax.conv_transpose(x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))

    assert passes(loss, (2, 2, 3, 5), (1, 4, 4, 3))[0] == 2 * (8 * 8 * 5) * 3


def test_two_layer_conv_net():
    def loss(params, x):
        first, second, head = params
        x = jax.nn.relu(lax.conv_general_dilated(x, first, (1, 1), "SAME"))
        x = jax.nn.relu(lax.conv_general_dilated(x, second, (2, 2), "SAME"))
        return jnp.sum(x.mean((2, 3)) @ head)

    first = 2 * (2 * 8 * 8 * 4) * 9 * 1
    second = 2 * (2 * 4 * 4 * 6) * 9 * 4
    head = 2 * 2 * 6 * 10
    found = passes(loss, [(4, 1, 3, 3), (6, 4, 3, 3), (6, 10)], (2, 1, 8, 8))
    assert found == (first + second + head, first + 2 * (second + head))


def attention(params, x):
    """One block of `jax.nn.dot_product_attention`."""
    query, key, value, out = params
    heads = [(x @ matrix).reshape(*x.shape[:2], HEADS, HEAD) for matrix in (query, key, value)]
    return jax.nn.dot_product_attention(*heads, is_causal=True).reshape(x.shape) @ out


def test_attention_block_counts_the_full_square():
    matrices = 2 * ROW_COUNT * LENGTH * WIDTH * WIDTH
    scores = 2 * ROW_COUNT * HEADS * LENGTH * LENGTH * HEAD
    found = passes(lambda params, x: jnp.sum(attention(params, x)), [SQUARE] * 4, (ROW_COUNT, LENGTH, WIDTH))
    forward = 4 * matrices + 2 * scores
    assert found == (forward, 2 * forward - 3 * matrices)


@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.dots_saveable])
def test_recomputation_does_not_count(policy):
    again = jax.checkpoint(attention, policy=policy)
    shapes = [SQUARE] * 4, (ROW_COUNT, LENGTH, WIDTH)
    kept, recomputed = (
        passes(lambda params, x, run=run: jnp.sum(run(params, x)), *shapes) for run in (attention, again)
    )
    assert kept == recomputed


def test_scan_counts_each_turn():
    """The first turn of a loop has no gradient of the data either, but counts like all others."""

    def loss(params, x):
        return jnp.sum(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params)[0])

    assert passes(loss, (9, WIDTH, WIDTH), INPUT) == (9 * PRODUCT, 2 * 9 * PRODUCT)


def test_loops_of_known_length_count_each_turn():
    def loss(w, x):
        return jnp.sum(lax.fori_loop(0, 3, lambda _, x: lax.fori_loop(0, 4, lambda _, x: x @ w, x), x))

    assert passes(loss, SQUARE, INPUT) == (12 * PRODUCT, 24 * PRODUCT)


@jax.custom_vjp
def own_product(x, w):
    return x @ w


own_product.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))


@jax.custom_jvp
def with_own_tangent(x, w):
    return x @ w


with_own_tangent.defjvp(lambda values, tangents: jax.jvp(jnp.matmul, values, tangents))

SAME = {
    "jit": jax.jit(jnp.matmul),
    "remat": jax.checkpoint(jnp.matmul),
    "custom_vjp": own_product,
    "custom_jvp": with_own_tangent,
    "vmap": lambda x, w: jax.vmap(lambda row: row @ w)(x),
    "cond": lambda x, w: lax.cond(x[0, 0] > 0, jnp.matmul, lambda x, w: x, x, w),
    "platforms": lambda x, w: lax.platform_dependent(x, w, cpu=jnp.matmul, default=lambda x, w: 2 * (x @ w)),
    "ragged": lambda x, w: lax.ragged_dot(x, w[None], jnp.array([ROW_COUNT])),
}


@pytest.mark.parametrize("name", SAME)
def test_products_inside_other_operations_count_the_same(name):
    def loss(w, x):
        return jnp.sum(SAME[name](SAME[name](x, w), w))

    assert passes(loss, SQUARE, INPUT) == (2 * PRODUCT, 3 * PRODUCT)


def test_groups_of_ragged_products_count_the_rows_once():
    def loss(w, x):
        return jnp.sum(lax.ragged_dot(x, w, jnp.array([2, 3, 0])))

    assert passes(loss, (3, WIDTH, WIDTH), INPUT) == (PRODUCT, PRODUCT)


UNTRAINED = {
    "a teacher": (lambda w, x: jnp.sum(lax.stop_gradient(x @ w)) * jnp.sum(w), 1, 0),
    "a frozen matrix": (lambda w, x: jnp.sum(x @ w @ lax.stop_gradient(w)), 2, 2),
    "a choice": (lambda w, x: jnp.sum(w) * jnp.sum(jnp.argmax(x @ w, axis=1)), 1, 0),
    "unused": (lambda w, x: (x @ w, jnp.sum(w))[1], 0, 0),
    "unused inside": (lambda w, x: jnp.sum(jax.jit(lambda w, x: (x @ w, w))(w, x)[1]), 0, 0),
    "a metric": (lambda w, x: (jnp.sum(w), jnp.sum(x @ w)), 1, 0),
    "a metric inside": (lambda w, x: jax.jit(lambda w, x: (jnp.sum(w), jnp.sum(x @ w)))(w, x), 1, 0),
    "a matrix of the data": (lambda w, x: jnp.sum(x @ x.T) + jnp.sum(w), ROW_COUNT / WIDTH, 0),
}


@pytest.mark.parametrize("name", UNTRAINED)
def test_gradients_that_nobody_needs_do_not_count(name):
    loss, forward, backward = UNTRAINED[name]
    assert passes(loss, SQUARE, INPUT) == (pytest.approx(forward * PRODUCT), backward * PRODUCT)


def searched(w, x):
    """As many turns as the values need."""
    return jnp.sum(w) + jnp.sum(lax.while_loop(lambda x: jnp.sum(x) > 0, lambda x: x @ lax.stop_gradient(w), x))


def with_a_kernel(w, x):
    from jax.experimental import pallas as pl

    def kernel(x_ref, w_ref, out_ref):
        out_ref[...] = x_ref[...] @ w_ref[...]

    return jnp.sum(pl.pallas_call(kernel, jax.ShapeDtypeStruct(INPUT, jnp.float32), interpret=True)(x, w))


def called_back(w, x):
    return jnp.sum(jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(INPUT, jnp.float32), x @ w))


@pytest.mark.parametrize(
    ("loss", "cause"),
    [
        (searched, "a loop of unknown length with products in xla/test_program_work.py:"),
        (with_a_kernel, "pallas_call in xla/test_program_work.py:"),
        (called_back, "pure_callback in xla/test_program_work.py:"),
    ],
)
def test_names_what_states_no_operations(loss, cause):
    for outer in (loss, jax.jit(loss), lambda w, x: lax.scan(lambda c, _: (loss(w, c * x), None), 1.0, length=2)[0]):
        (found,) = work_of(outer, SQUARE, INPUT).uncounted
        assert found.startswith(cause)


def test_loops_of_unknown_length_without_products_are_complete():
    def loss(w, x):
        return jnp.sum(lax.while_loop(lambda x: jnp.sum(x) > 0, lambda x: x - 1, lax.stop_gradient(x)) @ w)

    assert passes(loss, SQUARE, INPUT) == (PRODUCT, PRODUCT)

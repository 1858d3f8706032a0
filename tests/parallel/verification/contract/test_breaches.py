"""Breaches of the contract are reported with the measurement and the fix; correct models pass."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from spmdkit.parallel import Model
from spmdkit.parallel.verification.contract.breaches import breaches
from support import toy

WIDTH, CLASSES, ROWS = 8, 4, 6


def init(key):
    first, second = jax.random.split(key)
    return {
        "first": jax.random.normal(first, (WIDTH, WIDTH)) * 0.3,
        "second": jax.random.normal(second, (WIDTH, CLASSES)) * 0.3,
    }


def hidden(params, batch):
    return jnp.tanh(batch["inputs"] @ params["first"])


def losses(x, params, batch):
    chosen = jax.nn.log_softmax(x @ params["second"])
    return -jnp.take_along_axis(chosen, batch["targets"][:, None], axis=1)[:, 0]


def weighted(each, batch):
    return (each * batch["weights"]).sum(), batch["weights"].sum()


def right(params, batch, key):
    return weighted(losses(hidden(params, batch), params, batch), batch)


def batch_norm(params, batch, key):
    x = hidden(params, batch)
    x = (x - x.mean(0, keepdims=True)) * lax.rsqrt(x.var(0, keepdims=True) + 1e-5)
    return weighted(losses(x, params, batch), batch)


def broadcast_outputs(params, batch, key):
    """The outputs are (rows, 1), the targets (rows,)."""
    with jax.numpy_rank_promotion("allow"):  # as outside of tests
        error = hidden(params, batch) @ params["second"][:, :1] - batch["targets"]
    return (error**2).sum(), batch["weights"].sum()


def batch_norm_and_dropout(params, batch, key):
    """Statistics of the batch, and a dropout that draws for each row as it has to: the random numbers are right."""
    scale = 1.0 if key is None else toy.row_masks(batch, key, WIDTH)
    return batch_norm(params, {**batch, "inputs": batch["inputs"] * scale}, None)


def by_place(params, batch, key):
    """Each row's loss depends on its place in the batch."""
    place = jnp.arange(len(batch["targets"])) * 0.1
    return weighted(losses(hidden(params, batch) + place[:, None], params, batch), batch)


def drawn_at_trace_time(params, batch, key):
    """Every traced program has another factor."""
    total, weight = right(params, batch, key)
    return total * np.random.random(), weight


def neighbours(params, batch, key):
    """Rows in pairs: halves keep them together, another order does not."""
    x = hidden(params, batch)
    x = (x.reshape(-1, 2, WIDTH) + x.reshape(-1, 2, WIDTH)[:, ::-1]).reshape(x.shape)
    return weighted(losses(x, params, batch), batch)


def dropout_of_the_batch(params, batch, key):
    x = hidden(params, batch)
    if key is not None:
        x = jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x / 0.8, 0)
    return weighted(losses(x, params, batch), batch)


def dropout_always(params, batch, key):
    """It cannot do without a key."""
    x = hidden(params, batch) * jax.random.bernoulli(jax.random.split(key)[0], 0.8, (len(batch["targets"]), WIDTH))
    return weighted(losses(x, params, batch), batch)


def dropout_of_each_row(params, batch, key):
    x = hidden(params, batch)
    if key is not None:
        x = jnp.where(toy.row_masks(batch, key, WIDTH), x / 0.8, 0)
    return weighted(losses(x, params, batch), batch)


def of_rows(change):
    """Returns a loss that returns something else of the rows' losses."""
    return lambda params, batch, key: change(losses(hidden(params, batch), params, batch), batch)


def of_sums(change):
    """Returns a loss that changes the right pair, and may read the parameters."""
    return lambda params, batch, key: change(*right(params, batch, key), params)


def penalty(params):
    return 0.1 * sum(jnp.sum(leaf**2) for leaf in params.values())


mean_and_rows = of_rows(lambda each, batch: (each.mean(), jnp.float32(len(each))))
BROKEN = {
    "batch norm": (
        batch_norm,
        "rows",
        "its rows depend on each other. 4 rows give (",
        "Possible causes are batch norm",
    ),
    "outputs": (broadcast_outputs, "rows", "4 rows give (", "arrays of shapes (rows, 1) and (rows,)"),
    "norm and dropout": (batch_norm_and_dropout, "rows", "its rows depend on each other. 4 rows give ("),
    "place": (by_place, "rows", "a row's position in the batch"),
    "np.random": (drawn_at_trace_time, "trace", "computes something else each time", "in a program traced again"),
    "neighbours": (neighbours, "rows", "its rows depend on each other"),
    "dropout": (dropout_of_the_batch, "random", "with the same random numbers", 'fold_in(key, batch["example"][row])'),
    "dropout always": (dropout_always, "random", "its random numbers depend on which rows are together"),
    "mean, rows": (mean_and_rows, "mean", "2 rows give (", "the sum is 1 times as large", "must be 2 times as large"),
    "mean, one": (of_rows(lambda each, batch: (each.mean(), jnp.float32(1))), "mean", "means of means"),
    "ignored": (
        *(of_rows(lambda each, batch: (each.sum(), jnp.float32(len(each)))), "weights"),
        "Multiply the loss of each row (or token) by its weight",
    ),
    "number of rows": (
        *(of_rows(lambda each, batch: (weighted(each, batch)[0], jnp.float32(len(each)))), "weights"),
        *("with weights of zero (0, 4), which must be (0, 0)", "rows of weight zero count"),
    ),
    "divided": (
        *(of_sums(lambda total, weight, params: (total / weight * weight, weight)), "weights"),
        *("with weights of zero (nan, 0)", "do not divide by the weights"),
    ),
    "no weight": (
        *(of_sums(lambda total, weight, params: (total, 0 * weight)), "weights"),
        "the weight that it returns is 0. 4 rows give (",
    ),
    "penalty": (
        *(of_sums(lambda total, weight, params: (total + penalty(params), weight)), "weights"),
        *("on every call, for any weights of the rows", 'penalty * batch["weights"].sum()'),
    ),
    "times zero": (
        *(of_sums(lambda total, weight, params: (total * 0, weight)), "dead"),
        *("every gradient is zero: 96 parameters, a loss of (0, 4)", "a loss multiplied by 0"),
    ),
}
QUICK = ("ignored", "number of rows", "no weight", "penalty", "times zero")


def batch(rows=ROWS):
    return toy.labelled(np.random.default_rng(0), rows, WIDTH, classes=CLASSES, dtype="float32")


def found(loss, rows=None, *, make=init):
    model = loss if not callable(loss) else Model(init=make, loss=loss)
    params = jax.jit(model.init)(jax.random.key(0))
    return breaches(model, params, batch() if rows is None else rows, jax.random.key(0))


@pytest.mark.slow_cases(*(name for name in BROKEN if name not in QUICK))
@pytest.mark.parametrize("name", BROKEN)
def test_reports_breach(name):
    loss, kind, *texts = BROKEN[name]
    (breach,) = found(loss)
    assert breach.kind == kind, breach
    for text in texts:
        assert text in breach.message


@pytest.mark.slow
def test_finds_breaches_behind_head_of_zeros():
    """The loss of the first parameters is the same whatever comes before it."""

    def zeros(key):
        return {**init(key), "second": jnp.zeros((WIDTH, CLASSES))}

    for loss, kind in ((batch_norm, "rows"), (dropout_of_the_batch, "random")):
        assert [breach.kind for breach in found(loss, make=zeros)] == [kind]


def test_right_models_pass():
    weighted_penalty = of_sums(lambda total, weight, params: (total + penalty(params) * weight, weight))
    for loss in (right, dropout_of_each_row, weighted_penalty):
        assert found(loss) == ()


@pytest.mark.slow
def test_accepts_ragged_weights_few_rows_and_rows_without_weight():
    weights = np.array([0, 0, 0.1, 3, 0, 0.7], np.float32)
    assert found(right, {**batch(), "weights": weights}) == ()
    for rows in (1, 2, 3):
        assert found(right, batch(rows)) == ()
        assert [breach.kind for breach in found(mean_and_rows, batch(rows))] == ["mean"]
    assert found(batch_norm, {**batch(), "weights": np.zeros(ROWS, np.float32)}) == ()


@pytest.mark.slow
def test_finds_rows_that_depend_on_each_other_among_two_rows():
    """Two rows twice would have the statistics of the two."""
    assert [breach.kind for breach in found(batch_norm, batch(2))] == ["rows"]


def test_checks_batch_without_weights():
    def sums(weight):
        return lambda params, batch, key: (losses(hidden(params, batch), params, batch).sum(), weight(batch))

    rows = {name: array for name, array in batch().items() if name != "weights"}
    assert found(sums(lambda batch: jnp.float32(len(batch["targets"]))), rows) == ()
    (breach,) = found(sums(lambda batch: jnp.float32(1)), rows)
    assert breach.kind == "weights"
    assert "the weight that it returns does not add up. 4 rows give (" in breach.message
    (breach,) = found(lambda params, batch, key: (losses(hidden(params, batch), params, batch).mean(), 1.0), rows)
    assert breach.kind == "mean"


def test_leaves_nonfinite_loss_to_first_step():
    assert found(lambda params, batch, key: (right(params, batch, key)[0] * jnp.nan, batch["weights"].sum())) == ()


@pytest.mark.slow
def test_accepts_model_that_is_flat_for_a_few_rows():
    """The first four rows are on the flat side; and a loss of 0 is at its least."""

    def hinge(params, batch, key):
        return weighted(jax.nn.relu(batch["example"] - 3 + 0 * hidden(params, batch)[:, 0]) * alive(params), batch)

    def alive(params):
        return jnp.sum(params["first"] ** 2)

    assert found(hinge) == ()

    def at_its_least(params, batch, key):
        return weighted(batch["inputs"] @ params["w"] * 0 + jnp.sum(params["w"] ** 2), batch)

    assert found(at_its_least, make=lambda key: {"w": jnp.zeros(WIDTH)}) == ()


@pytest.mark.parametrize("frozen", ["first", "second"])
def test_accepts_model_with_one_nonzero_gradient(frozen):
    def partly(params, batch, key):
        return right({**params, frozen: lax.stop_gradient(params[frozen])}, batch, key)

    assert found(partly) == ()


def test_reports_zeros_that_multiply_zeros():
    (breach,) = found(
        right, make=lambda key: {"first": jnp.zeros((WIDTH, WIDTH)), "second": jnp.zeros((WIDTH, CLASSES))}
    )
    assert breach.kind == "dead"
    assert "zero at the parameters that init returns: 96 parameters" in breach.message


def test_ignores_rounding():
    """Large terms that cancel round by more than what is looked into; in float64 they do not."""
    large = jnp.array([1e5, -2e5, 1e5, -3e5])

    def cancelling(params, batch, key):
        each = losses(hidden(params, batch), params, batch)
        return weighted(each + large[batch["example"] % 4].astype(each.dtype), batch)

    assert found(cancelling) == ()


@pytest.mark.slow
def test_ignores_choices_that_few_bits_flip():
    """The nearest of many codes, in bfloat16: two of them are often equally near."""

    def nearest(params, batch, key):
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
        x = jnp.tanh(params["table"][batch["inputs"]] @ params["into"])
        distances = ((x[:, :, None] - params["codes"][None, None]) ** 2).sum(-1)
        code = params["codes"][distances.argmin(-1)]
        x = x + lax.stop_gradient(code - x)
        chosen = jax.nn.log_softmax((x @ params["out"]).astype(jnp.float32))
        return weighted(-jnp.take_along_axis(chosen, batch["targets"][..., None], axis=-1)[..., 0], batch)

    def make(key):
        table, into, codes, out = jax.random.split(key, 4)
        return {
            "table": jax.random.normal(table, (32, 64)),
            "into": jax.random.normal(into, (64, 32)) / 8,
            "codes": jax.random.normal(codes, (128, 32)),
            "out": jax.random.normal(out, (32, 32)) / 4,
        }

    assert found(nearest, toy.batch(0, 4, length=64), make=make) == ()


@pytest.mark.slow
def test_block_model_passes():
    assert found(toy.BLOCK_MODEL, toy.batch(0)) == ()
    broken = replace(toy.BLOCK_MODEL, block=lambda params, x, key: toy.block(params, x - x.mean(0, keepdims=True), key))
    assert [breach.kind for breach in found(broken, toy.batch(0))] == ["rows"]

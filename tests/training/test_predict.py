"""`predict` of a model, compiled for a mesh: what it may return, in which dtype it computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spmdkit.mesh.errors import UserError
from spmdkit.parallel import Model, lay_out
from spmdkit.training.predict import Predictor, named, to_host


def predictor(predict, compute="float32", mesh=None):
    init = lambda key: {"kernel": jnp.ones((4, 2))}  # noqa: E731
    model = Model(init=init, loss=lambda params, batch, key: (0.0, 0.0), predict=predict, name="m")
    plan = lay_out(model, mesh or {"data": 8})
    return Predictor(model, {"kernel": np.ones((4, 2), np.float32)}, plan, compute)


def products(params, batch):
    return batch["inputs"] @ params["kernel"]


@pytest.mark.parametrize("rows", [1, 7, 8, 13])
def test_the_filling_is_dropped(rows):
    inputs = np.arange(rows * 4, dtype=np.float32).reshape(rows, 4)
    np.testing.assert_array_equal(predictor(products).batch({"inputs": inputs}), inputs @ np.ones((4, 2)))


def test_it_computes_in_the_compute_dtype():
    seen = []

    def predict(params, batch):
        seen.extend([params["kernel"].dtype, batch["inputs"].dtype, batch["weights"].dtype])
        return products(params, batch)

    batch = {"inputs": np.ones((2, 4), np.float32), "weights": np.ones(2, np.float32)}
    assert predictor(predict, "bfloat16").batch(batch).dtype == jnp.bfloat16
    assert seen[:3] == [jnp.bfloat16, jnp.bfloat16, jnp.float32]


@pytest.mark.parametrize(
    ("predict", "given"),
    [
        (lambda params, batch: products(params, batch).sum(), r"an array of shape \(\) for 8 rows"),
        (lambda params, batch: {"a": products(params, batch).T}, r"an array of shape \(2, 8\) for 8 rows"),
        (lambda params, batch: (), r"nothing for 8 rows"),
    ],
)
def test_every_array_has_the_rows_of_the_batch(predict, given):
    with pytest.raises(UserError, match=rf"The model m predicts {given}\. Each array that `predict` returns must"):
        predictor(predict).batch({"inputs": np.ones((3, 4), np.float32)})


def test_a_model_that_predicts_nothing():
    with pytest.raises(
        UserError,
        match=r"The model m does not define `predict`, so it can predict no rows\. Give it one, .*rows of the batch "
        r"on dim 0`",
    ):
        predictor(None)


def test_a_form_of_batches_is_traced_once(monkeypatch):
    traced = []

    def predict(params, batch):
        traced.append(batch["inputs"].shape)
        return products(params, batch)

    made = predictor(predict)
    for _ in range(3):
        made.batch({"inputs": np.ones((8, 4), np.float32)})
    assert len(traced) <= 2


def test_names_of_what_is_predicted():
    assert named(1) == {"predictions": 1}
    assert named({"a": 1, "b": (2, 3)}) == {"predictions/a": 1, "predictions/b/0": 2, "predictions/b/1": 3}
    assert to_host(jax.numpy.arange(3)).tolist() == [0, 1, 2]
